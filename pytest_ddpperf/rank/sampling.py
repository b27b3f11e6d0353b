"""The timed steps of one rank whose set-up function made the step."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pytest_ddpperf.rank import context
from pytest_ddpperf.rank.timed_rank import TimedRank
from pytest_ddpperf.rank.warm_up import Step, warm_up, warm_up_freely
from pytest_ddpperf.rank.window import Stretch, new_marks, window_of
from pytest_ddpperf.records.errors import DdpPerfError, short_repr
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


def measure(step: Step, rank: TimedRank) -> Window:
    """Warm up, then time the steps of the window, each stretch of them from a common start.

    Between several stretches other processes use the cores, so the first step of each, with cold
    caches, is not counted. Garbage is collected before the window, so that both sides start with
    none; collecting before each stretch would give loaders time to get ahead.
    """
    plan = rank.plan
    board = rank.board
    number = rank.ctx.rank
    warmed = warm_up(step, rank)
    steps = plan.steps
    if warmed.steps:
        if plan.spreads:
            warmed = warm_up_freely(step, warmed, rank)
        # By the slowest rank, since none ends before it.
        (slowest_ns,) = rank.own.maximum([warmed.step_ns])
        steps = plan.steps_for(max(slowest_ns, 1) / 1e9)
    board.set_steps(number, steps)
    lengths: Iterable[int] = (steps,)
    if rank.stretches is not None:
        lengths = rank.stretches(steps, warmed.step_ns)
    on_board = rank.stretches is None and not plan.spreads
    taken = []
    counted = 0
    rank.begin_window()
    for length in lengths:
        marks = board.marks(number) if on_board else new_marks(length)
        stretch = Stretch(marks, rank, uncounted=rank.stretches is not None)
        _take(step, stretch, rank, counted)
        taken.append(stretch)
        counted += stretch.counted
    rank.enter(Phase.DELIVERY)
    lengths = [stretch.counted for stretch in taken if stretch.counted]
    return window_of(taken, lengths, warmed, rank)


def _take(step: Step, stretch: Stretch, rank: TimedRank, counted: int) -> None:
    """Time a stretch of steps, of which so many were `counted` before."""
    row = rank.row
    cell = Board.STEP_CELL
    mark = stretch.mark

    def at_step(index: int) -> None:
        row[cell] = counted + index

    rank.own.barrier()
    if rank.board.phase(rank.ctx.rank) is not Phase.STEPS:
        rank.enter(Phase.STEPS)
    stretch.begin()
    for index in range(stretch.length):
        row[cell] = counted + index
        # The graph of a step's result does not live through the next step.
        mark(step())
    stretch.finish(stretch.length, at_step)
