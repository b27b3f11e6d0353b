"""Times, compared with those of a baseline: what is observed of a launch, and the evidence between
launches."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from pytest_ddpperf.baseline.content import fact_changes
from pytest_ddpperf.records.metric import DEVICE
from pytest_ddpperf.records.plan import Limit, is_asked
from pytest_ddpperf.records.samples import (
    Comparison,
    Dropped,
    FactChange,
    Measurement,
    Measurements,
    Reason,
    Status,
    StretchLengths,
    Verdict,
)
from pytest_ddpperf.verdict import stats
from pytest_ddpperf.verdict.observed import (
    TRIM,
    alike,
    bound,
    by_stretches,
    has_figure,
    host,
    joined,
    logs,
    paired,
)
from pytest_ddpperf.verdict.speeds import (
    LEVEL_SHARE,
    find_lowest,
    find_speeds,
    most_p_value,
    with_speeds,
)
from pytest_ddpperf.verdict.stats import (
    Difference,
    Drift,
    Evidence,
    as_share,
    interval,
)

# How likely a test may be to call unchanged code regressed, over all its limits, however many tests
# a run has. docs/statistics.md has the figures of other rates.
TEST_LEVEL = 0.015
# What is assumed of the drift between sessions of one host before any was seen. Another host, which
# may be another device of the same model, differs by more, however quiet both are.
ASSUMED_DRIFT = Drift(floor=0.018, share=0.5, freedom=8, usual=0.05, steep=3.0)
_ANOTHER_HOST = 0.05
# A verdict is settled where further launches would bring another with less than this probability.
SETTLED_LEVEL = 0.05
# Between launches there must be something to compare.
LAUNCHES_NEEDED = 2


def unsupported(limit: Limit, *, steps: int, launches: int) -> str | None:
    """What a limit needs, where the asked steps and launches cannot support it; None where they
    can."""
    if launches < LAUNCHES_NEEDED:
        return f"a limit needs at least {LAUNCHES_NEEDED} launches, {launches} was asked"
    if not limit.kind.is_of_steps:
        return None
    needed, asked = stats.steps_needed(limit.kind.percentile), steps * launches
    if asked >= needed:
        return None
    return (
        f"needs at least {needed} timed steps in all (steps x launches); {steps} x {launches} ="
        f" {asked} were asked: raise --ddp-steps to {math.ceil(needed / launches)}"
    )


def judge_times(
    current: Measurement,
    baseline: Measurements,
    limits: Sequence[Limit],
    *,
    not_gated: Reason | None = None,
    level: float = TEST_LEVEL,
    share: float = 1.0,
    interleaved: bool = False,
    stretches: StretchLengths = (),
    assumed: Drift = ASSUMED_DRIFT,
) -> Verdict:
    """Compare times with the sessions of a baseline; `not_gated` is the reason code if they are not
    to be compared. Evidence needs that `share` of `level`, which an early look may spend.

    To a host that the baseline does not know, all sessions of a host count as one. If launches were
    `interleaved`, launch k of one side is compared with launch k of the other: there is no drift,
    and what else differs between the environments may be just what is compared. `stretches` are the
    lengths in which the windows of a pair were interleaved (`in_stretches`). Of windows of
    different lengths, as many steps are compared (`alike`).

    Raises ValueError for figures that are no measurement: a step time that is not a positive
    number, or sides without as many launches that are `interleaved`.
    """
    if not_gated:
        return Verdict(status=Status.NOT_GATED, reason=not_gated)
    if not baseline:
        return Verdict(status=Status.NO_BASELINE, reason=Reason.NO_BASELINE)
    broken, facts = _environment_differences(
        current, baseline[-1], interleaved=interleaved
    )
    if broken:
        return Verdict(
            status=Status.INCOMPARABLE,
            reason=Reason.MUST_MATCH,
            facts=broken + facts,
        )
    sides = [current, *baseline]
    kept, dropped = _comparable(limits, sides)
    if not kept:
        return Verdict(
            status=Status.NOT_GATED,
            reason=Reason.NO_SUPPORTED_LIMIT,
            dropped_limits=dropped,
            facts=facts,
        )
    now, *before = alike(sides)
    drift = None if interleaved else assumed
    found = _judge_limits(kept, now, before, level, share, drift, stretches)
    if found.details:
        return replace(found, dropped_limits=dropped)
    found = replace(found, facts=facts)
    if not found.status.compared:
        return found
    return replace(found, dropped_limits=dropped, sessions=len(baseline))


def _judge_limits(
    limits: Sequence[Limit],
    current: Measurement,
    baseline: Measurements,
    level: float,
    share: float,
    drift: Drift | None,
    stretches: StretchLengths,
) -> Verdict:
    """Compare by limits that the current side supports; without `drift` the launches were
    interleaved.

    Each limit is decided on the logarithms of per-launch quantiles. REGRESSED needs the estimate
    beyond the limit and evidence that there is a change at all, at `share` of `level` over all
    limits (Holm). Beyond the limit without evidence is INCONCLUSIVE. IMPROVED is REGRESSED
    mirrored. The error of the estimate contains the spread between launches and the drift between
    sessions: estimated from the baseline's sessions, and assumed if they are too few to tell.

    If launches have two speeds, evidence that more are slow is REGRESSED, too. Limits have what it
    leaves of the level: all if there is some, or if there could be none.
    """
    refused = _refuse_limits(limits, current, baseline)
    if refused is not None:
        return refused
    found = _differences(limits, current, baseline, drift, stretches)
    # of the error rate, relative to those of others
    weights = [
        limit.kind.default_weight if limit.default else 1.0 for limit in limits
    ]
    lowest = find_lowest(limits)
    speeds = find_speeds(
        limits[lowest], current, baseline, stretches, interleaved=drift is None
    )
    most = most_p_value([current, *baseline], level * share)
    if speeds is not None and speeds.least_p_value <= most < speeds.p_value:
        level *= 1 - LEVEL_SHARE
    comparisons = []
    for place, limit in enumerate(limits):
        difference = found[place]
        now = logs(limit, current)
        fastest = _fastest(limit, now, baseline) if drift else None
        p_values = [
            (each if difference.estimate > 0 else each.mirrored()).p_value()
            for each in found
        ]
        evidence = stats.holm(p_values, level, weights)[place]
        spent = stats.holm(p_values, level * share, weights)[place]
        comparisons.append(
            _comparison(
                limit, fmean(now), difference, evidence, spent.enough, fastest
            )
        )
    if speeds is not None:
        comparisons[lowest] = with_speeds(
            comparisons[lowest], speeds, speeds.p_value <= most
        )
    return _over_all(comparisons)


def _over_all(comparisons: Sequence[Comparison]) -> Verdict:
    """Return the verdict of the gravest comparison.

    Kernels take longer next to others with which they overlap. So the default limit on their time
    does not decide where the step is faster by evidence.
    """
    is_faster = any(
        c.limit.metric == "p50" and c.change.high < 0 for c in comparisons
    )
    status = gravest(
        c.status
        for c in comparisons
        if not (is_faster and c.limit.default and c.limit.metric == DEVICE)
    )
    return Verdict(
        status=status,
        reason=next(c.reason for c in comparisons if c.status is status),
        comparisons=tuple(comparisons),
    )


def _fastest(
    limit: Limit, now: Sequence[float], baseline: Measurements
) -> float:
    """Return the relative change from the fastest launches of sessions to now's."""
    before = fmean(min(logs(limit, session)) for session in baseline)
    return as_share(min(now) - before)


