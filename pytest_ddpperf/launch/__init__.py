"""Asking for N ranks: the rank server's handle, one launch with its deadline, code and results in
between."""

from pytest_ddpperf.launch.failed_ranks import describe_end
from pytest_ddpperf.launch.launcher import Launcher
from pytest_ddpperf.launch.output import Observer

__all__ = ["Launcher", "Observer", "describe_end"]
