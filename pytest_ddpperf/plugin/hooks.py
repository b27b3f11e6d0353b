"""pytest's hooks of every run, and the fixtures. The hooks around each test are in `running`, which
is imported if there are distributed tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_ddpperf.options import definitions
from pytest_ddpperf.plugin.item_settings import (
    check_place,
    own_settings,
    plain_failure,
    settings_of,
)
from pytest_ddpperf.plugin.items import (
    COLLECTED,
    PYTEST_BENCHMARK,
    WORLD_SIZE,
    has_any,
    has_own_sizes,
    is_distributed,
    nodeid_of,
    only_prints,
)
from pytest_ddpperf.plugin.reporter import Reporter, prepare_files
from pytest_ddpperf.plugin.snapshot import take_snapshot, why_not_compared
from pytest_ddpperf.plugin.state import RUN, Run

if TYPE_CHECKING:
    from pytest_ddpperf.plugin.fixtures import (
        CollectiveBenchmark,
        DdpBenchmark,
        DdpRun,
        RpcBenchmark,
    )
    from pytest_ddpperf.plugin.replay import StoreSamples


def pytest_addoption(parser: pytest.Parser) -> None:
    definitions.add_options(parser)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config,
) -> Generator[None, None, None]:
    take_snapshot(early_config)
    yield


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    is_torchruns = "TORCHELASTIC_RUN_ID" in os.environ
    is_step = os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    if not is_torchruns and not (is_step and definitions.given(config)):
        return None
    from pytest_ddpperf.plugin import remote

    return remote.main(config)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", definitions.MARKER_HELP)
    # if a conftest's `pytest_plugins` loaded the plugin later
    take_snapshot(config)
    plugins = config.pluginmanager
    if has_any(plugins, PYTEST_BENCHMARK):
        from pytest_ddpperf.plugin.replay import ReplayToBenchmark

        plugins.register(ReplayToBenchmark(config), "ddpperf-replay")
    run = Run(config)
    config.stash[RUN] = run
    given = definitions.given(config)
    if given or run.role.other_nodes:
        _check(run)
    if not run.worker:
        writes = given and not _only_shows(config)
        _register(run, Reporter(run, writes), "ddpperf-reporter")


def _register(run: Run, plugin: object, name: str) -> None:
    """Register a part of this plugin; raises pytest.UsageError if an option disables it, with which
    a run would report nothing."""
    if run.config.pluginmanager.register(plugin, name) is None:
        raise pytest.UsageError(f"-p no:{name} is not supported: drop it")


def _check(run: Run) -> None:
    """Refuse invalid settings, and what they cannot be combined with."""
    from pytest_ddpperf.records.errors import MissingExtraError, OptionError

    try:
        settings = run.settings
        prepare_files(run)
    except (OptionError, MissingExtraError) as error:
        raise pytest.UsageError(str(error)) from None
    compares = settings.comparison_option
    in_one_process = settings.records or compares
    if not in_one_process and settings.suite_plots:
        in_one_process = "--ddp-suite-plots"
    if not in_one_process and run.role.other_nodes:
        in_one_process = "a run on several nodes"
    if in_one_process and run.config.getoption("tx", None):
        raise pytest.UsageError(
            f"{in_one_process} is not supported under xdist: add -n 0"
        )
    if compares and (reason := why_not_compared()):
        raise pytest.UsageError(f"{compares} is {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[RUN].pytest_session = session


def pytest_unconfigure(config: pytest.Config) -> None:
    if RUN in config.stash:
        config.stash[RUN].close()


# --- collection


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if WORLD_SIZE not in metafunc.fixturenames or has_own_sizes(metafunc):
        return
    from pytest_ddpperf.records.errors import OptionError

    # raised here it would lose the whole file: the test fails in its setup
    with suppress(OptionError):
        sizes = settings_of(metafunc.definition).world_sizes
        if len(sizes) > 1:
            metafunc.parametrize(
                WORLD_SIZE, sizes, ids=[f"ws{size}" for size in sizes]
            )


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    item.stash[COLLECTED] = item.nodeid


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if is_distributed(item):
            item.config.stash[RUN].deselected.append(item)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare for the distributed tests among the items, if there are any."""
    run, items = session.config.stash[RUN], session.items
    if run.items:  # xdist's --looponfail calls this twice
        return
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
    # Pytest runs no test if one could not be collected, or after Ctrl-C, whose exception is on its
    # way through perform_collect() then.
    trace = sys.exc_info()[2]
    shows = (
        run.worker
        or _only_shows(run.config)
        or (
            trace is not None
            and trace.tb_frame.f_code is pytest.Session.perform_collect.__code__
        )
        or (
            session.testsfailed
            and not run.config.option.continue_on_collection_errors
        )
    )
    if run.items:
        from pytest_ddpperf.plugin.running import RunningTests

        _register(run, RunningTests(run), "ddpperf-tests")
        if not shows:
            _prepare(run, items)
    elif not shows and run.config.getoption("ddp_against") is not None:
        _look(run, items)


