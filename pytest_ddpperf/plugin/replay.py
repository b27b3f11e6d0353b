"""Feeds our samples to pytest-benchmark through its public interface: its table, JSON, save, compare, histogram."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pytest_ddpperf.measuring.measurement import Measured


class SampleClock:
    """A timer for `benchmark.pedantic` that reads 0.0 when a round starts and the next sample when it ends."""

    def __init__(self) -> None:
        self._pending: list[float] = []
        self._now = 0.0

    def load(self, samples: Sequence[float]) -> None:
        self._pending = list(reversed(samples))

    def advance(self) -> None:
        if self._pending:  # --benchmark-cprofile calls once more
            self._now = self._pending.pop()

    def __call__(self) -> float:
        now, self._now = self._now, 0.0
        return now


def mark_with_clock(item: pytest.Item) -> None:
    """Give the test our clock as pytest-benchmark's timer, next to what else its marker says."""
    theirs = item.get_closest_marker("benchmark")
    kwargs = {**(theirs.kwargs if theirs else {}), "timer": SampleClock()}
    item.add_marker(pytest.mark.benchmark(**kwargs), append=False)


class Replay:
    """Stores the group's step times under the test's name. A fixture that is disabled or not theirs (CodSpeed puts
    its own in place) is left alone."""

    def __init__(self, benchmark: Any, item: pytest.Item) -> None:
        marker = item.get_closest_marker("benchmark")
        self._benchmark = benchmark
        clock = marker.kwargs.get("timer") if marker else None
        theirs = type(benchmark).__module__.startswith("pytest_benchmark") and not benchmark.disabled
        self._clock = clock if theirs and isinstance(clock, SampleClock) else None

    def __call__(self, measured: Measured) -> None:
        """Replay a measurement that did not fail (what they save is compared next), the first of a test: theirs
        takes one."""
        clock, self._clock = self._clock, None
        if clock is None:
            return
        result = measured.result
        samples = [seconds for launch in result.step_seconds for seconds in launch]
        clock.load(samples)
        self._benchmark.extra_info["ddpperf"] = {
            "verdict": str(result.verdict),
            "reason": result.verdict.reason,
            "world_size": result.world_size,
            "backend": result.backend,
            **{f"p{q}": result.percentile(q) for q in (10, 50, 75, 90, 95)},
        }
        other = measured.outcome.baseline_side
        if other is not None:
            self._benchmark.extra_info["ddpperf"] |= {
                "against": str(other.version),
                "against_commit": other.version.commit,
            }
        self._benchmark.pedantic(clock.advance, rounds=len(samples), iterations=1)
