"""What explains a change, in words: phases of the step and counters, slow steps, and the figures of
ranks.

Where phases say nothing, CPU time, which waiting does not use, shows which rank worked more.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import NamedTuple

from pytest_ddpperf import text
from pytest_ddpperf.explain import find
from pytest_ddpperf.explain.kernels import (
    device_rise,
    exposed_rise,
    find_kernels,
)
from pytest_ddpperf.records import quantiles
from pytest_ddpperf.records.metric import MEAN
from pytest_ddpperf.records.outcome import BaselineSide
from pytest_ddpperf.records.plan import Limit, Plan
from pytest_ddpperf.records.samples import (
    Comparison,
    LaunchRankSteps,
    LaunchSteps,
    Measurement,
    Measurements,
    Status,
    Verdict,
)
from pytest_ddpperf.records.step_phases import BACKWARD, EXPOSED, Finding
from pytest_ddpperf.verdict.decision import FAULT_SECONDS
from pytest_ddpperf.verdict.observed import of_one_length

# What makes up half of a change is its main cause; where it is less, more comes from something
# else.
_MAIN_PART = 0.5
_MINOR_PART = 0.25


def explain(
    verdict: Verdict,
    plan: Plan,
    now: Measurement,
    baseline: Measurements,
    level: float,
    side: BaselineSide | None = None,
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return what explains the change that a verdict is about, and the same in words; nothing of
    PASS. `side` is the other one of interleaved launches."""
    if (
        not baseline
        or not verdict.status.compared
        or verdict.status is Status.PASS
    ):
        return (), ()
    change = _change(verdict)
    before = baseline[-1]
    # CPU time by rank explains a limit on it. That phases differ from those of a stored baseline is
    # no evidence by itself: the machine may be slower.
    is_open = side is None and verdict.status is Status.INCONCLUSIVE
    rise = 0.0
    if change and change.limit.kind.is_wall_time and not is_open:
        rise = _rise(change, now, before)
    found = find(now, before, rise, is_paired=side is not None, level=level)
    found = _with_exposed(found, exposed_rise(now, before), rise)
    # The device's work changed as the verdict says, and is a part of the step's rise, if known.
    sign = -1 if verdict.status is Status.IMPROVED else 1
    of_device = sign * device_rise(now, before)
    is_part = of_device > 0 and of_device >= _MINOR_PART * sign * rise
    if is_part and not is_open:
        found = (*find_kernels(now, before), *found)
    return found, find_causes(verdict, plan, now, baseline, found)


def _with_exposed(
    found: tuple[Finding, ...], exposed: float, rise: float
) -> tuple[Finding, ...]:
    """Return the findings with the communication that the kernels of a device no longer hide, if it
    is at least half of the `rise`. The backward pass of DDP waits for it, so its phase contains
    it."""
    if rise <= 0 or exposed < _MAIN_PART * rise:
        return found
    joined = tuple(
        replace(each, phases=(BACKWARD, EXPOSED))
        if each.phases == (BACKWARD,)
        else each
        for each in found
    )
    if joined != found:
        return joined
    return (
        Finding(phases=(EXPOSED,), seconds=exposed, share=exposed / rise),
        *found,
    )


def find_causes(
    verdict: Verdict,
    plan: Plan,
    now: Measurement,
    baseline: Measurements,
    found: Sequence[Finding] = (),
) -> tuple[str, ...]:
    """Return what explains a change, in words; () if nothing is known. `found` is of
    `explain.find`."""
    before = baseline[-1]
    change = _change(verdict)
    rise = _rise(change, now, before) if change else 0.0
    shown = verdict.shown
    headline = shown.limit.metric if shown else ""
    words = _slow_steps(
        verdict, now.samples.step_seconds, before.samples.step_seconds
    )
    of_it = f" (the step: {_signed(rise)})"
    kernels = [each for each in found if each.kernel]
    if kernels:
        is_of_step = change is not None and change.limit.kind.is_wall_time
        words.append(_kernels(kernels, plan, now, of_it if is_of_step else ""))
        of_it = ""
    for each in found:
        if each.kernel:
            continue
        words.append(_finding(each, plan, now, of_it, headline))
        if each.seconds is not None:
            of_it = ""  # the rise of the step stands there once
    words.append(_page_faults(now, before, rise))
    words.append(_collector(now, before, rise))
    words.append(_host_bound(verdict, now, before, rise, found))
    explained = sum(each.share for each in found if each.phases)
    is_explained = explained > _MAIN_PART if plan.rpc else explained > 0
    if not is_explained and verdict.status is Status.REGRESSED and change:
        words.append(_rank_causes(change, plan, now, before))
    return tuple(filter(None, words))


