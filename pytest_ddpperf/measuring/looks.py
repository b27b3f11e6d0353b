"""When a measurement has launches enough: looks declared in advance, a suspicion, its confirmation.

Knows verdicts, and nothing of how they come about or of launching. After as many launches as a look says, the
verdict on all launches so far is asked for:

- Within the limit and settled: the measurement ends. So it does with what further launches would hardly decide.
- Beyond the limit, in either direction, for the first time: a suspicion. It alone decides nothing.
- At a later look: the launches since the suspicion, by themselves, must come to the same verdict on the same metric
  as all launches together. Only then it stands.

So however often was looked, a regression is reported only where launches that had no part in raising the suspicion
show it again, with evidence of their own.

Between two looks the pairs so far end the measurement early if they are within the limit and settled. That claims
nothing, so it causes no false alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pytest_ddpperf.records import Status, Verdict

# The verdict on launches start..stop, counted from 0, `stop` excluded, with so many times the error rate.
Judge = Callable[[int, int, float], Verdict]

# What confirms may err more often than what decides: all launches together, of which it is half, decide as well.
_CONFIRMING = 2.0
_CLAIMS = {Status.REGRESSED: Status.INCONCLUSIVE, Status.IMPROVED: Status.PASS}  # what is left without confirmation


def schedule(first: int, most: int) -> tuple[int, ...]:
    """After how many launches is looked: `first`, then twice as many each time up to `most`, so that each look has
    as many fresh launches as raised the suspicion of the one before."""
    looks = [first]
    while 2 * looks[-1] <= most:
        looks.append(2 * looks[-1])
    return tuple(looks)


def decided(verdict: Verdict) -> bool:
    """Whether further launches would hardly bring another verdict that claims nothing."""
    return verdict.status not in _CLAIMS and all(comparison.settled for comparison in verdict.comparisons)


def follow(looks: Sequence[int], judge: Judge, *, final: bool) -> tuple[Verdict, bool]:
    """The verdict after `looks`, and whether the measurement ends with it; `final`: no further look will come."""
    suspected: dict[Status, int] = {}  # after how many launches first
    for number, launches in enumerate(looks):
        verdict = judge(0, launches, 1.0)
        if not verdict.status.compared or decided(verdict):
            return verdict, True
        if verdict.status in _CLAIMS:
            since = suspected.setdefault(verdict.status, launches)
            if since < launches and _confirms(judge(since, launches, _CONFIRMING), verdict):
                return verdict, True
            if final and number == len(looks) - 1:
                verdict = _unconfirmed(verdict)
        elif verdict.status is Status.INCONCLUSIVE:
            suspected.setdefault(Status.REGRESSED, launches)
    return verdict, final


def early_stop(launches: int, judge: Judge) -> tuple[Verdict, bool]:
    """Return the verdict after `launches`, between two looks, and whether the measurement ends with it."""
    verdict = judge(0, launches, 1.0)
    return verdict, verdict.status is Status.PASS and decided(verdict)


def _confirms(fresh: Verdict, verdict: Verdict) -> bool:
    return not _claimed(verdict, verdict.status).isdisjoint(_claimed(fresh, verdict.status))


def _claimed(verdict: Verdict, status: Status) -> set[str]:
    """The metrics of which it claims that. Of others it may claim the opposite, which confirms nothing."""
    return {c.limit.metric for c in verdict.comparisons if c.status is status}


def _unconfirmed(verdict: Verdict) -> Verdict:
    left, reason = _CLAIMS[verdict.status], "not-confirmed"
    comparisons = tuple(
        replace(comparison, status=left, reason=reason) if comparison.status is verdict.status else comparison
        for comparison in verdict.comparisons
    )
    return replace(verdict, status=left, reason=reason, comparisons=comparisons)
