"""Times a program that owns its loop, by its optimizer updates, without a collective of ours.

What ends a step is learned in the warm-up. The window begins with the last update of the warm-up;
after its last one the rank delivers and ends, wherever the program is.
"""

from __future__ import annotations

import importlib
import inspect
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from statistics import multimode
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

import pytest_ddpperf
from pytest_ddpperf.rank import context, sampling, warm_up
from pytest_ddpperf.rank.counters import Meter
from pytest_ddpperf.rank.updates import Updates
from pytest_ddpperf.records.errors import DdpPerfError, EndedEarly, short_repr
from pytest_ddpperf.records.plan import MARK, UPDATE, Program
from pytest_ddpperf.records.samples import Window
from pytest_ddpperf.wire.channels import Board, Phase

if TYPE_CHECKING:
    from pytest_ddpperf.rank.process import Rank


class Loop:
    """The steps of a program: warm-up, then the window. `deliver` takes what was measured, and does
    not return."""

    def __init__(
        self, rank: Rank, ctx: context.Context, deliver: Callable[[Window], NoReturn]
    ) -> None:
        self._rank, self._plan, self._ctx, self._board, self._deliver = (
            rank,
            rank.plan,
            ctx,
            rank.board,
            deliver,
        )
        self._pid = os.getpid()
        self._row = self._board.row(rank.number)
        self._phases = sampling.PhaseWatch(rank.plan, ctx)
        self._within = ExitStack()  # what lasts for the warm-up step under way
        self._steady: warm_up.Steadiness | None = None
        self._meter = Meter()
        self._counters: Mapping[str, int | None] = {}
        self._ended_ns: list[int] = []  # of warm-up steps
        self._passes: list[int] = []  # backward passes of each that was seen to begin
        self._losses: list[Any] = []
        self._seen = 0  # steps that were seen to begin
        self._waited = 0  # warm-up steps that were synchronized
        self._is_slowed = False
        self._unsettled = ""
        self._warmed: warm_up.WarmUp | None = None  # once the window has begun
        self._lengths: Iterator[int] = iter(())
        self._taken: list[sampling.Stretch] = []
        # counted steps of each stretch that was asked for
        self._of_stretch: list[int] = []
        self._step = self._missing = self._uncounted = self._left_out = 0
        self._is_short = False  # the last step was left out
        self._unfit = ""

    def learned(self, ended_ns: list[int]) -> bool:
        """It is known where steps end, of which some have ended at these times; return whether that
        counts."""
        if self._ended_ns and self._board.begin(0):
            self._unfit = "steps end otherwise than in the warm-up: raise --ddp-warmup"
            return False
        self._within.close()
        self._ended_ns = ended_ns
        self._row[Board.UPDATES_CELL] += len(ended_ns)
        self._passes.clear()
        self._seen = 0
        self._losses.clear()
        return True

    def step_ended(self, passes: int) -> None:
        """A step of so many backward passes has ended."""
        if os.getpid() != self._pid:  # in a child that trains
            return
        self._row[Board.UPDATES_CELL] += 1
        if self._warmed is None:
            self._warm_up(passes)
        else:
            self._time(passes)

    # --- warm-up

    def _warm_up(self, passes: int) -> None:
        """The first step that is seen to begin finds modules, and the next is counted; not one that
        is shorter."""
        plan, board, done, seen = (
            self._plan,
            self._board,
            len(self._ended_ns),
            self._seen,
        )
        self._within.close()
        is_free = plan.spreads and board.begin(0) > 0 and self._waited > 1
        if self._ctx.device.type != "cpu" and not is_free:
            torch.accelerator.synchronize()
        self._ended_ns.append(time.monotonic_ns())
        if not is_free:
            self._waited = done + 1
        elif done == self._waited:
            self._is_slowed = warm_up.is_slowed(self._ctx)
        self._seen += 1
        if seen:
            self._passes.append(passes)
            if passes < max(self._passes):
                self._counters = {}  # of a shorter step
        if self._steady is None:
            self._refuse_wrong_group()
            self._rank.enter(Phase.WARMUP)
            self._steady = warm_up.Steadiness(self._ctx.device)
        self._row[Board.STEP_CELL] = done
        loss = self._ctx.figures.pop("loss", None)
        self._losses += [loss] * (done >= plan.warmup)
        if (
            self._rank.number == 0
            and seen
            and not board.begin(0)
            and done >= plan.warmup - 1
        ):
            self._decide(done)
        if not is_free:
            self._steady.changed()
        beyond = self._row[Board.UPDATES_CELL] - board.begin(0)
        if board.steps(0) and beyond > 0:
            if beyond > 1:
                raise DdpPerfError(board.describe_updates())
            self._begin_window()
        elif not seen:
            self._within.enter_context(self._phases.finding_modules())
        elif not self._counters:
            self._counters = self._within.enter_context(
                self._meter.counting(None, self._ctx.device)
            )

    def _decide(self, done: int) -> None:
        """Let the window begin soon after nothing changes any more, by what rank 0 sees.

        Ranks that synchronise in each update are as far as rank 0. Those that average their models
        now and then may be ahead."""
        assert self._steady is not None, "the first update made it"
        self._unsettled = self._steady.unsettled(None)
        if not self._unsettled or done >= self._plan.warmup + warm_up.WARMUP_BEYOND:
            step_ns = max(self._step_ns(), 1)
            first = max(self._board.updates()) + 1
            self._board.set_begin(
                0, first + self._plan.spreads * warm_up.count_free_steps(step_ns)
            )
            self._board.set_steps(0, self._plan.steps_for(step_ns / 1e9))

    def _step_ns(self) -> int:
        """Return the shortest of the last steps that waited for the device."""
        last = self._ended_ns[: self._waited][-warm_up.TELLING - 1 :]
        return min(after - before for before, after in pairwise(last))

    def _refuse_wrong_group(self) -> None:
        """Raise DdpPerfError unless the program has the process group that was asked for."""
        plan = self._plan
        if not dist.is_initialized():
            if plan.world_size > 1:
                raise DdpPerfError(
                    "the program trains without a process group: it has to call"
                    " init_process_group()"
                )
            return
        if (size := dist.get_world_size()) != plan.world_size:
            raise DdpPerfError(
                f"the program's process group has {size} ranks, and {plan.world_size} were"
                " asked for"
            )
        group: Any = dist.distributed_c10d._get_default_group()
        try:
            backend = group._get_backend(self._ctx.device).name()
        except RuntimeError:
            backend = f"no backend for {self._ctx.device.type}"
        if backend != plan.backend:
            raise DdpPerfError(
                f"the program's process group uses {backend}, and {plan.backend} was asked for"
            )

    # --- the window

    def _begin_window(self) -> None:
        steps, step_ns = self._board.steps(0), self._step_ns()
        self._board.set_steps(self._rank.number, steps)
        self._warmed = warm_up.WarmUp(
            steps=len(self._ended_ns),
            unsettled=self._unsettled,
            counters=self._counters,
            notes=self._meter.notes,
            losses=self._losses,
            step_ns=step_ns,
            is_slowed=self._is_slowed,
        )
        self._rank.enter(Phase.STEPS)
        self._lengths = iter((steps,))
        if self._rank.in_stretches:
            self._lengths = self._rank.stretches(steps, step_ns)
        self._usual = max(multimode(self._passes))
        self._phases.begin()
        self._next_stretch()

    def _next_stretch(self) -> None:
        """Begin the next stretch; without one, deliver."""
        length = next(self._lengths, None)
        if length is None:
            # nothing more is timed, and no stack is sampled
            self._rank.enter(Phase.DELIVERY)
            self._deliver(self._window())
        self._of_stretch.append(0)
        self._begin_part(length, int(self._rank.in_stretches))

    def _begin_part(self, length: int, uncounted: int) -> None:
        """Begin what is left of a stretch."""
        marks = memoryview(bytearray(8 * (length + 1))).cast("q")
        self._part = sampling.Stretch(
            length, marks, self._plan, self._ctx, uncounted=uncounted
        )
        self._step, self._missing, self._uncounted = 0, length, uncounted
        self._part.begin()

    def _end_part(self, kept: int) -> None:
        self._part.finish(self._step, kept)
        self._phases.end(self._part)
        counted = max(kept - self._uncounted, 0)
        if counted:
            self._taken.append(self._part)
        self._of_stretch[-1] += counted

    def _time(self, passes: int) -> None:
        """Mark the end of a step. A shorter one is left out, and its stretch goes on after it; not
        the next one, for epochs end otherwise."""
        self._part.step_ended(self._step)
        self._step += 1
        self._row[Board.STEP_CELL] += 1
        self._is_short = passes < self._usual and not self._is_short
        if self._is_short:
            self._left_out += 1
            self._end_part(self._step - 1)
            self._begin_part(
                self._missing - (self._step - 1), self._uncounted * (self._step == 1)
            )
            return
        if passes != self._usual:
            which = (
                f"update {self._row[Board.UPDATES_CELL]} had {passes} backward passes"
            )
            self._unfit = f"{which}, and those before {self._usual}: raise --ddp-warmup"
        if self._step == self._missing:
            self._end_part(self._step)
            self._next_stretch()

    def _window(self) -> Window:
        assert self._warmed is not None, "the window has begun"
        lengths = [*filter(None, self._of_stretch)]
        found = sampling.window_of(
            self._taken,
            lengths,
            self._warmed,
            self._phases,
            None,
            self._ctx,
            self._plan,
        )
        notes = found.notes + ("a program that owns its loop is not traced",) * bool(
            self._plan.trace
        )
        return replace(
            found,
            unfit=self._unfit or found.unfit,
            left_out=self._left_out,
            notes=notes,
        )

    # --- the end of a program that ended too soon

    def unfinished(self, ended: str) -> EndedEarly:
        """Say how far the program came; `ended` says how it ended."""
        plan, steps, done = self._plan, self._board.steps(0), len(self._ended_ns)
        needed = max(self._board.begin(0), 7 + plan.warmup) + (steps or plan.steps)
        advice = f"let it take {needed} or more"
        if self._warmed is not None:
            timed = sum(self._of_stretch) + max(self._step - self._uncounted, 0) * (
                self._step < self._missing
            )
            when = f"after {timed} of {steps} timed steps"
            advice = (
                f"let it take {steps - timed} more steps, or ask for fewer (--ddp-steps,"
                " --ddp-min-time)"
            )
        elif done:
            when = f"after {done} steps, in the warm-up"
        elif plan.boundary == UPDATE:
            when = "before its steps were recognized"
        else:
            when, advice = "without a step", f"{plan.boundary} never ended one"
        return EndedEarly(f"{ended} {when}", advice)


