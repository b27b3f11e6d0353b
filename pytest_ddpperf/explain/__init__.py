"""What changed in a step, and how much of its time that explains: from the phases, counters and
stacks of two sides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import NormalDist, fmean, median

from pytest_ddpperf.records.metric import COPIES, without_totals
from pytest_ddpperf.records.samples import Counters, Measurement, Samples, StackSamples
from pytest_ddpperf.records.step_phases import (
    BACKWARD,
    EXPOSED,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PHASES,
    RPC_WAIT,
    Finding,
    StepPhases,
)
from pytest_ddpperf.verdict.stats import Difference, difference, paired

# A phase with a smaller part of the change is not worth a word.
_LEAST_SHARE = 0.1
# If more than this share of the change has no finding, the rest is a finding of its own.
_UNEXPLAINED = 0.25
# A file is named if its functions have at least this share of the change.
_OF_FILE = 0.25
# A rank is named if it has this share of the phase's time on the critical path: it is the last one
# in most steps. If ranks take turns at being late, none is named.
_MOSTLY = 0.75
# Bytes explain a change if they changed by at least this part of it, both relative: 1 % more bytes
# cannot make a step twice as long.
_BYTES_PART = 0.5

_MODEL = ("parameters.bytes", "gradient_bytes")
_COMPILER = ("recompilations", "graph_breaks")
# The counters that make others change come first.
_FIRST = (*_MODEL, *_COMPILER, "buckets")
# Not known to cost time, or the sum of others.
_NOT_CAUSES = ("peak_rss.bytes", "peak_memory.bytes", "buckets.largest_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The launches of both sides of a comparison, and how they are compared."""

    now: tuple[StepPhases, ...]
    before: tuple[StepPhases, ...]
    paired: bool  # whether the k-th launches of both were taken together
    level: float  # the error rate

    def change(self, figure: Callable[[StepPhases], float]) -> Difference:
        """Return the difference of a figure of each launch."""
        return _change(
            map(figure, self.now), map(figure, self.before), is_paired=self.paired
        )


def _change(
    now: Iterable[float], before: Iterable[float], *, is_paired: bool
) -> Difference:
    """Return the difference of the figures of launches."""
    if is_paired:
        return paired(*zip(*zip(now, before, strict=False), strict=True))
    return difference([*now], [[*before]])


def find(
    now: Measurement, before: Measurement, rise: float, *, is_paired: bool, level: float
) -> tuple[Finding, ...]:
    """Return what explains that a step takes `rise` seconds more, or less if negative: phases with
    counters that explain them first, then other phases, the largest first.

    Counts have no noise: those that differ are a finding. A phase is a finding if its change has
    evidence at the `level` of the test, shared by all phases: Student's or Welch's t-test on the
    phase's time in each launch."""
    counters = changed_counters(now.counters, before.counters)
    if (
        not rise
        or min(len(now.phases), len(before.phases)) < 2
        or not _alike(now.phases, before.phases)
    ):
        waits = (
            _rpc_wait(
                now.samples, before.samples, rise, is_paired=is_paired, level=level
            )
            if rise
            else None
        )
        if waits is not None:
            return (replace(waits, counters=counters),)
        return (Finding(phases=(), counters=counters),) if counters else ()
    sides = Sides(now=now.phases, before=before.phases, paired=is_paired, level=level)
    found = sorted(_phases(sides, rise), key=lambda each: each.share, reverse=True)
    if counters:
        step = sum(
            fmean(launch.own[phase][0] or 0.0 for launch in sides.before)
            for phase in PHASES
        )
        explaining = [each for each in counters if _may_explain(each, rise / step)]
        phases = _explained_by(explaining) if explaining else set[str]()
        explained = [
            each for each in found if set(each.phases) <= phases and each.rank is None
        ]
        others = [each for each in found if each not in explained]
        joined = _joined(explained, counters)
        found = [joined, *others] if explained else [*others, joined]
    rest = rise - sum(each.seconds or 0.0 for each in found)
    if any(each.phases for each in found) and abs(rest / rise) > _UNEXPLAINED:
        found.append(
            Finding(phases=(), seconds=rest, low=rest, high=rest, share=rest / rise)
        )
    return tuple(found)


