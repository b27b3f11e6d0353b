"""What the experiments share: how large they are, the tables that they fill, what is listed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_ddpperf.suite.sizes import Size, asked, chosen, largest_world, on_cuda
from pytest_ddpperf.suite.tables import Tables

_HERE = Path(__file__).parent
_TABLES = pytest.StashKey[Tables]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TABLES] = Tables()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Rows of the sweep: one rank without DDP, then one, two, four, ... up to those that were asked for."""
    if "sweep_ranks" in metafunc.fixturenames:
        most = largest_world(metafunc.config)
        rows = [0, *(ranks for ranks in (1 << power for power in range(20)) if ranks < most), most]
        metafunc.parametrize(
            "sweep_ranks",
            [
                pytest.param(
                    ranks, id=f"1m-{ranks}g" if ranks else "no-ddp", marks=pytest.mark.ddp(world_size=ranks or 1)
                )
                for ranks in dict.fromkeys(rows)
            ],
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(item.path).is_relative_to(_HERE)]
    for item in ours:
        item.add_marker(pytest.mark.ddp_defaults(**chosen(config).settings))
    if config.getoption("ddp_suite_list"):
        for item in sorted(ours, key=lambda item: item.name):
            told = getattr(getattr(item, "obj", None), "__doc__", None) or ""
            config.stash[_TABLES].listed[item.name.partition("[")[0]] = " ".join(told.split())
        config.hook.pytest_deselected(items=list(items))
        items.clear()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("ddp_suite_list") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        item.config.stash[_TABLES].skipped.append((item.name, report.longrepr[2].removeprefix("Skipped: ")))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    lines = list(config.stash[_TABLES].lines())
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
def bucket_mb(request: pytest.FixtureRequest) -> float:
    return float(asked(request.config, "ddp_suite_bucket_mb", 25))


@pytest.fixture
def roomy(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Call it with the bytes that each rank of a test needs: it skips one that needs more than there are."""

    def need(each: float, ranks: int | None = None) -> None:
        if on_cuda(request.config):
            needed, free = each, float(torch.cuda.get_device_properties(0).total_memory)
        else:
            needed, free = each * (ranks or largest_world(request.config)), _free_bytes()
        if needed > free:
            pytest.skip(f"needs about {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are there")

    return need


def _free_bytes() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:")), float("inf"))
