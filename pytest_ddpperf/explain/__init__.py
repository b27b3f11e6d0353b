"""What changed in a step, and how much of its time that explains: from the phases, counters and
stacks of two sides."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import log, sqrt
from statistics import NormalDist, fmean, median
from typing import NamedTuple

from pytest_ddpperf.records.metric import COPIES, WORK, without_totals
from pytest_ddpperf.records.samples import Counters, Measurement, StackSamples
from pytest_ddpperf.records.step_phases import (
    BACKWARD,
    EXPOSED,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PHASES,
    RPC_WAIT,
    ChangedCounter,
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
# Bytes and work explain a change if they changed by at least this part of it, both relative: 1 %
# more bytes cannot make a step twice as long.
_BYTES_PART = 0.5

_MODEL = ("parameters.bytes", "gradient_bytes")
_COMPILER = ("recompilations", "graph_breaks")
# The counters that make others change come first.
_FIRST = (*_MODEL, *_COMPILER, "buckets")
# Not known to cost time, or the sum of others.
_NOT_CAUSES = ("peak_rss.bytes", "peak_memory.bytes", "buckets.largest_bytes")


class Sides(NamedTuple):
    """Both sides of a comparison, and how they are compared."""

    now: Measurement
    before: Measurement
    rise: float  # of a step, in seconds; negative if it is faster
    is_paired: bool  # whether the k-th launches of both were taken together
    level: float  # the error rate

    def change(
        self, now: Sequence[float], before: Sequence[float]
    ) -> Difference:
        """Return the difference of the figures of launches."""
        if self.is_paired:
            pairs = min(len(now), len(before))
            return paired(now[:pairs], before[:pairs])
        return difference(now, [before])

    def phase_change(self, figure: Callable[[StepPhases], float]) -> Difference:
        """Return the difference of a figure of the phases of each launch, positive if it changed as
        the step did."""
        now, before = (
            [figure(launch) for launch in side.phases]
            for side in (self.now, self.before)
        )
        change = self.change(now, before)
        return change if self.rise > 0 else change.mirrored()

    def p_value(self, figure: Callable[[StepPhases], float]) -> float:
        """Return how likely such a change is by chance: by the ratios of launches, for noise grows
        with time. By their differences if a launch spent no time there."""
        launches = (*self.now.phases, *self.before.phases)
        if min(map(figure, launches)) <= 0:
            return self.phase_change(figure).p_value()
        return self.phase_change(lambda launch: log(figure(launch))).p_value()

    @property
    def change_of_step(self) -> float:
        """By how much a step takes longer, relative."""
        return self.rise / fmean(map(median, self.before.samples.step_seconds))

    @property
    def sign(self) -> int:
        """1 if a step takes longer, else -1."""
        return 1 if self.rise > 0 else -1


def find(
    now: Measurement,
    before: Measurement,
    rise: float,
    *,
    is_paired: bool,
    level: float,
) -> tuple[Finding, ...]:
    """Return what explains that a step takes `rise` seconds more, or less if negative: phases with
    counters that explain them first, then other phases, the largest first.

    Counts have no noise: those that differ are a finding. A phase is a finding if its change has
    evidence at the `level` of the test, shared by all phases: Student's or Welch's t-test on the
    logarithm of the phase's time in each launch."""
    sides = Sides(now, before, rise, is_paired, level)
    counters = changed_counters(now.counters, before.counters)
    # More work is a cause if it is enough of it; any change of the code changes some.
    counters = tuple(
        each
        for each in counters
        if each[0] not in WORK
        or (rise and _may_explain(each, sides.change_of_step))
    )
    found: list[Finding] = []
    if rise and _know_the_same(now.phases, before.phases):
        found = sorted(
            _phases(sides), key=lambda each: each.share, reverse=True
        )
    elif rise:
        waits = _rpc_wait(sides)
        if waits is not None:
            return (replace(waits, counters=counters),)
    if counters:
        explained = _explained(sides, found, counters)
        others = [each for each in found if each not in explained]
        joined = _joined(explained, counters)
        found = [joined, *others] if explained else [*others, joined]
    rest = rise - sum(each.seconds or 0.0 for each in found)
    if any(each.phases for each in found) and abs(rest / rise) > _UNEXPLAINED:
        found.append(Finding(phases=(), seconds=rest, share=rest / rise))
    return tuple(found)


