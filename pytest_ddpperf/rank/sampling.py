"""The timed loop of one rank: set-up, warm-up until nothing changes any more, the timed window."""

from __future__ import annotations

import gc
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from pytest_ddpperf.rank import clock, context, environment
from pytest_ddpperf.rank.context import Context
from pytest_ddpperf.rank.counters import Meter, count_compilations, recorded
from pytest_ddpperf.rank.group import OwnGroup
from pytest_ddpperf.rank.stamps import Arrivals, Stamps, rank_phases
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import Window
from pytest_ddpperf.records.step_phases import RankPhases
from pytest_ddpperf.wire import payload
from pytest_ddpperf.wire.channels import Board, Phase

Step = Callable[[], Any]


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
                f"setup returned {kind}, which did not run: it must be a plain function that returns the step, "
                "or a generator that yields it"
            )

    @property
    def step(self) -> Step:
        if not (callable(self.made) and payload.accepts(self.made, 0)):
            what = f"{payload.name_of(self.made)}, which needs arguments" if callable(self.made) else repr(self.made)
            raise DdpPerfError(
                f"setup returned {what}; it must return the step to time, a callable without arguments "
                "(or yield it, and clean up after)"
            )
        step: Step = self.made
        return step

    def clean_up(self) -> None:
        if self._generator is None:
            return
        for _ in self._generator:
            raise DdpPerfError("setup yielded twice; it must yield once")


# How many steps each stretch of a window of so many steps has, one after the other; a step lasts so many nanoseconds.
Stretches = Callable[[int, int], Iterable[int]]


def measure(
    step: Step, plan: Plan, ctx: Context, board: Board, meter: Meter, own: OwnGroup, stretches: Stretches | None
) -> Window:
    """Warm up, then time the steps of the window, each stretch of them from a common start; None: it is one stretch.

    Between several stretches other processes use the cores, so the first step of each, with cold caches, is not
    counted. Garbage is collected before the window only: collecting before each stretch would give loaders time to get
    ahead.
    """
    phases = PhaseWatch(plan, ctx)
    warmed = _warm_up(step, plan, ctx, board, meter, own, phases)
    if ctx.device.type != "cpu" and plan.timing == "free" and warmed.steps:
        _warm_up_freely(step, warmed, ctx, own)
    steps = _window_steps(warmed, plan, own)
    if stretches:
        steps = min(steps, plan.room)
    board.set_steps(ctx.rank, steps)
    uncounted = 1 if stretches else 0
    taken: list[Stretch] = []
    counted = 0
    gc.collect()
    gc.disable()
    phases.begin()
    grown = _allocator_growth(ctx.device)
    try:
        for length in stretches(steps, warmed.step_ns) if stretches else (steps,):
            has_own = stretches or plan.spreads
            marks = memoryview(bytearray(8 * (length + 1))).cast("q") if has_own else board.marks(ctx.rank)
            stretch = Stretch(length, marks, plan, ctx, uncounted=uncounted)
            stretch.take(step, board, meter, own, counted)
            phases.end(stretch)
            taken.append(stretch)
            counted += length - uncounted
    finally:
        gc.enable()
    board.enter(ctx.rank, Phase.DELIVERY, time.monotonic_ns())
    window = window_of(taken, warmed, phases, own, ctx, most=plan.room)
    if _allocator_growth(ctx.device) != grown:
        window = replace(window, unfit=f"rank {ctx.rank} allocated device memory: raise --ddp-warmup")
    return window


