"""How far the same code differs from itself: the rule, applied to many ways to split its launches into two sides."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from pytest_ddpperf.measuring.looks import follow
from pytest_ddpperf.records import Interval, Limit, Measurement, Samples, Splits, Status, Verdict
from pytest_ddpperf.verdict import judge_times
from pytest_ddpperf.verdict.stats import binomial_interval

_SPLITS = 500
_SEED = 0  # the same launches give the same rate
_TWO_SIDED = 1.96


def split(
    hand: Sequence[Measurement],
    base: Sequence[Measurement],
    stretches: Sequence[Sequence[int]],
    limits: Sequence[Limit],
    looks: Sequence[int],
    *,
    level: float,
) -> Splits:
    """Verdicts on blocks drawn anew, with replacement, the sides of each swapped by chance. `hand` and `base` are of
    one launch each, those of a block in the same place; `stretches` as for `judge_times`.

    The interval has two parts. How well so many splits show the rate that these launches have: Clopper and Pearson's.
    And how far other launches would have another: B. Efron, "Jackknife-after-bootstrap standard errors and influence
    functions", Journal of the Royal Statistical Society B 54 (1992).
    """
    source = random.Random(_SEED)
    blocks = range(len(hand))
    drawn, alarms, inconclusive = [], [], 0
    for _ in range(_SPLITS):
        places = source.choices(blocks, k=len(blocks))
        pairs = [source.sample((hand[place], base[place]), 2) for place in places]
        sides = [one for one, _ in pairs], [other for _, other in pairs]
        verdict = _judged(*sides, [stretches[place] for place in places], limits, looks, level)
        drawn.append(set(places))
        alarms.append(verdict.status is Status.REGRESSED)
        inconclusive += verdict.status is Status.INCONCLUSIVE
    rate = fmean(alarms)
    low, high = binomial_interval(sum(alarms), _SPLITS)
    without = [[alarm for places, alarm in zip(drawn, alarms, strict=True) if block not in places] for block in blocks]
    rates = [fmean(found) for found in without if found]
    influence = math.sqrt(math.fsum((other - fmean(rates)) ** 2 for other in rates) * (len(rates) - 1) / len(rates))
    how: dict[str, Any] = {"level": level, "interleaved": True, "stretches": stretches}
    resolution = judge_times(joined(hand), [joined(base)], limits, **how).comparisons
    return Splits(
        number=_SPLITS,
        alarms=Interval(
            estimate=rate,
            low=max(0.0, rate - math.hypot(rate - low, _TWO_SIDED * influence)),
            high=min(1.0, rate + math.hypot(high - rate, _TWO_SIDED * influence)),
        ),
        inconclusive=inconclusive / _SPLITS,
        resolution={comparison.limit.metric: comparison.resolution for comparison in resolution},
    )


def _judged(
    hand: Sequence[Measurement],
    base: Sequence[Measurement],
    stretches: Sequence[Sequence[int]],
    limits: Sequence[Limit],
    looks: Sequence[int],
    level: float,
) -> Verdict:
    def judge(start: int, stop: int, ease: float) -> Verdict:
        now, before = joined(hand[start:stop]), joined(base[start:stop])
        return judge_times(now, [before], limits, level=level * ease, interleaved=True, stretches=stretches[start:stop])

    for number in range(1, len(looks) + 1):
        verdict, ended = follow(looks[:number], judge, final=number == len(looks))
        if ended:
            break
    return verdict


def joined(launches: Sequence[Measurement]) -> Measurement:
    """Measurements of one launch each as one: their times."""
    every = [launch.samples for launch in launches]
    cpu = [samples.cpu_seconds[0] for samples in every if samples.cpu_seconds is not None]
    samples = Samples(
        step_seconds=tuple(samples.step_seconds[0] for samples in every),
        rank_seconds=tuple(samples.rank_seconds[0] for samples in every),
        cpu_seconds=tuple(cpu) if len(cpu) == len(every) else None,
    )
    return replace(launches[0], samples=samples)