def _finding(
    found: Finding, plan: Plan, now: Measurement, of_it: str, headline: str
) -> str:
    """Return "rank 1: forward +6.1 ms (the step: +6.4 ms); buckets 3 -> 24", without the headline's
    counter."""
    counters = [
        f"{name} {before:,} -> {after:,}"
        for name, before, after in found.counters
        if name != headline
    ]
    words = text.some(counters, 3)
    if found.seconds is None:
        return words
    amount = _signed(found.seconds)
    if not found.phases:
        if found.share > 0:
            return f"unexplained: {amount}"
        return f"all else: {amount}"
    who = ""
    if found.rank is not None:
        who = f"{text.process(plan, now.environment, found.rank)}: "
    *several, last = map(text.phase, found.phases)
    phases = f"{', '.join(several)} and {last}" if several else last
    return "; ".join(filter(None, (f"{who}{phases} {amount}{of_it}", words)))


_CALL = re.compile(r"(?:void )?(.*?)(?:\(.*\))?")
_NAMESPACE = re.compile(r"(?:\w+|\(anonymous namespace\))::")
_LONGEST_KERNEL = 60


def kernel_name(name: str) -> str:
    """Return the name of a kernel for people: without what it returns, its namespaces and
    arguments."""
    plain = _NAMESPACE.sub("", name)
    called = _CALL.fullmatch(plain)
    return text.shortened(called[1] if called else plain, _LONGEST_KERNEL)


def _kernels(
    found: Sequence[Finding], plan: Plan, now: Measurement, of_it: str
) -> str:
    """Return "device +0.76 ms (the step: +0.80 ms): gemm +0.74 ms (0 -> 32 calls)"."""
    first = found[0]
    whole = (first.seconds or 0.0) / first.share
    who = ""
    if first.rank is not None:
        who = f"{text.process(plan, now.environment, first.rank)}: "
    named = []
    for each in found:
        before, after = each.calls
        calls = f"{before:,.0f} -> {after:,.0f} calls"
        if before == after:
            calls = f"{text.several(round(after), 'call')} as before"
        named.append(
            f"{kernel_name(each.kernel)} {_signed(each.seconds or 0.0)} ({calls})"
        )
    return f"{who}device {_signed(whole)}{of_it}: {', '.join(named)}"


# A device that waits for less of a step is hardly kept waiting by the host.
_WAITS = 0.1


def _host_bound(
    verdict: Verdict,
    now: Measurement,
    before: Measurement,
    rise: float,
    found: Sequence[Finding],
) -> str:
    """Return that the device waits for the host, if the step took longer and neither its device
    nor communication did. Operators that explain it are a finding."""
    waits = now.waiting_share
    is_slower = verdict.status is Status.REGRESSED and rise > 0
    if not is_slower or waits is None or waits < _WAITS:
        return ""
    communicates = any(EXPOSED in each.phases for each in found)
    if communicates or device_rise(now, before) >= _MINOR_PART * rise:
        return ""
    return f"host-bound: the device waits {text.amount(waits)} of a step"


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


def _collector(now: Measurement, before: Measurement, rise: float) -> str:
    """Return that Python's garbage collector takes longer if that is a part of a rise: as
    `_page_faults`."""
    sides = (
        now.samples.most_collector_seconds,
        before.samples.most_collector_seconds,
    )
    if rise <= 0 or not all(sides):
        return ""
    after, earlier = map(median, sides)
    if after - earlier < _MINOR_PART * rise:
        return ""
    return (
        "Python's garbage collector takes"
        f" {text.seconds(earlier)} -> {text.seconds(after)} of a step"
    )


def _rise(change: Comparison, now: Measurement, before: Measurement) -> float:
    """Return by how many seconds a step takes longer; of a change of a phase, at least by so many
    as that does."""
    rise = change.now_seconds - change.baseline_seconds
    if not change.limit.kind.is_part:
        return rise
    of_step = now.samples.p50 - before.samples.p50
    return max(rise, of_step) if rise > 0 else min(rise, of_step)


def _signed(seconds: float) -> str:
    return text.seconds(seconds, signed=True)


def _change(verdict: Verdict) -> Comparison | None:
    """Return the change of a time that causes are looked for: the headline's, so that both are of
    one metric, if it went where the verdict says; else the largest that did. A figure of the
    user's own is no time."""
    sign = -1 if verdict.status is Status.IMPROVED else 1
    shown = verdict.shown
    moved = [
        c
        for c in verdict.comparisons
        if (c.status is verdict.status or c.p_value <= c.level)
        and sign * c.change.estimate > 0
        and not c.limit.kind.own_figure
    ]
    return max(
        moved,
        key=lambda c: (
            c is shown,
            c.limit.kind.is_wall_time,
            sign * c.change.estimate,
        ),
        default=None,
    )


