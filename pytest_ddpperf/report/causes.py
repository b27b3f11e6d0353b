"""What explains a change, in words: phases of the step and counters, slow steps, and the figures of
ranks.

Where phases say nothing, CPU time, which waiting does not use, shows which rank worked more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from pytest_ddpperf import text
from pytest_ddpperf.explain import find
from pytest_ddpperf.records.outcome import BaselineSide
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import (
    Comparison,
    LaunchRankSteps,
    LaunchSteps,
    Measurement,
    Status,
    Verdict,
)
from pytest_ddpperf.records.step_phases import Finding
from pytest_ddpperf.report import sentences
from pytest_ddpperf.verdict import stats
from pytest_ddpperf.verdict.decision import FAULT_SECONDS
from pytest_ddpperf.verdict.times import of_one_length

# What makes up half of a change is its main cause; where it is less, more comes from something
# else.
_MAIN_PART = 0.5
_MINOR_PART = 0.25


def explain(
    verdict: Verdict,
    plan: Plan,
    now: Measurement,
    baseline: Sequence[Measurement],
    level: float,
    side: BaselineSide | None = None,
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return what explains the change that a verdict is about, and the same in words; nothing of
    PASS. `side` is the other one of interleaved launches."""
    if not baseline or not verdict.status.compared or verdict.status is Status.PASS:
        return (), ()
    change = _change(verdict)
    # CPU time by rank explains a limit on it. That phases differ from those of a stored baseline is
    # no evidence by itself: the machine may be slower.
    is_open = side is None and verdict.status is Status.INCONCLUSIVE
    by_phase = change is not None and not change.limit.is_cpu_time and not is_open
    rise = _rise(change, now, baseline[-1]) if change is not None and by_phase else 0.0
    found = find(now, baseline[-1], rise, is_paired=side is not None, level=level)
    return found, find_causes(verdict, plan, now, baseline, found)


def find_causes(
    verdict: Verdict,
    plan: Plan,
    now: Measurement,
    baseline: Sequence[Measurement],
    found: Sequence[Finding] = (),
) -> tuple[str, ...]:
    """Return what explains a change, in words; () if nothing is known. `found` is of
    `explain.find`."""
    change = _change(verdict)
    rise = _rise(change, now, baseline[-1]) if change is not None else 0.0
    of_it = f"(the step: {_signed(rise)})"
    shown = sentences.shown(verdict)
    words = [
        *_slow_steps(
            verdict, now.samples.step_seconds, baseline[-1].samples.step_seconds
        )
    ]
    # the rise of the step stands there alone
    first = [each for each in found if each.seconds is not None][:1]
    for each in found:
        words.append(
            _finding(
                each,
                plan,
                now,
                of_it if each in first else "",
                shown.limit.metric if shown else "",
            )
        )
    words.append(_page_faults(now, baseline[-1], rise))
    explained = sum(each.share for each in found if each.phases)
    is_explained = explained > _MAIN_PART if plan.rpc else explained > 0
    if not is_explained and verdict.status is Status.REGRESSED:
        words += _rank_causes(change, plan, now, baseline[-1])
    return tuple(filter(None, words))


def _finding(
    found: Finding, plan: Plan, now: Measurement, of_it: str, shown: str
) -> str:
    """Return "rank 1: forward +6.1 ms (the step: +6.4 ms); buckets 3 -> 24", without the headline's
    counter."""
    counters = [
        f"{name} {before:,} -> {after:,}"
        for name, before, after in found.counters
        if name != shown
    ]
    words = text.some(counters, 3)
    if found.seconds is None:
        return words
    amount = f"{_signed(found.seconds)} {of_it}".rstrip()
    if not found.phases:
        is_rest = found.share > 0
        return (
            f"unexplained: {amount}"
            if is_rest
            else f"all else: {_signed(found.seconds)}"
        )
    who = (
        f"{text.process(plan, now.environment, found.rank)}: "
        if found.rank is not None
        else ""
    )
    *several, last = map(text.phase, found.phases)
    phases = f"{', '.join(several)} and {last}" if several else last
    return "; ".join(filter(None, (f"{who}{phases} {amount}", words)))


def _page_faults(now: Measurement, before: Measurement, rise: float) -> str:
    """Return that page faults rose if they are a part of a rise: the largest over ranks, the median
    over launches."""
    sides = now.samples.most_page_faults, before.samples.most_page_faults
    if rise <= 0 or not all(sides):
        return ""
    after, earlier = map(median, sides)
    if (after - earlier) * FAULT_SECONDS < _MINOR_PART * rise:
        return ""
    return (
        f"page faults {earlier:,.0f} -> {after:,.0f} a step: the allocator may give memory back in"
        " each step"
    )


