"""What a run tells of reports that it writes, or does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_ddpperf.measuring.outcomes import Report
from pytest_ddpperf.plugin import written
from pytest_ddpperf.records import Run, Status, codec
from tests.unit.test_git import commit
from tests.unit.test_report import outcome, verdict

NO_COMMIT = "--ddp-history: nothing was added: what was measured is no commit of a git repository"


def told(run: Run, measured: Path) -> list[str]:
    """Of adding a measurement to the history in a folder of its own."""
    report = Report(run)
    report.take({"outcomes": [codec.encode(outcome(verdict(Status.PASS)))]})
    written._remember(report, measured / "history", measured)
    return report.told


def test_why_git_told_no_commit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(Run(), tmp_path) == [NO_COMMIT]
    commit(tmp_path)
    assert told(Run(), tmp_path) == [f"{NO_COMMIT}: git could not say when the run began, and can now"]
    known = replace(Run(), commit="c0ffee" * 6 + "c0ff-dirty", committed="2026-01-02T03:04:05+00:00")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert told(Run(), tmp_path) == [f"{NO_COMMIT}: git is not installed, or not on PATH"]
    assert told(known, tmp_path) == [
        "--ddp-history: nothing was added: the working tree differs from commit c0ffeec0ffee: commit what is measured"
    ]