def _know_the_same(
    now: Sequence[StepPhases], before: Sequence[StepPhases]
) -> bool:
    """Whether all launches have the same ranks, and know the same phases: more than that a step
    takes time, a pass or a wait. An optimizer or a loader may appear."""
    launches = (*now, *before)
    ranks = {len(launch.own[OTHER]) for launch in launches}
    known = {
        tuple(
            None not in launch.own[phase]
            for phase in (FORWARD, BACKWARD, EXPOSED)
        )
        for launch in launches
    }
    if min(len(now), len(before)) < 2 or len(ranks) > 1 or len(known) > 1:
        return False
    waits = any(any(launch.own[EXPOSED]) for launch in launches)
    return waits or _knows_passes(now)


def _knows_passes(launches: Sequence[StepPhases]) -> bool:
    """Whether forward or backward passes are known, of launches that know the same."""
    own = launches[0].own
    return None not in own[FORWARD] or None not in own[BACKWARD]


def _phases(sides: Sides) -> Iterator[Finding]:
    """Yield the phases with evidence that they changed as the step did."""
    with_path = all(
        launch.path for launch in (*sides.now.phases, *sides.before.phases)
    )
    level = sides.level / len(PHASES)
    for phase in PHASES:
        # without passes it is no more than the step
        if phase == OTHER and not _knows_passes(sides.now.phases):
            continue

        def taken(launch: StepPhases, phase: str = phase) -> float:
            if with_path:
                return sum(launch.path[phase])
            return fmean(seconds or 0.0 for seconds in launch.own[phase])

        change, p_value = sides.phase_change(taken), sides.p_value(taken)
        found = _of_phase(sides, phase, change, p_value, level)
        if found is None:
            continue
        if with_path and sides.rise > 0:
            late = _late_rank(sides, phase, change.estimate, level)
            found = replace(found, rank=late)
        yield found


def _of_phase(
    sides: Sides, phase: str, change: Difference, p_value: float, level: float
) -> Finding | None:
    """Return the finding that a phase changed as the step did; `change` is positive then. None
    without evidence."""
    least = _LEAST_SHARE * abs(sides.rise)
    if p_value > level or change.estimate < least:
        return None
    return Finding(
        phases=(phase,),
        seconds=sides.sign * change.estimate,
        # there is evidence that it changed
        reach=min(change.reach(level), change.estimate),
        share=change.estimate / abs(sides.rise),
    )


def _rpc_wait(sides: Sides) -> Finding | None:
    """Return that trainers wait longer for RPC, or less: the one that waits longest, in its median
    step."""
    now, before = (
        [
            sides.sign * max(map(median, launch))
            for launch in side.samples.blocked_seconds or ()
        ]
        for side in (sides.now, sides.before)
    )
    if min(len(now), len(before)) < 2:
        return None
    change = sides.change(now, before)
    return _of_phase(sides, RPC_WAIT, change, change.p_value(), sides.level)


# A phase that took no time counts as this long: no clock tells less.
_CLOCK_SECONDS = 1e-6


def _late_rank(
    sides: Sides, phase: str, rise: float, level: float
) -> int | None:
    """Return the rank whose own phase alone rose, and which is on the critical path of most steps;
    None if none is. Alone: with evidence that it takes longer than the next one by more than it
    did."""
    ranks = range(len(sides.now.phases[0].own[phase]))
    if phase == EXPOSED or len(ranks) < 2:
        return None

    def taken(launch: StepPhases, rank: int) -> float:
        return launch.own[phase][rank] or 0.0

    rises = [
        sides.phase_change(partial(taken, rank=rank)).estimate for rank in ranks
    ]
    late = max(ranks, key=rises.__getitem__)
    most = rises[late]
    others = [rises[rank] for rank in ranks if rank != late]

    def apart(launch: StepPhases) -> float:
        next_one = max(taken(launch, rank) for rank in ranks if rank != late)
        return taken(launch, late) / max(next_one, _CLOCK_SECONDS)

    on_path = [
        fmean(launch.path[phase][rank] for launch in sides.now.phases)
        for rank in ranks
    ]
    is_late = (
        max(others) < most / 2
        and most >= rise / 2
        and sides.p_value(apart) <= level / len(ranks)
        and on_path[late] >= _MOSTLY * sum(on_path)
    )
    return late if is_late else None


