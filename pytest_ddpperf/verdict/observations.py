"""From measurements to what statistics are about: one observation a launch, the logarithm of a percentile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from pytest_ddpperf.records import Limit, Measurement, Recording, Samples, Scalar, StoredSession
from pytest_ddpperf.records.errors import SampleError
from pytest_ddpperf.verdict import stats

# The percentiles that are compared stretch by stretch; those beyond are few steps of each.
_MIDDLE = 25, 75
# Of their differences, the share that is left out at either end: steps come in modes, as the scheduler has it, and
# where a few stretches more than half are in another one, a pair differs by all that lies between.
TRIM = 0.2


def logs(limit: Limit, measurement: Measurement) -> list[float]:
    return [math.log(value) for value in _quantiles(limit, measurement)]


def _quantiles(limit: Limit, measurement: Measurement) -> tuple[float, ...]:
    samples: Samples = measurement.samples
    if limit.is_cpu_time:
        assert samples.cpu_seconds is not None, "judge checks it first"
        return stats.cpu_quantiles(samples.cpu_seconds, limit.percentile)
    _check(chain.from_iterable(samples.step_seconds))
    return stats.launch_quantiles(samples.step_seconds, limit.percentile)


def _check(seconds: Iterable[float]) -> None:
    for value in seconds:
        if not 0 < value < math.inf:  # nan is neither
            raise SampleError(f"{value!r} is not a duration in seconds")


def has_cpu(limit: Limit, measurement: Measurement) -> bool:
    """Whether there is CPU time to take logarithms of: a rank that only waits may use none in some steps."""
    cpu = measurement.samples.cpu_seconds
    return cpu is not None and all(0 < value < math.inf for value in stats.cpu_quantiles(cpu, limit.percentile))


def is_middle(limit: Limit) -> bool:
    """Whether stretches show it better than all steps together."""
    return not limit.is_cpu_time and _MIDDLE[0] <= limit.percentile <= _MIDDLE[1]


def in_stretches(
    limit: Limit,
    now: Sequence[float],
    base: Sequence[float],
    current: Measurement,
    baseline: Measurement,
    stretches: Sequence[Sequence[int]],
) -> list[float]:
    """The baseline's logarithms such that those of `now` differ from them by what the stretches show."""
    sides = zip(current.samples.step_seconds, baseline.samples.step_seconds, strict=True)
    return [
        own - stats.by_stretches(*steps, lengths, limit.percentile) if len(lengths) > 1 else other
        for own, other, steps, lengths in zip(now, base, sides, stretches, strict=True)
    ]


def host(measurement: Measurement) -> Scalar:
    return measurement.environment.recorded.get("host")


def joined(sessions: Sequence[Sequence[float]], hosts: Sequence[Scalar]) -> list[list[float]]:
    """The sessions of each host as one."""
    return [
        [value for session, host in zip(sessions, hosts, strict=True) if host == own for value in session]
        for own in dict.fromkeys(hosts)
    ]


def alike(sides: Sequence[Measurement], *, first_node: bool) -> list[Measurement]:
    """With steps that can be compared: as many on all sides, and of the `first_node` alone or of all on all."""
    cut = of_one_length([side.samples for side in sides])
    if first_node:
        cut = [replace(side, step_seconds=side.node_seconds or side.step_seconds) for side in cut]
    return [replace(side, samples=samples) for side, samples in zip(sides, cut, strict=True)]


# Of a step at p50, by how much the clocks of several nodes may be apart for the steps of all nodes to be told.
CLOCKS_SHARE = 0.01


def on_one_clock(sides: Iterable[Samples]) -> bool:
    """Whether the clocks of all nodes are known well enough, on all sides, for the steps of all nodes to be compared;
    on one node they are the same."""
    return all(
        max(side.clock_seconds) <= CLOCKS_SHARE * stats.geometric_mean(stats.launch_quantiles(side.step_seconds, 50))
        for side in sides
        if side.clock_seconds is not None
    )


def of_one_length(sides: Sequence[Samples]) -> list[Samples]:
    """With as many steps a launch as the side with the fewest has, the first ones: a percentile of few steps lies
    elsewhere than one of many."""
    steps = min(side.steps for side in sides)
    return [side if side.steps == steps else side.first(steps) for side in sides]


# Of which a report tells the percentiles of each launch: those that are limited, and enough to draw a distribution.
_PERCENTILES = range(5, 100, 5)


def in_percentiles(session: Recording, steps: int) -> StoredSession:
    """A session by the percentiles of its launches, cut to so many steps, as they are compared."""
    samples = session.measurement.samples.first(steps)
    return StoredSession(
        created=session.created,
        commit=session.commit,
        host=str(host(session.measurement) or ""),
        steps=steps,
        launch_seconds={f"p{q}": stats.launch_quantiles(samples.step_seconds, q) for q in _PERCENTILES},
    )