def _refuse_limits(
    limits: Sequence[Limit], current: Measurement, baseline: Measurements
) -> Verdict | None:
    """Return why sides cannot be compared by these limits; None if they can."""
    thin = [
        each
        for side in (current, *baseline)
        for each in _supported(side, limits)[1]
    ]
    if thin:
        return Verdict(
            status=Status.INCOMPARABLE,
            reason=Reason.BASELINE_SUPPORT,
            details=tuple(dict.fromkeys(map(str, thin))),
        )
    for limit in limits:
        reason, where = Reason.UNKNOWN_METRIC_NOW, "now"
        if has_figure(limit, current):
            reason, where = Reason.UNKNOWN_METRIC, "in the baseline"
            if all(has_figure(limit, side) for side in baseline):
                continue
        return Verdict(
            status=Status.INCOMPARABLE,
            reason=reason,
            details=(f"{limit.metric} is unknown {where}",),
        )
    return None


def _environment_differences(
    current: Measurement, base: Measurement, *, interleaved: bool
) -> tuple[tuple[FactChange, ...], tuple[FactChange, ...]]:
    """Return the facts that must match and do not, and all others that differ."""
    now, before = current.environment, base.environment
    must_match = fact_changes(now.must_match, before.must_match)
    recorded = fact_changes(now.recorded, before.recorded)
    figures = _other_figures(current, base)
    if not interleaved:
        return (*must_match, *figures), recorded
    asked = (
        {name: fact for name, fact in facts.items() if is_asked(name)}
        for facts in (now.must_match, before.must_match)
    )
    broken = fact_changes(*asked)
    others = (change for change in must_match if change not in broken)
    return (*broken, *figures), (
        *fact_changes(now.key, before.key),
        *others,
        *recorded,
    )