def _alike(now: Sequence[StepPhases], before: Sequence[StepPhases]) -> bool:
    """Whether all launches have the same ranks, and know the same phases: more than that a step
    takes time. An optimizer or a loader may appear."""
    launches = (*now, *before)
    ranks = {len(launch.own[OTHER]) for launch in launches}
    known = {
        tuple(None not in launch.own[phase] for phase in (FORWARD, BACKWARD, EXPOSED))
        for launch in launches
    }
    return len(ranks) == len(known) == 1 and any(known.pop()[:2])


def _phases(sides: Sides, rise: float) -> Iterator[Finding]:
    """Yield the phases with evidence that they changed as the step did."""
    sign = 1 if rise > 0 else -1
    with_path = all(launch.path for launch in (*sides.now, *sides.before))
    level = sides.level / len(PHASES)
    for phase in PHASES:

        def taken(launch: StepPhases, phase: str = phase) -> float:
            if with_path:
                return sum(launch.path[phase])
            return fmean(seconds or 0.0 for seconds in launch.own[phase])

        change = sides.change(lambda launch: sign * taken(launch))
        if (found := _of_phase(phase, change, rise, level)) is not None:
            is_late = with_path and sign > 0
            yield replace(
                found,
                rank=_late_rank(sides, phase, change.estimate, level)
                if is_late
                else None,
            )


def _of_phase(
    phase: str, change: Difference, rise: float, level: float
) -> Finding | None:
    """Return the finding that a phase changed as the step did; `change` is positive then. None
    without evidence."""
    if change.p_value() > level or change.estimate < _LEAST_SHARE * abs(rise):
        return None
    sign, reach = (1 if rise > 0 else -1), change.reach(level)
    low, high = sorted(sign * (change.estimate + each) for each in (-reach, reach))
    share = change.estimate / abs(rise)
    return Finding(
        phases=(phase,), seconds=sign * change.estimate, low=low, high=high, share=share
    )


def _rpc_wait(
    now: Samples, before: Samples, rise: float, *, is_paired: bool, level: float
) -> Finding | None:
    """Return that trainers wait longer for RPC, or less: the one that waits longest, in its median
    step."""
    sign, sides = (
        (1 if rise > 0 else -1),
        (now.blocked_seconds or (), before.blocked_seconds or ()),
    )
    waits = [[sign * max(map(median, launch)) for launch in side] for side in sides]
    if min(map(len, waits)) < 2:
        return None
    return _of_phase(RPC_WAIT, _change(*waits, is_paired=is_paired), rise, level)


def _late_rank(sides: Sides, phase: str, rise: float, level: float) -> int | None:
    """Return the rank whose own phase alone rose, and which is on the critical path of most steps;
    None if none is."""
    ranks = range(len(sides.now[0].own[phase]))
    if phase == EXPOSED or len(ranks) < 2:
        return None

    def of_rank(rank: int) -> Difference:
        return sides.change(lambda launch: launch.own[phase][rank] or 0.0)

    rises = [of_rank(rank) for rank in ranks]
    late = max(ranks, key=lambda rank: rises[rank].estimate)
    most = rises[late].estimate
    alone = all(rises[rank].estimate < most / 2 for rank in ranks if rank != late)
    on_path = [
        fmean(launch.path[phase][rank] for launch in sides.now) for rank in ranks
    ]
    evident = rises[late].p_value() <= level / len(ranks)
    return (
        late
        if alone
        and evident
        and most >= rise / 2
        and on_path[late] >= _MOSTLY * sum(on_path)
        else None
    )


def changed_counters(
    now: Counters, before: Counters
) -> tuple[tuple[str, int, int], ...]:
    """Return the counters that differ, each with its values before and now; causes come before what
    follows."""
    found = [
        (name, earlier, later)
        for name, later in now.items()
        if later is not None
        and (earlier := before.get(name)) is not None
        and later != earlier
    ]
    finer = without_totals([name for name, *_ in found if name not in _NOT_CAUSES])
    order = {name: number for number, name in enumerate(_FIRST)}
    causes = [each for each in found if each[0] in finer]
    return tuple(sorted(causes, key=lambda each: order.get(each[0], len(order))))


