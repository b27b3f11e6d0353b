"""What is observed of the launches of both sides, in the form that limits compare."""

import math
from collections.abc import Sequence
from dataclasses import replace

from pytest_ddpperf.records import quantiles
from pytest_ddpperf.records.metric import MEAN
from pytest_ddpperf.records.outcome import StoredSession
from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.samples import (
    Comparison,
    LaunchSteps,
    Measurement,
    Recording,
    Samples,
    Scalar,
    StretchLengths,
)
from pytest_ddpperf.verdict import stats


def bound(limit: Limit, base: float) -> float:
    """The limit as a difference of logarithms; `base` is the logarithm of what it is a limit to, in
    seconds."""
    if limit.kind.lower_is_worse:
        return -math.log1p(-limit.value)
    return math.log1p(
        limit.value if limit.unit == "%" else limit.value / math.exp(base)
    )


def bound_of(comparison: Comparison) -> float:
    """The limit of a comparison as a difference of logarithms."""
    return bound(comparison.limit, math.log(comparison.baseline_seconds))


# Of the differences of pairs that are compared stretch by stretch, the share that is left out at
# either end: steps come in modes, as the scheduler has it, and where a few stretches more than half
# are in another one, a pair differs by all that lies between.
TRIM = 0.2
# Most work of a step shows in it, and hardly any work of others on the machine.
CPU_TIME = Limit(metric="cpu_p50", value=0.0, unit="%")


def logs(limit: Limit, measurement: Measurement) -> list[float]:
    return [math.log(value) for value in limit.kind.figures(measurement)]


def has_figure(limit: Limit, measurement: Measurement) -> bool:
    """Whether each launch has what a limit is on, to take its logarithm: a rank that only waits may
    use no CPU time in some steps, and not all phases of all steps are known."""
    found = limit.kind.figures(measurement)
    return len(found) == measurement.samples.launches and all(
        0 < value < math.inf for value in found
    )


def in_stretches(
    limit: Limit,
    now: Sequence[float],
    base: Sequence[float],
    current: Measurement,
    baseline: Measurement,
    stretches: StretchLengths,
) -> list[float]:
    """The baseline's logarithms such that those of `now` differ from them by what the stretches
    show."""
    sides = zip(
        current.samples.step_seconds, baseline.samples.step_seconds, strict=True
    )
    return [
        own - stats.by_stretches(*steps, lengths, limit.kind.percentile)
        if len(lengths) > 1
        else other
        for own, other, steps, lengths in zip(
            now, base, sides, stretches, strict=True
        )
    ]


def paired(
    limit: Limit,
    current: Measurement,
    other: Measurement,
    stretches: StretchLengths,
) -> tuple[list[float], list[float]]:
    now, base = logs(limit, current), logs(limit, other)
    if by_stretches(limit, stretches):
        base = in_stretches(limit, now, base, current, other, stretches)
    return now, base


def by_stretches(limit: Limit, stretches: StretchLengths) -> bool:
    """Whether launches are compared stretch by stretch: both sides were interleaved within them."""
    return limit.kind.is_in_stretches and any(len(own) > 1 for own in stretches)


def host(measurement: Measurement) -> Scalar:
    """Return the host, or all hosts of several nodes."""
    recorded = measurement.environment.recorded
    return recorded.get("hosts") or recorded.get("host")


def joined(
    sessions: Sequence[Sequence[float]], hosts: Sequence[Scalar]
) -> list[list[float]]:
    """The sessions of each host as one."""
    by_host: dict[Scalar, list[float]] = {}
    for session, host in zip(sessions, hosts, strict=True):
        by_host.setdefault(host, []).extend(session)
    return [*by_host.values()]


def alike(sides: Sequence[Measurement]) -> list[Measurement]:
    """Return the sides with as many steps each."""
    cut = of_one_length([side.samples for side in sides])
    return [
        replace(side, samples=samples)
        for side, samples in zip(sides, cut, strict=True)
    ]


def of_one_length(sides: Sequence[Samples]) -> list[Samples]:
    """Cut launches to the first steps, as many as the shortest side has: a percentile depends on
    their number."""
    steps = min(side.steps for side in sides)
    return [
        side if side.steps == steps else side.first(steps) for side in sides
    ]


# The percentiles of each launch that a report has: those that are limited, and enough to draw a
# distribution.
PERCENTILES = range(5, 100, 5)


def launch_figures(launches: LaunchSteps) -> dict[str, tuple[float, ...]]:
    """Return what a report draws of launches, in seconds, by metric: percentiles and the mean."""
    # once, for sorting again costs next to nothing
    ordered = [sorted(launch) for launch in launches]
    return {
        **{
            f"p{q}": quantiles.launch_quantiles(ordered, q) for q in PERCENTILES
        },
        MEAN: quantiles.launch_means(launches),
    }


def in_percentiles(session: Recording, steps: int) -> StoredSession:
    """A session by the percentiles of its launches, cut to so many steps, as they are compared."""
    samples = session.measurement.samples.first(steps)
    return StoredSession(
        created=session.created,
        commit=session.commit,
        host=str(host(session.measurement) or ""),
        steps=steps,
        launch_seconds=launch_figures(samples.step_seconds),
        phases=session.measurement.mean_phases,
        limits=session.limits,
        launches=session.launches,
        why=session.why,
    )
