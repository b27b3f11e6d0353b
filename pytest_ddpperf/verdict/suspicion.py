"""A suspicion against a stored baseline: what raises one, and what re-measuring the baseline's own code makes of it.

A baseline compares today with another day, and no statistics can tell a slower machine from slower code there. An
interleaved comparison with the baseline's own code can: both sides share the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pytest_ddpperf.records import Comparison, Status, Verdict
from pytest_ddpperf.verdict.times import bound

MACHINE_SLOWER = "machine-slower"
# Of the limit: a change beyond that share is worth the seconds of a confirmation. docs/statistics.md has the rates.
SUSPICIOUS = 0.5


def is_suspected(verdict: Verdict, share: float = SUSPICIOUS) -> bool:
    """Whether the times of a verdict against a stored baseline are worth a second look. Counters have no noise."""
    if not verdict.status.compared or verdict.reason == "counter-rose":
        return False
    if any(math.log1p(each.change.estimate) > share * _bound(each) for each in verdict.comparisons):
        return True
    # Other work on a machine only makes launches slower, the fastest of them least, and their low percentiles least. So
    # a baseline of a busy hour hides slower code from all other figures.
    lowest = min(verdict.comparisons, key=lambda each: each.limit.percentile, default=None)
    return lowest is not None and math.log1p(lowest.fastest or 0.0) > share * _bound(lowest)


def confirm(stored: Verdict, interleaved: Verdict, causes: Sequence[str]) -> Verdict:
    """Return the verdict of a test whose baseline said `stored` and whose baseline's own code, today, `interleaved`.

    `causes` are what else may have changed since the baseline was recorded, which both sides share today. It is
    `stored` itself if the comparison decides nothing.
    """
    if interleaved.status is Status.REGRESSED:
        return replace(interleaved, reason="confirmed", differences=stored.differences)
    if any(each.status is Status.REGRESSED for each in stored.counters):
        return stored  # counts have no noise, and no machine makes them rise
    if stored.reason == "recompiled":
        return stored  # its launches say little of steady training, however fast the machine was
    if causes or interleaved.status not in (Status.PASS, Status.IMPROVED) or not _is_clear(stored, interleaved):
        return stored
    interleaved = replace(interleaved, differences=stored.differences, sessions=stored.sessions)
    if stored.status in (Status.REGRESSED, Status.INCONCLUSIVE):
        return replace(interleaved, status=Status.INCONCLUSIVE, reason=MACHINE_SLOWER)
    if stored.status is interleaved.status:
        return interleaved
    return replace(interleaved, status=Status.PASS, reason="within-limit")


def _is_clear(stored: Verdict, interleaved: Verdict) -> bool:
    """Whether the comparison has all limits and leaves none open: each is settled, or its bound excludes the claim."""
    found = {each.limit.metric: each for each in interleaved.comparisons}
    claims = {each.limit.metric: each.change.low for each in stored.comparisons if each.status is Status.REGRESSED}
    return all(
        (each := found.get(comparison.limit.metric)) is not None
        and (each.settled or each.change.high < claims.get(comparison.limit.metric, -1.0))
        for comparison in stored.comparisons
    )


def _bound(comparison: Comparison) -> float:
    return bound(comparison.limit, math.log(comparison.baseline_seconds))
