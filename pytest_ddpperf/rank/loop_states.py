"""What the loop of a program is at, step by step: learning, warming or timing. Each state returns
the next one.

- `Learning`: it is not known yet where steps end.
- `Warming`: steps until nothing changes any more, by what rank 0 sees. If it turns out that steps
  end otherwise, the warm-up begins anew.
- `Timing`: the window. It begins with the last step of the warm-up. After its last step the rank
  delivers and ends, wherever the program is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import multimode
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from pytest_ddpperf.rank import warm_up
from pytest_ddpperf.rank.context import Context
from pytest_ddpperf.rank.counters import Meter
from pytest_ddpperf.rank.stamps import PhaseWatch
from pytest_ddpperf.rank.window import Stretch, new_marks, window_of
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.plan import UPDATE, Plan
from pytest_ddpperf.records.samples import Window
from pytest_ddpperf.wire.channels import Board, Phase


class Rank(Protocol):
    """What a loop needs of its rank; `lifecycle.Rank` has it."""

    @property
    def number(self) -> int: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def board(self) -> Board: ...
    @property
    def in_stretches(self) -> bool: ...
    def enter(self, phase: Phase) -> None: ...
    def end_child(self, error: BaseException | None = None) -> None: ...
    def stretches(self, steps: int, step_ns: int) -> Iterator[int]: ...


@dataclass(frozen=True, slots=True)
class Shared:
    """What all states of a loop use. `deliver` takes what was measured, and does not return."""

    rank: Rank
    ctx: Context
    row: memoryview  # of the board
    phases: PhaseWatch
    deliver: Callable[[Window], NoReturn]

    @property
    def plan(self) -> Plan:
        return self.rank.plan

    @property
    def board(self) -> Board:
        return self.rank.board


# So many steps more than the warm-up are enough for most programs: three show where steps end, and
# in the others DDP rebuilds its buckets, say, and a rank gets ahead of the first one.
_UNTIL_WINDOW = 7


def _advise(shared: Shared) -> str:
    """Advise a program that has ended before its window."""
    plan, board = shared.plan, shared.board
    needed = max(board.begin(0), _UNTIL_WINDOW + plan.warmup)
    return f"let it take {needed + (board.steps(0) or plan.steps)} or more"


class Learning:
    """It is not known yet where steps end: no step has ended."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def learned(self, ended_ns: list[int]) -> Warming:
        """It is known where steps end, of which some have ended at these times."""
        return Warming(self._shared, ended_ns)

    def step_ended(self, passes: int) -> Warming | Timing:
        """A step of so many backward passes has ended, where the program says so."""
        return Warming(self._shared, []).step_ended(passes)

    def when(self) -> tuple[str, str]:
        """Return when the program has ended, and what to do then."""
        boundary = self._shared.plan.boundary
        if boundary == UPDATE:
            return "before its steps were recognized", _advise(self._shared)
        return "without a step", f"{boundary} never ended one"