# Steps that take more than so many times the median of their launch are slow: beyond what load does
# to most of them.
_SLOW = 2.0
# Of all steps, at most as many are few.
_FEW = 0.35


def _slow_steps(
    verdict: Verdict, now: LaunchSteps, before: LaunchSteps
) -> list[str]:
    """Return which steps are slow if few are, and they make up most of the rise of the mean."""
    means = [c for c in verdict.comparisons if c.limit.metric == MEAN]
    if not means or means[0].status is not verdict.status:
        return []
    rise = means[0].now_seconds - means[0].baseline_seconds
    slow = _slow(now)
    added = slow.added_seconds - _slow(before).added_seconds
    if rise <= 0 or not 0 < slow.share <= _FEW or added < _MAIN_PART * rise:
        return []
    typical = text.seconds(quantiles.quantile(slow.seconds, 50))
    return [f"about 1 of {round(1 / slow.share)} steps takes {typical}"]


class _SlowSteps(NamedTuple):
    """The slow steps of a measurement."""

    seconds: list[float]  # their durations
    share: float  # of all steps
    added_seconds: float  # what they add to the mean


def _slow(launches: LaunchSteps) -> _SlowSteps:
    slow, added = [], 0.0
    for launch in launches:
        usual = quantiles.quantile(launch, 50)
        for seconds in launch:
            if seconds > _SLOW * usual:
                slow.append(seconds)
                added += seconds - usual
    steps = sum(map(len, launches))
    return _SlowSteps(slow, len(slow) / steps, added / steps)


def _rank_causes(
    change: Comparison, plan: Plan, now: Measurement, before: Measurement
) -> str:
    """Return what CPU time says of a rise."""
    samples, earlier = of_one_length([now.samples, before.samples])
    if (
        len(samples.rank_seconds[0]) != len(earlier.rank_seconds[0])
        or samples.cpu_seconds is None
        or earlier.cpu_seconds is None
    ):
        return ""
    rise = change.now_seconds - change.baseline_seconds
    sides = [
        _figures_by_rank(durations, change.limit)
        for durations in (samples.cpu_seconds, earlier.cpu_seconds)
    ]
    rises = [after - own for after, own in zip(*sides, strict=True)]
    usual = max(sides[1]) / change.baseline_seconds
    of_it = ""
    if change.limit.kind.is_wall_time:
        of_it = f" (the step: {_signed(_rise(change, now, before))})"
    return _computing(rises, rise, usual, plan, now) + of_it


# CPU time that is a smaller share of a rise is not its cause.
_LEAST_BUSY = 0.1


def _computing(
    rises: Sequence[float],
    rise: float,
    usual: float,
    plan: Plan,
    now: Measurement,
) -> str:
    """Return whose CPU time rose; `rises` are by rank. CPU time is a `usual` share of the
    baseline's step. If it is as large a share of the rise, the rank computes, on a core that it
    shares with others."""
    most = max(0.0, *rises)
    if most < rise * min(max(usual, _LEAST_BUSY), _MAIN_PART):
        how = "waiting more than computing"
        if most < rise * _MINOR_PART:
            how = "waiting, not computing"
        return f"{how}: CPU time {_signed(most)}"
    late = [rank for rank, each in enumerate(rises) if each > most / 2]
    who = text.some(
        [text.process(plan, now.environment, rank) for rank in late], 3
    )
    if len(late) == len(rises):
        who = (
            "every rank computes longer"
            if len(rises) > 1
            else "it computes longer"
        )
    amounts = text.span([rises[rank] for rank in late], _signed)
    return f"{who}: CPU time {amounts}"


def _figures_by_rank(durations: LaunchRankSteps, limit: Limit) -> list[float]:
    """Return each rank's seconds by the metric of the limit: a few slow steps change the mean and
    no percentile."""
    if limit.metric != MEAN:
        return by_rank(durations, limit.kind.percentile)
    ranks = range(len(durations[0]))
    return [
        fmean(step for launch in durations for step in launch[rank])
        for rank in ranks
    ]


def by_rank(durations: LaunchRankSteps, q: float) -> list[float]:
    """Return each rank's q-th percentile over launches, in seconds."""
    return [
        quantiles.percentile(tuple(launch[rank] for launch in durations), q)
        for rank in range(len(durations[0]))
    ]