def _may_explain(counter: tuple[str, int, int], change: float) -> bool:
    """Whether a counter changed as the step did, whose relative `change` is given; bytes by enough
    of it."""
    name, before, now = counter
    if (now - before) * change < 0:
        return False
    return not (name.endswith("bytes") and before) or abs(
        now / before - 1
    ) >= _BYTES_PART * abs(change)


def _explained_by(counters: Sequence[tuple[str, int, int]]) -> set[str]:
    """Return the phases that take longer because of counters."""
    first = counters[0][0]
    if first in _MODEL:
        return {FORWARD, BACKWARD, EXPOSED, OPTIMIZER}
    if first in COPIES:
        return {*PHASES}
    if first in _COMPILER:
        return {FORWARD, BACKWARD, OPTIMIZER, OTHER}
    # Before a forward pass buffers are broadcast, and parameters gathered.
    early = any(name.startswith(("broadcast", "all_gather")) for name, *_ in counters)
    return {BACKWARD, EXPOSED, FORWARD} if early else {BACKWARD, EXPOSED}


def _joined(
    findings: Sequence[Finding], counters: tuple[tuple[str, int, int], ...]
) -> Finding:
    """Return one finding of several phases, with the counters that explain them."""
    if not findings:
        return Finding(phases=(), counters=counters)
    return Finding(
        phases=tuple(
            phase for phase in PHASES if any(phase in each.phases for each in findings)
        ),
        seconds=sum(each.seconds or 0.0 for each in findings),
        low=sum(each.low for each in findings),
        high=sum(each.high for each in findings),
        share=sum(each.share for each in findings),
        counters=counters,
    )


def find_slower_file(
    sampled: Sequence[Sequence[StackSamples]],
    steps: Sequence[float],
    found: Sequence[Finding],
    *,
    rise: float,
    files: Collection[str],
    level: float,
) -> Finding | None:
    """Return which of the `files` that differ has functions that take more of a step, with evidence
    at the `level`; None if none has. `sampled` are the ranks' stacks of a launch now and one
    before, and `steps` the seconds of a step in each; without sampling, a step takes `rise` seconds
    more.

    What functions gain counts up to what those of all these files gain together, and up to what
    those of the same caller do: a function that only moved gains nothing. If the first finding
    names a rank, only its stacks count, for the others wait for it. Samples are taken as
    independent, so that their numbers have Poisson's variance."""
    rank = found[0].rank if found else None
    seconds: dict[tuple[str, str, str], float] = defaultdict(float)
    variance = 0.0
    for sign, ranks, step in zip((1, -1), sampled, steps, strict=True):
        chosen = [
            stacks for number, stacks in enumerate(ranks) if rank in (None, number)
        ]
        taken = sum(stacks.taken for stacks in chosen)
        for file, function, caller, count in (
            each for stacks in chosen for each in stacks.functions
        ):
            if file in files:
                seconds[file, function, caller] += sign * count * step / taken
                variance += count * (step / taken) ** 2
    gains = {file: _gain(seconds, file) for file in files}
    slower = max(gains, key=gains.__getitem__)
    gain = min(gains[slower], sum(seconds.values()))
    reach = NormalDist().inv_cdf(1 - level / len(gains)) * sqrt(variance)
    if rise <= 0 or gain <= reach or gain < _OF_FILE * rise:
        return None
    by_function: dict[str, float] = defaultdict(float)
    for (file, function, _), each in seconds.items():
        by_function[function] += each * (file == slower)
    return Finding(
        phases=(),
        seconds=gain,
        low=gain - reach,
        high=gain + reach,
        share=gain / rise,
        rank=rank,
        file=slower,
        function=max(by_function, key=by_function.__getitem__),
    )


def _gain(seconds: Mapping[tuple[str, str, str], float], file: str) -> float:
    """Return by how much the functions of a file gained, by caller not more than all functions that
    it calls."""
    total, own = defaultdict[str, float](float), defaultdict[str, float](float)
    for (where, _, caller), each in seconds.items():
        total[caller] += each
        own[caller] += each * (where == file)
    return sum(min(gain, max(total[caller], 0.0)) for caller, gain in own.items())
