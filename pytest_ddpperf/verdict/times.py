"""Times, held against those of a baseline: evidence between launches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from pytest_ddpperf.records import (
    Comparison,
    Interval,
    Limit,
    Measurement,
    Scalar,
    Status,
    Verdict,
)
from pytest_ddpperf.records.errors import SampleError
from pytest_ddpperf.verdict import observations, stats
from pytest_ddpperf.verdict.stats import Difference, Drift, Evidence

# How likely a test may be to call unchanged code regressed, over all its limits, however many tests a run has.
# docs/statistics.md has the figures of other rates.
TEST_LEVEL = 0.015
# What is assumed of the drift between sessions of one host before any was seen. Another host, which may be another
# device of the same model, differs by more, however quiet both are.
ASSUMED_DRIFT = Drift(floor=0.018, share=0.5, freedom=8, usual=0.05, steep=3.0)
_ANOTHER_HOST = 0.05
# A verdict is settled where further launches would bring another with less than this probability.
_SETTLED_LEVEL = 0.05
# Of the facts that must match, those that are asked for: with others, step times of one test are not alike.
_ASKED = ("batch_size ", "warmup ", "timing ", "collective ")
# Between launches there must be something to compare.
LAUNCHES_NEEDED = 2


def unsupported(limit: Limit, *, steps: int, launches: int) -> str | None:
    """What a limit needs, where the asked steps and launches cannot support it; None where they can."""
    if launches < LAUNCHES_NEEDED:
        return f"a limit is decided between launches: it needs at least {LAUNCHES_NEEDED}, {launches} was asked"
    needed, asked = stats.steps_needed(limit.percentile), steps * launches
    if asked >= needed:
        return None
    return (
        f"needs at least {needed} timed steps in all (steps x launches); {steps} x {launches} = {asked} were asked: "
        f"raise --ddp-steps to {math.ceil(needed / launches)}"
    )


def judge_times(
    current: Measurement,
    baseline: Sequence[Measurement],
    limits: Sequence[Limit],
    *,
    not_gated: str | None = None,
    level: float = TEST_LEVEL,
    interleaved: bool = False,
    stretches: Sequence[Sequence[int]] = (),
    assumed: Drift = ASSUMED_DRIFT,
) -> Verdict:
    """Hold times against the sessions of a baseline; `not_gated` is the reason code where they shall not be.

    Each limit is decided on the logarithms of per-launch quantiles. REGRESSED needs the estimate beyond the limit
    and evidence that there is a change at all, at `level` over all limits (Holm). Beyond the limit without evidence
    is INCONCLUSIVE. IMPROVED is REGRESSED mirrored. The error of the estimate contains the spread between launches
    and the drift between sessions: estimated from the baseline's sessions, and `assumed` as far as they are too few
    to tell. To a host that the baseline does not know, all sessions of a host count as one. Where launches were
    `interleaved`, k of one side beside k of the other, they are compared in pairs: there is no drift, and what else
    differs between the sides' environments may be just what is compared. Where their windows took turns, too, by launch
    in so long `stretches`, see `observations.in_stretches`. Of sides with windows of different lengths, as many steps
    are compared: see `observations.alike`.

    Raises SampleError for figures that are no measurement: a step time that is not a positive number, a single
    launch on a side that is to be compared, sides without as many launches that are `interleaved`.
    """
    if not_gated is not None:
        return Verdict(status=Status.NOT_GATED, reason=not_gated)
    if not baseline:
        return Verdict(status=Status.NO_BASELINE, reason="no-baseline")
    differences = differing(current.environment.recorded, baseline[-1].environment.recorded)
    broken = differing(current.environment.must_match, baseline[-1].environment.must_match)
    if interleaved:
        where = differing(current.environment.key, baseline[-1].environment.key)
        asked = tuple(line for line in broken if line.startswith(_ASKED))
        differences = (*where, *(line for line in broken if line not in asked), *differences)
        broken = asked
    if broken:
        return Verdict(status=Status.INCOMPARABLE, reason="must-match", differences=broken + differences)
    kept, dropped = _supported(current, _on_times(limits))
    if not kept:
        return Verdict(status=Status.NOT_GATED, reason="no-supported-limit", dropped=dropped, differences=differences)
    if min(session.samples.launches for session in baseline) < LAUNCHES_NEEDED:
        raise SampleError(f"a baseline of a single launch: a comparison needs {LAUNCHES_NEEDED} a side")
    first_node = not observations.on_one_clock([side.samples for side in (current, *baseline)])
    current, *baseline = observations.alike([current, *baseline], first_node=first_node)
    thin = dict.fromkeys(line for side in (current, *baseline) for line in _supported(side, kept)[1])
    if thin:
        return Verdict(status=Status.INCOMPARABLE, reason="baseline-support", dropped=dropped, differences=tuple(thin))
    for reason, sides in (("no-cpu-time-now", [current]), ("no-cpu-time", baseline)):
        if any(limit.is_cpu_time and not observations.has_cpu(limit, side) for limit in kept for side in sides):
            return Verdict(status=Status.INCOMPARABLE, reason=reason, differences=differences)
    if interleaved and [current.samples.launches] != [side.samples.launches for side in baseline]:
        counts = " + ".join(str(side.samples.launches) for side in baseline)
        raise SampleError(f"{current.samples.launches} launches and {counts}: they were not interleaved")
    comparisons = _compare(
        kept, current, baseline, level=level, drift=None if interleaved else assumed, stretches=stretches
    )
    status = gravest(comparison.status for comparison in comparisons)
    return Verdict(
        status=status,
        reason=next(c.reason for c in comparisons if c.status is status),
        comparisons=comparisons,
        dropped=dropped,
        differences=differences,
        sessions=len(baseline),
        first_node=first_node,
    )


def gravest(statuses: Iterable[Status]) -> Status:
    return min(statuses, key=(Status.REGRESSED, Status.INCONCLUSIVE, Status.IMPROVED, Status.PASS).index)


def _on_times(limits: Iterable[Limit]) -> list[Limit]:
    return [limit for limit in limits if not limit.is_counter]


def resolutions(current: Measurement, limits: Iterable[Limit], *, level: float = TEST_LEVEL) -> dict[str, float]:
    """By metric, the relative slowdown that two measurements like this one, taken on one occasion, would resolve."""
    return {own.limit.metric: _share(own.resolution) for own in _with_itself(current, limits, level)}


def coarse(current: Measurement, limits: Iterable[Limit], *, level: float = TEST_LEVEL) -> bool:
    """Whether there is a limit that two measurements like this one, taken on one occasion, would not resolve."""
    return any(own.resolution > bound(own.limit, own.mean) for own in _with_itself(current, limits, level))


class _Own(NamedTuple):
    """What a measurement says of one limit by itself; both figures are logarithms."""

    limit: Limit
    mean: float
    resolution: float


def _with_itself(current: Measurement, limits: Iterable[Limit], level: float) -> Iterator[_Own]:
    """The limits it supports."""
    kept, _ = _supported(current, _on_times(limits))
    kept = [limit for limit in kept if not limit.is_cpu_time or observations.has_cpu(limit, current)]
    for limit in kept:
        logs = observations.logs(limit, current)
        yield _Own(limit, fmean(logs), stats.difference(logs, [logs]).resolution(level / len(kept)))


def _supported(current: Measurement, limits: Iterable[Limit]) -> tuple[list[Limit], tuple[str, ...]]:
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


def _compare(
    limits: Sequence[Limit],
    current: Measurement,
    baseline: Sequence[Measurement],
    *,
    level: float,
    drift: Drift | None,
    stretches: Sequence[Sequence[int]],
) -> tuple[Comparison, ...]:
    pairs = [
        (observations.logs(limit, current), [observations.logs(limit, session) for session in baseline])
        for limit in limits
    ]
    if drift is None:
        found = []
        for limit, (now, (base,)) in zip(limits, pairs, strict=True):
            if observations.is_middle(limit) and any(len(own) > 1 for own in stretches):
                shown = observations.in_stretches(limit, now, base, current, baseline[0], stretches)
                found.append(stats.paired(now, shown, trim=observations.TRIM))
            else:
                found.append(stats.paired(now, base))
    else:
        here, hosts = observations.host(current), [observations.host(session) for session in baseline]
        found = [_across(now, sessions, here, hosts, drift) for now, sessions in pairs]
    slower = stats.holm([difference.p_value() for difference in found], level)
    faster = stats.holm([difference.mirrored().p_value() for difference in found], level)
    fastest = [_share(min(now) - fmean(map(min, sessions))) if drift is not None else None for now, sessions in pairs]
    return tuple(
        replace(_comparison(limit, fmean(now), difference, *evidence), fastest=change)
        for limit, (now, _), difference, change, *evidence in zip(
            limits, pairs, found, fastest, slower, faster, strict=True
        )
    )


def _across(
    now: Sequence[float], sessions: Sequence[Sequence[float]], here: Scalar, hosts: Sequence[Scalar], drift: Drift
) -> Difference:
    """Of logarithms, where sessions were on other occasions, and maybe on other hosts."""
    if any(host != here for host in hosts):
        drift = replace(drift, floor=max(drift.floor, _ANOTHER_HOST))
    if here not in hosts:
        sessions = observations.joined(sessions, hosts)
    return stats.difference(now, sessions, drift=drift)


def shift(
    now: Sequence[float],
    sessions: Sequence[Sequence[float]],
    *,
    here: Scalar,
    hosts: Sequence[Scalar],
    level: float,
) -> Interval:
    """How much more `now` is than the sessions of a baseline, as `judge_times` would have it of a limit: each value is
    the percentile of a launch, in seconds, two a session at least. `here` is the host, `hosts` those of the sessions;
    each bound is at `level`."""
    logs = [[math.log(value) for value in side] for side in (now, *sessions)]
    found = _across(logs[0], logs[1:], here, hosts, ASSUMED_DRIFT)
    return _interval(found, found.reach(level))


def _interval(difference: Difference, reach: float) -> Interval:
    return Interval(
        estimate=_share(difference.estimate),
        low=_share(difference.estimate - reach),
        high=_share(difference.estimate + reach),
    )


def _comparison(
    limit: Limit, now: float, difference: Difference, evidence_slower: Evidence, evidence_faster: Evidence
) -> Comparison:
    """`now` is the mean logarithm of the current side."""
    base = now - difference.estimate
    slower, faster = difference.estimate > bound(limit, base), -difference.estimate > bound(limit, now)
    # What only further launches could change: the part of the error that is the current launches' own.
    noise = difference.without("base", "drift").reach(_SETTLED_LEVEL)
    evidence = evidence_slower if difference.estimate > 0 else evidence_faster
    status, reason = Status.PASS, "within-limit"
    settled = difference.estimate + noise <= bound(limit, base)
    if slower and evidence_slower.enough:
        status, reason = Status.REGRESSED, "beyond-limit"
    elif slower:
        status, reason = Status.INCONCLUSIVE, "not-significant"
        settled = difference.estimate + noise <= difference.without("now").reach(evidence.level)
    elif faster:  # what might be better without evidence is within its limit
        status = Status.IMPROVED if evidence_faster.enough else Status.PASS
        reason = "improved" if evidence_faster.enough else "not-significant"
    reach = difference.reach(evidence.level)
    resolution = difference.resolution(evidence.level)
    fine = resolution <= bound(limit, base)
    return Comparison(
        limit=limit,
        status=status,
        reason=reason,
        baseline_seconds=math.exp(base),
        now_seconds=math.exp(now),
        change=_interval(difference, reach),
        p_value=(difference if difference.estimate > 0 else difference.mirrored()).p_value(),
        level=evidence.level,
        resolution=_share(resolution),
        alarm_rate=difference.beyond(max(bound(limit, base), reach)),
        settled=settled,
        drift=math.sqrt(difference.drift.variance) if difference.drift is not stats.NOTHING else None,
        launches_needed=None if fine else difference.launches_for(bound(limit, base), evidence.level),
    )


def bound(limit: Limit, base: float) -> float:
    """The limit as a difference of logarithms; `base` is the logarithm of what it is a limit to, in seconds."""
    if limit.is_bandwidth:
        return -math.log1p(-limit.value)
    return math.log1p(limit.value if limit.unit == "%" else limit.value / math.exp(base))


def _share(logarithm: float) -> float:
    return math.expm1(min(logarithm, 700.0))


def differing(now: Mapping[str, Scalar], base: Mapping[str, Scalar]) -> tuple[str, ...]:
    """Facts that differ, as "torch 2.12 -> 2.13"."""

    def lines() -> Iterator[str]:
        for name in sorted({*now, *base}):
            before, after = (_text(facts.get(name)) for facts in (base, now))
            if before != after:
                yield f"{name.removeprefix('env:')} {before} -> {after}"

    return tuple(lines())


def _text(value: Scalar) -> str:
    return "unset" if value is None or value == "" else str(value)
