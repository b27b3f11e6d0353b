"""When a measurement has launches enough: looks declared in advance, a suspicion, its confirmation.

Knows verdicts, and nothing of how they come about or of launching. After as many launches as a look says, the
verdict on all launches so far is asked for:

- Within the limit and settled: the measurement ends. So it does with what further launches would hardly decide.
- Beyond the limit, in either direction, for the first time: a suspicion. It alone decides nothing.
- At a later look, with at least as many launches behind the suspicion as before it: those fresh launches, by
  themselves, must come to the same verdict on the same metric as all launches together. Only then it stands.

So however often was looked, a regression is reported only where launches that had no part in raising the suspicion
show it again, with evidence of their own. Where no further launch may be taken after the first look, that look is a
test of fixed size and its verdict stands as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pytest_ddpperf.records import Status, Verdict

# A verdict on launches start..stop, counted from 0, `stop` excluded.
Judge = Callable[[int, int], Verdict]

_CLAIMS = {Status.REGRESSED: Status.INCONCLUSIVE, Status.IMPROVED: Status.PASS}  # what is left without confirmation


def schedule(first: int, most: int) -> tuple[int, ...]:
    """After how many launches is looked: `first`, then twice as many each time, `most` at last."""
    looks = [first]
    while looks[-1] < most:
        looks.append(min(2 * looks[-1], most))
    if len(looks) > 2 and looks[-1] < 1.5 * looks[-2]:
        del looks[-2]  # hardly more launches than there were: one look less
    return tuple(looks)


class Looks:
    """One measurement's way through its looks."""

    def __init__(self, launches: tuple[int, ...]) -> None:
        self._launches = launches
        self._suspected: dict[Status, int] = {}  # after how many launches first

    def take(self, look: int, judge: Judge) -> tuple[Verdict, bool]:
        """The verdict at look number `look` (from 0), and whether the measurement ends with it."""
        launches = self._launches[look]
        last = look == len(self._launches) - 1
        verdict = judge(0, launches)
        if not verdict.status.compared:
            return verdict, True
        if verdict.status in _CLAIMS:
            if len(self._launches) == 1 or self._confirmed(verdict, launches, judge):
                return verdict, True
            if last:
                return _unconfirmed(verdict), True
        elif all(comparison.settled for comparison in verdict.comparisons):
            return verdict, True
        if verdict.status is not Status.PASS:
            claim = Status.IMPROVED if verdict.status is Status.IMPROVED else Status.REGRESSED
            self._suspected.setdefault(claim, launches)
        return verdict, last

    def _confirmed(self, verdict: Verdict, launches: int, judge: Judge) -> bool:
        suspected = self._suspected.get(verdict.status)
        if suspected is None or launches < 2 * suspected:
            return False
        fresh = judge(suspected, launches)
        return not _claimed(verdict).isdisjoint(_claimed(fresh))


def _unconfirmed(verdict: Verdict) -> Verdict:
    left, reason = _CLAIMS[verdict.status], "not-confirmed"
    comparisons = tuple(
        replace(comparison, status=left, reason=reason) if comparison.status is verdict.status else comparison
        for comparison in verdict.comparisons
    )
    return replace(verdict, status=left, reason=reason, comparisons=comparisons)


def _claimed(verdict: Verdict) -> set[tuple[str, Status]]:
    return {(c.limit.metric, c.status) for c in verdict.comparisons if c.status in _CLAIMS}
