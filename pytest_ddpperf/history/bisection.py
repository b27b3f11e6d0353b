"""Between which commits did a test become slower? A search by comparisons, most of which halve what
is left.

All commits are compared with one and the same version. So a commit is known by a `Difference`: the
logarithm of how much longer that version takes. Between two commits a test became slower by the
difference of theirs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from pytest_ddpperf.records.samples import Interval
from pytest_ddpperf.verdict import stats
from pytest_ddpperf.verdict.stats import NOTHING, Difference

# How likely a search may be to name a wrong commit.
ERROR_RATE = 0.05
# Of the whole rise: a part that is smaller is not looked for.
LEAST_PART = 0.25
# Why a commit is passed over that was measured. A gap with so many of them is not split further.
UNDECIDED = "too noisy to decide"
MOST_UNDECIDED = 2
# Of a commit that is the same as the version that all are compared with.
SAME = Difference(
    estimate=0.0, now=NOTHING, base=NOTHING, drift=NOTHING, launches=0
)


class Gap(NamedTuple):
    """Two measured commits, by their places, with none between them that was measured, and the rise
    from one to the other."""

    before: int
    after: int
    rise: Difference


def rise(before: Difference, after: Difference) -> Difference:
    """Return how much slower the second commit is, as a difference of logarithms."""
    return replace(
        before, estimate=before.estimate - after.estimate, base=after.now
    )


@dataclass(slots=True)
class Bisection:
    """A search among commits, by their places: 0 is the fast one, `last` the slow one. `measured`
    has both."""

    last: int
    measured: dict[int, Difference]
    # why these could not be measured
    skipped: dict[int, str] = field(default_factory=dict)

    @property
    def whole(self) -> Difference:
        """The rise from the first commit to the last one."""
        return rise(self.measured[0], self.measured[self.last])

    @property
    def level(self) -> float:
        """The error rate of each decision, such that all have ERROR_RATE together; each has two
        sides."""
        # in a search for a single slower commit
        decisions = (self.last - 1).bit_length()
        return ERROR_RATE / (2 * max(decisions, 1))

    def became_slower(self, bound: float, level: float) -> bool | None:
        """Return whether the test became slower beyond the bound, a logarithm, at this error rate.
        None if that is open: the estimate is beyond half the bound, and a rise beyond the bound is
        not excluded."""
        estimate = self.whole.estimate
        reach = self.whole.reach(level)
        if estimate > max(bound, reach):
            return True
        return None if estimate > max(bound / 2, bound - reach) else False

    def gaps(self) -> Iterator[Gap]:
        """Yield the gaps in which the test became slower, by evidence and by a part worth looking
        for."""
        for before, after in pairwise(sorted(self.measured)):
            found = rise(self.measured[before], self.measured[after])
            if self._is_slower(found):
                yield Gap(before, after, found)

    def _is_slower(self, rise: Difference) -> bool:
        least = LEAST_PART * self.whole.estimate
        return rise.estimate > max(rise.reach(self.level), least)

    def next(self) -> int | None:
        """Return the commit to measure next, in the middle of the largest gap that can be split;
        None at the end."""
        for gap in sorted(self.gaps(), key=lambda gap: -gap.rise.estimate):
            places = range(gap.before + 1, gap.after)
            undecided = sum(
                self.skipped.get(place) == UNDECIDED for place in places
            )
            left = [place for place in places if place not in self.skipped]
            if left and undecided < MOST_UNDECIDED:
                middle = (gap.before + gap.after) / 2
                return min(left, key=lambda place: abs(place - middle))
        return None

    def decide(
        self, place: int, found: Difference, *, one_side: bool = False
    ) -> bool:
        """Take a measurement of the commit if it shows on which side of it the test became slower,
        or that it did on both; return whether it does. With `one_side` it may leave open whether
        the test became slower on the other."""
        before = max(each for each in self.measured if each < place)
        after = min(each for each in self.measured if each > place)
        rise_before = rise(self.measured[before], found)
        rise_after = rise(found, self.measured[after])
        slower = [self._is_slower(rise_before), self._is_slower(rise_after)]
        difference = abs(rise_before.estimate - rise_after.estimate)
        is_one_side = difference / 2 > found.reach(self.level)
        if is_one_side or all(slower) or (one_side and any(slower)):
            self.measured[place] = found
            return True
        return False

    def left(self) -> int:
        """Return how many commits may still be a slower one."""
        widths = [gap.after - gap.before for gap in self.gaps()]
        return sum(width for width in widths if width > 1)


def interval(rise: Difference, level: float) -> Interval:
    """Return a rise as a relative change with its bounds."""
    return stats.interval(rise.estimate, rise.reach(level))
