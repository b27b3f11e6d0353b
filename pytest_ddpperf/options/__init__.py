"""Command line, ini file and marker -> one frozen Settings -> a Plan.

Every pytest run imports the table; what reads settings is imported where some were given, or a test needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_ddpperf.options.definitions import MARKER as MARKER
from pytest_ddpperf.options.definitions import MARKER_HELP as MARKER_HELP
from pytest_ddpperf.options.definitions import add_options as add_options
from pytest_ddpperf.options.definitions import given as given

if TYPE_CHECKING:
    from pytest_ddpperf.options.settings import Settings as Settings
    from pytest_ddpperf.options.settings import launches as launches
    from pytest_ddpperf.options.settings import plan as plan
    from pytest_ddpperf.options.settings import read as read
    from pytest_ddpperf.options.settings import where as where
    from pytest_ddpperf.options.settings import with_markers as with_markers


def __getattr__(name: str) -> Any:
    if name not in ("Settings", "launches", "plan", "read", "where", "with_markers"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pytest_ddpperf.options import settings

    return getattr(settings, name)