def _rise(change: Comparison, now: Measurement, before: Measurement) -> float:
    """Return by how many seconds a step takes longer; of a change of a phase, at least by so many
    as that does."""
    rise = change.now_seconds - change.baseline_seconds
    if not change.limit.is_phase:
        return rise
    of_step = stats.percentile(now.samples.step_seconds, 50) - stats.percentile(
        before.samples.step_seconds, 50
    )
    return max(rise, of_step) if rise > 0 else min(rise, of_step)


def _signed(seconds: float) -> str:
    return text.seconds(seconds, signed=True)


def _change(verdict: Verdict) -> Comparison | None:
    """Return the change of a time that causes are looked for: the headline's, so that both are of
    one metric, if it went where the verdict says; else the largest that did."""
    sign = -1 if verdict.status is Status.IMPROVED else 1
    shown = sentences.shown(verdict)
    moved = [
        c
        for c in verdict.comparisons
        if c.status is verdict.status and sign * c.change.estimate > 0
    ]
    return max(
        moved,
        key=lambda c: (c is shown, not c.limit.is_cpu_time, sign * c.change.estimate),
        default=None,
    )


# Steps that take more than so many times the median of their launch are slow: beyond what load does
# to most of them.
_SLOW = 2.0
# Of all steps, at most as many are few.
_FEW = 0.25


def _slow_steps(
    verdict: Verdict, now: LaunchSteps, before: LaunchSteps
) -> Iterator[str]:
    """Yield which steps are slow if few are, and they make up most of the rise of the mean."""
    mean = next(
        (
            c
            for c in verdict.comparisons
            if c.limit.is_mean and c.status is verdict.status
        ),
        None,
    )
    if mean is None or mean.change.estimate <= 0:
        return
    (slow, share, seconds), (_, _, seconds_before) = _slow(now), _slow(before)
    if not 0 < share <= _FEW or seconds - seconds_before < _MAIN_PART * (
        mean.now_seconds - mean.baseline_seconds
    ):
        return
    durations = [
        now[launch][step] for launch, steps in enumerate(slow) for step in steps
    ]
    yield f"1 of {round(1 / share)} steps takes {text.seconds(stats.quantile(durations, 50))}"


def _slow(launches: LaunchSteps) -> tuple[list[list[int]], float, float]:
    """Return the slow steps of each launch, their share of all, and how much they add to the mean,
    in seconds."""
    medians = [stats.quantile(launch, 50) for launch in launches]
    slow = [
        [step for step, seconds in enumerate(launch) if seconds > _SLOW * median]
        for launch, median in zip(launches, medians, strict=True)
    ]
    added = sum(
        launches[k][step] - medians[k] for k, steps in enumerate(slow) for step in steps
    )
    steps = sum(map(len, launches))
    return slow, sum(map(len, slow)) / steps, added / steps


def _rank_causes(
    change: Comparison | None, plan: Plan, now: Measurement, before: Measurement
) -> Iterator[str]:
    """Yield what CPU time says of a rise."""
    samples, earlier = of_one_length([now.samples, before.samples])
    if change is None or len(samples.rank_seconds[0]) != len(earlier.rank_seconds[0]):
        return
    rise = change.now_seconds - change.baseline_seconds
    of_it = f"(the step: {_signed(rise)})"
    if samples.cpu_seconds is not None and earlier.cpu_seconds is not None:
        q = 50 if change.limit.is_mean else change.limit.percentile
        sides = by_rank(samples.cpu_seconds, q), by_rank(earlier.cpu_seconds, q)
        yield _computing(
            [after - own for after, own in zip(*sides, strict=True)],
            rise,
            of_it,
            plan,
            now,
        )


def _computing(
    rises: Sequence[float], rise: float, of_it: str, plan: Plan, now: Measurement
) -> str:
    """Return whose CPU time rose; `rises` are by rank."""
    most = max(0.0, *rises)
    if most < rise * _MAIN_PART:
        how = (
            "waiting, not computing"
            if most < rise * _MINOR_PART
            else "waiting more than computing"
        )
        return f"{how}: CPU time {_signed(most)} {of_it}"
    late = [rank for rank, each in enumerate(rises) if each > most / 2]
    who = text.some([text.process(plan, now.environment, rank) for rank in late], 3)
    if len(late) == len(rises):
        who = "every rank computes longer" if len(rises) > 1 else "it computes longer"
    return (
        f"{who}: CPU time {text.span([rises[rank] for rank in late], _signed)} {of_it}"
    )


def by_rank(durations: LaunchRankSteps, q: float) -> list[float]:
    """Return each rank's q-th percentile over launches, in seconds."""
    return [
        stats.percentile(tuple(launch[rank] for launch in durations), q)
        for rank in range(len(durations[0]))
    ]
