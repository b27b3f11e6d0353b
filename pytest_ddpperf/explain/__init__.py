"""What changed in a step, and how much of its time that explains: from the phases and counters of two sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from pytest_ddpperf.records.samples import Counters, Measurement
from pytest_ddpperf.records.step_phases import BACKWARD, EXPOSED, FORWARD, OPTIMIZER, OTHER, PHASES, Finding, StepPhases
from pytest_ddpperf.verdict.stats import Difference, difference, paired

# A phase with a smaller part of the change is not worth a word.
_LEAST_SHARE = 0.1
# More than so much of the change without a finding is said.
_UNEXPLAINED = 0.25
# A rank is named if so much of the phase's time on the way back through all ranks is its own: it is the last one in
# most steps. If ranks take turns at being late, none is.
_MOSTLY = 0.75

_MODEL = ("parameters.bytes", "gradient_bytes")
_COMPILER = ("recompilations", "graph_breaks")
# Of counters that changed, those that make others change come first.
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
        now, before = [figure(launch) for launch in self.now], [figure(launch) for launch in self.before]
        if self.paired:
            pairs = min(len(now), len(before))
            return paired(now[:pairs], before[:pairs])
        return difference(now, [before])


def find(now: Measurement, before: Measurement, rise: float, *, is_paired: bool, level: float) -> tuple[Finding, ...]:
    """Return what explains that a step takes `rise` seconds more, or less if negative: the largest part first, after
    what counters that changed explain.

    Counts have no noise: each that differs is a finding. A phase is one if its change has evidence at the `level` of
    the test, shared by all phases: Student's or Welch's t-test on the phase's time in each launch."""
    counters = changed_counters(now.counters, before.counters)
    if not rise or min(len(now.phases), len(before.phases)) < 2 or not _alike(now.phases, before.phases):
        return (Finding(phases=(), counters=counters),) if counters else ()
    sides = Sides(now=now.phases, before=before.phases, paired=is_paired, level=level)
    found = sorted(_phases(sides, rise), key=lambda each: each.share, reverse=True)
    if counters:
        explained = [each for each in found if set(each.phases) <= _explained_by(counters)]
        found = [_joined(explained, counters), *(each for each in found if each not in explained)]
    rest = rise - sum(each.seconds or 0.0 for each in found)
    if any(each.phases for each in found) and rest / rise > _UNEXPLAINED:
        found.append(Finding(phases=(), seconds=rest, low=rest, high=rest, share=rest / rise))
    return tuple(found)


def _alike(now: Sequence[StepPhases], before: Sequence[StepPhases]) -> bool:
    """Whether both sides have the same ranks, and know more than that a step takes time."""
    launches = (*now, *before)
    ranks = {len(launch.own[OTHER]) for launch in launches}
    passes = (launch.own[phase] for launch in launches for phase in (FORWARD, BACKWARD))
    return len(ranks) == 1 and any(None not in own for own in passes)


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
        if change.p_value() > level or change.estimate < _LEAST_SHARE * abs(rise):
            continue
        reach = change.reach(level)
        bounds = sorted(sign * (change.estimate + each) for each in (-reach, reach))
        yield Finding(
            phases=(phase,),
            seconds=sign * change.estimate,
            low=bounds[0],
            high=bounds[1],
            share=change.estimate / abs(rise),
            rank=_late_rank(sides, phase, change.estimate, level) if with_path and sign > 0 else None,
        )


def _late_rank(sides: Sides, phase: str, rise: float, level: float) -> int | None:
    """Return the rank whose own phase alone rose, and along which most steps went; None if there is none such."""
    ranks = range(len(sides.now[0].own[phase]))
    if phase == EXPOSED or len(ranks) < 2:
        return None
    rises = [sides.change(lambda launch, rank=rank: launch.own[phase][rank] or 0.0) for rank in ranks]  # type: ignore[misc]
    late = max(ranks, key=lambda rank: rises[rank].estimate)
    most = rises[late].estimate
    alone = all(rises[rank].estimate < most / 2 for rank in ranks if rank != late)
    way = [fmean(launch.path[phase][rank] for launch in sides.now) for rank in ranks]
    evident = rises[late].p_value() <= level / len(ranks)
    return late if alone and evident and most >= rise / 2 and way[late] >= _MOSTLY * sum(way) else None


def changed_counters(now: Counters, before: Counters) -> tuple[tuple[str, int, int], ...]:
    """Return the counters that differ, each with its values before and now; causes come before what follows."""
    found = [
        (name, earlier, later)
        for name, later in now.items()
        if later is not None and (earlier := before.get(name)) is not None and later != earlier
    ]
    causes = [each for each in found if each[0] not in _NOT_CAUSES]
    # Those of all collectives together only if no other says it.
    finer = [each for each in causes if not each[0].startswith("collectives.")] or causes
    return tuple(sorted(finer, key=lambda each: _FIRST.index(each[0]) if each[0] in _FIRST else len(_FIRST)))


def _explained_by(counters: Sequence[tuple[str, int, int]]) -> set[str]:
    """Return the phases that take longer because of counters."""
    first = counters[0][0]
    if first in _MODEL:
        return {FORWARD, BACKWARD, EXPOSED, OPTIMIZER}
    if first in _COMPILER:
        return {FORWARD, BACKWARD, OPTIMIZER, OTHER}
    # Before a forward pass buffers are broadcast, and parameters gathered.
    early = any(name.startswith(("broadcast", "all_gather")) for name, *_ in counters)
    return {BACKWARD, EXPOSED, FORWARD} if early else {BACKWARD, EXPOSED}


def _joined(findings: Sequence[Finding], counters: tuple[tuple[str, int, int], ...]) -> Finding:
    """Return one finding of several phases, with the counters that explain them."""
    if not findings:
        return Finding(phases=(), counters=counters)
    ranks = {each.rank for each in findings}
    return Finding(
        phases=tuple(phase for phase in PHASES if any(phase in each.phases for each in findings)),
        seconds=sum(each.seconds or 0.0 for each in findings),
        low=sum(each.low for each in findings),
        high=sum(each.high for each in findings),
        share=sum(each.share for each in findings),
        rank=ranks.pop() if len(ranks) == 1 else None,
        counters=counters,
    )
