"""The timed loop of one rank: set-up, and the window that follows the warm-up."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

import torch

from pytest_ddpperf.rank import clock, context, environment
from pytest_ddpperf.rank.context import Context
from pytest_ddpperf.rank.counters import Meter, count_compilations
from pytest_ddpperf.rank.group import OwnGroup
from pytest_ddpperf.rank.stamps import Arrivals, Stamps, rank_phases
from pytest_ddpperf.rank.warm_up import (
    Step,
    WarmUp,
    allocator_growth,
    warm_up,
    warm_up_freely,
)
from pytest_ddpperf.records.errors import DdpPerfError, short_repr
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import Window
from pytest_ddpperf.records.step_phases import RankPhases
from pytest_ddpperf.wire import payload
from pytest_ddpperf.wire.channels import Board, Phase


class Prepared:
    """The value that the user's set-up function made, and its clean-up if it was a generator."""

    def __init__(self, setup: Callable[..., Any], *args: Any) -> None:
        self.made: Any = context.call_keeping_locals(setup, *args)
        self._generator: Iterator[object] | None = None
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
        if not (callable(self.made) and payload.accepts(self.made, 0)):
            what = short_repr(self.made)
            if callable(self.made):
                what = f"{payload.name_of(self.made)}, which needs arguments"
            raise DdpPerfError(
                f"setup returned {what}; it must return the step to time, a callable without"
                " arguments (or yield it, and clean up after)"
            )
        step: Step = self.made
        return step

    def clean_up(self) -> None:
        if self._generator is None:
            return
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
    if plan.spreads and warmed.steps:
        warmed = warm_up_freely(step, warmed, ctx, own)
    # By the slowest rank, since none ends before it.
    steps = (
        plan.steps_for(max(*own.maximum([warmed.step_ns]), 1) / 1e9)
        if warmed.steps
        else plan.steps
    )
    board.set_steps(ctx.rank, steps)
    uncounted = 1 if stretches else 0
    taken: list[Stretch] = []
    counted = 0
    gc.collect()
    gc.disable()
    phases.begin()
    try:
        for length in stretches(steps, warmed.step_ns) if stretches else (steps,):
            has_own = stretches or plan.spreads
            marks = (
                memoryview(bytearray(8 * (length + 1))).cast("q")
                if has_own
                else board.marks(ctx.rank)
            )
            stretch = Stretch(length, marks, plan, ctx, uncounted=uncounted)
            stretch.take(step, board, meter, own, counted)
            phases.end(stretch)
            taken.append(stretch)
            counted += length - uncounted
    finally:
        gc.enable()
    board.enter(ctx.rank, Phase.DELIVERY, time.monotonic_ns())
    lengths = [
        stretch.length - uncounted for stretch in taken if stretch.length > uncounted
    ]
    return window_of(taken, lengths, warmed, phases, own, ctx, plan)


def window_of(
    taken: Sequence[Stretch],
    lengths: Sequence[int],
    warmed: WarmUp,
    phases: PhaseWatch,
    own: OwnGroup | None,
    ctx: Context,
    plan: Plan,
) -> Window:
    """Return what a window measured; `lengths` are the counted steps of its stretches. If there are
    more steps than the plan has room for, that many are kept, evenly spread."""
    # First, for what is asked for below takes time. Threads of RPC poll, with nothing to do.
    goes_on = not plan.rpc and environment.goes_on()
    notes = [*warmed.notes]
    facts = environment.of_rank(ctx, notes)
    compiled = _compiled_at(taken)
    unfit = {
        f"recompiled at step {compiled}: raise --ddp-warmup": compiled,
        "allocated device memory (an evaluation?): raise --ddp-warmup": any(
            stretch.has_grown for stretch in taken
        ),
        "was slowed down by heat or power: see ddpperf doctor": (
            warmed.is_slowed or facts.get("slowdown")
        ),
    }
    blocked = [
        ns
        for stretch in taken
        for ns in _differences(stretch.counted(stretch.blocked_ns))
    ]
    cpu = [
        ns for stretch in taken for ns in _differences(stretch.counted(stretch.cpu_ns))
    ]
    marks = [tuple(stretch.counted(stretch.marks_ns)) for stretch in taken]
    values = [value for stretch in taken for value in stretch.counted(stretch.returned)]
    figures = [each for stretch in taken for each in stretch.counted(stretch.recorded)]
    steps = [pair for each in marks for pair in pairwise(each)]
    if len(steps) > plan.room:
        kept, lengths = _spread(lengths, plan.room)
        steps, blocked = (
            [steps[index] for index in kept],
            [blocked[index] for index in kept],
        )
        values, figures = (
            [values[index] for index in kept],
            [figures[index] for index in kept],
        )
        marks = [*steps]
    return Window(
        marks_ns=tuple(each for each in marks if len(each) > 1),
        cpu_ns=tuple(cpu) if ctx.device.type == "cpu" else None,
        examples=context.count_examples(values),
        blocked_ns=tuple(blocked),
        counters=warmed.counters,
        losses=context.first_losses(
            [*warmed.losses, *(each.get("loss") for s in taken for each in s.recorded)]
        ),
        recorded=context.figures_by_name(figures),
        sent=tuple(warmed.sent),
        first_ratio=_first_ratio(taken) if warmed.steps and not compiled else 0.0,
        unsettled=warmed.unsettled,
        warmup=warmed.steps,
        phases=phases.phases(steps, own),
        stretches=tuple(lengths),
        notes=(*notes, *phases.notes),
        facts=facts,
        page_faults=round(
            sum(s.page_faults for s in taken) / max(1, sum(s.taken for s in taken)), 1
        ),
        goes_on=goes_on,
        unfit=next(
            (
                f"{plan.name(ctx.rank)} {words}"
                for words, is_so in unfit.items()
                if is_so
            ),
            "",
        ),
    )


