"""The reports of a run that are files."""

from __future__ import annotations

import json

import pytest

from tests.integration.conftest import Run

NOTHING = "def test_nothing(): pass"


@pytest.mark.parametrize("option", ["--ddp-json"])
def test_a_report_that_cannot_be_written_is_told_and_is_red(pytester: pytest.Pytester, run: Run, option: str) -> None:
    pytester.makepyfile(NOTHING)
    (pytester.path / "file").write_text("")
    result = run(f"{option}=file/out")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"{option} {pytester.path}/file/out was not written: *"])
    assert run(f"{option}=file/out", "--collect-only").ret == 0


def test_a_run_without_distributed_tests_writes_a_report_of_none(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(NOTHING)
    assert run("--ddp-json=new/folder/out.json").ret == 0
    report = json.loads((pytester.path / "new/folder/out.json").read_text())
    assert report["measurements"] == []
    assert report["summary"]["measured"] == 0
