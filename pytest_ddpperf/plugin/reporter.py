"""The end of a run: results go to the terminal and to files. Reports are imported if there is
something to report."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_ddpperf.plugin.state import Run

if TYPE_CHECKING:
    from pytest_ddpperf.plugin.results import RunResults


class Reporter:
    """Reports the results, in the only process or in xdist's controller. `writes`: reports that are
    files, too."""

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

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._run.failed.add(report.nodeid)
        message = getattr(report, "ddpperf", None)
        if message is not None:
            self._run.report.take(message)
            if not message["skipped"]:
                self._run.ran += 1

    @pytest.hookimpl(trylast=True)  # after conftests, which may add sections
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        run = self._run
        run.end(self._refused)
        if run.reported and run.report.usage_error:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        if (
            self._writes
            and not write_files(run)
            and session.exitstatus == pytest.ExitCode.OK
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for title, lines in self._run.sections.items():
            terminalreporter.section(title)
            for line in lines:
                terminalreporter.write_line(line)
        if self._run.reported:
            self._summarise(terminalreporter)
        if (
            self._run.ran
            and self._run.config.getoption("verbose") >= 0
            and _covers_no_ranks(self._run.config)
        ):
            terminalreporter.write_line(_NO_COVERAGE)

    def _summarise(self, terminalreporter: Any) -> None:
        run = self._run
        from pytest_ddpperf.report.summary import annotated
        from pytest_ddpperf.text import terminal_width

        terminalreporter.section("distributed performance")
        verbosity = run.config.getoption("verbose")
        # Else xdist's workers collected, and no header was shown.
        collected = run.config.getoption("dist", "no") == "no"
        header = (
            run.report.header(verbosity)
            if verbosity > 0 and run.report.facts and not collected
            else ()
        )
        lines = run.report.lines(verbosity, terminal_width())
        github = os.environ.get("GITHUB_ACTIONS") == "true"
        annotations = annotated(run.report.outcomes) if github else ()
        for line in (*annotations, *header, *lines):
            terminalreporter.write_line(line)


# What measures the rank server, the ranks that it forks, and their end.
_PATCHES = ("subprocess", "fork", "_exit")
_NO_COVERAGE = (
    f"coverage does not measure ranks: set patch = {', '.join(_PATCHES)} in its section run"
    " (coverage 7.10)"
)


def _covers_no_ranks(config: pytest.Config) -> bool:
    """Say whether pytest-cov measures this run, but not its ranks."""
    controller: Any = getattr(
        config.pluginmanager.get_plugin("_cov"), "cov_controller", None
    )
    patches: list[str] = []
    with suppress(Exception):  # coverage.py before 7.10 refuses the name of the option
        patches = controller.cov.get_option("run:patch")
    return controller is not None and not {*_PATCHES} <= {*patches}


# --- reports that are files


def prepare_files(run: Run) -> None:
    """Check that the requested reports can be made, before a run that may take hours; raises
    MissingExtraError.

    Note the commit while the run has saved nothing yet."""
    settings = run.settings
    if settings.html_path is not None:
        from pytest_ddpperf.report import figures

        figures.check("--ddp-html")
    asked = (
        settings.json_path,
        settings.markdown_path,
        settings.html_path,
        settings.history_dir,
    )
    if any(path is not None for path in asked) and not run.worker:
        _ = run.report  # which begins when it is first used


def write_files(run: Run) -> bool:
    """Write the requested reports and return whether all were written. The summary says which were
    not, and why."""
    from pytest_ddpperf import files
    from pytest_ddpperf.records import codec
    from pytest_ddpperf.report import markdown, page

    reports: tuple[tuple[str, Path | None, Callable[[RunResults], str]], ...] = (
        (
            "--ddp-json",
            run.settings.json_path,
            lambda report: codec.dumps(report.data()),
        ),
        (
            "--ddp-markdown",
            run.settings.markdown_path,
            lambda report: markdown.report(report.stored()),
        ),
        (
            "--ddp-html",
            run.settings.html_path,
            lambda report: page.html(report.stored()),
        ),
    )
    for option, path, text in reports:
        if path is not None:
            with _noting_errors(run.report, f"{option} {path} was not written"):
                files.write(path, text(run.report), append=markdown.appends(path))
    if run.settings.history_dir is not None and run.reported:
        with _noting_errors(run.report, "--ddp-history"):
            _add_to_history(run.report, run.settings.history_dir, run.config.rootpath)
    return not run.reported or not run.report.unwritten


@contextmanager
def _noting_errors(report: RunResults, what: str) -> Iterator[None]:
    """Let the summary say why a report was not written. Other reports are still written, but the
    run fails."""
    from pytest_ddpperf.records.errors import DdpPerfError

    try:
        yield
    except Exception as error:
        why = getattr(error, "strerror", None) or str(error)
        known = isinstance(error, OSError | DdpPerfError)
        report.unwritten.append(
            f"{what}: {why if known else f'{type(error).__name__}: {error}'}"
        )


def _add_to_history(report: RunResults, root: Path, measured: Path) -> None:
    """Add the measurements of the code in `measured` to the history, or say why not; raises
    FileError."""
    from pytest_ddpperf.git import git
    from pytest_ddpperf.history import entries
    from pytest_ddpperf.records.errors import GitError
    from pytest_ddpperf.text import several

    entry = entries.make_entry(report.outcomes, report.run)
    why = entries.why_unfit(report.run)
    if not entry.measurements:
        why = "no measurement of this commit alone can be added (see docs/history.md)"
    if why:
        if not report.run.commit:
            try:
                git(measured, "rev-parse", "HEAD")
            except GitError as error:
                why += f": {' '.join(str(error).split())}"
        report.messages.append(f"--ddp-history: nothing was added: {why}")
        return
    path = entries.add_entry(root, entry)
    report.messages.append(
        f"--ddp-history: {several(len(entry.measurements), 'measurement')} added as {path}"
    )
