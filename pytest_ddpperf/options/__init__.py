"""Command line + ini + marker -> one frozen Settings -> a Plan: parsers, the table of settings, reading."""

from pytest_ddpperf.options.settings import Settings, launches, plan, read, where, with_markers
from pytest_ddpperf.options.table import MARKER_HELP, add_options

__all__ = ["MARKER_HELP", "Settings", "add_options", "launches", "plan", "read", "where", "with_markers"]