def _other_figures(
    current: Measurement, base: Measurement
) -> tuple[FactChange, ...]:
    """Return the user's own figures that are others in the baseline."""
    changes = []
    now, before = current.samples.figures, base.samples.figures
    for name in sorted(now.keys() & before.keys()):
        was, is_now = str(before[name].figure), str(now[name].figure)
        if was != is_now:
            changes.append(FactChange(name=name, before=was, now=is_now))
    return tuple(changes)


def gravest(statuses: Iterable[Status]) -> Status:
    return min(
        statuses,
        key=(
            Status.REGRESSED,
            Status.INCONCLUSIVE,
            Status.IMPROVED,
            Status.PASS,
        ).index,
    )


def resolutions(
    current: Measurement, limits: Iterable[Limit], *, level: float = TEST_LEVEL
) -> dict[str, float]:
    """By metric, the relative slowdown that two measurements like this one, taken on one occasion,
    would resolve."""
    return {
        limit.metric: as_share(own)
        for limit, _, own in _with_itself(current, limits, level)
    }


def coarse(
    current: Measurement, limits: Iterable[Limit], *, level: float = TEST_LEVEL
) -> bool:
    """Whether there is a limit that two measurements like this one, taken on one occasion, would
    not resolve."""
    return any(
        own > bound(limit, mean)
        for limit, mean, own in _with_itself(current, limits, level)
    )


def _with_itself(
    current: Measurement, limits: Iterable[Limit], level: float
) -> Iterator[tuple[Limit, float, float]]:
    """Yield each limit that the measurement supports, with its mean and its resolution, both
    logarithms."""
    kept, _ = _supported(current, limits)
    kept = [limit for limit in kept if has_figure(limit, current)]
    for limit in kept:
        observed = logs(limit, current)
        yield (
            limit,
            fmean(observed),
            stats.difference(observed, [observed]).resolution(
                level / len(kept)
            ),
        )


def _supported(
    current: Measurement, limits: Iterable[Limit]
) -> tuple[list[Limit], tuple[Dropped, ...]]:
    """Return the limits on times that the measurement can support, and those it cannot."""
    launches = current.samples.launches
    steps = min(
        (len(steps) for steps in current.samples.step_seconds), default=0
    )
    kept, dropped = [], []
    for limit in limits:
        if limit.kind.is_exact:
            continue
        problem = unsupported(limit, steps=steps, launches=launches)
        if problem:
            dropped.append(Dropped(limit=limit, why=problem))
        else:
            kept.append(limit)
    return kept, tuple(dropped)


def _comparable(
    limits: Iterable[Limit], sides: Measurements
) -> tuple[list[Limit], tuple[Dropped, ...]]:
    """Return the limits that the current side, the first, can support, without default ones that
    another side cannot, or whose figures a side lacks; and those left out. A note of its launches
    says why the current side lacks figures; one of the user's own must not get lost, nor be in some
    launches of another side."""
    supported, dropped = _supported(sides[0], limits)
    for side in sides[1:]:
        # a later look may have more steps than the one that was saved
        default = [limit for limit in supported if limit.default]
        enough, thin = _supported(side, default)
        why = "the baseline has too few steps or launches"
        dropped += tuple(Dropped(limit=each.limit, why=why) for each in thin)
        supported = [
            limit for limit in supported if limit in enough or not limit.default
        ]
    kept = []
    for limit in supported:
        is_known = has_figure(limit, sides[0])
        is_lost = limit.kind.own_figure != "" and (
            not is_known or any(_lacks_some(limit, side) for side in sides[1:])
        )
        everywhere = all(has_figure(limit, side) for side in sides)
        if not limit.default or is_lost or everywhere:
            kept.append(limit)
        elif is_known:
            dropped += (
                Dropped(limit=limit, why="the baseline does not know it"),
            )
    return kept, dropped


def _lacks_some(limit: Limit, side: Measurement) -> bool:
    """Whether some launches of a side have a figure of the user's own, and others lack it."""
    own = side.samples.figures.get(limit.kind.own_figure)
    has_some = own is not None and any(map(any, own.values))
    return has_some and not has_figure(limit, side)


def _differences(
    limits: Sequence[Limit],
    current: Measurement,
    baseline: Measurements,
    drift: Drift | None,
    stretches: StretchLengths,
) -> list[Difference]:
    """Return the difference of logarithms for each limit; without `drift` the launches were
    interleaved."""
    found = []
    here = host(current)
    hosts = [host(session) for session in baseline]
    if drift and any(each != here for each in hosts):
        drift = drift._replace(floor=max(drift.floor, _ANOTHER_HOST))
    for limit in limits:
        if drift:
            now = logs(limit, current)
            sessions = [logs(limit, session) for session in baseline]
            if here not in hosts:
                sessions = joined(sessions, hosts)
            drifts = None if _is_constant(limit, current, baseline) else drift
            found.append(stats.difference(now, sessions, drift=drifts))
        else:
            (other,) = baseline
            pairs = paired(limit, current, other, stretches)
            trim = TRIM if by_stretches(limit, stretches) else 0.0
            found.append(stats.paired(*pairs, trim=trim))
    return found


