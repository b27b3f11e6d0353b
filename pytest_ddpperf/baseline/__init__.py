"""The store of baselines, made for code review. Knows records, files and git; nothing of pytest or torch."""

from pytest_ddpperf.baseline.git import commit_of
from pytest_ddpperf.baseline.naming import environment, environment_name, file_name
from pytest_ddpperf.baseline.store import Store

__all__ = ["Store", "commit_of", "environment", "environment_name", "file_name"]
