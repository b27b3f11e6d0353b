"""What a launch brought back: the windows of its ranks become LaunchSamples."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from pytest_ddpperf.launch.phases import step_phases
from pytest_ddpperf.launch.run import Delivery
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.figure import FigureValues, figures_of
from pytest_ddpperf.records.metric import COUNTERS, POINT_TO_POINT
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import (
    GOES_ON,
    Counters,
    Digests,
    Facts,
    LaunchSamples,
    RankFigures,
    StepFigures,
    Window,
    Windows,
)
from pytest_ddpperf.records.step_phases import known_by_all


def collect(
    plan: Plan,
    windows: Windows,
    delivery: Delivery,
    *,
    facts: Facts,
    files: Digests,
    others: tuple[str, ...],
) -> LaunchSamples:
    """`windows` by rank; `facts`, `files` and `others` as LaunchSamples has them."""
    if len({tuple(map(len, window.marks_ns)) for window in windows}) > 1:
        raise DdpPerfError("ranks differ in the steps that they took")
    clocks = delivery.clocks_ahead_ns
    windows = [
        on_our_clock(window, clocks[rank]) if rank in clocks else window
        for rank, window in enumerate(windows)
    ]
    ranks: Windows = () if plan.command else windows  # a command has none
    step_seconds = _step_seconds(windows)
    blocked = tuple(_seconds(window.blocked_ns) for window in windows)
    notes = dict.fromkeys(note for window in windows for note in window.notes)
    counters = _counters(windows)
    doubts = _doubts(windows)
    if plan.boundary:
        doubts |= _of_program(windows, step_seconds)
    return LaunchSamples(
        step_seconds=step_seconds,
        rank_seconds=tuple(map(_rank_seconds, ranks)),
        stretches=windows[0].stretches,
        cpu_seconds=known_by_all(list(map(_cpu_seconds, windows))),
        examples=known_by_all([each.examples for each in windows]),
        blocked_seconds=blocked if plan.rpc else None,
        counters=counters,
        recorded=_recorded(windows),
        figures=_figures(windows),
        losses=_losses(windows),
        page_faults=tuple(each.page_faults for each in ranks) or None,
        collector_seconds=tuple(each.collector_seconds for each in ranks)
        or None,
        **_of_devices(windows),
        cost=delivery.cost,
        facts=facts,
        files=files,
        libraries=delivery.opened.libraries,
        others=others,
        output=delivery.output,
        notes=(*delivery.notes, *notes),
        unfit=next((window.unfit for window in windows if window.unfit), ""),
        unsettled=windows[0].unsettled,
        warmup=windows[0].warmup,
        phases=step_phases(windows),
        is_silent=_is_silent(plan, windows, counters),
        stacks=tuple(
            each.stacks for each in windows if each.stacks is not None
        ),
        doubts=doubts,
    )


def _cpu_seconds(window: Window) -> tuple[float, ...] | None:
    return None if window.cpu_ns is None else _seconds(window.cpu_ns)


def _of_devices(windows: Windows) -> dict[str, Any]:
    """Return what a step gave the device of each rank to do, as LaunchSamples has it; {} if a rank
    does not know."""
    known = known_by_all([each.device for each in windows])
    if known is None:
        return {}
    return {
        "device_seconds": tuple(each.seconds for each in known),
        "busy_seconds": tuple(each.busy_seconds for each in known),
        "exposed_seconds": tuple(each.exposed_seconds for each in known),
        "kernels": tuple(each.kernels for each in known),
    }


def on_our_clock(window: Window, ahead_ns: float) -> Window:
    """Return a window with the times of its marks and phases by this node's clock, not by its own,
    which is so much ahead."""

    ahead = round(ahead_ns)
    marks = tuple(
        tuple(ns - ahead for ns in marks) for marks in window.marks_ns
    )
    phases = window.phases
    if phases is not None:
        steps = tuple(
            tuple((index, end - ahead) for index, end in step)
            for step in phases.steps
        )
        arrivals = phases.arrivals
        if arrivals is not None:
            arrivals = tuple((ns - ahead, name) for ns, name in arrivals)
        phases = replace(phases, steps=steps, arrivals=arrivals)
    return replace(window, marks_ns=marks, phases=phases)


def _step_seconds(windows: Windows) -> tuple[float, ...]:
    # stretch x rank x mark
    stretches = zip(*(window.marks_ns for window in windows), strict=True)
    return _seconds(ns for marks in stretches for ns in completions(marks))


def _rank_seconds(window: Window) -> tuple[float, ...]:
    return _seconds(
        ns for marks in window.marks_ns for ns in _differences(marks)
    )


def completions(marks: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the group's step times: between completions of the whole group, the first from the
    common start.

    `marks` is rank x mark: a rank's start, then the end of each of its steps, all on one clock and
    in one unit, which is the result's. They add up to the wall time of the window.
    """
    return _differences([max(each) for each in zip(*marks, strict=True)])


