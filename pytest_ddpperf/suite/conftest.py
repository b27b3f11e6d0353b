"""Fixtures and tables that the experiments share."""

import os
from collections.abc import Callable, Generator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf import (
    Context,
    DdpBenchmark,
    DdpRun,
    Result,
    add_section,
    node_count,
)
from pytest_ddpperf.suite import workloads
from pytest_ddpperf.suite.tables import Latencies, Tables, save
from pytest_ddpperf.suite.workloads import (
    Fits,
    Need,
    Size,
    Step,
    SweepRow,
    Timed,
)

_HERE = Path(__file__).parent
_TABLES = pytest.StashKey[Tables]()
# what first steps needed
_TRIED = pytest.StashKey[dict[object, list[Need | None]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TABLES] = Tables()
    config.stash[_TRIED] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make rows over ranks, as PyTorch's DDP benchmark has them: on one machine one, two, four, ...
    ranks up to its share of those that were asked for, then as many on each of two, four, ...
    machines. The sweep also has one without DDP."""
    machines = node_count(metafunc.config)
    here = max(1, workloads.largest_world(metafunc.config) // machines)
    rows = [SweepRow(1, ranks) for ranks in _doubled(here)]
    rows += [
        SweepRow(several, several * here) for several in _doubled(machines)[1:]
    ]
    if "sweep_row" in metafunc.fixturenames:
        sweep = [_row(row, row.name, row) for row in (SweepRow(1, 0), *rows)]
        metafunc.parametrize("sweep_row", sweep)
    if "scaled_ranks" in metafunc.fixturenames:
        scaled = [_row(row.ranks, f"{row.ranks}-ranks", row) for row in rows]
        metafunc.parametrize("scaled_ranks", scaled)


def _doubled(most: int) -> list[int]:
    """Return 1, 2, 4, ..., and the most."""
    numbers = []
    number = 1
    while number < most:
        numbers.append(number)
        number *= 2
    return [*numbers, most]


def _row(value: object, name: str, row: SweepRow) -> Any:
    mark = pytest.mark.ddp(world_size=row.ranks or 1, nodes=row.machines)
    return pytest.param(value, id=name, marks=mark)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    drawn = config.getoption("ddp_suite_plots") is not None
    if drawn and find_spec("matplotlib") is None:
        raise pytest.UsageError(
            "--ddp-suite-plots needs matplotlib: pip install 'pytest-ddpperf[plots]'"
        )
    for item in items:
        if Path(item.path).is_relative_to(_HERE):
            item.add_marker(pytest.mark.ddp(**_open_settings(config)))


def _open_settings(config: pytest.Config) -> dict[str, Any]:
    """Return the settings of the size that the run leaves open. The limits suit only its own
    launches and steps."""
    settings = workloads.chosen_size(config).settings
    given = {
        name
        for name in settings
        if workloads.read_option(config, f"ddp_{name}") is not None
    }
    if given & {"launches", "steps"}:
        given.add("threshold")
    if "launches" in given:
        given.add("max_launches")
    return {name: settings[name] for name in settings if name not in given}


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    tables = config.stash[_TABLES]
    lines = list(tables.lines())
    folder = config.getoption("ddp_suite_plots")
    if folder is not None and not config.option.collectonly:
        place = config.invocation_params.dir / os.path.expanduser(folder)
        try:
            plots = save(tables.all_plots(), place)
            lines += [f"drawn: {path}" for path in plots] or [
                "--ddp-suite-plots: nothing was measured that has a figure"
            ]
        except Exception as error:  # the tables are shown all the same
            lines.append(f"--ddp-suite-plots: {type(error).__name__}: {error}")
            session.exitstatus = max(exitstatus, pytest.ExitCode.TESTS_FAILED)
    if lines:
        add_section(config, "pytest_ddpperf.suite", lines)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        item.config.stash[_TABLES].skipped.append(
            (item.name, report.longrepr[2].removeprefix("Skipped: "))
        )
    return report


@pytest.fixture
def size(request: pytest.FixtureRequest) -> Size:
    """How much is measured."""
    return workloads.chosen_size(request.config)


@pytest.fixture
def tables(request: pytest.FixtureRequest) -> Tables:
    """The results, shown together at the end of the run."""
    return request.config.stash[_TABLES]


@pytest.fixture
def tokens(size: Size, ddp_world_size: int) -> int:
    """The batch size of a GPT, as `Size.images` is a ResNet's. It differs from size to size."""
    return workloads.share_of(size, ddp_world_size) * size.tokens


@pytest.fixture
def fits(
    request: pytest.FixtureRequest,
    ddp_run: DdpRun,
    ddp_world_size: int,
    size: Size,
) -> Fits:
    """Call it with a model: it skips a test whose ranks need more memory than is free, by a first
    step that is measured once for all tests of a model."""
    # These marks say where ranks run.
    marks = str([mark.kwargs for mark in request.node.iter_markers("ddp")])
    tried = request.config.stash[_TRIED]

    def check(model: str, sequences: int | None = None) -> None:
        # Not if it is sure to fit: where batches are small, the copies of parameters are most of
        # what a step needs. Other machines may have less.
        gradients = workloads.gradient_bytes(model, size)
        least = workloads.COPIES * gradients * ddp_world_size
        is_one_machine = node_count(request.config) == 1
        if (
            size.name != "full"
            and is_one_machine
            and least < workloads.free_memory() / 2
        ):
            return
        case = model, sequences, ddp_world_size, marks
        if case not in tried:
            tried[case] = ddp_run(workloads.first_step, model, size, sequences)
        for need in tried[case]:
            if need is not None:
                need.require()

    return check


@pytest.fixture
def timed(
    ddp_benchmark: DdpBenchmark, fits: Fits, size: Size, tokens: int
) -> Timed:
    """Call it with a set-up, and with the model and the number of iterations of a step, as
    `time_step`."""
    return partial(workloads.time_step, ddp_benchmark, fits, size, tokens)


@pytest.fixture
def compared(timed: Timed, tables: Tables) -> Timed:
    """Call it with an experiment, one of its variants, and what `timed` takes: the step times of
    all variants are compared in a table."""
    return partial(time_variant, timed, tables)


def time_variant(
    timed: Timed,
    tables: Tables,
    experiment: str,
    variant: str,
    setup: Callable[[Context], Step],
    model: str = "",
    iterations: int = 1,
) -> Result:
    result = timed(setup, model, iterations)
    tables.get(Latencies).add(experiment, variant, result, iterations)
    return result