def _look(run: Run, items: list[pytest.Item]) -> None:
    """Find out what the other version's tests would be judged by, in a run that has none. If that
    cannot be known, the run says so: these tests may all be gone."""
    from pytest_ddpperf.records.errors import DdpPerfError

    report = run.report
    try:
        run.start_others(items)
    except DdpPerfError as error:
        problem = str(error).splitlines()[0]
        report.messages.append(f"no distributed test to compare: {problem}")


def _only_shows(config: pytest.Config) -> bool:
    """Say whether pytest shows tests or their fixtures (--setup-plan too), and calls none."""
    return only_prints(config, "collectonly setuponly")


def _prepare(run: Run, items: list[pytest.Item]) -> None:
    """Ask a probe rank what the machine has, and refuse options that need more. Meanwhile other
    versions collect."""
    if sys.platform == "win32":
        raise pytest.UsageError(
            "pytest-ddpperf forks its ranks: it runs on Linux and macOS, not on Windows"
        )
    from pytest_ddpperf.records.errors import (
        DdpPerfError,
        MarkerError,
        Unavailable,
    )

    try:
        for item in run.items:
            with suppress(MarkerError):  # the test will fail
                settings_of(item)
        run.start_others(items)
        for item in run.items:
            # the test will be skipped, or fail
            with suppress(MarkerError):
                try:
                    check_place(item)
                except Unavailable:
                    run.lacking.add(nodeid_of(item))
        if run.items:
            run.report.facts = run.machine()
        run.role.await_others(run)
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
    if hasattr(request, "param"):  # of a parametrization with indirect=True
        size: int = request.param
        return size
    settings = own_settings(request.node)
    if len(settings.world_sizes) > 1:
        sizes = ",".join(map(str, settings.world_sizes))
        raise plain_failure(
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
    request: pytest.FixtureRequest,
    ddp_world_size: int,
    _ddp_replay: StoreSamples | None,
) -> DdpBenchmark:
    """Call `ddp_benchmark(setup, batch_size=...)`: time a distributed training step on real ranks
    and gate it."""
    from pytest_ddpperf.plugin.fixtures import DdpBenchmark

    return DdpBenchmark(request, ddp_world_size, _ddp_replay)


@pytest.fixture
def rpc_benchmark(
    request: pytest.FixtureRequest, _ddp_replay: StoreSamples | None
) -> RpcBenchmark:
    """Call `rpc_benchmark(trainer, master=..., parameter_server=...)`: time trainers that call
    others by RPC."""
    from pytest_ddpperf.plugin.fixtures import RpcBenchmark

    return RpcBenchmark(request, 0, _ddp_replay)


@pytest.fixture
def collective_benchmark(
    request: pytest.FixtureRequest,
    ddp_world_size: int,
    _ddp_replay: StoreSamples | None,
) -> CollectiveBenchmark:
    """Call `collective_benchmark(op, sizes, dtype=...)`: time and check one collective over several
    sizes."""
    from pytest_ddpperf.plugin.fixtures import CollectiveBenchmark

    return CollectiveBenchmark(request, ddp_world_size, _ddp_replay)


@pytest.fixture
def _ddp_replay() -> None:
    """Without pytest-benchmark nothing is replayed."""
