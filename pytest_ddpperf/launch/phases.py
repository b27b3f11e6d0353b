"""Where the time of a launch's steps went: each rank's own phases, and the critical path through
all ranks."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from pytest_ddpperf.records.samples import StepFigures, Window, Windows
from pytest_ddpperf.records.step_phases import (
    EXPOSED,
    PHASES,
    RANK_WAIT,
    RankPhases,
    StepPhases,
    known_by_all,
)


class Piece(NamedTuple):
    """A part of one rank's step, in nanoseconds."""

    phase: str
    begin: float
    end: float


def step_phases(windows: Windows) -> StepPhases | None:
    """Return what the windows of all ranks, which are on one clock, say together; None if a rank
    does not know its phases."""
    found = known_by_all([window.phases for window in windows])
    steps = min((len(phases.steps) for phases in found or ()), default=0)
    if found is None or not steps:
        return None
    table = [
        _steps(window, phases, steps)
        for window, phases in zip(windows, found, strict=True)
    ]
    # step x rank x piece
    by_step = list(zip(*table, strict=True))
    begins = [max(pieces[0].begin for pieces in step) for step in by_step]
    ends = [max(pieces[-1].end for pieces in step) for step in by_step]
    usual = _middle_half(
        [end - begin for begin, end in zip(begins, ends, strict=True)]
    )
    usual_steps = [by_step[step] for step in usual]
    own = {phase: _own(phase, found, usual_steps) for phase in PHASES}
    own[RANK_WAIT] = (None,) * len(windows)
    path: dict[str, tuple[float, ...]] = {}
    arrivals = known_by_all([phases.arrivals for phases in found])
    if arrivals is not None:
        starts = Starts(arrivals)
        own[RANK_WAIT] = tuple(
            fmean(starts.waited_in(rank, step[rank]) for step in usual_steps)
            / 1e9
            for rank in range(len(windows))
        )
        paths = [
            find_critical_path(by_step[step], begins[step], starts)
            for step in usual
        ]
        for phase in PHASES:
            path[phase] = tuple(
                fmean(each.get((rank, phase), 0.0) for each in paths) / 1e9
                for rank in range(len(windows))
            )
    return StepPhases(steps=steps, own=own, path=path)


def _steps(
    window: Window, phases: RankPhases, steps: int
) -> list[tuple[Piece, ...]]:
    """Return the last steps of a rank."""
    begins = [mark for marks in window.marks_ns for mark in marks[:-1]]
    found = []
    for first, pieces in zip(
        begins[-steps:], phases.steps[-steps:], strict=True
    ):
        step = []
        begin = first
        for index, end in pieces:
            step.append(Piece(PHASES[index], begin, end))
            begin = end
        found.append(tuple(step))
    return found


def _middle_half(durations: Sequence[float]) -> list[int]:
    """Return which steps are neither of the shortest nor of the longest quarter."""
    order = sorted(range(len(durations)), key=durations.__getitem__)
    cut = len(order) // 4
    return order[cut : len(order) - cut]


def _own(
    phase: str,
    ranks: Sequence[RankPhases],
    steps: Sequence[Sequence[Sequence[Piece]]],
) -> StepFigures:
    """Return each rank's mean seconds in a phase; None where it is not seen."""
    found: list[float | None] = []
    for rank, phases in enumerate(ranks):
        if phase not in phases.seen:
            found.append(None)
            continue
        pieces = [p for step in steps for p in step[rank] if p.phase == phase]
        found.append(sum(p.end - p.begin for p in pieces) / len(steps) / 1e9)
    return tuple(found)


# By so much, marks of different ranks may contradict what must have come first.
_TOLERANCE_NS = 50_000
# Collectives that one rank may have started and not waited for.
_MOST_OPEN = 64


class Starts:
    """When each rank started each collective and message: the last of them ends the waiting of the
    others. A message is named again where a rank begins to wait for it."""

    def __init__(self, by_rank: Sequence[Sequence[tuple[float, str]]]) -> None:
        self._by_rank = by_rank
        self._times = [[when for when, _ in starts] for starts in by_rank]
        self._last: dict[str, tuple[float, int]] = {}
        for rank, starts in enumerate(by_rank):
            first = {name: when for when, name in reversed(starts)}
            for name, when in first.items():
                self._last[name] = max(
                    self._last.get(name, (when, rank)), (when, rank)
                )

    def last(self, rank: int, begin: float, end: float) -> tuple[int, float]:
        """Return which rank started what `rank` waited for last, and when; `rank` itself if it did.

        It is the latest collective that this rank had started and that all had before the wait
        ended, for no wait ends before that."""
        place = bisect_right(self._times[rank], end)
        for when, name in reversed(
            self._by_rank[rank][max(place - _MOST_OPEN, 0) : place]
        ):
            last, who = self._last[name]
            if last <= end + _TOLERANCE_NS:
                return (who, min(last, end)) if last > begin else (rank, when)
        return rank, begin

    def waited_in(self, rank: int, step: Sequence[Piece]) -> float:
        """Return for how long of a step the rank waited for other ranks."""
        waits = []
        for piece in step:
            if piece.phase != EXPOSED:
                continue
            who, when = self.last(rank, piece.begin, piece.end)
            if who != rank:
                waits.append(max(when - piece.begin, 0.0))
        return sum(waits)


def find_critical_path(
    step: Sequence[Sequence[Piece]], begin: float, starts: Starts
) -> Mapping[tuple[int, str], float]:
    """Return the nanoseconds of a step by rank and phase, followed backwards from its end to
    `begin`.

    `step` is rank x piece. Where a rank waited for a later one, the path continues on that rank,
    from when it started the collective: what made it late is counted, not the wait. Source: C.-Q.
    Yang and B. P. Miller, "Critical Path Analysis for the Execution of Parallel and Distributed
    Programs", ICDCS 1988."""
    taken: dict[tuple[int, str], float] = defaultdict(float)
    ends = [[piece.end for piece in pieces] for pieces in step]
    rank = max(range(len(step)), key=lambda each: ends[each][-1])
    at = ends[rank][-1]
    just_changed = False
    while at > begin:
        piece = step[rank][
            min(bisect_left(ends[rank], at), len(ends[rank]) - 1)
        ]
        since = max(piece.begin, begin)
        if piece.phase == EXPOSED and not just_changed:
            who, when = starts.last(rank, piece.begin, at)
            if who != rank and when > since:
                taken[rank, EXPOSED] += at - when
                # no time has passed: the path must not change back
                just_changed = when == at
                at, rank = when, who
                continue
        just_changed = False
        taken[rank, piece.phase] += at - since
        at = since
    return taken