class Warming:
    """The warm-up. The first step that is seen to begin finds modules, and the next is counted; not
    one that is shorter."""

    def __init__(self, shared: Shared, ended_ns: list[int]) -> None:
        refuse_wrong_group(shared.plan, shared.ctx.device)
        shared.rank.enter(Phase.WARMUP)
        shared.row[Board.UPDATES_CELL] += len(ended_ns)
        self._shared = shared
        self._ended_ns = ended_ns  # of each step
        self._waited = 0  # steps after which this process waited for the device
        self._is_seen = False  # whether a step was seen to begin
        self._passes: list[int] = []  # backward passes of each that was seen to begin
        self._losses: list[Any] = []
        self._within = ExitStack()  # what lasts for the step under way
        self._meter = Meter()
        self._counters: Mapping[str, int | None] = {}
        self._steady = warm_up.Steadiness(shared.ctx.device)
        self._is_slowed = False
        self._unsettled = ""
        self._unfit = ""

    def learned(self, ended_ns: list[int]) -> Warming | None:
        """Steps turn out to end otherwise; None if it is too late: the window is decided."""
        if self._ended_ns and self._shared.board.begin(0):
            self._unfit = ENDS_OTHERWISE
            return None
        self._within.close()
        return Warming(self._shared, ended_ns)

    def step_ended(self, passes: int) -> Warming | Timing:
        shared, board = self._shared, self._shared.board
        self._within.close()
        shared.row[Board.UPDATES_CELL] += 1
        shared.row[Board.STEP_CELL] = len(self._ended_ns)
        is_free = shared.plan.spreads and board.begin(0) > 0 and self._waited > 1
        self._mark(is_free)
        was_seen, self._is_seen = self._is_seen, True
        if was_seen:
            self._passes.append(passes)
            if passes < max(self._passes):
                self._counters = {}  # of a shorter step
            if shared.rank.number == 0 and not board.begin(0):
                self._decide()
        if not is_free:
            self._steady.changed()
        beyond = shared.row[Board.UPDATES_CELL] - board.begin(0)
        if board.steps(0) and beyond > 0:
            if beyond > 1:
                raise DdpPerfError(board.describe_updates())
            timing = self._timing(max(multimode(self._passes or [passes])))
            timing.begin()
            return timing
        if not was_seen:
            self._within.enter_context(shared.phases.finding_modules())
        elif not self._counters:
            counting = self._meter.counting(None, shared.ctx.device)
            self._counters = self._within.enter_context(counting)
        return self

    def _mark(self, is_free: bool) -> None:
        """Mark the end of a step: once the device has done its work, unless it `is_free`."""
        ctx, done = self._shared.ctx, len(self._ended_ns)
        if ctx.device.type != "cpu" and not is_free:
            torch.accelerator.synchronize()
        self._ended_ns.append(time.monotonic_ns())
        if not is_free:
            self._waited = done + 1
        elif done == self._waited:
            self._is_slowed = warm_up.is_slowed(ctx)
        loss = ctx.figures.pop("loss", None)
        if done >= self._shared.plan.warmup:
            self._losses.append(loss)

    def _decide(self) -> None:
        """Let the window begin soon after nothing changes any more, by what rank 0 sees.

        Ranks that synchronise in each update are as far as rank 0. Those that average their models
        now and then may be ahead."""
        plan, board = self._shared.plan, self._shared.board
        beyond = len(self._ended_ns) - plan.warmup
        if beyond < 0:
            return
        self._unsettled = self._steady.unsettled(None)
        if self._unsettled and beyond <= warm_up.WARMUP_BEYOND:
            return
        step_ns = max(self._step_ns(), 1)
        begin = max(board.updates()) + 1
        if plan.spreads:
            begin += warm_up.count_free_steps(step_ns)
        board.set_begin(0, begin)
        board.set_steps(0, plan.steps_for(step_ns / 1e9))

    def _step_ns(self) -> int:
        """Return the shortest of the last steps that waited for the device."""
        last = self._ended_ns[: self._waited][-warm_up.TELLING - 1 :]
        return min(after - before for before, after in pairwise(last))

    def _timing(self, usual: int) -> Timing:
        warmed = warm_up.WarmUp(
            steps=len(self._ended_ns),
            unsettled=self._unsettled,
            counters=self._counters,
            notes=self._meter.notes,
            losses=self._losses,
            step_ns=self._step_ns(),
            is_slowed=self._is_slowed,
        )
        return Timing(self._shared, warmed, self._meter, usual, self._unfit)

    def when(self) -> tuple[str, str]:
        """Return when the program has ended, and what to do then."""
        when = f"after {len(self._ended_ns)} steps, in the warm-up"
        return when, _advise(self._shared)


ENDS_OTHERWISE = "steps end otherwise than in the warm-up: raise --ddp-warmup"


