"""The store of baselines, made for code review. Knows records and files; nothing of pytest or
torch."""

from pytest_ddpperf.baseline.store import Store

__all__ = ["Store"]