def run(
    rank: Rank,
    ctx: context.Context,
    program: Any,
    deliver: Callable[[Window], NoReturn],
    fail: Any,
) -> NoReturn:
    """Run a program until its window is over. `fail` reports an error and ends the rank; in a child
    of the rank it does nothing."""
    loop = Loop(rank, ctx, deliver)
    if rank.plan.boundary == UPDATE:
        Updates(loop.step_ended, loop.learned, fail).install()
    ended = "the program ended"
    try:
        if isinstance(program, Program):
            _prepare(program)
        if rank.plan.boundary != UPDATE:
            _mark_steps(rank.plan.boundary, loop, fail)
        if isinstance(program, Program):
            _run(program)
        else:
            context.call_keeping_locals(program, ctx)
    except SystemExit as error:
        rank.end_child(error)
        if error.code not in (None, 0):
            raise DdpPerfError(
                f"the program called sys.exit({short_repr(error.code)}): {_last_line()}"
            ) from None
        frames = traceback.extract_tb(error.__traceback__)
        # as `exit` is
        last = [frame for frame in frames if "_sitebuiltins" not in frame.filename][-1]
        where = f"{last.filename.removeprefix(os.getcwd() + os.sep)}:{last.lineno}"
        ended = f"the program called sys.exit({error.code or 0}) in {where}"
    rank.end_child()
    raise loop.unfinished(ended)


