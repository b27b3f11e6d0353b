"""The decision: is the current measurement worse than the baseline, and does that fail the test?

The only place that decides. Knows records and statistics; nothing of files, pytest or how it is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from pytest_ddpperf import stats
from pytest_ddpperf.records import Comparison, Interval, Limit, Measurement, Scalar, Status, Verdict

# Between launches there must be something to compare.
_LAUNCHES_NEEDED = 2


def unsupported(limit: Limit, *, steps: int, launches: int) -> str | None:
    """What a limit needs, where the asked steps and launches cannot support it; None where they can."""
    if launches < _LAUNCHES_NEEDED:
        return f"a limit is decided between launches: it needs at least {_LAUNCHES_NEEDED}, {launches} was asked"
    needed, asked = stats.steps_needed(limit.percentile), steps * launches
    if asked >= needed:
        return None
    return (
        f"needs at least {needed} timed steps in all (steps x launches); {steps} x {launches} = {asked} were asked: "
        f"raise --ddp-steps to {math.ceil(needed / launches)}"
    )


def judge(
    current: Measurement,
    baseline: Measurement | None,
    limits: Sequence[Limit],
    *,
    not_gated: str | None = None,
) -> Verdict:
    """Hold `current` against `baseline`; `not_gated` is the reason code where it shall not be.

    Each limit is decided on the logarithms of per-launch quantiles. REGRESSED needs the estimate beyond the limit
    and evidence that there is a change at all: the one-sided 95 % bound of Welch's t-test above zero. Beyond the
    limit without evidence is INCONCLUSIVE. IMPROVED is REGRESSED mirrored.
    """
    if not_gated is not None:
        return Verdict(status=Status.NOT_GATED, reason=not_gated)
    if baseline is None:
        return Verdict(status=Status.NO_BASELINE, reason="no-baseline")
    differences = _differences(current.environment.recorded, baseline.environment.recorded)
    broken = _differences(current.environment.must_match, baseline.environment.must_match)
    if broken:
        return Verdict(status=Status.INCOMPARABLE, reason="must-match", differences=broken + differences)
    kept, dropped = _supported(current, limits)
    if not kept:
        return Verdict(status=Status.NOT_GATED, reason="no-supported-limit", dropped=dropped, differences=differences)
    if baseline.samples.launches < _LAUNCHES_NEEDED:
        return Verdict(status=Status.INCOMPARABLE, reason="baseline-launches", differences=differences)
    if any(limit.is_cpu_time and not (_has_cpu(current) and _has_cpu(baseline)) for limit in kept):
        return Verdict(status=Status.INCOMPARABLE, reason="no-cpu-time", differences=differences)
    comparisons = tuple(_compare(limit, current, baseline) for limit in kept)
    statuses = [comparison.status for comparison in comparisons]
    order = (Status.REGRESSED, Status.INCONCLUSIVE, Status.IMPROVED, Status.PASS)
    status = next(status for status in order if status in statuses)
    return Verdict(
        status=status,
        reason=next(c.reason for c in comparisons if c.status is status),
        comparisons=comparisons,
        dropped=dropped,
        differences=differences,
    )


def fails(verdict: Verdict, *, fail_on: frozenset[str] | None, baseline_missing: Literal["warn", "fail"]) -> bool:
    """Whether a verdict fails its test; `fail_on`, when given, names exactly those that do."""
    if fail_on is not None:
        return verdict.status.value.lower().replace(" ", "-") in fail_on
    if verdict.status in (Status.NO_BASELINE, Status.INCOMPARABLE) or verdict.reason == "debugging-variable":
        return baseline_missing == "fail"
    return verdict.status is Status.REGRESSED


def _supported(current: Measurement, limits: Sequence[Limit]) -> tuple[list[Limit], tuple[str, ...]]:
    """The limits that the measurement can support, and those of ours it cannot, in words."""
    launches = current.samples.launches
    steps = min((len(steps) for steps in current.samples.step_seconds), default=0)
    kept, dropped = [], []
    for limit in limits:
        problem = unsupported(limit, steps=steps, launches=launches)
        if problem is None:
            kept.append(limit)
        else:
            dropped.append(f"{limit}: {problem}")
    return kept, tuple(dropped)


def _compare(limit: Limit, current: Measurement, baseline: Measurement) -> Comparison:
    now, base = _quantiles(limit, current), _quantiles(limit, baseline)
    logs = stats.welch([math.log(value) for value in now], [math.log(value) for value in base])
    now_seconds, base_seconds = stats.geometric_mean(now), stats.geometric_mean(base)
    if limit.unit == "%":
        slower, faster = logs.estimate > math.log1p(limit.value), logs.estimate < -math.log1p(limit.value)
    else:
        slower = now_seconds - base_seconds > limit.value
        faster = base_seconds - now_seconds > limit.value
    if slower:
        proven, status, reason = logs.low > 0, Status.REGRESSED, "beyond-limit"
    elif faster:
        proven, status, reason = logs.high < 0, Status.IMPROVED, "improved"
    else:
        proven, status, reason = True, Status.PASS, "within-limit"
    if not proven:
        # Only what might be worse is left open; what might be better is within its limit.
        status = Status.INCONCLUSIVE if slower else Status.PASS
        reason = "not-significant"
    return Comparison(
        limit=limit,
        status=status,
        reason=reason,
        baseline_seconds=base_seconds,
        now_seconds=now_seconds,
        change=Interval(
            estimate=math.expm1(logs.estimate), low=math.expm1(logs.low), high=math.expm1(min(logs.high, 700.0))
        ),
    )


def _quantiles(limit: Limit, measurement: Measurement) -> tuple[float, ...]:
    if limit.is_cpu_time:
        assert measurement.samples.cpu_seconds is not None, "judge checks it first"
        return stats.cpu_quantiles(measurement.samples.cpu_seconds, limit.percentile)
    return stats.launch_quantiles(measurement.samples.step_seconds, limit.percentile)


def _has_cpu(measurement: Measurement) -> bool:
    """Whether there is CPU time to take logarithms of."""
    cpu = measurement.samples.cpu_seconds
    return cpu is not None and all(min(rank) > 0 for launch in cpu for rank in launch)


def _differences(now: Mapping[str, Scalar], base: Mapping[str, Scalar]) -> tuple[str, ...]:
    """Facts that differ, as "torch 2.12 -> 2.13"."""

    def lines() -> Iterator[str]:
        for name in sorted({*now, *base}):
            before, after = (_text(facts.get(name)) for facts in (base, now))
            if before != after:
                yield f"{name.removeprefix('env:')} {before} -> {after}"

    return tuple(lines())


def _text(value: Scalar) -> str:
    return "unset" if value is None or value == "" else str(value)
