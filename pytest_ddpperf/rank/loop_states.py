"""What the loop of a program is at, step by step: learning, warming or timing. Each state returns
the next one.

- `Learning`: it is not known yet where steps end.
- `Warming`: steps until nothing changes any more, by what rank 0 sees. If it turns out that steps
  end otherwise, the warm-up begins anew.
- `Timing`: the window. It begins with the last step of the warm-up. After its last step comes what
  was measured, wherever the program is.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import multimode
from typing import Any

import torch
import torch.distributed as dist

from pytest_ddpperf.rank import torch_names, warm_up
from pytest_ddpperf.rank.group import wrong_size
from pytest_ddpperf.rank.process import flush
from pytest_ddpperf.rank.timed_rank import TimedRank
from pytest_ddpperf.rank.window import Stretch, new_marks, window_of
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.plan import NCCL, UPDATE, Plan, backends_by_device
from pytest_ddpperf.records.samples import Counters, Window
from pytest_ddpperf.wire.channels import Board, Phase

# So many steps more than the warm-up are enough for most programs: three show where steps end, and
# in the others DDP rebuilds its buckets, say, and a rank gets ahead of the first one.
_UNTIL_WINDOW = 7
_RPC_WORKERS = "torch.distributed.rpc.api:_ALL_WORKER_NAMES"
_USES_RPC = (
    "it uses torch.distributed.rpc, for which there are rpc_benchmark and"
    " ddp_benchmark.command"
)
_MARK = 'mark where steps end (boundary="mark")'
# Between looks at the board, while pytest agrees on the window with other nodes.
_POLL_SECONDS = 0.001


def _advise(rank: TimedRank) -> str:
    """Advise a program that has ended before its window."""
    plan = rank.plan
    board = rank.board
    needed = max(board.begin(), _UNTIL_WINDOW + plan.warmup)
    return (
        f"let it take {needed + (board.steps(0) or plan.steps)} steps or more"
    )


@dataclass
class Learning:
    """It is not known yet where steps end: no step has ended."""

    _rank: TimedRank

    def learned(self, ended_ns: list[int]) -> Warming:
        """It is known where steps end, of which some have ended at these times."""
        return Warming(self._rank, ended_ns)

    def step_ended(self, passes: int) -> Warming | Timing | Window:
        """A step of so many backward passes has ended, where the program says so."""
        return Warming(self._rank, []).step_ended(passes)

    def when(self, has_passed: bool) -> tuple[str, str]:
        """Return when the program has ended, and what to do then. `has_passed` says whether it has
        made a backward pass."""
        boundary = self._rank.plan.boundary
        if boundary == UPDATE:
            advice = _advise(self._rank)
            if torch_names.find(_RPC_WORKERS):
                advice = _USES_RPC
            elif not has_passed:
                advice = f"it made no backward pass: its output may say why; if it trains, {_MARK}"
            return "before its steps were recognized", advice
        return "without a step", (
            f'boundary="{boundary}" was never reached ("mark" is a call of'
            " pytest_ddpperf.step_end())"
        )


class Warming:
    """The warm-up. Near its end one step finds modules, and a later one is counted: earlier steps
    may belong to another stage of the training. A step with fewer backward passes than others is
    not counted."""

    def __init__(self, rank: TimedRank, ended_ns: list[int]) -> None:
        refuse_wrong_group(rank.plan, rank.ctx.device)
        rank.enter(Phase.WARMUP)
        rank.row[Board.UPDATES_CELL] += len(ended_ns)
        self._rank = rank
        self._ended_ns = ended_ns  # of each step
        self._waited = 0  # steps after which this process waited for the device
        self._is_seen = False  # whether a step was seen to begin
        self._has_found = False  # modules
        # backward passes of each that was seen to begin
        self._passes: list[int] = []
        self._losses: list[Any] = []
        self._within = ExitStack()  # what lasts for the step under way
        self._counters: Counters = {}
        # the thread of the step under way, if it is counted
        self._counts_in = 0
        self._steady = warm_up.Steadiness(rank.ctx.device)
        self._is_slowed = False
        self._unsettled = ""
        self._unfit = ""

    def learned(self, ended_ns: list[int]) -> Warming | None:
        """Steps turn out to end otherwise; None if it is too late: the window is decided."""
        if self._ended_ns and self._rank.board.begin():
            self._unfit = ENDS_OTHERWISE
            return None
        self._within.close()
        return Warming(self._rank, ended_ns)

    def step_ended(self, passes: int) -> Warming | Timing | Window:
        rank, board = self._rank, self._rank.board
        if (
            rank.ctx.device.type == "cuda"
            and torch.cuda.is_current_stream_capturing()
        ):
            raise DdpPerfError(
                f"an update is captured in a CUDA graph, whose replays are not seen: {_MARK}"
            )
        # torch counts by thread
        if self._counts_in not in (0, threading.get_ident()):
            raise DdpPerfError(
                "steps end in different threads: let the program train in one, as an executor with"
                " max_workers=1 does"
            )
        self._within.close()
        rank.row[Board.UPDATES_CELL] += 1
        is_free = rank.plan.spreads and board.begin() > 0 and self._waited > 1
        self._mark(is_free)
        rank.row[Board.STEP_CELL] = len(self._ended_ns)
        was_seen, self._is_seen = self._is_seen, True
        if was_seen:
            self._passes.append(passes)
            if self._counts_in and passes < max(self._passes):
                self._counters = {}  # of a shorter step
            self._counts_in = 0
            if rank.ctx.rank == 0 and not board.begin():
                self._decide()
        steps = board.steps(0)  # once, for they may be known any moment
        while steps and not board.begin():
            time.sleep(_POLL_SECONDS)
        if not is_free:
            self._steady.changed()
        beyond = rank.row[Board.UPDATES_CELL] - board.begin()
        if steps and beyond > 0:
            if beyond > 1:
                raise DdpPerfError(board.describe_updates(rank.plan.boundary))
            usual = max(multimode(self._passes or [passes]))
            return Timing(rank, self._warmed(), usual, self._unfit).begin()
        if not self._has_found:
            if len(self._ended_ns) >= rank.plan.warmup - 2:
                self._within.enter_context(rank.phases.finding_modules())
                self._has_found = True
        elif not self._counters:
            counting = rank.meter.counting(rank.own, rank.ctx.device)
            self._counters = self._within.enter_context(counting)
            self._counts_in = threading.get_ident()
        return self

    def _mark(self, is_free: bool) -> None:
        """Mark the end of a step: once the device has done its work, unless it `is_free`."""
        ctx = self._rank.ctx
        done = len(self._ended_ns)
        if not (self._rank.on_cpu or is_free):
            torch.accelerator.synchronize()
        self._ended_ns.append(time.monotonic_ns())
        if not is_free:
            self._waited = done + 1
        elif done == self._waited:
            self._is_slowed = warm_up.is_slowed(ctx)
        loss = ctx.figures.pop("loss", None)
        if done >= self._rank.plan.warmup:
            self._losses.append(loss)

    def _decide(self) -> None:
        """Let the window begin soon after nothing changes any more, by what rank 0 sees.

        Ranks that synchronise in each update are as far as rank 0. Those that average their models
        now and then may be ahead. So all wait after their next update, and those of other nodes are
        known when these have the number of steps."""
        ctx = self._rank.ctx
        plan = self._rank.plan
        board = self._rank.board
        beyond = len(self._ended_ns) - plan.warmup
        if beyond < 0:
            return
        self._unsettled = self._steady.unsettled(self._rank.own)
        if self._unsettled and beyond <= warm_up.WARMUP_BEYOND:
            return
        step_ns = max(self._step_ns(), 1)
        board.set_steps(0, plan.steps_for(step_ns / 1e9))
        others = range(ctx.local_world_size, ctx.world_size)
        while not all(map(board.steps, others)):
            time.sleep(_POLL_SECONDS)
        begin = max(board.updates()) + 1
        if plan.spreads:
            begin += warm_up.count_free_steps(step_ns)
        board.set_begin(begin)

    def _step_ns(self) -> int:
        """Return the shortest of the last steps that waited for the device."""
        last = self._ended_ns[: self._waited][-warm_up.TELLING - 1 :]
        return min(after - before for before, after in pairwise(last))

    def _warmed(self) -> warm_up.WarmUp:
        return warm_up.WarmUp(
            steps=len(self._ended_ns),
            unsettled=self._unsettled,
            counters=self._counters,
            notes=self._rank.meter.notes,
            losses=self._losses,
            step_ns=self._step_ns(),
            is_slowed=self._is_slowed,
        )

    def when(self, _: bool) -> tuple[str, str]:
        """Return when the program has ended, and what to do then."""
        when = f"in step {len(self._ended_ns) + 1} of the warm-up"
        return when, _advise(self._rank)


ENDS_OTHERWISE = (
    f"steps end otherwise than in the warm-up: raise --ddp-warmup, or {_MARK}"
)


@dataclass
class Timing:
    """The window. A step that is shorter than the usual ones is left out, and its stretch goes on
    after it, in another part; not the next one, for epochs end otherwise."""

    _rank: TimedRank
    _warmed: warm_up.WarmUp
    _usual: int  # backward passes of a step
    _unfit: str
    # the parts with counted steps
    _taken: list[Stretch] = field(default_factory=list)
    # steps of each stretch that was asked for
    _counted: list[int] = field(default_factory=list)
    _left_out: int = 0
    _is_short: bool = False  # the last step was left out

    def begin(self) -> Timing | Window:
        rank, steps = self._rank, self._rank.board.steps(0)
        rank.board.set_steps(rank.ctx.rank, steps)
        rank.enter(Phase.STEPS)
        self._lengths = iter(
            (steps,)
            if rank.stretches is None
            else rank.stretches(steps, self._warmed.step_ns)
        )
        if rank.written is not None:
            flush()
            rank.written.begin()
        rank.begin_window()
        return self._next_stretch()

    def learned(self, ended_ns: list[int]) -> None:
        """Steps turn out to end otherwise, which is too late."""
        self._unfit = ENDS_OTHERWISE

    def step_ended(self, passes: int) -> Timing | Window:
        part = self._part
        row = self._rank.row
        part.mark()
        row[Board.UPDATES_CELL] += 1
        row[Board.STEP_CELL] += 1
        self._is_short = passes < self._usual and not self._is_short
        if self._is_short:
            self._left_out += 1
            kept = part.steps - 1
            missing = part.length - kept
            self._end_part(kept)
            self._begin_part(missing, uncounted=part.uncounted and not kept)
            return self
        # the first reason explains those that follow
        if passes != self._usual and not self._unfit:
            self._unfit = (
                f"update {row[Board.UPDATES_CELL]} had {passes} backward passes, and most"
                f" before it {self._usual}: raise --ddp-warmup, or {_MARK}"
            )
        if part.steps == part.length:
            self._end_part(part.steps)
            return self._next_stretch()
        return self

    def _next_stretch(self) -> Timing | Window:
        """Begin the next stretch; without one, return what was measured."""
        length = next(self._lengths, None)
        if length is None:
            # more than ends of epochs: they are a kind of update of their own
            if 3 * self._left_out > self._rank.row[Board.STEP_CELL]:
                self._unfit = (
                    f"{self._left_out} steps had fewer backward passes: {_MARK}"
                )
            # nothing more is timed, and no stack is sampled
            self._rank.enter(Phase.DELIVERY)
            return self._window()
        self._counted.append(0)
        self._begin_part(length, uncounted=self._rank.stretches is not None)
        return self

    def _begin_part(self, length: int, *, uncounted: bool) -> None:
        self._part = Stretch(new_marks(length), self._rank, uncounted=uncounted)
        self._part.begin()

    def _end_part(self, kept: int) -> None:
        self._part.finish(kept)
        self._counted[-1] += self._part.counted
        if self._part.counted:
            self._taken.append(self._part)

    def _window(self) -> Window:
        counted = [steps for steps in self._counted if steps]
        found = window_of(self._taken, counted, self._warmed, self._rank)
        notes = found.notes
        if self._rank.plan.trace:
            notes += ("a program that owns its loop is not traced",)
        figures = found.figures
        if self._rank.written is not None:
            flush()
            written = self._rank.written.read()
            if both := {*figures} & {*written}:
                raise DdpPerfError(
                    f"{min(both)} is recorded by steps, and written by the program: give one"
                    " another name"
                )
            figures = {**figures, **written}
        return replace(
            found,
            unfit=self._unfit or found.unfit,
            left_out=self._left_out,
            notes=notes,
            figures=figures,
        )

    def when(self, _: bool) -> tuple[str, str]:
        """Return when the program has ended, and what to do then."""
        steps = self._rank.board.steps(0)
        part = self._part
        timed = sum(self._counted) + max(part.steps - part.uncounted, 0)
        return f"after {timed} of {steps} timed steps", (
            f"let it take {steps - timed} more steps (more where steps are faster), or ask for"
            " fewer (--ddp-steps, --ddp-min-time)"
        )


def refuse_wrong_group(plan: Plan, device: torch.device) -> None:
    """Raise DdpPerfError unless the program has the process group that was asked for."""
    if not dist.is_initialized():
        if plan.world_size > 1:
            remedy = "it has to call init_process_group()"
            if torch_names.find(_RPC_WORKERS):
                remedy = _USES_RPC
            raise DdpPerfError(
                f"the program trains without a process group: {remedy}"
            )
        return
    size = dist.get_world_size()
    if size != plan.world_size:
        raise wrong_size(size, plan.world_size)
    if device.type == "cpu" and torch.cuda.memory_allocated():
        raise DdpPerfError(
            "the program trains on cuda, and its ranks are measured on the CPU: set --ddp-device"
        )
    has = backends_by_device(dist.get_backend_config())
    backend = has.get(device.type, f"no backend for {device.type}")
    asked = plan.device_backend
    if backend != asked and not {backend, asked}.issubset(NCCL):
        raise DdpPerfError(
            f"the program's process group uses {backend}, and {asked} was asked for (--ddp-backend)"
        )