def _mark_steps(
    boundary: str, loop: Loop, fail: Callable[[BaseException], None]
) -> None:
    """Let a step end where the program says so, or where a function returns:
    "package.module:Class.method"."""

    def mark() -> None:
        try:
            loop.step_ended(1)
        except Exception as error:  # which the program might catch
            fail(error)

    if boundary == MARK:
        pytest_ddpperf._marks.append(mark)
        return
    module, _, path = boundary.partition(":")
    *owners, last = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    found = inspect.getattr_static(owner, last)
    function = getattr(found, "__func__", found)  # of a class method or static method

    @wraps(function)
    def marking(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        mark()
        return result

    setattr(owner, last, marking if function is found else type(found)(marking))


def _prepare(program: Program) -> None:
    """Let this process look as Python does for a program: its own folder, or that of a module,
    first on sys.path."""
    os.chdir(program.cwd)
    sys.argv[:] = [program.path, *program.args]
    sys.path.insert(
        0, program.cwd if program.is_module else os.path.dirname(program.path)
    )


def _run(program: Program) -> None:
    if program.is_module:
        runpy.run_module(program.path, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program.path, run_name="__main__")


def _last_line() -> str:
    """Return the last line that this process wrote to its error output."""
    with suppress(OSError, ValueError):
        sys.stderr.flush()
        with open(os.readlink("/proc/self/fd/2"), errors="replace") as log:
            lines = [line.strip() for line in log if line.strip()]
            return lines[-1] if lines else "it wrote nothing"
    return "see its error output"
