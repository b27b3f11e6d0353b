"""Two held launches, one a side, in turns: stretch by stretch, in random order."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
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

    @property
    def fills(self) -> str:
        """Why no launch that needs as much can be beside it, in words; "" where one can."""

    def stretch(self, steps: int) -> None:
        """Run so many, of which the first is not counted."""

    def deliver(self) -> LaunchSamples:
        """Its end, and what came of it."""


_H = TypeVar("_H", bound=Held)


def in_turns(sides: tuple[_H, _H], source: random.Random) -> None:
    """Run the windows of both sides, which have the same number of steps, to their ends."""
    for side in source.sample(sides, 2):
        side.stretch(1)  # which counts nothing
    longest = max(side.step_seconds for side in sides)
    for counted in stretches(sides[0].steps, longest, source):
        for side in source.sample(sides, 2):
            side.stretch(counted + 1)


def stretches(steps: int, step_seconds: float, source: random.Random) -> Iterator[int]:
    """How many steps each stretch of a window counts. Their lengths are drawn, from a least to twice that, so that
    what a step does every second or fourth time is left out, at the beginning of stretches, as often as not."""
    long_enough = math.ceil(_STRETCH_SECONDS / step_seconds) if step_seconds > 0 else 0
    least = max(_STRETCH_STEPS, min(long_enough, steps // _STRETCHES))
    while steps > 0:
        length = source.randint(least, 2 * least)
        if steps - length < least:
            length = steps
        yield length
        steps -= length
