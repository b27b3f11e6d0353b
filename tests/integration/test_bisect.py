"""`ddpperf bisect` with real runs of pytest, on a simulated clock."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.git import git
from tests.integration.conftest import FEW, SMALL, STEP
from tests.processes import descendants, gone, until

TEST = "tests/test_step.py::test_train"


@pytest.fixture
def project(tmp_path: Path, temporary: Path) -> Path:
    top = tmp_path / "project"
    (top / "tests").mkdir(parents=True)
    git(tmp_path, "init", "--quiet", "--initial-branch=main", top)
    (top / "tests/test_step.py").write_text(
        STEP
        + """
import pathlib
from work import MILLISECONDS

def test_train(ddp_benchmark):
    top, reports = (pathlib.Path(os.environ[name]) for name in ("WAITS", "XDG_CACHE_HOME"))
    if top.exists() and [*reports.glob("*/*/*.json")]:
        (top / "begun").touch()
        time.sleep(3600)
    ddp_benchmark(lambda ctx: lasting(ctx, MILLISECONDS))
"""
    )
    (top / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (top / ".gitignore").write_text("__pycache__\n")
    for milliseconds in (5, 5.1, 60):
        (top / "work.py").write_text(f"MILLISECONDS = {milliseconds}\n")
        git(top, "add", "--all")
        git(top, "commit", "--quiet", "-m", f"A step of {milliseconds} ms")
    return top


def command(project: Path) -> tuple[list[str], dict[str, str]]:
    fixed = ("-p", "no:randomly", "-p", "no:benchmark", *SMALL, *FEW)
    environ = {
        **os.environ,
        "XDG_CACHE_HOME": str(project.parent / "cache"),
        "PYTHONPATH": os.getcwd(),
        # while this folder exists, the second comparison does not end
        "WAITS": str(project.parent / "waits"),
    }
    environ.pop("CI", None)
    asked = [
        sys.executable,
        "-m",
        "pytest_ddpperf",
        "bisect",
        TEST,
        "--good",
        "HEAD~2",
        "--",
        *fixed,
    ]
    return asked, environ


def contents(top: Path) -> dict[Path, bytes]:
    files = (
        path
        for path in top.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    return {path: path.read_bytes() for path in files}


def test_a_search_is_interrupted_goes_on_and_leaves_the_repository_as_it_was(
    project: Path,
) -> None:
    asked, environ = command(project)
    before = contents(project)
    waits = Path(environ["WAITS"])
    waits.mkdir()
    first = subprocess.Popen(
        asked, cwd=project, env=environ, stderr=subprocess.PIPE, text=True
    )
    reports = project.parent / "cache/pytest-ddpperf"
    until((waits / "begun").exists)
    started = descendants(first.pid)
    first.send_signal(signal.SIGINT)
    _, error = first.communicate(timeout=600)
    assert first.returncode == 130
    assert error.endswith(
        "ddpperf: interrupted: the same command goes on from here\n"
    )
    assert started
    until(lambda: gone(started))
    shutil.rmtree(waits)
    ended = subprocess.run(
        asked,
        cwd=project,
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    slower = git(project, "rev-parse", "HEAD")[:12]
    lines = ended.stdout.splitlines()
    (found,) = (
        number
        for number, line in enumerate(lines)
        if line.startswith(f"slower at {slower}: ")
    )
    assert lines[found + 1].endswith(": A step of 60 ms")
    assert lines[found + 2] == "  changes work.py"
    assert "2 comparisons" in lines[-1]
    assert [*reports.iterdir()] == []
    after = contents(project)
    assert after == before
    assert git(project, "worktree", "list").count("\n") == 0