def window_of(
    taken: Sequence[Stretch], warmed: WarmUp, phases: PhaseWatch, own: OwnGroup | None, ctx: Context, most: int
) -> Window:
    """Return what the stretches of a window measured: of more than so many steps, as many, evenly spread."""
    facts = environment.of_rank(ctx)
    slowed = f"the device of rank {ctx.rank} was slowed down by heat or power: see ddpperf doctor"
    blocked = [ns for stretch in taken for ns in _differences(stretch.counted(stretch.blocked_ns))]
    cpu = [ns for stretch in taken for ns in _differences(stretch.counted(stretch.cpu_ns))]
    marks = [tuple(stretch.counted(stretch.marks_ns)) for stretch in taken]
    values = [value for stretch in taken for value in stretch.counted(stretch.returned)]
    figures = [each for stretch in taken for each in stretch.counted(stretch.recorded)]
    steps = [pair for each in marks for pair in pairwise(each)]
    is_spread = len(steps) > most
    if is_spread:
        kept = [index * len(steps) // most for index in range(most)]
        steps, blocked = [steps[index] for index in kept], [blocked[index] for index in kept]
        values, figures = [values[index] for index in kept], [figures[index] for index in kept]
        marks = [*steps]
    return Window(
        marks_ns=tuple(each for each in marks if len(each) > 1),
        cpu_ns=tuple(cpu) if ctx.device.type == "cpu" else None,
        examples=context.count_examples(values),
        blocked_ns=tuple(blocked),
        counters=warmed.counters,
        losses=context.first_losses([*warmed.losses, *(each.get("loss") for s in taken for each in s.recorded)]),
        recorded=context.figures_by_name(figures),
        compiled_at=_compiled_at(taken),
        sent=tuple(warmed.sent),
        first_ratio=_first_ratio(taken) if warmed.steps else 0.0,
        unsettled=warmed.unsettled,
        warmup=warmed.steps,
        phases=phases.phases(steps, own),
        stretches=(most,) if is_spread else (),
        notes=phases.notes,
        facts=facts,
        unfit=slowed if facts.get("slowdown") else "",
    )


class PhaseWatch:
    """What is known of the phases of steps: nothing in an RPC launch, of one collective, and on a device that each step
    waits for."""

    def __init__(self, plan: Plan, ctx: Context) -> None:
        self._is_program = bool(plan.boundary)
        self._on_cpu = ctx.device.type == "cpu"
        self._is_on = not plan.rpc and plan.collective is None and (self._on_cpu or plan.timing == "free")
        self._stamps = Stamps(ctx.device)
        self.notes: tuple[str, ...] = ()
        if self._is_on:
            try:
                self._stamps.install()
            except Exception as error:  # of another version of torch: nothing else depends on phases
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._is_on = False
        self.notes = (f"phases of the step are unknown: {type(error).__name__}: {error}",)

    def finding(self, warmup: int, asked: int) -> AbstractContextManager[None]:
        """Find the modules that are stamped, in a warm-up step before those `asked` end: what this makes torch.compile
        do is over in the step that is counted."""
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

    def phases(self, steps: Sequence[tuple[int, int]], own: OwnGroup | None) -> RankPhases | None:
        """Return the phases of the last counted `steps`, each a begin and an end."""
        if not self._is_on:
            return None
        stamps = self._stamps
        arrivals = self._arrivals.read(own) if self._on_cpu else None
        before = stamps.before if self._is_program else None
        found = rank_phases(steps, stamps.taken, arrivals, has_ddp=stamps.has_ddp, before=before)
        if found is None:
            self.notes = ("phases of the step are unknown: one of its passes did not end within it",)
        return found


class Stretch:
    """Steps in a row and their figures; cumulative ones have a value before the first step and after each."""

    def __init__(self, length: int, marks_ns: memoryview, plan: Plan, ctx: Context, *, uncounted: int = 0) -> None:
        """The first `uncounted` of so many steps are not counted."""
        self._device, self._rank, self._ctx, self.length, self._uncounted = ctx.device, ctx.rank, ctx, length, uncounted
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        self.timer = clock.StepClock(plan.timing, self._device, marks_ns)
        self.marks_ns = marks_ns
        self.returned: list[Any] = [None] * length
        self.recorded: list[Mapping[str, Any]] = [{}] * length
        self._cpu = clock.CpuClock()
        self.cpu_ns = [0] * (length + 1)  # zeros off CPU
        self.blocked_ns = [0] * (length + 1)
        self.graphs = [count_compilations()] * (length + 1)

    def take(self, step: Step, board: Board, meter: Meter, own: OwnGroup, counted: int) -> None:
        """Time `step`, of which so many were `counted` before."""
        row, cell, timer, on_cpu = board.row(self._rank), Board.STEP_CELL, self.timer, self._device.type == "cpu"
        processed, cpu_ns, blocked_ns, graphs = self.returned, self.cpu_ns, self.blocked_ns, self.graphs
        figures, recorded, record, cpu = self._ctx.figures, self.recorded, self._ctx.record, self._cpu
        figures.clear()  # of warm-up steps, or of set-up
        own.barrier()
        if board.phase(self._rank) is not Phase.STEPS:
            board.enter(self._rank, Phase.STEPS, time.monotonic_ns())
        timer.start()
        blocked_ns[0] = meter.blocked_ns()
        cpu_ns[0] = cpu.read_ns()
        for index in range(self.length):
            row[cell] = counted + index
            value = step()
            timer.mark(index)
            if on_cpu:
                cpu_ns[index + 1] = cpu.read_ns()
            # Of the usual ones without a call.
            processed[index] = value if value is None or type(value) is int else context.read_returned(value, record)
            value = None  # the graph of a step's result must not live through the next step
            if figures:
                recorded[index] = dict(figures)
                figures.clear()
            graphs[index + 1] = count_compilations()
            blocked_ns[index + 1] = meter.blocked_ns()

        def at_step(index: int) -> None:
            row[cell] = counted + index

        timer.finish(self.length, at_step)

    def begin(self) -> None:
        """Mark the start of steps that a program takes."""
        self._ctx.figures.clear()
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

    def finish(self, steps: int, kept: int) -> None:
        """End after so many steps, of which only the first ones are `kept`."""
        self.timer.finish(steps)
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
    """Return the first step of the window, counted or not, over the median of the others; 0 if it says nothing."""
    took = [ns for stretch in taken for ns in _differences(stretch.marks_ns)]
    return took[0] / max(median(took[1:]), 1) if len(took) > 1 and took[0] > _COLD_NS else 0.0


def _compiled_at(taken: Sequence[Stretch]) -> int:
    """Return the first counted step, from 1, in which torch.compile compiled something; 0 for none."""
    counted = 0
    for stretch in taken:
        before, *after = stretch.counted(stretch.graphs)
        for number, graphs in enumerate(after, 1):
            if graphs != before:
                return counted + number
        counted += len(after)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    steps: int  # it took
    unsettled: str  # what its last step still changed, in words
    counters: Mapping[str, int | None]  # of a step; nothing is known of less than three
    sent: Sequence[int] = ()  # as `Window` has it
    losses: list[Any] = field(default_factory=list)  # of the steps beyond those asked, None where one recorded none
    step_ns: int = 0  # the shortest of its last steps, with what it left the device to do


# Of the warm-up, the steps that tell how long one takes: enough for one of them to be undisturbed, and late enough for
# what only the first steps do to be over.
TELLING = 3
# Of the warm-up, the step in which is counted: the last but one asked, for counting should not be the last thing that
# happens before the window. DDP rebuilds its buckets in the second step, so counts hold from the third on.
_COUNTED_FROM = 3


def _warm_up(
    step: Step, plan: Plan, ctx: Context, board: Board, meter: Meter, own: OwnGroup, phases: PhaseWatch
) -> WarmUp:
    """Take the asked steps, and more until no rank's last one changed anything, up to a cap."""
    row, cell = board.row(ctx.rank), Board.STEP_CELL
    board.enter(ctx.rank, Phase.WARMUP, time.monotonic_ns())
    counters: Mapping[str, int | None] = {}
    if plan.warmup == 0:
        return WarmUp(steps=0, unsettled="", counters=counters)
    watch = Steadiness(ctx.device)
    step_ns, sent, losses = [], [], []
    watched = (0, max(plan.warmup - 2, _COUNTED_FROM - 1)) if plan.warmup >= _COUNTED_FROM else ()
    for index in range(plan.warmup + WARMUP_BEYOND):
        if index >= plan.warmup - 1:
            watch.changed()
        row[cell] = index
        before = recorded(own) if index in watched else None
        began = time.monotonic_ns()
        with phases.finding(index, plan.warmup):
            if index and index in watched:
                with meter.counting(own, ctx.device) as counters:
                    step()
            else:
                context.read_returned(step(), ctx.record)
        if ctx.device.type != "cpu":
            torch.accelerator.synchronize()
        step_ns.append(time.monotonic_ns() - began)
        losses += [ctx.figures.pop("loss", None)] * (index >= plan.warmup)
        if index in watched and (after := recorded(own)) is not None:
            sent.append(len(after.keys() - (before or {}).keys()))
        if index >= plan.warmup - 1:
            unsettled = watch.unsettled(own)
            if not unsettled:
                break
    shortest = min(step_ns[-TELLING:])
    return WarmUp(steps=index + 1, unsettled=unsettled, counters=counters, sent=sent, losses=losses, step_ns=shortest)


# Of steps that do not wait for the device: its clock is slow after a pause, and rises within a second.
_FREELY_SECONDS = 1.0


def _warm_up_freely(step: Step, warmed: WarmUp, ctx: Context, own: OwnGroup) -> None:
    """Take more steps as the window does, without waiting for the device after each: its queue fills, and memory that
    is in use until then is allocated now."""
    slowest = max(*own.maximum([warmed.step_ns]), 1) / 1e9
    for _ in range(max(TELLING, math.ceil(_FREELY_SECONDS / slowest))):
        context.read_returned(step(), ctx.record)
        warmed.losses.append(ctx.figures.get("loss"))
        ctx.figures.clear()
    torch.accelerator.synchronize()


def _window_steps(warmed: WarmUp, plan: Plan, own: OwnGroup) -> int:
    """Return how many steps all ranks time, by the slowest rank, since none ends before it."""
    if not warmed.steps:
        return plan.steps
    return plan.steps_for(max(*own.maximum([warmed.step_ns]), 1) / 1e9)


# How many steps the warm-up may go on beyond those asked, until nothing changes any more.
WARMUP_BEYOND = 20
_CAUSES = ("compiling", "allocating device memory", "rebuilding gradient buckets")


class Steadiness:
    """One rank's view of whether its last step changed anything that later steps find done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rebuilds = 0
        # DDP reports the rebuilds of its buckets to its log only, whatever log level the user set.
        log = logging.getLogger("torch.nn.parallel.distributed")
        log.info, self._info = self._count_rebuild, log.info  # type: ignore[method-assign, assignment]
        self._before = self._counts()

    def _counts(self) -> tuple[int, ...]:
        return count_compilations(), _allocator_growth(self._device), self._rebuilds

    def _count_rebuild(self, message: object, *arguments: object, **options: Any) -> None:
        self._rebuilds += "buckets have been rebuilt" in str(message)
        self._info(message, *arguments, **{"stacklevel": 2, **options})

    def changed(self) -> list[bool]:
        """Return whether anything changed since the last call, by cause."""
        now, before = self._counts(), self._before
        self._before = now
        return [after != earlier for after, earlier in zip(now, before, strict=True)]

    def unsettled(self, own: OwnGroup | None) -> str:
        """Describe what the last step changed in any rank; all ranks call it together. Without a group of our `own`, of
        this rank."""
        changes = own.maximum(self.changed()) if own is not None else self.changed()
        return ", ".join(cause for cause, any_rank in zip(_CAUSES, changes, strict=True) if any_rank)


def _allocator_growth(device: torch.device) -> int:
    """Return how often the caching allocator asked the device for memory, plus how often it tried again because there
    was too little. The number of segments would not do: an expandable segment grows without a new one."""
    if device.type == "cpu":
        return 0
    stats = torch.accelerator.memory_stats(device)
    return int(stats.get("num_device_alloc", 0)) + int(stats.get("num_alloc_retries", 0))