def _is_silent(plan: Plan, windows: Windows, counters: Counters) -> bool:
    """Return whether several ranks are known to send nothing to each other; of those over RPC it is
    not asked."""
    if plan.world_size == 1 or plan.rpc:
        return False
    arrivals = [
        window.phases.arrivals if window.phases is not None else None
        for window in windows
    ]
    # Gradients may be synchronised in other steps than the one that was counted.
    may_accumulate = None in arrivals and counters["gradient_bytes"] is not None
    sent = {
        counters[f"{kind}.count"] for kind in ("collectives", *POINT_TO_POINT)
    }
    return sent == {0} and not any(arrivals) and not may_accumulate


# More than cold caches and a late rank add to the first step.
_FIRST_RATIO = 10


def _doubts(windows: Windows) -> dict[str, str]:
    """Return, by kind, what suggests that steps differ in their work, which all ranks must show, or
    that a rank leaves some of it behind."""
    found: dict[str, str] = {}
    if all(any(window.sent) and window.sent[1:] == (0,) for window in windows):
        most = max(window.sent[0] for window in windows)
        sent = f"{most} collective{'s' if most > 1 else ''}"
        found["sent"] = (
            f"the first warm-up step sent {sent}, a later one none: does the step still train?"
        )
    if (ratio := min(window.first_ratio for window in windows)) > _FIRST_RATIO:
        took = f"{ratio:.0f}x the median of the others"
        found["first step"] = (
            f"the first timed step took {took}: does the step do the same work each time?"
        )
    if any(window.goes_on for window in windows):
        found[GOES_ON] = (
            "threads or children of a rank still work after the steps: does the step wait for all"
            " that it starts?"
        )
    return found


# Steps that take so many times the median are said.
_LONG = 3


def _of_program(
    windows: Windows, step_seconds: Sequence[float]
) -> dict[str, str]:
    """Return, by kind, what is to be known of the steps of a program that owns its loop."""
    found: dict[str, str] = {}
    steps, usual = len(step_seconds), median(step_seconds)
    if left_out := windows[0].left_out:
        found["left out"] = (
            f"left out: {left_out} of {steps + left_out} steps, which had fewer backward passes"
        )
    if long := sum(each > _LONG * usual for each in step_seconds):
        took = f"took more than {_LONG}x the median (evaluation, checkpoints, logging?)"
        found["long"] = f"{long} of {steps} steps {took}"
    return found


def _counters(windows: Windows) -> dict[str, int | None]:
    """Return the largest counts over ranks; unknown if one rank does not know."""
    found: dict[str, int | None] = {}
    for name in {**dict.fromkeys(COUNTERS), **windows[0].counters}:
        known = known_by_all([each.counters.get(name) for each in windows])
        found[name] = None if known is None else max(known)
    return found


def _recorded(windows: Windows) -> dict[str, RankFigures]:
    """Return the figures that any rank recorded, of all ranks."""
    names = dict.fromkeys(
        name for window in windows for name in window.recorded
    )
    nothing = (None,) * len(windows[0].blocked_ns)
    return {
        name: tuple(window.recorded.get(name, nothing) for window in windows)
        for name in names
    }


def _figures(windows: Windows) -> dict[str, FigureValues]:
    """Return the figures of the user's own that any rank has, of all ranks; raises DdpPerfError if
    ranks differ in what one is."""
    found = {}
    figures = figures_of(window.figures for window in windows)
    for name, figure in figures.items():
        ranks: list[tuple[float, ...]] = []
        for rank, window in enumerate(windows):
            own = window.figures.get(name)
            if own is not None and own.figure != figure:
                raise DdpPerfError(
                    f"{name}: {figure}; but on rank {rank} {own.figure}: a figure has one"
                    " direction"
                )
            ranks.append(() if own is None else own.values[0][0])
        found[name] = FigureValues(figure=figure, values=(tuple(ranks),))
    return found


def _losses(windows: Windows) -> StepFigures | None:
    """Return the mean over ranks of the first losses, None where one is not finite; None if no rank
    recorded them."""
    ranks = [window.losses for window in windows if window.losses]
    steps = zip(*ranks, strict=False)
    means = tuple(None if None in step else fmean(step) for step in steps)
    return means or None


def _differences(marks: Sequence[float]) -> tuple[float, ...]:
    return tuple(after - before for before, after in pairwise(marks))


def _seconds(nanoseconds: Iterable[float]) -> tuple[float, ...]:
    return tuple(ns / 1e9 for ns in nanoseconds)
