"""pytest's hooks: adapters. What they adapt is imported when a distributed test needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_ddpperf import options
from pytest_ddpperf.plugin import declared, state
from pytest_ddpperf.plugin.items import BENCHMARKS, WORLD_SIZE, is_distributed, uses
from pytest_ddpperf.plugin.outset import OUTSET, Outset, traces_one_side
from pytest_ddpperf.plugin.reporter import Reporter
from pytest_ddpperf.plugin.state import RUN, Run

if TYPE_CHECKING:
    from pytest_ddpperf.records import Outcome


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, None, None]:
    early_config.stash[OUTSET] = Outset.of(early_config)
    yield


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    from pytest_ddpperf.plugin import nodes

    return nodes.main(config)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", options.MARKER_HELP)
    run = config.stash[RUN] = Run(config)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from pytest_ddpperf.plugin import nodes

        nodes.lead(run)
    if options.given(config) or run.fleet is not None:
        _check(config, run)
    if not run.worker:
        writes = options.given(config) and not _calls_none(config)
        config.pluginmanager.register(Reporter(run, writes=writes), "ddpperf-reporter")
    declared.register(config.pluginmanager)


def _check(config: pytest.Config, run: Run) -> None:
    """Refuse settings that cannot be."""
    from pytest_ddpperf.plugin import written
    from pytest_ddpperf.records.errors import MissingExtraError, OptionError

    try:
        settings = run.settings
        written.begin(run)
    except (OptionError, MissingExtraError) as error:
        raise pytest.UsageError(str(error)) from None
    if settings.records and _workers(config) > 1:
        raise pytest.UsageError(
            f"{settings.records} with {_workers(config)} xdist workers: baselines are recorded by one; add -n 0"
        )
    if settings.suite_plots and _workers(config):
        raise pytest.UsageError("--ddp-suite-plots with xdist workers: figures are drawn by one process; add -n 0")
    if run.fleet is not None and _workers(config):
        raise pytest.UsageError("-n over several nodes: each node's pytest takes part in one test at a time")
    if settings.beside and _workers(config):
        raise pytest.UsageError(
            f"{settings.beside} with {_workers(config)} xdist workers: launches of both sides take turns; add -n 0"
        )
    if settings.beside and traces_one_side(run.outset):
        raise pytest.UsageError(f"{settings.beside} with --cov that traces ranks, of this side alone: add --no-cov")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[RUN].pytest_session = session


def pytest_unconfigure(config: pytest.Config) -> None:
    if RUN in config.stash:
        config.stash[RUN].close()


def _workers(config: pytest.Config) -> int:
    """How many xdist workers this controller starts; 0 without xdist, or in a worker."""
    if config.getoption("dist", "no") == "no":
        return 0
    counts = [spec.partition("*")[0] for spec in config.getoption("tx", None) or ()]
    return sum(int(count) if count.isdigit() else 1 for count in counts)


# --- collection


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if WORLD_SIZE not in metafunc.fixturenames:
        return
    from pytest_ddpperf.records.errors import MarkerError

    with suppress(MarkerError):  # raised here it would lose the whole file: the test fails in its setup
        sizes = state.settings_of(metafunc.definition).world_sizes
        if len(sizes) > 1:
            metafunc.parametrize(WORLD_SIZE, sizes, ids=[f"ws{size}" for size in sizes])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from_benchmark = declared.has_benchmark(config.pluginmanager)
    for item in items:
        if from_benchmark and uses(item, BENCHMARKS):
            # Theirs, when a launch fails before anything could be replayed: an error under -W error.
            item.add_marker(pytest.mark.filterwarnings("ignore:Benchmark fixture was not used at all"))


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        item.config.stash[RUN].deselected.add(item.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    run = session.config.stash[RUN]
    if session.items and session.config.getoption("ddp_suite_plots") and not _suite_among(session.items):
        raise pytest.UsageError("--ddp-suite-plots: the suite is not among the tests: --pyargs pytest_ddpperf.suite")
    run.collected(session.items)
    if run.items and not run.worker and not _calls_none(session.config):
        _prepare(run, session.items)


def _calls_none(config: pytest.Config) -> bool:
    """Whether tests are shown, or what they would have of fixtures (--setup-plan too), and none is called."""
    return bool(config.option.collectonly or config.getoption("setuponly", False))


def _suite_among(items: Sequence[pytest.Item]) -> bool:
    return any(Path(__file__).parents[1] / "suite" in item.path.parents for item in items)


def _prepare(run: Run, items: list[pytest.Item]) -> None:
    """Ask a probe rank what there is, and refuse what the command line or the ini file asks beyond it; meanwhile the
    version to compare with collects."""
    if sys.platform == "win32":
        raise pytest.UsageError("pytest-ddpperf forks its ranks: it runs on Linux and macOS, not on Windows")
    from pytest_ddpperf.measuring.machine import Unavailable
    from pytest_ddpperf.records.errors import DdpPerfError, MarkerError

    try:
        run.start_others(items)
        for item in run.items:
            with suppress(Unavailable, MarkerError):  # the test will be skipped, or fail
                run.place(item)
        run.report.facts = run.session.machine()
        run.await_others()
    except DdpPerfError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    run = config.stash[RUN]
    if not run.items or run.worker or _calls_none(config):
        return []
    return list(run.report.header(config.getoption("verbose")))


# --- tests


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if is_distributed(item):
        item.config.stash[RUN].enter(item)
        state.of(item).begin()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    if not is_distributed(item):
        return (yield)
    test = state.of(item)
    test.calling = True
    try:
        return (yield)
    finally:
        test.calling = False


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    try:
        result = yield
    except BaseException:
        for told in _leave(item):
            item.add_report_section("teardown", "of another node", told)
        raise
    if elsewhere := _leave(item):
        pytest.fail("\n\n".join(elsewhere), pytrace=False)
    if is_distributed(item):
        _save(item)
    return result


def _leave(item: pytest.Item) -> list[str]:
    """The test is over, on other nodes too: what failed there in its setup or teardown."""
    if not is_distributed(item):
        return []
    run = item.config.stash[RUN]
    run.leave(item)
    return run.fleet.failed() if run.fleet is not None else []


def _save(item: pytest.Item) -> None:
    """Write the baselines of a test that has passed as a whole, in its first attempt. What could not be written fails
    its reruns, too."""
    from pytest_ddpperf.records.errors import DdpPerfError

    test = state.of(item)
    run = item.config.stash[RUN]
    for index, candidate, imported in test.candidates if test.passed and test.attempt == 1 else ():
        outcome = test.outcomes[index]
        try:
            test.outcomes[index] = replace(outcome, saved=run.session.save(candidate, imported))
        except DdpPerfError as error:
            test.unsaved[outcome.test.label] = str(error)
    for index, outcome in enumerate(test.outcomes):
        if problem := test.unsaved.get(outcome.test.label):
            test.outcomes[index] = replace(outcome, fails=True, error=problem.splitlines()[0])
    if test.unsaved:
        pytest.fail("\n".join(test.unsaved.values()), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if is_distributed(item):
        _note(item, report)
    return report


def _note(item: pytest.Item, report: pytest.TestReport) -> None:
    """Let the report of a test carry what we have to say of it: under xdist it crosses to the controller."""
    test = state.of(item)
    if test.calling:
        test.part_failed |= report.failed
        return
    if report.when == "call":
        test.passed = report.passed and not test.part_failed and not hasattr(report, "wasxfail")
    expected = hasattr(report, "wasxfail") and report.when != "teardown" and not report.failed
    if expected:
        test.outcomes = [_expected(outcome) if outcome.fails else outcome for outcome in test.outcomes]
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if report.when == "teardown" or skipped:
        report.ddpperf = item.config.stash[RUN].telling(item, skipped=skipped)  # type: ignore[attr-defined]


def _expected(outcome: Outcome) -> Outcome:
    """Of a test that was to fail, as it did."""
    return replace(outcome, fails=False, notes=(*outcome.notes, "expected to fail"))
