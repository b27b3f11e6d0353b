"""Divides steps into pieces, each a phase and its end, by the stamps of what began and ended in
them."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from pytest_ddpperf.rank.counters import has_compiled
from pytest_ddpperf.records.step_phases import (
    BACKWARD,
    DATA,
    EXPOSED,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PHASES,
    RankPhases,
)

# What a stamp says to begin, or with the opposite sign to end.
IN_FORWARD = 1
IN_BACKWARD = 2
IN_OPTIMIZER = 3
IN_WAIT = 4
# when, in nanoseconds or as an event that is not placed yet, and what begins or ends
Stamp = tuple[Any, int]
# what was started, in order of time: when, and a name that is the same on all ranks
Starts = list[tuple[int, str]]

# Of a window, the steps of which phases are known: enough for their mean, and cheap to follow
# through all ranks.
_LAST = 200


def rank_phases(
    steps: Sequence[tuple[int, int]],
    stamps: Sequence[Stamp],
    arrivals: tuple[Starts, int] | None,
    *,
    has_ddp: bool,
    before: Sequence[int] | None = None,
) -> RankPhases | None:
    """Return the phases of the last `steps`, each a begin and an end; None if the stamps are not
    nested.

    `arrivals` are what this rank started, and since when all of it is known; None if that is
    unknown. If the step `has_ddp`, backward passes end with a wait. Steps of a program may end
    within something: `before` is what was open before the first stamp; None of others."""
    started, since = arrivals or ([], 0)
    known = [step for step in steps[-_LAST:] if step[0] >= since]
    times = [when for when, _ in stamps]
    starts = [when for when, _ in started]
    found = []
    seen = {OTHER}
    place = 0
    open_kinds = list(before or ())
    for begin, end in known:
        first = _first_after(times, stamps, begin)
        last = _first_after(times, stamps, end)
        own_starts = starts[
            bisect_right(starts, begin) : bisect_right(starts, end)
        ]
        step = _Step(
            begin,
            own_starts if has_ddp else (),
            still_open(stamps[place:first], open_kinds),
            arrivals is not None,
        )
        if not step.take(stamps[first:last], end) or (
            step.open and before is None
        ):
            return None
        place = last
        open_kinds = step.open
        seen.update(phase for phase, _ in step.pieces)
        found.append(
            tuple((PHASES.index(phase), until) for phase, until in step.pieces)
        )
    if started and EXPOSED not in seen and not has_ddp and has_compiled():
        arrivals = None  # compiled code waits unseen
    if arrivals is not None:
        seen.add(EXPOSED)  # of which there may be none
    first = bisect_left(starts, known[0][0]) if known else 0
    return RankPhases(
        steps=tuple(found),
        seen=tuple(phase for phase in PHASES if phase in seen),
        arrivals=None if arrivals is None else tuple(started[first:]),
    )


def _first_after(
    times: Sequence[int], stamps: Sequence[Stamp], mark: int
) -> int:
    """Return the place of the first stamp after a step's end. Of those at the same time, for a
    device's clock is coarse, what ends belongs to the step, and what begins does not."""
    first = bisect_left(times, mark)
    last = bisect_right(times, mark)
    signs = (1 if kind > 0 else -1 for _, kind in stamps[first:last])
    depths = [*accumulate(signs, initial=0)]
    return first + depths.index(min(depths))


def still_open(stamps: Sequence[Stamp], before: Sequence[int]) -> list[int]:
    """Return what began and has not ended, where so much was open before; what never began is left
    out."""
    found = list(before)
    for _, kind in stamps:
        if kind > 0:
            found.append(kind)
        elif found and found[-1] == -kind:
            found.pop()
    return found


@dataclass
class _Step:
    """Divides one step into pieces, each a phase and its end."""

    _at: int  # first, where the step begins
    _starts: Sequence[int]  # of collectives that DDP may wait for
    open: list[int]
    _knows_waits: bool
    pieces: list[tuple[str, int]] = field(default_factory=list)
    # pieces whose phase depends on what follows
    _gaps: list[int] = field(default_factory=list)
    _last: str = ""  # phase, gaps and waits left out

    def __post_init__(self) -> None:
        self._waited_until = self._at

    def take(self, stamps: Sequence[Stamp], end: int) -> bool:
        """Divide the step at its `stamps`; return whether they are well nested."""
        for when, kind in stamps:
            self._until(when)
            if kind > 0:
                self.open.append(kind)
            elif self.open and self.open[-1] == -kind:
                self.open.pop()
                if kind == -IN_WAIT:
                    self._waited_until = when
                if kind == -IN_BACKWARD and IN_BACKWARD not in self.open:
                    self._expose(when)
            else:
                return False
        self._until(end)
        self._name_gaps("")
        return bool(self.pieces)

    def _phase(self) -> str:
        """Return the phase that lasts now; "" between those that are known."""
        if IN_WAIT in self.open:
            return EXPOSED if self._knows_waits else OTHER
        if IN_BACKWARD in self.open:
            # What activation checkpointing computes anew belongs to it, and no optimizer.
            within = self.open[self.open.index(IN_BACKWARD) :]
            return OTHER if IN_OPTIMIZER in within else BACKWARD
        if not self.open:
            return ""
        # An optimizer may call a closure, which has the other two, and a module may train within
        # its forward pass.
        return FORWARD if self.open[-1] == IN_FORWARD else OPTIMIZER

    def _until(self, when: int) -> None:
        """End the phase that lasts now."""
        phase = self._phase()
        if phase in (FORWARD, BACKWARD, OPTIMIZER):
            # An optimizer that comes first may call the passes: what comes before it is data.
            if phase != OPTIMIZER or self._last:
                self._name_gaps(phase)
            self._last = phase
        if when <= self._at:
            return
        if self.pieces and self.pieces[-1][0] == phase:
            self.pieces.pop()
        elif not phase:
            self._gaps.append(len(self.pieces))
        self.pieces.append((phase, when))
        self._at = when

    def _name_gaps(self, following: str) -> None:
        phase = OTHER
        if following == FORWARD:
            phase = FORWARD if self._last == FORWARD else DATA
        elif following == BACKWARD and self._last == FORWARD:
            # the loss, most likely
            phase = FORWARD
        for index in self._gaps:
            self.pieces[index] = phase, self.pieces[index][1]
        self._gaps.clear()

    def _expose(self, end: int) -> None:
        """Of a backward pass that ends now, call what follows the start of its last collective a
        wait: DDP waits for all of them then, in C++. Not if Python code has waited since."""
        if (
            not self._knows_waits
            or not self.pieces
            or self.pieces[-1][0] != BACKWARD
        ):
            return
        index = bisect_right(self._starts, end) - 1
        if index < 0 or (start := self._starts[index]) <= self._waited_until:
            return
        begin = self.pieces[-2][1] if len(self.pieces) > 1 else 0
        if start > begin:
            self.pieces[-1:] = [(BACKWARD, start), (EXPOSED, end)]
