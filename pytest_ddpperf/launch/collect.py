"""What the ranks of a launch delivered, as one launch's samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from pytest_ddpperf.launch.remote_ranks import Clock
from pytest_ddpperf.launch.run import Delivery
from pytest_ddpperf.records import COUNTERS, LaunchSamples, Plan, RankFigures, Scalar, Window


def collected(
    plan: Plan, windows: Sequence[Window], delivery: Delivery, *, facts: Mapping[str, Scalar]
) -> LaunchSamples:
    """`windows` by rank; `facts` as LaunchSamples has them."""
    cpu = [window.cpu_ns for window in windows if window.cpu_ns is not None]
    examples = [window.examples for window in windows if window.examples is not None]
    stretches = list(zip(*(window.marks_ns for window in windows), strict=True))  # stretch x rank x mark
    clocks = delivery.clocks
    on_one = [tuple(_on_our_clock(own, clocks.get(rank)) for rank, own in enumerate(marks)) for marks in stretches]
    first = [rank for rank in plan.part(0) if rank < plan.world_size]
    return LaunchSamples(
        step_seconds=_step_seconds(on_one),
        node_seconds=_step_seconds([[marks[rank] for rank in first] for marks in stretches]) if clocks else None,
        clock_seconds=max(clock.half_width_ns for clock in clocks.values()) / 1e9 if clocks else None,
        rank_seconds=tuple(
            _seconds([ns for marks in own for ns in _differences(marks)]) for own in zip(*stretches, strict=True)
        ),
        stretches=tuple(len(marks[0]) - 1 for marks in stretches),
        cpu_seconds=tuple(map(_seconds, cpu)) if len(cpu) == len(windows) else None,
        examples=tuple(examples) if len(examples) == len(windows) else None,
        blocked_seconds=tuple(_seconds(window.blocked_ns) for window in windows) if plan.rpc else None,
        counters=_counters(windows),
        recorded=_recorded(windows),
        phases=delivery.phases,
        facts=facts,
        output=delivery.output,
        notes=delivery.notes,
        unfit=_unfit(plan, windows),
        unsettled=windows[0].unsettled,
        warmup=windows[0].warmup,
    )


def _on_our_clock(marks: Sequence[int], clock: Clock | None) -> Sequence[float]:
    return marks if clock is None else [clock.here(mark) for mark in marks]


def _step_seconds(stretches: Sequence[Sequence[Sequence[float]]]) -> tuple[float, ...]:
    """`stretches` is stretch x rank x mark."""
    return tuple(seconds for marks in stretches for seconds in _seconds(_completions_of(marks)))


def _completions_of(marks: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """`marks` is rank x mark, of one stretch."""
    return completions([own[0] for own in marks], [own[1:] for own in marks])


def completions(starts: Sequence[float], ends: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the group's step times: between completions of the whole group, the first from the common start.

    `starts` is by rank, `ends` rank x step, all on one clock and in one unit, which is the result's. They add up to
    the wall time of the window.
    """
    marks = [max(starts), *(max(step) for step in zip(*ends, strict=True))]
    return _differences(marks)


def _unfit(plan: Plan, windows: Sequence[Window]) -> str:
    """Why a launch says little of steady training, in words, by what happened and not by its times."""
    compiled = [(rank, window.compiled_at) for rank, window in enumerate(windows) if window.compiled_at]
    return f"{plan.name(compiled[0][0])} recompiled at step {compiled[0][1]}" if compiled else ""


def _counters(windows: Sequence[Window]) -> dict[str, int | None]:
    """Return the largest counts over ranks; unknown if one rank does not know."""
    found: dict[str, int | None] = {}
    for name in {**dict.fromkeys(COUNTERS), **windows[0].counters}:
        known = [count for window in windows if (count := window.counters.get(name)) is not None]
        found[name] = max(known) if len(known) == len(windows) else None
    return found


def _recorded(windows: Sequence[Window]) -> dict[str, RankFigures]:
    """Return the figures that any rank recorded, of all ranks."""
    names = dict.fromkeys(name for window in windows for name in window.recorded)
    nothing = (None,) * len(windows[0].blocked_ns)
    return {name: tuple(window.recorded.get(name, nothing) for window in windows) for name in names}


def _differences(marks: Sequence[float]) -> tuple[float, ...]:
    return tuple(after - before for before, after in pairwise(marks))


def _seconds(nanoseconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(ns / 1e9 for ns in nanoseconds)