def _is_constant(
    limit: Limit, current: Measurement, baseline: Measurements
) -> bool:
    """Whether the limit is on a figure that may be constant by its declaration, and is: then it has
    no drift."""
    own = current.samples.figures.get(limit.kind.own_figure)
    before = {each for session in baseline for each in logs(limit, session)}
    return (
        own is not None
        and own.figure.constant
        and len({*logs(limit, current)}) == len(before) == 1
    )


def differences_of(
    verdict: Verdict,
    current: Measurement,
    baseline: Measurements,
    *,
    interleaved: bool,
    stretches: StretchLengths,
) -> list[Difference]:
    """Return the difference of logarithms behind each comparison of a verdict, or of other launches
    by its limits."""
    limits = [comparison.limit for comparison in verdict.comparisons]
    current, *baseline = alike([current, *baseline])
    return _differences(
        limits,
        current,
        baseline,
        None if interleaved else ASSUMED_DRIFT,
        stretches,
    )


def _comparison(
    limit: Limit,
    now: float,
    difference: Difference,
    evidence: Evidence,
    enough: bool,
    fastest: float | None,
) -> Comparison:
    """`now` is the mean logarithm of the current side; `evidence` is that of a change in the
    direction of the estimate, and `enough` is whether it is enough at this look."""
    estimate = difference.estimate
    base = now - estimate
    allowed = bound(limit, base)
    status, reason, settled = _decide(
        difference, allowed, estimate < -bound(limit, now), evidence, enough
    )
    reach = difference.reach(evidence.level)
    resolution = difference.resolution(evidence.level)
    drift = None
    if difference.drift is not stats.NOTHING:
        drift = math.sqrt(difference.drift.variance)
    needed = None
    if resolution > allowed:
        needed = difference.launches_for(allowed, evidence.level)
    return Comparison(
        limit=limit,
        status=status,
        reason=reason,
        baseline_seconds=math.exp(base),
        now_seconds=math.exp(now),
        change=interval(estimate, reach),
        p_value=(
            difference if estimate > 0 else difference.mirrored()
        ).p_value(),
        level=evidence.level,
        resolution=as_share(resolution),
        alarm_rate=difference.beyond(max(allowed, reach)),
        settled=settled,
        drift=drift,
        launches_needed=needed,
        fastest=fastest,
    )


def _decide(
    difference: Difference,
    allowed: float,
    is_faster: bool,
    evidence: Evidence,
    enough: bool,
) -> tuple[Status, Reason, bool]:
    """Return the status of a limit, why, and whether further launches would hardly change it;
    `is_faster`: the estimate is an improvement by more than the limit."""
    estimate = difference.estimate
    # What only further launches could change: the part of the error that is the current launches'
    # own. What they could not: all else.
    own = replace(difference, base=stats.NOTHING, drift=stats.NOTHING)
    noise = own.reach(SETTLED_LEVEL)
    lasting = replace(difference, now=stats.NOTHING)
    if estimate > allowed:
        if enough:
            return Status.REGRESSED, Reason.BEYOND_LIMIT, False
        is_hopeless = estimate + noise <= lasting.reach(evidence.level)
        settled = is_hopeless and not evidence.enough
        return Status.INCONCLUSIVE, Reason.NOT_SIGNIFICANT, settled
    if is_faster and enough:
        return Status.IMPROVED, Reason.IMPROVED, False
    slower = max(estimate, 0.0)
    if slower + difference.reach(SETTLED_LEVEL) > seen(allowed):
        is_hopeless = slower + lasting.reach(SETTLED_LEVEL) > seen(allowed)
        return Status.INCONCLUSIVE, Reason.TOO_NOISY, is_hopeless
    settled = estimate + noise <= allowed
    if is_faster:
        # what might be better without evidence is within its limit
        settled = settled and not evidence.enough
        return Status.PASS, Reason.NOT_SIGNIFICANT, settled
    return Status.PASS, Reason.WITHIN_LIMIT, settled


# PASS means that a slowdown of so many limits would have been seen. docs/statistics.md has the
# figures of other choices.
_SEEN_LIMITS = 3


def seen(allowed: float) -> float:
    """Return the largest slowdown that a PASS may leave possible, as a difference of logarithms,
    by that which the limit allows."""
    return math.log1p(_SEEN_LIMITS * math.expm1(allowed))
