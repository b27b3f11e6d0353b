"""Leading another pytest over a line: it collects, then runs the tests that it is told, up to their measurements."""

from pytest_ddpperf.led.line import Line
from pytest_ddpperf.led.process import Led
from pytest_ddpperf.led.sources import Sources
from pytest_ddpperf.led.tests import Tests

__all__ = ["Led", "Line", "Sources", "Tests"]
