"""The end of a run: its results go to the terminal, and to files. Reports are imported if there is
something to report."""

import os
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_ddpperf.plugin.state import Run


@dataclass(eq=False)
class Reporter:
    """Reports the results, in the only process or in xdist's controller."""

    _run: Run
    _writes: bool  # reports that are files, too
    _refused: str = ""  # why no test will run

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

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._run.failed.add(report.nodeid)
        elif str(report.outcome) == "rerun":  # its subtests may have failed
            self._run.failed.discard(report.nodeid)
        message = getattr(report, "ddpperf", None)
        if message is not None:
            self._run.report.take(message)
            if not message["skipped"]:
                self._run.ran += 1

    @pytest.hookimpl(trylast=True)  # after conftests, which may add sections
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        run = self._run
        run.end(self._refused, writes=self._writes)
        if not run.reported:
            return
        if run.report.usage_error:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        elif session.exitstatus == pytest.ExitCode.OK and (
            run.report.unwritten or run.report.too_weak
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for title, lines in self._run.sections.items():
            terminalreporter.section(title)
            for line in lines:
                terminalreporter.write_line(line)
        if self._run.reported:
            self._summarise(terminalreporter)

    def _summarise(self, terminalreporter: Any) -> None:
        from pytest_ddpperf.report import guard
        from pytest_ddpperf.report.summary import MOST_COMMANDS, annotated
        from pytest_ddpperf.text import terminal_width

        config, report = self._run.config, self._run.report
        verbosity = config.getoption("verbose")
        lines: list[str] = []
        if os.environ.get("GITHUB_ACTIONS") == "true":
            lines += guard.annotated(report.run)
            lines += annotated(report.outcomes, MOST_COMMANDS - len(lines))
        # xdist's workers collected, and no header was shown
        if verbosity > 0 and config.getoption("tx", None):
            lines += report.header(verbosity)
        terminalreporter.section("distributed performance")
        for line in (*lines, *report.lines(verbosity, terminal_width())):
            terminalreporter.write_line(line)


def prepare_files(run: Run) -> None:
    """Check that the requested reports can be made, before a run that may take hours; raises
    MissingExtraError.

    Note the commit while the run has saved nothing yet."""
    settings = run.settings
    if settings.html_path is not None:
        from pytest_ddpperf.report import figures

        figures.check("--ddp-html")
    files = (settings.json_path, settings.markdown_path, settings.html_path)
    if any((*files, settings.history_dir)) and not run.worker:
        _ = run.report  # which begins when it is first used
