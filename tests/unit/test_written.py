"""What a run says of reports that it writes, or does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.plugin import results
from pytest_ddpperf.plugin.results import RunResults
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import GitError
from pytest_ddpperf.records.outcome import RunInfo
from pytest_ddpperf.records.samples import Status
from tests.unit.test_git import commit
from tests.unit.test_report import outcome, verdict

NO_COMMIT = "--ddp-history: nothing was added: what was measured is not a commit of a git repository"


def reported(run: RunInfo, measured: Path) -> list[str]:
    """Return the messages about adding a measurement to a history in the folder `measured`."""
    report = RunResults(run)
    report.take({"outcomes": [codec.encode(outcome(verdict(Status.PASS)))]})
    report.add_to_history(measured / "history", measured)
    return report.messages


def test_why_there_is_no_commit_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (said,) = reported(RunInfo(), tmp_path)
    assert said.startswith(f"{NO_COMMIT}: fatal: not a git repository")
    commit(tmp_path)
    assert reported(RunInfo(), tmp_path) == [NO_COMMIT]
    known = replace(
        RunInfo(),
        commit="c0ffee" * 6 + "c0ff-dirty",
        committed="2026-01-02T03:04:05+00:00",
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reported(RunInfo(), tmp_path) == [
        f"{NO_COMMIT}: git is not installed, or not on PATH"
    ]
    assert reported(known, tmp_path) == [
        "--ddp-history: nothing was added: the working tree differs from commit c0ffeec0ffee:"
        " commit what is measured"
    ]


def test_git_is_not_asked_again_for_files_if_it_did_not_answer_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def changed_files(top: Path, commit: str, *, timeout: float) -> list[str]:
        asked.append(timeout)
        raise GitError(f"git did not answer within {timeout:g} s")

    monkeypatch.setattr(results, "changed_files", changed_files)
    monkeypatch.setattr(results, "_GIT_SECONDS", 3.0)
    report = results.begin_results(tmp_path, {})
    report.note_files(tmp_path, tmp_path / "baselines")
    assert (asked, report.messages) == ([3.0], [])


def run_pytest(
    pytester: pytest.Pytester, *arguments: str
) -> tuple[pytest.RunResult, dict[str, Any], str]:
    """Run pytest; return its result, its JSON, and its Markdown after the first line."""
    fixed = (
        "-p",
        "no:randomly",
        "-p",
        "no:benchmark",
        "--ddp-json=out.json",
        "--ddp-markdown=out.md",
    )
    result = pytester.runpytest_inprocess(*fixed, *arguments)
    return (
        result,
        json.loads(Path("out.json").read_text()),
        Path("out.md").read_text().partition("\n")[2],
    )


def test_reports_of_a_red_run_do_not_look_green(
    pytester: pytest.Pytester,
) -> None:
    red = """
        import pytest

        @pytest.fixture
        def broken():
            yield
            assert False

        @pytest.fixture
        def missing():
            assert False

        def test_own(broken): assert False
        def test_no_fixture(missing): ...
        def test_green(): ...
        @pytest.mark.xfail
        def test_expected(): assert False
    """
    pytester.makepyfile(test_red=red, test_none="import no_such_module")
    result, data, markdown = run_pytest(
        pytester, "--continue-on-collection-errors"
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert data["summary"]["other_failures"] == 3
    assert markdown == "## 3 other failures (0 of 0 compared)\n"
