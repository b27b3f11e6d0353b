"""The end of a run: its results go to the reports. Reports are imported only when there is something to report."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

from pytest_ddpperf.plugin.state import Run


class Reporter:
    """In the process that reports: the only one, or xdist's controller. `writes`: reports that are files, too."""

    def __init__(self, run: Run, *, writes: bool) -> None:
        self._run, self._writes = run, writes
        self._refused = ""  # why no test will run

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        try:
            return (yield)
        except pytest.UsageError as error:
            self._refused = "\n".join(map(str, error.args))
            raise

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._run.failed.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        run = self._run
        run.end(self._refused)
        if run.reported and run.report.usage_error:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        if self._writes:
            from pytest_ddpperf.plugin import written

            if not written.write(run) and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        run = self._run
        if not run.reported:
            return
        from pytest_ddpperf.report.ci import annotated

        terminalreporter.section("distributed performance")
        collects = run.config.getoption("dist", "no") == "no"  # else xdist's workers do, and no header was shown
        lines = run.report.lines(run.config.getoption("verbose"), header=not collects)
        github = os.environ.get("GITHUB_ACTIONS") == "true"
        annotations = annotated(run.report.outcomes) if github else ()
        for line in (*annotations, *lines):
            terminalreporter.write_line(line)


class ResultListener:
    """Collects what the reports of tests carry. Registered if there are distributed tests, or options of ours."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._run.failed.add(report.nodeid)
        message = getattr(report, "ddpperf", None)
        if message is not None:
            self._run.report.take(message)
