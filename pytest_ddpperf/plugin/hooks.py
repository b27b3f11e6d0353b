"""pytest's hooks of every run, and the fixtures. The hooks around each test are in `running`, which
is imported if there are distributed tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_ddpperf.options import definitions
from pytest_ddpperf.plugin import state
from pytest_ddpperf.plugin.items import (
    COLLECTED,
    WORLD_SIZE,
    has_benchmark,
    is_distributed,
)
from pytest_ddpperf.plugin.reporter import Reporter, prepare_files
from pytest_ddpperf.plugin.state import RUN, SNAPSHOT, Run, take_snapshot, traces_ranks

if TYPE_CHECKING:
    from pytest_ddpperf.compare.result import Measured
    from pytest_ddpperf.plugin.fixtures import (
        CollectiveBenchmark,
        DdpBenchmark,
        DdpRun,
        RpcBenchmark,
    )

    Replay = Callable[[Measured], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    definitions.add_options(parser)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config,
) -> Generator[None, None, None]:
    early_config.stash[SNAPSHOT] = take_snapshot(early_config)
    yield


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    from pytest_ddpperf.plugin import remote

    return remote.main(config)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", definitions.MARKER_HELP)
    if has_benchmark(config.pluginmanager):
        config.pluginmanager.register(_ReplayToBenchmark(config), "ddpperf-replay")
    run = config.stash[RUN] = Run(config)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from pytest_ddpperf.plugin import remote

        remote.lead(run)
    given = definitions.given(config)
    if given or run.other_nodes is not None:
        _check(config, run)
    if not run.worker:
        config.pluginmanager.register(
            Reporter(run, writes=given and not _only_shows(config)), "ddpperf-reporter"
        )


def _check(config: pytest.Config, run: Run) -> None:
    """Refuse invalid settings."""
    from pytest_ddpperf.records.errors import MissingExtraError, OptionError

    try:
        settings = run.settings
        prepare_files(run)
    except (OptionError, MissingExtraError) as error:
        raise pytest.UsageError(str(error)) from None
    plots = "--ddp-suite-plots" if settings.suite_plots else ""
    nodes = "a run on several nodes" if run.other_nodes is not None else ""
    in_one_process = settings.records or settings.comparison_option or plots or nodes
    if in_one_process and config.getoption("dist", "no") != "no":
        raise pytest.UsageError(
            f"{in_one_process} is not supported under xdist: add -n 0"
        )
    option = settings.comparison_option
    if option and nodes:
        raise pytest.UsageError(
            f"{option} is not supported over several nodes: use stored baselines"
        )
    if option and traces_ranks():
        raise pytest.UsageError(
            f"{option} is not supported with coverage in ranks: add --no-cov, or run pytest without"
            " coverage"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[RUN].pytest_session = session


def pytest_unconfigure(config: pytest.Config) -> None:
    if RUN in config.stash:
        config.stash[RUN].close()


# --- collection


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if WORLD_SIZE not in metafunc.fixturenames:
        return
    from pytest_ddpperf.records.errors import MarkerError

    # raised here it would lose the whole file: the test fails in its setup
    with suppress(MarkerError):
        sizes = state.settings_of(metafunc.definition).world_sizes
        if len(sizes) > 1:
            metafunc.parametrize(WORLD_SIZE, sizes, ids=[f"ws{size}" for size in sizes])


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    item.stash[COLLECTED] = item.nodeid


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare for the distributed tests among the items, if there are any."""
    run, items = session.config.stash[RUN], session.items
    suite = Path(__file__).parents[1] / "suite"
    if (
        items
        and run.config.getoption("ddp_suite_plots")
        and not any(suite in item.path.parents for item in items)
    ):
        raise pytest.UsageError(
            "--ddp-suite-plots: the suite is not among the tests: --pyargs pytest_ddpperf.suite"
        )
    run.items = [item for item in items if is_distributed(item)]
    if not run.items:
        return
    from pytest_ddpperf.plugin.running import RunningTests

    plugins = run.config.pluginmanager
    plugins.register(RunningTests(run), "ddpperf-tests")
    if not run.worker and not _only_shows(run.config):
        _prepare(run, items)


def _only_shows(config: pytest.Config) -> bool:
    """Say whether pytest shows tests or their fixtures (--setup-plan too), and calls none."""
    return bool(config.option.collectonly or config.getoption("setuponly", False))


