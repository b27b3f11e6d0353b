"""pytest-ddpperf: distributed performance regression as ordinary red and green tests."""

__version__ = "0.1.0"
