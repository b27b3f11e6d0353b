"""What becomes of a suspicion against a stored baseline, once the baseline's own code was measured beside the code at
hand.

A baseline compares today with another day, and no statistics can tell a slower machine from slower code there. Turns
with the baseline's code can: they share the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pytest_ddpperf.records import Comparison, Status, Verdict
from pytest_ddpperf.verdict.times import bound

MACHINE_DRIFTED = "machine-drifted"
NOT_SETTLED = "not-settled"
# Of the limit: what may be beyond that is worth the seconds of turns. docs/statistics.md has what that suspects.
SUSPICIOUS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What is known beside both verdicts."""

    another_host: bool  # than any session of the baseline had
    environment: tuple[str, ...]  # facts that may make steps slower and differ on both sides: "torch 2.12 -> 2.13"
    variables: tuple[str, ...] = ()  # that differ, too, and were the baseline's where its code ran: "X unset -> 1"
    code_differs: bool  # whether ranks of both sides imported files that differ
    code_is_todays: bool  # whether files and distributions hold what the baseline's ranks imported
    unaccounted: tuple[str, ...] = ()  # modules that ranks imported from where nobody knows what they hold


def suspected(verdict: Verdict, share: float = SUSPICIOUS) -> bool:
    """Whether the times of a verdict against a stored baseline are worth a second look. Counters have no noise."""
    if not verdict.status.compared or verdict.reason == "counter-rose":
        return False
    if any(_change(each) > share * _bound(each) for each in verdict.comparisons):
        return True
    # Other work on a machine makes launches slower only, the fastest of them least, and their low percentiles least: a
    # baseline of a busy hour hides slower code from all others.
    lowest = min(verdict.comparisons, key=lambda each: each.limit.percentile, default=None)
    return lowest is not None and math.log1p(lowest.fastest or 0.0) > share * _bound(lowest)


def settled(stored: Verdict, turned: Verdict, found: Circumstances) -> Verdict:
    """The verdict of a test whose baseline said `stored` and whose baseline's code, in turns, `turned`. The figures of
    turns lead: the others were looked at again for being large. Where turns cannot tell it is `stored`."""
    if turned.status is Status.REGRESSED:
        of_variables = found.variables and not found.code_differs
        reason = "environment" if of_variables else "confirmed"
        return replace(turned, reason=reason, differences=stored.differences)
    if any(each.status is Status.REGRESSED for each in stored.counters):
        return stored  # counts have no noise, and no machine makes them rise
    asked, told = ({each.limit.metric for each in verdict.comparisons} for verdict in (stored, turned))
    if found.unaccounted or not asked <= told or not (not_slower(turned) or _refuted(stored, turned)):
        return stored
    # First, for hosts of a fleet have another name each time, and would excuse whatever else changed.
    if found.environment and stored.status is Status.REGRESSED:
        return replace(stored, reason="environment") if not_slower(turned) else stored
    if not (found.code_differs or found.code_is_todays):
        return stored  # what both sides have installed cannot be seen in turns
    turned = replace(turned, differences=stored.differences, sessions=stored.sessions)
    if not not_slower(turned):
        return replace(turned, status=Status.INCONCLUSIVE, reason=NOT_SETTLED)
    if stored.status is turned.status is Status.IMPROVED:
        return turned
    if stored.status is not Status.REGRESSED and stored.status is not Status.INCONCLUSIVE:
        return replace(turned, status=Status.PASS, reason="within-limit")
    if found.environment:
        turned = replace(turned, differences=found.environment)
        return replace(turned, status=Status.INCONCLUSIVE, reason="environment-differs")
    reason = "other-machine" if found.another_host else MACHINE_DRIFTED
    return replace(turned, status=Status.INCONCLUSIVE, reason=reason)


def not_slower(turned: Verdict) -> bool:
    """Whether turns show that nothing is slower than its limit allows, which is more than that nothing was found."""
    return turned.status.compared and all(_high(each) < _bound(each) for each in turned.comparisons)


def _refuted(stored: Verdict, turned: Verdict) -> bool:
    """Whether what the baseline claims cannot be the code's: turns found nothing beyond the limit, and of every metric
    that regressed their upper bound lies below the lower one of the claim."""
    if stored.status is not Status.REGRESSED or turned.status not in (Status.PASS, Status.IMPROVED):
        return False
    highest = {each.limit.metric: _high(each) for each in turned.comparisons}
    claims = [each for each in stored.comparisons if each.status is Status.REGRESSED]
    return all(highest[each.limit.metric] < math.log1p(each.change.low) for each in claims)


def _change(comparison: Comparison) -> float:
    return math.log1p(comparison.change.estimate)


def _high(comparison: Comparison) -> float:
    return math.log1p(comparison.change.high)


def _bound(comparison: Comparison) -> float:
    return bound(comparison.limit, math.log(comparison.baseline_seconds))
