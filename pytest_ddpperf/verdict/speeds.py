"""Launches of two speeds: how many are slow, and whether more are than before."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from operator import not_
from statistics import fmean

from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.samples import (
    Comparison,
    Measurement,
    Measurements,
    Reason,
    Speeds,
    Status,
    StretchLengths,
)
from pytest_ddpperf.verdict import stats
from pytest_ddpperf.verdict.observed import bound, logs, paired

# The share of slow launches is tested from so many launches of both sides on.
_LAUNCHES = 40
# What it has of the error rate of a look: at the last one just so much that five of twenty are
# evidence, if there were none before. Limits could do little with it, for launches of two speeds
# differ much.
LEVEL_SHARE = 7 / 8
# If more slow launches are less likely than this by chance, there may be more.
_SUSPECTED = 0.2


def most_p_value(sides: Measurements, level: float) -> float:
    """Return the largest p-value with which more slow launches are evidence."""
    launches = sum(side.samples.launches for side in sides)
    return LEVEL_SHARE * level if launches >= _LAUNCHES else 0.0


def find_lowest(limits: Sequence[Limit]) -> int:
    """Return the place of the limit on the lowest percentile, which other work on the machine
    disturbs least. What is no wall time of the whole step comes last."""

    def rank(place: int) -> tuple[bool, float]:
        kind = limits[place].kind
        return not kind.is_wall_time or kind.is_part, kind.percentile

    return min(range(len(limits)), key=rank)


def find_speeds(
    limit: Limit,
    current: Measurement,
    baseline: Measurements,
    stretches: StretchLengths,
    *,
    interleaved: bool,
) -> Speeds | None:
    """Return the two speeds of launches, at the time that a limit is on; None if there is but one,
    or if the limit is on no time.

    A slow launch is slower than the fastest one of its session or, interleaved, than the other one
    of its pair, by more than the limit and all differences between fast ones. So pairs of two slow
    launches count as fast. A slow launch of now is slower than the baseline's fastest as well.
    """
    if limit.kind.own_figure:
        return None
    now = logs(limit, current)
    if interleaved:
        now, before = paired(limit, current, baseline[0], stretches)
        apart = [own - other for own, other in zip(now, before, strict=True)]
        apart_before = [-each for each in apart]
    else:
        # as if the fastest launch of each session took as long as now
        before, fastest = [], []
        for session in baseline:
            values = logs(limit, session)
            fastest.append(min(values))
            before += [each - min(values) + min(now) for each in values]
        apart = [each - max(min(now), fmean(fastest)) for each in now]
        apart_before = [each - min(now) for each in before]
    every = [*apart, *apart_before]
    slower = [each for each in every if each >= 0]
    slow_from = stats.find_gap(slower, bound(limit, fmean(now)))
    if slow_from is None:
        return None
    is_slow = [each >= slow_from for each in every]
    both = sum(is_slow)
    slow = sum(is_slow[: len(now)])

    def likely(slow: int, slow_before: int) -> float:
        if interleaved:
            return stats.more_are_slower(slow, slow_before, len(now))
        return stats.fisher(slow, len(now), slow_before, len(before))

    values = [*now, *before]
    fast = compress(values, map(not_, is_slow))
    if interleaved:
        # the other one of each pair, which was measured at the same time
        fast = compress([*before, *now], is_slow)
    return Speeds(
        fast_seconds=math.exp(fmean(fast)),
        slow_seconds=math.exp(fmean(compress(values, is_slow))),
        slow=slow,
        launches=len(now),
        slow_before=both - slow,
        launches_before=len(before),
        p_value=likely(slow, both - slow),
        least_p_value=likely(min(both, len(now)), max(both - len(now), 0)),
    )


def with_speeds(
    comparison: Comparison, speeds: Speeds, enough: bool
) -> Comparison:
    """Return the comparison of launches with two speeds; `enough` is whether there is evidence, at
    this look, that more are slow. Launches that are faster by more than the limit stay so: the slow
    ones among them are slow only for these."""
    comparison = replace(comparison, speeds=speeds)
    if speeds.p_value > _SUSPECTED or comparison.status is Status.IMPROVED:
        return comparison
    status = Status.INCONCLUSIVE
    if enough or comparison.status is Status.REGRESSED:
        status = Status.REGRESSED
    return replace(
        comparison, status=status, reason=Reason.TWO_SPEEDS, settled=False
    )
