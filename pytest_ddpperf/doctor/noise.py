"""What launches of the same code say of the machine, by the statistics of the gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from pytest_ddpperf.doctor.bench import Taken
from pytest_ddpperf.measuring.launches import measurement
from pytest_ddpperf.records import Environment, LaunchSamples, Limit, Verdict
from pytest_ddpperf.records.doctor import Cores, Load, Noise, Resolved, Trial
from pytest_ddpperf.verdict import TEST_LEVEL, judge_times, observations, stats
from pytest_ddpperf.verdict.times import LAUNCHES_NEEDED

# As many as a gate takes before it looks first.
FIRST_LOOK = 5

Launched = Sequence[LaunchSamples]


def of(
    taken: Taken,
    trials: Sequence[tuple[str, Cores]],
    limits: Sequence[Limit],
    *,
    in_stretches: bool,
    seconds: float,
    during: Load,
) -> Noise:
    """Of a run of one test with these `limits`; `trials` are the code of a finding and the cores it would have."""
    alone, pairs = taken.alone, taken.pairs
    tried = []
    for (code, cores), on in zip(trials, taken.on, strict=True):
        rounds = min(len(on), len(alone))
        tried.append(
            Trial(code=code, cores=cores, here=_one(on, rounds, limits), all_cores=_one(alone, rounds, limits))
        )
    return Noise(
        seconds=seconds,
        steps=len(alone[0].step_seconds) if alone else 0,
        step_seconds=median(step for launch in alone for step in launch.step_seconds) if alone else 0.0,
        limits=tuple(limits),
        stored=tuple(stored(alone[:count], limits) for count in _looks(len(alone))),
        drift=_drift(alone, limits),
        turns=tuple(turns(pairs[:count], limits, in_stretches=in_stretches) for count in _looks(len(pairs))),
        in_stretches=in_stretches,
        trials=tuple(tried),
        during=during,
        problem=taken.problem,
    )


def _looks(count: int) -> tuple[int, ...]:
    """At the first look, and with all there are."""
    if count < LAUNCHES_NEEDED:
        return ()
    return (FIRST_LOOK, count) if count > FIRST_LOOK else (count,)


def _one(launches: Launched, count: int, limits: Sequence[Limit]) -> Resolved | None:
    return stored(launches[:count], limits) if count >= LAUNCHES_NEEDED else None


def stored(launches: Launched, limits: Sequence[Limit]) -> Resolved:
    """What a measurement like this one tells against a baseline of one session like this one, on another day."""
    now = measurement(launches, Environment())
    logs = {limit.metric: observations.logs(limit, now) for limit in limits}
    return _resolved(len(launches), logs, _against_itself(launches, limits))


def _against_itself(launches: Launched, limits: Sequence[Limit]) -> Verdict:
    now = measurement(launches, Environment())
    return judge_times(now, [now], limits, level=TEST_LEVEL)


def _drift(launches: Launched, limits: Sequence[Limit]) -> float:
    if len(launches) < LAUNCHES_NEEDED:
        return 0.0
    return max(comparison.drift or 0.0 for comparison in _against_itself(launches, limits).comparisons)


def turns(
    pairs: Sequence[tuple[LaunchSamples, LaunchSamples]], limits: Sequence[Limit], *, in_stretches: bool
) -> Resolved:
    """What so many pairs of launches in turns tell."""
    now, base = (measurement(side, Environment()) for side in zip(*pairs, strict=True))
    stretches = [one.stretches for one, _ in pairs]
    apart = {}
    for limit in limits:
        one, other = observations.logs(limit, now), observations.logs(limit, base)
        if in_stretches and observations.is_middle(limit):
            other = observations.in_stretches(limit, one, other, now, base, stretches)
        apart[limit.metric] = [after - before for after, before in zip(one, other, strict=True)]
    verdict = judge_times(
        now,
        [base],
        limits,
        level=TEST_LEVEL,
        interleaved=True,
        stretches=stretches if in_stretches else (),
    )
    return _resolved(len(pairs), apart, verdict)


def _resolved(launches: int, logs: dict[str, list[float]], verdict: Verdict) -> Resolved:
    return Resolved(
        launches=launches,
        spread={metric: math.sqrt(stats.variance(values)) for metric, values in logs.items()},
        resolution={comparison.limit.metric: comparison.resolution for comparison in verdict.comparisons},
    )
