"""The clock of another node beside this one's: how far they are apart, between which bounds.

Nothing is known of clocks of two nodes but that they run on, at speeds that differ by tens of millionths. Whoever asks
the other for its time, and looks at his own before and after, knows that the other's was read in between: so each
exchange bounds the offset, and all of a series together do so closest. Between two series, before and after a window,
the offset moves from the one to the other: over seconds speeds hardly change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """By how much another clock is ahead of ours, at one time."""

    at_ns: float  # by our clock
    ns: float
    half_width_ns: float  # the offset is not further from `ns`


def offset(exchanges: Iterable[tuple[int, int, int]]) -> Offset:
    """By exchanges one right after the other, each (ours before, theirs, ours after) in nanoseconds, at least one."""
    before, theirs, after = zip(*exchanges, strict=True)
    low = max(there - end for there, end in zip(theirs, after, strict=True))
    high = min(there - start for start, there in zip(before, theirs, strict=True))
    # Apart by less than they drift during the series, the bounds may even have changed places.
    return Offset(at_ns=(before[0] + after[-1]) / 2, ns=(low + high) / 2, half_width_ns=abs(high - low) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Another clock from one series of exchanges to the next."""

    first: Offset
    last: Offset

    @property
    def half_width_ns(self) -> float:
        return max(self.first.half_width_ns, self.last.half_width_ns)

    def here(self, there_ns: float) -> float:
        """What our clock showed when the other showed `there_ns`, in nanoseconds."""
        first, last = self.first, self.last
        began = first.at_ns + first.ns  # by the other clock
        took = last.at_ns + last.ns - began
        passed = (there_ns - began) / took if took > 0 else 0.0
        return there_ns - (first.ns + (last.ns - first.ns) * passed)
