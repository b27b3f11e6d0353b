"""How a process of ours begins."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.channels import Lines

TOLD_BACK = """
import socket, sys
from pytest_ddpperf.wire.channels import Lines

def main(descriptor, start):
    lines = Lines(socket.socket(fileno=descriptor))
    lines.send({"start": start, "sys_path": sys.path})
    (further,) = lines.receive()
    lines.send(further)
"""
OURS = str(Path(boot.__file__).parents[2])


@pytest.fixture
def module(tmp_path: Path) -> str:
    """The folder of a module that tells what it was told; beside it one that hides one of
    Python's."""
    (tmp_path / "told_back.py").write_text(TOLD_BACK)
    (tmp_path / "json.py").write_text("raise ImportError('not of Python')")
    return str(tmp_path)


def reported(folder: str, start: dict[str, Any], **environ: str) -> Any:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                boot.command(sys.executable, "told_back", theirs.fileno()),
                cwd=folder,
                env={**os.environ, **environ},
                pass_fds=[theirs.fileno()],
            )
        lines = Lines(ours)
        lines.send(start)
        while not (answers := lines.receive()):
            assert answers is not None, "it ended"
        lines.send({"further": 1})
        assert lines.receive() == [{"further": 1}]
    assert process.wait(60) == 0
    return answers[0]


def test_a_process_has_asserts_if_pytest_has() -> None:
    code = "from pytest_ddpperf.wire import boot; print(boot.command('python', 'm', 3)[:4])"
    for flags in ([], ["-O"], ["-OO"]):
        shown = subprocess.run(
            [sys.executable, *flags, "-c", code],
            env={**os.environ, "PYTHONPATH": OURS},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        expected = ["python", *["-O"] * len("".join(flags).strip("-")), "-c"]
        assert shown.startswith(str(expected)[:-1]), shown


def test_a_process_is_told_more_than_an_argument_may_hold(module: str) -> None:
    path = [OURS, *sys.path, "", "x" * 200_000, "a\nb", "\udc80", module]
    start = {"sys_path": path, "kept": ["y" * 200] * 5000}
    assert reported(module, start) == {"start": start, "sys_path": path}


def test_the_search_path_of_a_new_interpreter_is_not_that_of_pytest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "variable"))
    monkeypatch.syspath_prepend(str(tmp_path / "pytest"))
    found = boot.search_path_of_new()
    assert os.path.dirname(os.__file__) in found
    assert not any(entry.startswith(str(tmp_path)) for entry in found)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    assert boot.search_path_of_new() == []
