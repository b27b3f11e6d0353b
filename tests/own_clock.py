"""A clock for programs in ranks: it stands still until a program moves it."""

# `clock.time.now += 5_000_000` lets 5 ms pass on the clock by which steps are marked.
OWN_CLOCK = """
import time
from pytest_ddpperf.rank import clock

class Clock:
    monotonic, sleep, thread_time_ns = time.monotonic, time.sleep, time.thread_time_ns
    now = 1
    def monotonic_ns(self):
        return self.now

clock.time = Clock()
"""