def _prepare(run: Run, items: list[pytest.Item]) -> None:
    """Ask a probe rank what the machine has, and refuse options that need more. Meanwhile other
    versions collect."""
    if sys.platform == "win32":
        raise pytest.UsageError(
            "pytest-ddpperf forks its ranks: it runs on Linux and macOS, not on Windows"
        )
    from pytest_ddpperf.records.errors import DdpPerfError, MarkerError, Unavailable

    try:
        run.start_others(items)
        for item in run.items:
            # the test will be skipped, or fail
            with suppress(Unavailable, MarkerError):
                run.place(item)
        run.report.facts = run.session.machine()
        run.await_others()
    except DdpPerfError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    run = config.stash[RUN]
    if not run.items or run.worker or _only_shows(config):
        return []
    return list(run.report.header(config.getoption("verbose")))


# --- fixtures, as pytest lists them: what they adapt is imported when a distributed test needs it


@pytest.fixture
def ddp_world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks of the test. With several --ddp-world-size, each has a test of its
    own."""
    settings = state.own_settings(request.node)
    if len(settings.world_sizes) > 1:
        sizes = ",".join(map(str, settings.world_sizes))
        raise state.plain_failure(
            f"world sizes {sizes}: a unittest.TestCase or a single parameter cannot have several; "
            "give it @pytest.mark.ddp(world_size=N), or the test one list"
        )
    return settings.world_sizes[0]


@pytest.fixture
def ddp_run(request: pytest.FixtureRequest, ddp_world_size: int) -> DdpRun:
    """Call `ddp_run(fn, *args)`: `fn(ctx, *args)` on every rank of a fresh process group; the
    results by rank."""
    from pytest_ddpperf.plugin.fixtures import DdpRun

    return DdpRun(request, ddp_world_size)


@pytest.fixture
def ddp_benchmark(
    request: pytest.FixtureRequest, ddp_world_size: int, _ddp_replay: Replay | None
) -> DdpBenchmark:
    """Call `ddp_benchmark(setup, batch_size=...)`: time a distributed training step on real ranks
    and gate it."""
    from pytest_ddpperf.plugin.fixtures import DdpBenchmark

    return DdpBenchmark(request, ddp_world_size, _ddp_replay)


@pytest.fixture
def rpc_benchmark(
    request: pytest.FixtureRequest, _ddp_replay: Replay | None
) -> RpcBenchmark:
    """Call `rpc_benchmark(trainer, master=..., parameter_server=...)`: time trainers that call
    others by RPC."""
    from pytest_ddpperf.plugin.fixtures import RpcBenchmark

    return RpcBenchmark(request, 0, _ddp_replay)


@pytest.fixture
def collective_benchmark(
    request: pytest.FixtureRequest, ddp_world_size: int, _ddp_replay: Replay | None
) -> CollectiveBenchmark:
    """Call `collective_benchmark(op, sizes, dtype=...)`: time and check one collective over several
    sizes."""
    from pytest_ddpperf.plugin.fixtures import CollectiveBenchmark

    return CollectiveBenchmark(request, ddp_world_size, _ddp_replay)


@pytest.fixture
def _ddp_replay() -> None:
    """Without pytest-benchmark nothing is replayed."""


# The options of pytest-benchmark that ask for its reports.
_THEIR_REPORTS = (
    "json",
    "save",
    "autosave",
    "compare",
    "histogram",
    "cprofile",
    "only",
)


class _ReplayToBenchmark:
    """Replays to pytest-benchmark. Its fixture is among those of a test, so that --benchmark-only
    and -skip see it.

    Its rows of distributed tests are shown if the user asked for its reports, or at -v."""

    def __init__(self, config: pytest.Config) -> None:
        asked = (config.getoption(f"benchmark_{name}", None) for name in _THEIR_REPORTS)
        self._shows = config.getoption("verbose") > 0 or any(asked)

    @pytest.hookimpl(wrapper=True)
    def pytest_benchmark_group_stats(
        self,
    ) -> Generator[None, list[tuple[Any, list[Any]]], list[tuple[Any, list[Any]]]]:
        groups = yield
        if self._shows:
            return groups
        theirs = (
            (name, [row for row in rows if "ddpperf" not in row["extra_info"]])
            for name, rows in groups
        )
        return [(name, rows) for name, rows in theirs if rows]

    @pytest.fixture
    def _ddp_replay(
        self, request: pytest.FixtureRequest, benchmark: Any
    ) -> Generator[Replay | None]:
        from pytest_ddpperf.plugin.watch import replay_into

        yield replay_into(benchmark, request.node)
        # Else pytest-benchmark warns if nothing was replayed, also after Ctrl-C: an error under -W
        # error.
        benchmark.skipped = True
