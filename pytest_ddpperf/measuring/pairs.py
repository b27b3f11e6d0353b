"""Two paused launches, one a side, interleaved stretch by stretch in random order."""

from __future__ import annotations

import math
import random
import statistics
import time
from typing import Protocol, TypeVar

from pytest_ddpperf.records import LaunchSamples

# A stretch is as short as it may be: what goes on around it, longer than that, is in both sides. But what wakes up,
# stops and is fetched into caches at its beginning must be small beside it.
_STRETCH_SECONDS = 0.03
_STRETCH_STEPS = 3
# Of short windows, for the median over them to leave some out.
_STRETCHES = 8


class Held(Protocol):
    """A launch that has warmed up and rests."""

    @property
    def steps(self) -> int:
        """Of its window."""

    @property
    def step_seconds(self) -> float:
        """What one takes, about; 0 where that is not known."""

    def stretch(self, steps: int) -> None:
        """Run so many, of which the first is not counted."""

    def deliver(self) -> LaunchSamples:
        """Its end, and what came of it."""


_H = TypeVar("_H", bound=Held)


def interleave(sides: tuple[_H, _H], source: random.Random) -> None:
    """Run the windows of both sides, which have the same number of steps, to their ends."""
    for side in source.sample(sides, 2):
        side.stretch(1)  # which counts nothing
    lengths = Lengths(sides[0].steps, max(side.step_seconds for side in sides), source)
    while counted := lengths.draw():
        began = time.monotonic()
        for side in source.sample(sides, 2):
            side.stretch(counted + 1)
        lengths.took((time.monotonic() - began) / len(sides) / (counted + 1))


class Lengths:
    """How many steps each stretch of a window counts. They are drawn, from a least to twice that, so that what a step
    does every second or fourth time is left out, at the beginning of stretches, as often as not.

    A step is taken to last as long as those of the stretches so far did in the median: warm-up tells of steps that
    nothing disturbed, and where many are, stretches by that would be few.
    """

    def __init__(self, steps: int, step_seconds: float, source: random.Random) -> None:
        """`step_seconds`: of a step, for the first stretch; 0 where it is not known."""
        self._left = self._steps = steps
        self._source = source
        self._first, self._seen = step_seconds, list[float]()

    def draw(self) -> int:
        """The next one's; 0 when the window is over."""
        least = self._least()
        length = min(self._source.randint(least, 2 * least), self._left)
        if self._left - length < least:
            length = self._left
        self._left -= length
        return length

    def took(self, step_seconds: float) -> None:
        """A step of the last one, about."""
        self._seen.append(step_seconds)

    def _least(self) -> int:
        step = statistics.median(self._seen) if self._seen else self._first
        long_enough = math.ceil(_STRETCH_SECONDS / step) if step > 0 else 0
        return max(_STRETCH_STEPS, min(long_enough, self._steps // _STRETCHES))
