"""Runs that add to a history."""

from __future__ import annotations

import json

import pytest

from pytest_ddpperf.cli.main import main
from tests.git import git
from tests.integration.conftest import STEP, Run

STEPS = (
    STEP
    + """
def test_step(ddp_benchmark):
    ddp_benchmark(lasting)
"""
)


def test_a_run_of_a_commit_is_added_and_others_are_not(
    pytester: pytest.Pytester, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    pytester.makepyfile(test_step=STEPS)
    result = run("--ddp-history=kept")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "--ddp-history: nothing was added: what was measured is not a commit of a git"
            " repository: fatal: *"
        ]
    )
    git(pytester.path, "init", "--quiet")
    git(pytester.path, "add", "test_step.py")
    git(pytester.path, "commit", "--quiet", "-m", "a commit")
    commit = git(pytester.path, "rev-parse", "HEAD")

    result = run("--ddp-history=kept", "--ddp-json=out.json")
    (file,) = (pytester.path / "kept").glob("*.json")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [f"--ddp-history: 1 measurement added as {file}"]
    )
    added = json.loads(file.read_text())
    (row,) = added["measurements"]
    assert (added["commit"], row["test"]["name"]) == (commit, "test_step")
    assert {
        name: len(each) for name, each in row["launch_seconds"].items()
    } == {
        "p10": 3,
        "p50": 3,
        "p90": 3,
    }

    capsys.readouterr()
    assert (
        main(
            [
                "history",
                "add",
                str(pytester.path / "out.json"),
                "--to",
                str(pytester.path / "again"),
            ]
        )
        == 0
    )
    (again,) = (pytester.path / "again").glob("*.json")
    # the option and the command add the same
    assert again.read_text() == file.read_text()

    (pytester.path / "file").write_text("")
    result = run("--ddp-history=file/below")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [f"--ddp-history: {pytester.path}/file/below/*: cannot be written: *"]
    )

    (pytester.path / "test_step.py").write_text(STEPS + "\n")
    result = run("--ddp-history=kept")
    result.stdout.fnmatch_lines(
        [
            f"--ddp-history: nothing was added: the working tree differs from commit {commit[:12]}*"
        ]
    )
    result = run("--ddp-history=kept", "--ddp-disable")
    result.stdout.fnmatch_lines(
        [
            "--ddp-history: nothing was added: no measurement of this commit alone can be added"
            " (see docs/history.md)"
        ]
    )
    assert list((pytester.path / "kept").glob("*.json")) == [file]
