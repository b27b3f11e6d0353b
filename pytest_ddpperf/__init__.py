"""pytest-ddpperf: distributed performance regression as ordinary red and green tests.

The names below are for type hints, for `except` and for conftests; they are imported when asked
for, since pytest imports this package in every run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_ddpperf.compare.result import CollectiveResult, Result
    from pytest_ddpperf.plugin.fixtures import (
        CollectiveBenchmark,
        DdpBenchmark,
        DdpRun,
        GateFailed,
        RpcBenchmark,
    )
    from pytest_ddpperf.plugin.state import add_section, node_count
    from pytest_ddpperf.rank.context import Context, RpcContext

__all__ = [
    "CollectiveBenchmark",
    "CollectiveResult",
    "DdpBenchmark",
    "DdpRun",
    "GateFailed",
    "Result",
    "RpcBenchmark",
]
__all__ += ["Context", "RpcContext", "add_section", "node_count", "step_end"]
__version__ = "0.1.0"

# what to call, in a rank that times a program by its marks
_marks: list[Callable[[], None]] = []


def step_end() -> None:
    """Say that a step of a training loop has ended, for `ddp_benchmark.loop(..., boundary="mark")`.

    Outside of a rank that is timed it does nothing, so a program may keep it."""
    for mark in _marks:
        mark()


_HOMES = {
    **dict.fromkeys(("CollectiveResult", "Result"), "compare.result"),
    **dict.fromkeys(("Context", "RpcContext"), "rank.context"),
    **dict.fromkeys(("add_section", "node_count"), "plugin.state"),
    **dict.fromkeys(
        ("CollectiveBenchmark", "DdpBenchmark", "DdpRun", "GateFailed", "RpcBenchmark"),
        "plugin.fixtures",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