def changed_counters(
    now: Counters, before: Counters
) -> tuple[ChangedCounter, ...]:
    """Return the counters that differ, each with its values before and now; causes come before what
    follows."""
    found = []
    for name, later in now.items():
        earlier = before.get(name)
        if later is not None and earlier is not None and later != earlier:
            found.append((name, earlier, later))
    finer = without_totals(
        [name for name, *_ in found if name not in _NOT_CAUSES]
    )
    order = [*_FIRST, *now]
    causes = [each for each in found if each[0] in finer]
    return tuple(sorted(causes, key=lambda each: order.index(each[0])))


def _explained(
    sides: Sides, found: Sequence[Finding], counters: Sequence[ChangedCounter]
) -> list[Finding]:
    """Return the findings that counters explain."""
    change = sides.change_of_step
    explaining = [each for each in counters if _may_explain(each, change)]
    if not explaining:
        return []
    phases = _explained_by(explaining)
    return [
        each for each in found if {*each.phases} <= phases and each.rank is None
    ]


def _may_explain(counter: ChangedCounter, change: float) -> bool:
    """Whether a counter changed as the step did, whose relative `change` is given; bytes and work
    by enough of it."""
    name, before, now = counter
    if (now - before) * change < 0:
        return False
    if not before or not (name.endswith("bytes") or name in WORK):
        return True
    return abs(now / before - 1) >= _BYTES_PART * abs(change)


def _explained_by(counters: Sequence[ChangedCounter]) -> set[str]:
    """Return the phases that take longer because of counters."""
    first = counters[0][0]
    if first in _MODEL:
        return {FORWARD, BACKWARD, EXPOSED, OPTIMIZER}
    if first in COPIES:
        return {*PHASES}
    if first in WORK:
        return {*PHASES} - {EXPOSED}
    if first in _COMPILER:
        return {FORWARD, BACKWARD, OPTIMIZER, OTHER}
    # Before a forward pass buffers are broadcast, and parameters gathered.
    early = any(
        name.startswith(("broadcast", "all_gather")) for name, *_ in counters
    )
    return {BACKWARD, EXPOSED, FORWARD} if early else {BACKWARD, EXPOSED}


def _joined(
    findings: Sequence[Finding], counters: tuple[ChangedCounter, ...]
) -> Finding:
    """Return one finding of several phases, with the counters that explain them."""
    if not findings:
        return Finding(phases=(), counters=counters)
    return Finding(
        phases=tuple(
            phase
            for phase in PHASES
            if any(phase in each.phases for each in findings)
        ),
        seconds=sum(each.seconds or 0.0 for each in findings),
        reach=sum(each.reach for each in findings),
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
        chosen = ranks if rank is None else [ranks[rank]]
        taken = sum(stacks.taken for stacks in chosen)
        for stacks in chosen:
            for names, count in stacks.functions:
                innermost, caller = (*names, "", "")[:2]
                file, _, function = innermost.rpartition(":")
                if file in files:
                    seconds[file, function, caller] += (
                        sign * count * step / taken
                    )
                    variance += count * (step / taken) ** 2
    gains = {file: _gain(seconds, file) for file in files}
    slower = max(gains, key=gains.__getitem__)
    gain = min(gains[slower], sum(seconds.values()))
    reach = NormalDist().inv_cdf(1 - level / len(gains)) * sqrt(variance)
    if rise <= 0 or gain <= reach or gain < _OF_FILE * rise:
        return None
    by_function: dict[str, float] = defaultdict(float)
    for (file, function, _), each in seconds.items():
        if file == slower:
            by_function[function] += each
    return Finding(
        phases=(),
        seconds=gain,
        reach=reach,
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
        if where == file:
            own[caller] += each
    return sum(
        min(gain, max(total[caller], 0.0)) for caller, gain in own.items()
    )
