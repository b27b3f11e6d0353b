"""pytest-ddpperf: distributed performance regression as ordinary red and green tests.

The names below are for type hints, for `except` and for conftests; they are imported when asked
for, since pytest imports this package in every run.

PYTEST_DONT_REWRITE: pytest would warn where another version's process has imported it before.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pytest_ddpperf.marks import step_end
from pytest_ddpperf.version import __version__ as __version__

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
    from pytest_ddpperf.records.figure import Figure

__all__ = [
    "CollectiveBenchmark",
    "CollectiveResult",
    "Context",
    "DdpBenchmark",
    "DdpRun",
    "Figure",
    "GateFailed",
    "Result",
    "RpcBenchmark",
    "RpcContext",
    "add_section",
    "node_count",
    "step_end",
]

_HOMES = {
    **dict.fromkeys(("CollectiveResult", "Result"), "compare.result"),
    **dict.fromkeys(("Context", "RpcContext"), "rank.context"),
    "Figure": "records.figure",
    **dict.fromkeys(("add_section", "node_count"), "plugin.state"),
    **dict.fromkeys(
        (
            "CollectiveBenchmark",
            "DdpBenchmark",
            "DdpRun",
            "GateFailed",
            "RpcBenchmark",
        ),
        "plugin.fixtures",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
