"""The decision: is the current measurement worse than the baseline, and does that fail the test?

The only place that decides. Knows records and statistics; nothing of files, pytest or reports. The choices
made here, with the figures they rest on, are in docs/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.samples import Comparison, Measurement, Status, Verdict
from pytest_ddpperf.verdict.counters import with_counters
from pytest_ddpperf.verdict.times import bound, judge_times


def judge(current: Measurement, baseline: Sequence[Measurement], limits: Sequence[Limit], **how: Any) -> Verdict:
    """Hold `current` against the sessions of a baseline: its times, as `judge_times`, and its counters."""
    return with_counters(judge_times(current, baseline, limits, **how), current, baseline, limits)


def without_steady_windows(verdict: Verdict) -> Verdict:
    """Return the verdict on launches of which most recompiled within their window: they say little of steady training,
    so nothing is claimed to be within a limit. A slowdown stays one: recompiling takes time, too."""
    if verdict.status in (Status.PASS, Status.IMPROVED):
        return replace(verdict, status=Status.INCONCLUSIVE, reason="recompiled")
    return verdict


def fails(verdict: Verdict, *, fail_on: frozenset[str] | None, baseline_missing: Literal["warn", "fail"]) -> bool:
    """Whether a verdict fails its test; `fail_on`, when given, names exactly those that do. Never one that is saved: a
    project whose ini file names what is not gated could not record a baseline."""
    if fail_on is not None:
        if verdict.reason == "saving":
            return False
        return verdict.status.value.lower().replace(" ", "-") in fail_on
    if verdict.status in (Status.NO_BASELINE, Status.INCOMPARABLE) or verdict.reason == "debugging-variable":
        return baseline_missing == "fail"
    return verdict.status is Status.REGRESSED


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
