"""pytest's hooks and fixtures: adapters. What they adapt is imported when a distributed test needs it."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_ddpperf import options
from pytest_ddpperf.plugin import state
from pytest_ddpperf.plugin.items import BENCHMARKS, WORLD_SIZE, is_distributed, uses
from pytest_ddpperf.plugin.state import RUN, Run

if TYPE_CHECKING:
    from pytest_ddpperf.plugin.fixtures import CollectiveBenchmark, DdpBenchmark, DdpRun, RpcBenchmark
    from pytest_ddpperf.plugin.replay import Replay


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    for text in options.MARKERS_HELP:
        config.addinivalue_line("markers", text)
    run = config.stash[RUN] = Run(config)
    if options.given(config):
        _check(config, run)
    if not run.worker:
        config.pluginmanager.register(_Reporter(run), "ddpperf-reporter")
    with_benchmark = config.pluginmanager.hasplugin("benchmark")
    config.pluginmanager.register(_BesideBenchmark() if with_benchmark else _Alone(), "ddpperf-fixtures")


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
    if settings.beside and _workers(config):
        raise pytest.UsageError(
            f"{settings.beside} with {_workers(config)} xdist workers: launches of both sides take turns; add -n 0"
        )


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

    try:
        sizes = state.settings_of(metafunc.definition).world_sizes
    except MarkerError:
        return  # an error here would lose the whole file: the test will fail in its setup
    if len(sizes) > 1 and not _sized_by_parameters(metafunc):
        metafunc.parametrize(WORLD_SIZE, sizes, ids=[f"ws{size}" for size in sizes])


def _sized_by_parameters(metafunc: pytest.Metafunc) -> bool:
    """Whether each of the test's parameters has a marker of its own that says the world size."""
    calls = metafunc._calls  # pytest has no public word for them

    def sized(mark: Any) -> bool:
        return mark.name == options.MARKS[options.MARKER] and "world_size" in mark.kwargs

    return bool(calls) and all(any(map(sized, getattr(call, "marks", ()))) for call in calls)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from_benchmark = config.pluginmanager.hasplugin("benchmark")
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
    for option in ("ddp_suite_list", "ddp_suite_plots"):
        if session.items and session.config.getoption(option) and not _suite_among(session.items):
            name = "--" + option.replace("_", "-")
            raise pytest.UsageError(f"{name}: the suite is not among the tests: add --pyargs pytest_ddpperf.suite")
    run.collected(session.items)
    if run.items and not run.worker and not session.config.option.collectonly:
        _prepare(run, session.items)


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
        run.start_base(items)
        for item in run.items:
            with suppress(Unavailable, MarkerError):  # the test will be skipped, or fail
                run.place(item)
        run.report.facts = run.session.machine()
        run.await_base()
    except DdpPerfError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    run = config.stash[RUN]
    if not run.items or run.worker or config.option.collectonly:
        return []
    return list(run.report.header(config.getoption("verbose")))


# --- tests


@pytest.fixture
def _ddp_world_size(request: pytest.FixtureRequest) -> int:
    """The world size of this test, where it is not parametrised with several."""
    settings = state.own_settings(request.node)
    if len(settings.world_sizes) > 1:
        sizes = ",".join(map(str, settings.world_sizes))
        pytest.fail(
            f"world sizes {sizes}: a unittest.TestCase cannot be parametrised; give it @pytest.mark.ddp(world_size=N)",
            pytrace=False,
        )
    return settings.world_sizes[0]


@pytest.fixture
def ddp_run(request: pytest.FixtureRequest, _ddp_world_size: int) -> DdpRun:
    """Call `ddp_run(fn, *args)`: `fn(ctx, *args)` on every rank of a fresh process group; the results by rank."""
    from pytest_ddpperf.plugin.fixtures import DdpRun

    return DdpRun(request, _ddp_world_size)


