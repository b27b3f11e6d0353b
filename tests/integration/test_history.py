"""Runs that add to a history."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_ddpperf.cli.main import main
from pytest_ddpperf.history import folder
from tests.integration.conftest import SMALL, STEP, Run
from tests.integration.test_against import SECOND, Repository, repository
from tests.integration.test_against import STEP as IMPORTING
from tests.unit.test_history import history, stepped

__all__ = ["repository"]

STEPS = (
    STEP
    + """
def test_step(ddp_benchmark):
    ddp_benchmark(lasting)
"""
)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_run_of_a_commit_is_added_and_others_are_told(
    pytester: pytest.Pytester, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    pytester.makepyfile(test_step=STEPS)
    result = run("--ddp-history=kept")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["--ddp-history: nothing was added: what was measured is no commit of a git repository"]
    )
    git(pytester.path, "init", "--quiet")
    git(pytester.path, "add", "test_step.py")
    git(pytester.path, "commit", "--quiet", "-m", "a commit")
    commit = git(pytester.path, "rev-parse", "HEAD")

    result = run("--ddp-history=kept", "--ddp-json=out.json")
    (file,) = (pytester.path / "kept").glob("*/*.json")
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"--ddp-history: 1 added as {file}"])
    added = json.loads(file.read_text())
    (row,) = added["measurements"]
    assert (added["run"]["commit"], row["test"]) == (commit, {"module": "test_step", "name": "test_step"})
    assert {name: len(each) for name, each in row["launch_seconds"].items()} == {"p10": 3, "p50": 3, "p90": 3}

    capsys.readouterr()
    assert main(["history", "add", str(pytester.path / "out.json"), "--to", str(pytester.path / "again")]) == 0
    (again,) = (pytester.path / "again").glob("*/*.json")
    assert again.read_text() == file.read_text()  # the option and the command add the same

    (pytester.path / "file").write_text("")
    result = run("--ddp-history=file")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"--ddp-history: {pytester.path}/file/*: cannot be written: *"])

    (pytester.path / "test_step.py").write_text(STEPS + "\n")
    result = run("--ddp-history=kept")
    result.stdout.fnmatch_lines(
        [f"--ddp-history: nothing was added: the working tree differs from commit {commit[:12]}*"]
    )
    result = run("--ddp-history=kept", "--ddp-disable")
    result.stdout.fnmatch_lines(["--ddp-history: nothing was added: nothing was measured of this commit alone"])
    assert list((pytester.path / "kept").glob("*/*.json")) == [file]


MARKER = "@pytest.mark.ddp(world_size=(1, 2))"
SIZED = """
@pytest.mark.parametrize("kind", ["bf16"])
def test_step(ddp_benchmark, kind):
    ddp_benchmark(lambda ctx: lasting(ctx, speed.MILLISECONDS))
"""


@pytest.mark.parametrize(
    ("marker", "options"), [(MARKER, ()), ("", ("--ddp-world-size=1,2",))], ids=["marker", "option"]
)
def test_a_step_of_a_test_with_several_world_sizes_is_measured_again_with_its_own(
    repository: Repository,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    marker: str,
    options: tuple[str, ...],
) -> None:
    """With 60 instead of 5 ms from the second commit on; the history is what a run of each would have added."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:randomly -p no:benchmark")
    repository.write("tests/test_step.py", IMPORTING, marker, SIZED)
    earlier = repository.commit()
    repository.write("src/speed/__init__.py", SECOND)
    later = repository.commit()
    kept = repository.top.parent / "kept"
    assert run(f"--ddp-history={kept}", "-k", "ws2", *options).ret == 0
    (file,) = kept.glob("*/*.json")
    (measured,) = folder.read(kept)
    file.unlink()
    (row,) = measured.measurements
    assert (row.test.name, row.sized) == ("test_step[bf16]", True)
    for day, each in enumerate(history(stepped((40, 240.0)))):
        ran = replace(each.run, commit={39: earlier, 40: later}.get(day, each.run.commit))
        figures = each.measurements[0].launch_seconds
        folder.add(kept, replace(measured, run=ran, measurements=(replace(row, launch_seconds=figures),)))

    small = [option for option in SMALL if not option.startswith("--ddp-threshold")]
    arguments = ["history", "confirm", "test_step", "--in", str(kept), f"--option={' '.join(small)}"]
    status = main(arguments)
    out = capfd.readouterr().out
    assert status == 1, out
    assert f"measuring {later[:12]} beside {earlier[:12]}" in out
    assert "REGRESSED  tests/test_step.py::test_step[bf16-ws2]  p10 x 12" in out
    assert "ws1" not in out