def _spread(lengths: Sequence[int], most: int) -> tuple[list[int], list[int]]:
    """Return the indices of the `most` steps that are kept, and how many each stretch keeps,
    without those that keep none."""
    begins = [*accumulate(lengths, initial=0)]
    shares = [
        after - before
        for before, after in pairwise(end * most // begins[-1] for end in begins)
    ]
    each = zip(begins, lengths, shares, strict=False)
    kept = [
        begin + index * length // share
        for begin, length, share in each
        for index in range(share)
    ]
    return kept, [*filter(None, shares)]


class PhaseWatch:
    """What is known of the phases of steps: nothing in an RPC launch, of one collective, and on a
    device that each step waits for."""

    def __init__(self, plan: Plan, ctx: Context) -> None:
        self._is_program = bool(plan.boundary)
        self._on_cpu = ctx.device.type == "cpu"
        self._is_on = (
            not plan.rpc
            and plan.collective is None
            and (self._on_cpu or plan.timing == "free")
        )
        self._stamps = Stamps(ctx.device)
        self.notes: tuple[str, ...] = ()
        if self._is_on:
            try:
                self._stamps.install()
            except Exception as error:
                # of another version of torch: nothing else depends on phases
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._is_on = False
        self.notes = (
            f"phases of the step are unknown: {type(error).__name__}: {error}",
        )

    def finding(self, warmup: int, asked: int) -> AbstractContextManager[None]:
        """Find the modules that are stamped, in a warm-up step before those `asked` end: what this
        makes torch.compile do is over in the step that is counted."""
        return self.finding_modules() if warmup == max(asked - 4, 0) else nullcontext()

    def finding_modules(self) -> AbstractContextManager[None]:
        return self._stamps.finding_modules() if self._is_on else nullcontext()

    def begin(self) -> None:
        """The window is about to begin."""
        self._stamps.clear()
        self._arrivals = Arrivals()

    def end(self, stretch: Stretch) -> None:
        """A stretch of the window has ended."""
        if self._is_on:
            try:
                self._stamps.place(stretch.timer)
            except RuntimeError as error:
                self._give_up(error)

    def phases(
        self, steps: Sequence[tuple[int, int]], own: OwnGroup | None
    ) -> RankPhases | None:
        """Return the phases of the last counted `steps`, each a begin and an end."""
        if not self._is_on:
            return None
        stamps = self._stamps
        arrivals = (
            self._arrivals.read(own, stamps.messages)
            if self._on_cpu and stamps.knows_partners
            else None
        )
        before = stamps.before if self._is_program else None
        found = rank_phases(
            steps, stamps.taken, arrivals, has_ddp=stamps.has_ddp, before=before
        )
        if found is None:
            self.notes = (
                "phases of the step are unknown: one of its passes did not end within it",
            )
        return found


# That a step leaves on a device to be read after the window: its loss, its examples, and some that
# it records.
_FIGURES = 8
# Float32 numbers in 1 MiB, the largest block that CUDA's allocator splits into small ones, and
# those of 512 B in it.
_BLOCK, _COPIES = 1 << 18, 2048


class Stretch:
    """Steps in a row and their figures; cumulative ones have a value before the first step and
    after each."""

    def __init__(
        self,
        length: int,
        marks_ns: memoryview,
        plan: Plan,
        ctx: Context,
        *,
        uncounted: int,
    ) -> None:
        """The first `uncounted` of so many steps are not counted."""
        self._device, self._rank, self._ctx, self.length, self._uncounted = (
            ctx.device,
            ctx.rank,
            ctx,
            length,
            uncounted,
        )
        if self._device.type != "cpu":
            # The allocator keeps this memory for copies of figures: it need not ask the device in
            # the window.
            [
                torch.empty(_BLOCK, device=self._device)
                for _ in range(length * _FIGURES // _COPIES + 1)
            ]
            torch.accelerator.synchronize()
        self._allocated = allocator_growth(self._device)
        # the memory of the device that is in use or kept, in these steps
        self.has_grown = False
        self.timer = clock.StepClock(plan.timing, self._device, marks_ns)
        self.marks_ns = marks_ns
        self.returned: list[Any] = [None] * length
        self.recorded: list[Mapping[str, Any]] = [{}] * length
        self._cpu = clock.CpuClock()
        self.cpu_ns = [0] * (length + 1)  # zeros off CPU
        self.blocked_ns = [0] * (length + 1)
        self.graphs = [count_compilations()] * (length + 1)

    def take(
        self, step: Step, board: Board, meter: Meter, own: OwnGroup, counted: int
    ) -> None:
        """Time `step`, of which so many were `counted` before."""
        row, cell, timer, on_cpu = (
            board.row(self._rank),
            Board.STEP_CELL,
            self.timer,
            self._device.type == "cpu",
        )
        processed, cpu_ns, blocked_ns, graphs = (
            self.returned,
            self.cpu_ns,
            self.blocked_ns,
            self.graphs,
        )
        figures, recorded, record, cpu = (
            self._ctx.figures,
            self.recorded,
            self._ctx.record,
            self._cpu,
        )
        own.barrier()
        if board.phase(self._rank) is not Phase.STEPS:
            board.enter(self._rank, Phase.STEPS, time.monotonic_ns())
        self.begin()
        blocked_ns[0] = meter.blocked_ns()
        for index in range(self.length):
            row[cell] = counted + index
            value = step()
            timer.mark(index)
            if on_cpu:
                cpu_ns[index + 1] = cpu.read_ns()
            # Of the usual ones without a call.
            processed[index] = (
                value
                if value is None or type(value) is int
                else context.read_returned(value, record)
            )
            # the graph of a step's result must not live through the next step
            value = None
            if figures:
                recorded[index] = dict(figures)
                figures.clear()
            graphs[index + 1] = count_compilations()
            blocked_ns[index + 1] = meter.blocked_ns()

        def at_step(index: int) -> None:
            row[cell] = counted + index

        self.finish(self.length, self.length, at_step)

    def begin(self) -> None:
        """Mark the start of the steps."""
        self._ctx.figures.clear()  # of warm-up steps, or of set-up
        self._faults_before = clock.page_faults()
        self.timer.start()
        self.cpu_ns[0] = self._cpu.read_ns()

    def step_ended(self, index: int) -> None:
        """Mark the end of a step that the program took."""
        self.timer.mark(index)
        if self._device.type == "cpu":
            self.cpu_ns[index + 1] = self._cpu.read_ns()
        if self._ctx.figures:
            self.recorded[index] = dict(self._ctx.figures)
            self._ctx.figures.clear()
        self.graphs[index + 1] = count_compilations()

    def finish(
        self, steps: int, kept: int, at_step: Callable[[int], None] = lambda step: None
    ) -> None:
        """End after so many steps, of which only the first ones are `kept`; `at_step` is as
        `StepClock` has it."""
        self.timer.finish(steps, at_step)
        self.taken, self.page_faults = steps, clock.page_faults() - self._faults_before
        # One that is left out may need more memory, as an evaluation does.
        self.has_grown = (
            kept == steps and allocator_growth(self._device) != self._allocated
        )
        self.length = kept
        self.marks_ns = self.marks_ns[: kept + 1]
        self.cpu_ns, self.blocked_ns, self.graphs = (
            each[: kept + 1] for each in (self.cpu_ns, self.blocked_ns, self.graphs)
        )
        self.returned, self.recorded = self.returned[:kept], self.recorded[:kept]

    def counted(self, figures: Sequence[Any]) -> Sequence[Any]:
        """Return those of the steps that are counted."""
        return figures[self._uncounted :]


def _differences(totals: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise(totals)]


# Cold caches alone can make a shorter step ten times as long.
_COLD_NS = 1_000_000


def _first_ratio(taken: Sequence[Stretch]) -> float:
    """Return the first step of the window, counted or not, over the median of the others; 0 if it
    says nothing."""
    took = [ns for stretch in taken for ns in _differences(stretch.marks_ns)]
    return (
        took[0] / max(median(took[1:]), 1)
        if len(took) > 1 and took[0] > _COLD_NS
        else 0.0
    )


def _compiled_at(taken: Sequence[Stretch]) -> int:
    """Return the first counted step, from 1, in which torch.compile compiled something; 0 for
    none."""
    counted = 0
    for stretch in taken:
        before, *after = stretch.counted(stretch.graphs)
        for number, graphs in enumerate(after, 1):
            if graphs != before:
                return counted + number
        counted += len(after)
    return 0
