"""pytest-ddpperf: distributed performance regression as ordinary red and green tests.

The names below are for type hints, for `except` and for conftests; they are imported when asked for, since pytest
imports this package in every run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_ddpperf.measuring.measurement import CollectiveResult as CollectiveResult
    from pytest_ddpperf.measuring.measurement import Result as Result
    from pytest_ddpperf.plugin.fixtures import CollectiveBenchmark as CollectiveBenchmark
    from pytest_ddpperf.plugin.fixtures import DdpBenchmark as DdpBenchmark
    from pytest_ddpperf.plugin.fixtures import DdpRun as DdpRun
    from pytest_ddpperf.plugin.fixtures import GateFailed as GateFailed
    from pytest_ddpperf.plugin.fixtures import RpcBenchmark as RpcBenchmark
    from pytest_ddpperf.plugin.state import add_section as add_section
    from pytest_ddpperf.plugin.state import node_count as node_count
    from pytest_ddpperf.rank.context import Context as Context
    from pytest_ddpperf.rank.context import RpcContext as RpcContext

__version__ = "0.1.0"

_marks: list[Callable[[], None]] = []  # what to call, in a rank that times a program by its marks


def step_end() -> None:
    """Say that a step of a training loop has ended, for `ddp_benchmark.loop(..., boundary="mark")`.

    Outside of a rank that is timed it does nothing, so a program may keep it."""
    for mark in _marks:
        mark()


_HOMES = {
    "CollectiveBenchmark": "plugin.fixtures",
    "CollectiveResult": "measuring.measurement",
    "Context": "rank.context",
    "DdpBenchmark": "plugin.fixtures",
    "DdpRun": "plugin.fixtures",
    "GateFailed": "plugin.fixtures",
    "Result": "measuring.measurement",
    "RpcBenchmark": "plugin.fixtures",
    "RpcContext": "rank.context",
    "add_section": "plugin.state",
    "node_count": "plugin.state",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
