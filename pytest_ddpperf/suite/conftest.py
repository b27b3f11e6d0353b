"""What the experiments share: how large they are, the tables that they fill, what is listed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_ddpperf.suite.sizes import SIZES, Size
from pytest_ddpperf.suite.tables import Tables

_HERE = Path(__file__).parent
_TABLES = pytest.StashKey[Tables]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TABLES] = Tables()


def _asked(config: pytest.Config, name: str, default: Any) -> Any:
    """An option of the plugin's: from the command line, else from the ini file."""
    given = config.getoption(name)
    if given is None:
        given = config.getini(name)
    return default if given is None else given


def _size(config: pytest.Config) -> Size:
    name = _asked(config, "ddp_suite_size", "auto")
    if name == "auto":
        name = "full" if torch.cuda.is_available() else "small"
    return SIZES[name]


def largest_world(config: pytest.Config) -> int:
    """The most ranks that --ddp-world-size asks for."""
    asked = _asked(config, "ddp_world_size", "2")
    parts = asked if isinstance(asked, (list, tuple)) else [asked]
    return max(int(number) for part in parts for number in str(part).split(","))


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
        item.add_marker(pytest.mark.ddp_defaults(**_size(config).settings))
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
    return _size(request.config)


@pytest.fixture
def tables(request: pytest.FixtureRequest) -> Tables:
    """Where results go, to be told together at the end."""
    return request.config.stash[_TABLES]


@pytest.fixture
def bucket_mb(request: pytest.FixtureRequest) -> float:
    return float(_asked(request.config, "ddp_suite_bucket_mb", 25))


@pytest.fixture
def roomy() -> Callable[[float], None]:
    """Call it with the bytes that a test needs: it skips one that needs more than are free."""
    return _need_bytes


def _need_bytes(needed: float) -> None:
    free = _free_bytes()
    if needed > free:
        pytest.skip(f"needs about {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free")


def _free_bytes() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:")), float("inf"))