class Timing:
    """The window. A step that is shorter than the usual ones is left out, and its stretch goes on
    after it, in another part; not the next one, for epochs end otherwise."""

    def __init__(
        self,
        shared: Shared,
        warmed: warm_up.WarmUp,
        meter: Meter,
        usual: int,
        unfit: str,
    ) -> None:
        """Steps have as many backward passes as is `usual`."""
        self._shared = shared
        self._warmed = warmed
        self._meter = meter
        self._usual = usual
        self._unfit = unfit
        self._taken: list[Stretch] = []  # the parts with counted steps
        self._counted: list[int] = []  # steps of each stretch that was asked for
        self._left_out = 0
        self._is_short = False  # the last step was left out

    def begin(self) -> None:
        rank, steps = self._shared.rank, self._shared.board.steps(0)
        self._shared.board.set_steps(rank.number, steps)
        rank.enter(Phase.STEPS)
        self._lengths = iter((steps,))
        if rank.in_stretches:
            self._lengths = rank.stretches(steps, self._warmed.step_ns)
        self._shared.phases.begin()
        self._next_stretch()

    def learned(self, ended_ns: list[int]) -> None:
        """Steps turn out to end otherwise, which is too late."""
        self._unfit = ENDS_OTHERWISE

    def step_ended(self, passes: int) -> Timing:
        part, row = self._part, self._shared.row
        part.mark()
        row[Board.UPDATES_CELL] += 1
        row[Board.STEP_CELL] += 1
        self._is_short = passes < self._usual and not self._is_short
        if self._is_short:
            self._left_out += 1
            kept = part.steps - 1
            missing = part.length - kept
            self._end_part(kept)
            self._begin_part(missing, 0 if kept else part.uncounted)
            return self
        if passes != self._usual:
            self._unfit = (
                f"update {row[Board.UPDATES_CELL]} had {passes} backward passes, and those"
                f" before {self._usual}: raise --ddp-warmup"
            )
        if part.steps == part.length:
            self._end_part(part.steps)
            self._next_stretch()
        return self

    def _next_stretch(self) -> None:
        """Begin the next stretch; without one, deliver."""
        length = next(self._lengths, None)
        if length is None:
            # nothing more is timed, and no stack is sampled
            self._shared.rank.enter(Phase.DELIVERY)
            self._shared.deliver(self._window())
        self._counted.append(0)
        self._begin_part(length, 1 if self._shared.rank.in_stretches else 0)

    def _begin_part(self, length: int, uncounted: int) -> None:
        self._part = Stretch(
            new_marks(length),
            self._shared.plan,
            self._shared.ctx,
            self._meter,
            uncounted=uncounted,
        )
        self._part.begin()

    def _end_part(self, kept: int) -> None:
        part = self._part
        part.finish(kept)
        self._shared.phases.end(part.timer)
        if part.counted:
            self._taken.append(part)
        self._counted[-1] += part.counted

    def _window(self) -> Window:
        shared = self._shared
        found = window_of(
            self._taken,
            [counted for counted in self._counted if counted],
            self._warmed,
            shared.phases,
            None,
            shared.ctx,
            shared.plan,
        )
        notes = found.notes
        if shared.plan.trace:
            notes += ("a program that owns its loop is not traced",)
        unfit = self._unfit or found.unfit
        return replace(found, unfit=unfit, left_out=self._left_out, notes=notes)

    def when(self) -> tuple[str, str]:
        """Return when the program has ended, and what to do then."""
        steps, part = self._shared.board.steps(0), self._part
        timed = sum(self._counted) + max(part.steps - part.uncounted, 0)
        return f"after {timed} of {steps} timed steps", (
            f"let it take {steps - timed} more steps, or ask for fewer (--ddp-steps,"
            " --ddp-min-time)"
        )


def refuse_wrong_group(plan: Plan, device: torch.device) -> None:
    """Raise DdpPerfError unless the program has the process group that was asked for."""
    if not dist.is_initialized():
        if plan.world_size > 1:
            raise DdpPerfError(
                "the program trains without a process group: it has to call"
                " init_process_group()"
            )
        return
    size = dist.get_world_size()
    if size != plan.world_size:
        raise DdpPerfError(
            f"the program's process group has {size} ranks, and {plan.world_size} were"
            " asked for"
        )
    group: Any = dist.group.WORLD
    try:
        backend = group._get_backend(device).name()
    except RuntimeError:
        backend = f"no backend for {device.type}"
    if backend != plan.backend:
        raise DdpPerfError(
            f"the program's process group uses {backend}, and {plan.backend} was asked for"
        )
