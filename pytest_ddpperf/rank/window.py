"""The window of a rank: stretches of timed steps, and what they come to."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from pytest_ddpperf.rank import clock, context, environment
from pytest_ddpperf.rank.counters import compilation_state
from pytest_ddpperf.rank.timed_rank import TimedRank
from pytest_ddpperf.rank.warm_up import WarmUp, allocator_growth
from pytest_ddpperf.records.samples import Scalar, Window

# That a step leaves on a device to be read after the window: its loss, its examples, and some that
# it records.
_FIGURES = 8
# Float32 numbers in 1 MiB, the largest block that CUDA's allocator splits into small ones, and
# those of 512 B in it.
_BLOCK = 1 << 18
_COPIES = 2048


class TimedStep(NamedTuple):
    begin_ns: int
    end_ns: int
    cpu_ns: int  # 0 off CPU
    blocked_ns: int
    has_compiled: bool
    returned: Any
    recorded: Mapping[str, Any]


def new_marks(steps: int) -> memoryview:
    """Return memory for the marks of so many steps."""
    return memoryview(bytearray(8 * (steps + 1))).cast("q")


class Stretch:
    """Steps in a row, which their caller takes between `begin` and `finish`, and `mark`s each."""

    def __init__(
        self, marks_ns: memoryview, rank: TimedRank, *, uncounted: bool
    ) -> None:
        """There is a mark for the begin of the first step, and one for the end of each. The first
        step may be `uncounted`."""
        self.marks_ns = marks_ns
        length = len(marks_ns) - 1
        self.length = length  # in the end, the steps that are kept
        self.uncounted = uncounted
        self.steps = 0  # taken so far
        self.page_faults = 0
        self.collector_ns = 0
        # the memory of the device that is in use or kept, in these steps
        self.has_grown = False
        self._rank = rank
        self._ctx = rank.ctx
        if not rank.on_cpu:
            # The allocator keeps this memory for copies of figures: it need not ask the device in
            # the window.
            room = [
                torch.empty(_BLOCK, dtype=torch.float32, device=rank.ctx.device)
                for _ in range(length * _FIGURES // _COPIES + 1)
            ]
            del room
            torch.accelerator.synchronize()
        self._allocated = allocator_growth(rank.ctx.device)
        self.timer = clock.StepClock(
            rank.plan.timing, rank.ctx.device, marks_ns
        )
        self._cpu = clock.CpuClock()
        self._collector = clock.CollectorClock()
        # Cumulative: before the first step, and after each.
        self._cpu_ns = [0] * (length + 1)
        self._blocked_ns = [0] * (length + 1)
        self._graphs = [compilation_state()] * (length + 1)
        # Of each step.
        self._returned: list[Any] = [None] * length
        self._recorded: list[Mapping[str, Any]] = [{}] * length

    def begin(self) -> None:
        """Mark the start of the steps."""
        self._ctx.figures.clear()  # of warm-up steps, or of set-up
        self._faults_before = clock.page_faults()
        self._collector.start()
        self.timer.start()
        self._cpu_ns[0] = self._cpu.read_ns()
        self._blocked_ns[0] = self._rank.meter.blocked_ns()

    def mark(self, returned: Any = None) -> None:
        """Mark the end of a step, and keep what it returned and recorded."""
        step = self.steps
        self.timer.mark(step)
        after = step + 1
        self.steps = after
        if self._rank.on_cpu:
            self._cpu_ns[after] = self._cpu.read_ns()
        if returned is not None:
            # the usual ones without a call
            self._returned[step] = (
                returned
                if type(returned) is int
                else context.read_returned(returned, self._ctx.keep)
            )
        figures = self._ctx.figures
        if figures:
            self._recorded[step] = dict(figures)
            figures.clear()
        self._graphs[after] = compilation_state()
        self._blocked_ns[after] = self._rank.meter.blocked_ns()

    def finish(
        self, kept: int, at_step: Callable[[int], None] = lambda step: None
    ) -> None:
        """End after the steps so far, of which the first ones are `kept`; `at_step` is as
        `StepClock` has it."""
        self.timer.finish(self.steps, at_step)
        self.page_faults = clock.page_faults() - self._faults_before
        self.collector_ns = self._collector.stop()
        # One that is left out may need more memory, as an evaluation does.
        if kept == self.steps:
            now = allocator_growth(self._ctx.device)
            self.has_grown = now != self._allocated
        self.length = kept
        self._rank.phases.end(self.timer)

    @property
    def counted(self) -> int:
        """The number of steps that count."""
        return max(self.length - self.uncounted, 0)

    def counted_marks(self) -> tuple[int, ...]:
        return tuple(self.marks_ns[self.uncounted : self.length + 1])

    def timed_steps(self) -> list[TimedStep]:
        """Return all steps that are kept, counted or not."""
        return [
            TimedStep(
                self.marks_ns[step],
                self.marks_ns[step + 1],
                self._cpu_ns[step + 1] - self._cpu_ns[step],
                self._blocked_ns[step + 1] - self._blocked_ns[step],
                self._graphs[step + 1] != self._graphs[step],
                self._returned[step],
                self._recorded[step],
            )
            for step in range(self.length)
        ]


def window_of(
    taken: Sequence[Stretch],
    lengths: Sequence[int],
    warmed: WarmUp,
    rank: TimedRank,
) -> Window:
    """Return what a window measured; `lengths` are the counted steps of its stretches. If there are
    more steps than the plan has room for, that many are kept, evenly spread."""
    plan = rank.plan
    ctx = rank.ctx
    # First, for what is asked for below takes time. Threads of RPC poll, with nothing to do.
    goes_on = not plan.rpc and environment.goes_on()
    notes = [*warmed.notes]
    facts = environment.of_rank(ctx, notes)
    all_steps = []
    steps = []
    for stretch in taken:
        timed = stretch.timed_steps()
        all_steps.extend(timed)
        steps.extend(timed[stretch.uncounted :])
    marks = [stretch.counted_marks() for stretch in taken if stretch.counted]
    compiled = [
        number for number, step in enumerate(steps, 1) if step.has_compiled
    ]
    why_unfit = _why_unfit(taken, compiled, warmed, facts)
    if len(steps) > plan.room:
        kept, lengths = _spread(lengths, plan.room)
        steps = [steps[index] for index in kept]
        marks = [(step.begin_ns, step.end_ns) for step in steps]
    said = [step.recorded for step in steps]
    losses = [step.recorded.get("loss") for step in all_steps]
    times = [(step.begin_ns, step.end_ns) for step in steps]
    return Window(
        marks_ns=tuple(marks),
        cpu_ns=tuple(step.cpu_ns for step in steps) if rank.on_cpu else None,
        examples=context.count_examples([step.returned for step in steps]),
        blocked_ns=tuple(step.blocked_ns for step in steps),
        counters=warmed.counters,
        losses=context.first_losses([*warmed.losses, *losses]),
        recorded=context.figures_by_name(said),
        # A program may record after its update, so its first record may contain the pause before
        # the window. In stretches, the first step does not count.
        figures=context.judged_figures(
            ctx.judged, said, plan.boundary and rank.stretches is None
        ),
        sent=tuple(warmed.sent),
        first_ratio=_first_ratio(all_steps)
        if warmed.steps and not compiled
        else 0.0,
        unsettled=warmed.unsettled,
        warmup=warmed.steps,
        phases=rank.phases.phases(times, rank.own),
        stretches=tuple(lengths),
        notes=(*notes, *rank.phases.notes),
        facts=facts,
        page_faults=round(_mean(taken, "page_faults"), 1),
        collector_seconds=_mean(taken, "collector_ns") / 1e9,
        goes_on=goes_on,
        unfit=f"{plan.name(ctx.rank)} {why_unfit}" if why_unfit else "",
    )


def _mean(taken: Sequence[Stretch], name: str) -> float:
    """Return the mean over all steps of a figure that each stretch has."""
    total = sum(getattr(stretch, name) for stretch in taken)
    return float(total / max(1, sum(stretch.steps for stretch in taken)))


def _why_unfit(
    taken: Sequence[Stretch],
    compiled: list[int],
    warmed: WarmUp,
    facts: Mapping[str, Scalar],
) -> str:
    """Return what makes a window unfit, as words that follow the name of its rank; "" for none.
    In the steps of the numbers `compiled` torch.compile compiled something."""
    if compiled:
        return f"recompiled at step {compiled[0]}: raise --ddp-warmup"
    if any(stretch.has_grown for stretch in taken):
        return "allocated device memory (an evaluation?): raise --ddp-warmup"
    if warmed.is_slowed or facts.get("slowdown"):
        return "was slowed down by heat or power: see ddpperf doctor"
    return ""


def _spread(lengths: Sequence[int], most: int) -> tuple[list[int], list[int]]:
    """Return the indices of the `most` steps that are kept, and how many each stretch keeps,
    without those that keep none."""
    total = sum(lengths)
    kept = []
    shares = []
    for begin, end in pairwise(accumulate(lengths, initial=0)):
        share = end * most // total - begin * most // total
        if share:
            shares.append(share)
            kept += [
                begin + index * (end - begin) // share for index in range(share)
            ]
    return kept, shares


# Cold caches alone can make a shorter step ten times as long.
_COLD_NS = 1_000_000


def _first_ratio(steps: Sequence[TimedStep]) -> float:
    """Return the first step of the window, counted or not, over the median of the others; 0 if it
    says nothing."""
    took = [step.end_ns - step.begin_ns for step in steps]
    if len(took) < 2 or took[0] <= _COLD_NS:
        return 0.0
    return took[0] / max(median(took[1:]), 1)