@pytest.fixture
def ddp_benchmark(request: pytest.FixtureRequest, _ddp_world_size: int, _ddp_replay: Replay | None) -> DdpBenchmark:
    """Call `ddp_benchmark(setup, batch_size=...)`: time a distributed training step on real ranks and gate it."""
    from pytest_ddpperf.plugin.fixtures import DdpBenchmark

    return DdpBenchmark(request, _ddp_world_size, _ddp_replay)


@pytest.fixture
def rpc_benchmark(request: pytest.FixtureRequest, _ddp_replay: Replay | None) -> RpcBenchmark:
    """Call `rpc_benchmark(trainer, master=..., parameter_server=...)`: time trainers that call others by RPC."""
    from pytest_ddpperf.plugin.fixtures import RpcBenchmark

    return RpcBenchmark(request, _ddp_replay)


@pytest.fixture
def collective_benchmark(
    request: pytest.FixtureRequest, _ddp_world_size: int, _ddp_replay: Replay | None
) -> CollectiveBenchmark:
    """Call `collective_benchmark(op, sizes, dtype=...)`: time and check one collective over several sizes."""
    from pytest_ddpperf.plugin.fixtures import CollectiveBenchmark

    return CollectiveBenchmark(request, _ddp_world_size, _ddp_replay)


class _Alone:
    """Without pytest-benchmark."""

    @pytest.fixture
    def _ddp_replay(self) -> None:
        return None


class _BesideBenchmark:
    """With pytest-benchmark: its fixture is among those of a test, so that --benchmark-only and -skip see the test."""

    @pytest.fixture
    def _ddp_replay(self, request: pytest.FixtureRequest, benchmark: Any) -> Replay:
        from pytest_ddpperf.plugin.replay import Replay

        return Replay(benchmark, request.node)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        # Asked again: CodSpeed takes their plugin out, and its own reading of the marker knows no timer.
        theirs = item.config.pluginmanager.hasplugin("benchmark")
        if theirs and uses(item, BENCHMARKS):
            from pytest_ddpperf.plugin.replay import mark_with_clock

            mark_with_clock(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if is_distributed(item):
        item.config.stash[RUN].enter(item)
        state.of(item).begin()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    try:
        result = yield
    finally:
        if is_distributed(item):
            item.config.stash[RUN].leave(item)
    if is_distributed(item):
        _save(item)
    return result


def _save(item: pytest.Item) -> None:
    """Write the baselines of a test that has passed as a whole, in its first attempt."""
    from pytest_ddpperf.records.errors import DdpPerfError

    test = state.of(item)
    if not test.passed or test.attempt > 1:
        return
    run = item.config.stash[RUN]
    problems: list[str] = []
    for index, candidate in test.candidates:
        try:
            sessions = run.session.save(candidate, run.files_of(item))
            test.outcomes[index] = replace(test.outcomes[index], saved=sessions)
        except DdpPerfError as error:
            problems.append(str(error))
            test.outcomes[index] = replace(test.outcomes[index], error=problems[-1].splitlines()[0])
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


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
    if report.when == "call":
        test.passed = report.passed and not hasattr(report, "wasxfail")
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if report.when == "teardown" or skipped:
        report.ddpperf = item.config.stash[RUN].telling(item, skipped=skipped)  # type: ignore[attr-defined]


class _Reporter:
    """The end of a run, in the process that reports: the only one, or xdist's controller."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        message = getattr(report, "ddpperf", None)
        if message is not None:
            self._run.report.take(message)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        run = self._run
        if run.reported:
            run.end()
        if run.reported and run.report.usage_error:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        if options.given(run.config) and not session.config.option.collectonly:
            from pytest_ddpperf.plugin import written

            if not written.write(run) and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        run = self._run
        if not run.reported:
            return
        from pytest_ddpperf.report.annotations import annotated

        terminalreporter.section("distributed performance")
        lines = run.report.lines(run.config.getoption("verbose"), header=run.distributes)
        for line in (*annotated(run.report.outcomes, run.settings.annotate), *lines):
            terminalreporter.write_line(line)
