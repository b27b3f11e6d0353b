"""The timed steps of one rank whose set-up function made the step."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pytest_ddpperf.rank import context
from pytest_ddpperf.rank.context import Context
from pytest_ddpperf.rank.counters import Meter
from pytest_ddpperf.rank.group import OwnGroup
from pytest_ddpperf.rank.stamps import PhaseWatch
from pytest_ddpperf.rank.warm_up import Step, warm_up, warm_up_freely
from pytest_ddpperf.rank.window import Stretch, new_marks, window_of
from pytest_ddpperf.records.errors import DdpPerfError, short_repr
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import Window
from pytest_ddpperf.wire import payload
from pytest_ddpperf.wire.channels import Board, Phase


class Prepared:
    """The value that the user's set-up function made, and its clean-up if it was a generator."""

    def __init__(self, setup: Callable[..., Any], *args: Any) -> None:
        self.made: Any = context.call_keeping_locals(setup, *args)
        self._generator: Iterator[object] = iter(())
        if inspect.isgenerator(self.made):
            self._generator = self.made
            self.made = next(self._generator, None)
        elif kind := context.describe_not_run(self.made):
            raise DdpPerfError(
                f"setup returned {kind}, which did not run: it must be a plain function that"
                " returns the step, or a generator that yields it"
            )

    @property
    def step(self) -> Step:
        step: Step = self.made
        if callable(step) and payload.accepts(step, 0):
            return step
        what = short_repr(step)
        if callable(step):
            what = f"{payload.name_of(step)}, which needs arguments"
        raise DdpPerfError(
            f"setup returned {what}; it must return the step to time, a callable without"
            " arguments (or yield it, and clean up after)"
        )

    def clean_up(self) -> None:
        for _ in self._generator:
            raise DdpPerfError("setup yielded twice; it must yield once")


# How many steps each stretch of a window of so many steps has, one after the other; a step lasts so
# many nanoseconds.
Stretches = Callable[[int, int], Iterable[int]]


def measure(
    step: Step,
    plan: Plan,
    ctx: Context,
    board: Board,
    meter: Meter,
    own: OwnGroup,
    stretches: Stretches | None,
) -> Window:
    """Warm up, then time the steps of the window, each stretch of them from a common start; None:
    it is one stretch.

    Between several stretches other processes use the cores, so the first step of each, with cold
    caches, is not counted. Garbage is collected before the window only: collecting before each
    stretch would give loaders time to get ahead.
    """
    phases = PhaseWatch(plan, ctx)
    warmed = warm_up(step, plan, ctx, board, meter, own, phases)
    steps = plan.steps
    if warmed.steps:
        if plan.spreads:
            warmed = warm_up_freely(step, warmed, ctx, own)
        # By the slowest rank, since none ends before it.
        (slowest_ns,) = own.maximum([warmed.step_ns])
        steps = plan.steps_for(max(slowest_ns, 1) / 1e9)
    board.set_steps(ctx.rank, steps)
    lengths: Iterable[int] = (steps,)
    if stretches is not None:
        lengths = stretches(steps, warmed.step_ns)
    on_board = stretches is None and not plan.spreads
    taken: list[Stretch] = []
    gc.collect()
    gc.disable()
    phases.begin()
    try:
        for length in lengths:
            marks = board.marks(ctx.rank) if on_board else new_marks(length)
            uncounted = 0 if stretches is None else 1
            stretch = Stretch(marks, plan, ctx, meter, uncounted=uncounted)
            _take(step, stretch, board, ctx.rank, own, sum(s.counted for s in taken))
            phases.end(stretch.timer)
            taken.append(stretch)
    finally:
        gc.enable()
    board.enter(ctx.rank, Phase.DELIVERY, time.monotonic_ns())
    counted = [stretch.counted for stretch in taken if stretch.counted]
    return window_of(taken, counted, warmed, phases, own, ctx, plan)


def _take(
    step: Step, stretch: Stretch, board: Board, rank: int, own: OwnGroup, counted: int
) -> None:
    """Time a stretch of steps, of which so many were `counted` before."""
    row, cell, mark = board.row(rank), Board.STEP_CELL, stretch.mark

    def at_step(index: int) -> None:
        row[cell] = counted + index

    own.barrier()
    if board.phase(rank) is not Phase.STEPS:
        board.enter(rank, Phase.STEPS, time.monotonic_ns())
    stretch.begin()
    for index in range(stretch.length):
        row[cell] = counted + index
        # The graph of a step's result does not live through the next step.
        mark(step())
    stretch.finish(stretch.length, at_step)
