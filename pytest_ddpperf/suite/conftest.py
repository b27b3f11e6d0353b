"""What the experiments share: how large they are, the tables that they fill, what is listed."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_ddpperf import node_count
from pytest_ddpperf.suite.plots import drawable, save
from pytest_ddpperf.suite.sizes import Size, SweepRow, asked, chosen, largest_world, of_a_node, on_cuda
from pytest_ddpperf.suite.tables import Tables
from pytest_ddpperf.suite.workloads import tokens_of

_HERE = Path(__file__).parent
_TABLES = pytest.StashKey[Tables]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TABLES] = Tables()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Rows over ranks: one, two, four, ... up to those that were asked for; of the sweep, one without DDP before. What
    does not divide over the machines is left out, unless one has room for it."""
    most, machines = largest_world(metafunc.config), node_count(metafunc.config)
    each = list(dict.fromkeys([*(1 << power for power in range(20) if 1 << power < most), most]))
    if "sweep_row" in metafunc.fixturenames:
        rows = [SweepRow(1, 0), *(SweepRow(1, ranks) for ranks in each)]
        rows += [SweepRow(machines, ranks) for ranks in each if machines > 1 and ranks % machines == 0]
        metafunc.parametrize("sweep_row", [_row(row, row.name, row) for row in rows])
    if "scaled_ranks" in metafunc.fixturenames:
        rows = [SweepRow(1 if ranks <= most // machines else machines, ranks) for ranks in each]
        over = [row for row in rows if row.ranks % row.machines == 0]
        metafunc.parametrize("scaled_ranks", [_row(row.ranks, f"{row.ranks}-ranks", row) for row in over])


def _row(value: object, name: str, row: SweepRow) -> Any:
    return pytest.param(value, id=name, marks=pytest.mark.ddp(world_size=row.ranks or 1, nodes=row.machines))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("ddp_suite_plots") is not None and not drawable():
        raise pytest.UsageError("--ddp-suite-plots needs matplotlib 3.9: pip install 'pytest-ddpperf[plots]'")
    ours = [item for item in items if Path(item.path).is_relative_to(_HERE)]
    for item in ours:
        item.add_marker(pytest.mark.ddp(**_open_settings(config)))


def _open_settings(config: pytest.Config) -> dict[str, Any]:
    """Return the settings of the size that the run leaves open. The limits suit only its own launches and steps."""
    settings = {
        name: value for name, value in chosen(config).settings.items() if asked(config, f"ddp_{name}", None) is None
    }
    if "launches" not in settings:
        settings.pop("max_launches", None)
    if not {"launches", "steps"} <= settings.keys():
        settings.pop("threshold", None)
    return settings


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    folder = session.config.getoption("ddp_suite_plots")
    if folder is not None and not session.config.option.collectonly:
        tables = session.config.stash[_TABLES]
        try:
            tables.drawn = list(save(tables.plots(), session.config.invocation_params.dir / os.path.expanduser(folder)))
            tables.problem = "" if tables.drawn else "--ddp-suite-plots: nothing was measured that has a figure"
        except Exception as error:  # what was measured is told all the same
            tables.problem = f"--ddp-suite-plots: {type(error).__name__}: {error}"
            session.exitstatus = max(exitstatus, pytest.ExitCode.TESTS_FAILED)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        item.config.stash[_TABLES].skipped.append((item.name, report.longrepr[2].removeprefix("Skipped: ")))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    tables = config.stash[_TABLES]
    lines = list(tables.lines())
    if lines:
        terminalreporter.section("pytest_ddpperf.suite")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def size(request: pytest.FixtureRequest) -> Size:
    """How much is measured."""
    return chosen(request.config)


@pytest.fixture
def tables(request: pytest.FixtureRequest) -> Tables:
    """Where results go, to be told together at the end."""
    return request.config.stash[_TABLES]


@pytest.fixture
def ranks(_ddp_world_size: int) -> int:
    """How many the test has; with several --ddp-world-size each is a test of its own."""
    return _ddp_world_size


@pytest.fixture
def tokens(size: Size, ranks: int) -> int:
    """The batch size of a GPT."""
    return tokens_of(size, ranks)


@pytest.fixture
def roomy(request: pytest.FixtureRequest, ranks: int) -> Callable[..., None]:
    """Call it with the bytes that each rank of a test needs: it skips one whose ranks on this machine need more than it
    has. `cuda` says whether each has a CUDA device, where that is not the run's to say."""
    here = of_a_node(request.node, ranks)

    def need(each: float, *, cuda: bool | None = None) -> None:
        on_device = on_cuda(request.config, here) if cuda is None else cuda
        if on_device and torch.cuda.is_available():  # else the test will say so itself
            needed, free = each, float(torch.cuda.get_device_properties(0).total_memory)
        else:
            needed, free = each * here, _free_bytes()
        if needed > free:
            pytest.skip(f"needs about {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are there")

    return need


def _free_bytes() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:")), float("inf"))
