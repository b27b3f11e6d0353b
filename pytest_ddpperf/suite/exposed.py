"""What a step waits for communication, as torch's profiler tells it: communication beside which nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pytest_ddpperf import Context

_STEP = "ddpperf step"

Interval = tuple[float, float]


def profiled(ctx: Context, step: Callable[[], object], steps: int) -> list[tuple[float, float]]:
    """Seconds of each step, and of communication that nothing hides in it."""
    on_cpu = ctx.device.type == "cpu"
    activities = [ProfilerActivity.CPU] if on_cpu else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as taken:
        for _ in range(steps):
            with record_function(_STEP):
                step()
                if not on_cpu:
                    torch.accelerator.synchronize()
    events = list(taken.events() or ())
    computed = _computed if on_cpu else _computed_there
    communicated = _communicated_there if ctx.backend == "nccl" else _communicated
    (thread,) = {event.thread for event in events if _is_step(event)}
    computation = [_interval(event) for event in events if computed(event, thread)]
    communication = [_interval(event) for event in events if communicated(event)]
    return [
        ((ended - began) / 1e6, exposed(communication, computation, (began, ended)) / 1e6)
        for began, ended in (_interval(event) for event in events if _is_step(event))
    ]


def exposed(communication: Iterable[Interval], computation: Iterable[Interval], within: Interval) -> float:
    """How long something was communicated, and nothing computed."""
    computation = list(computation)
    return max(0.0, _covered([*communication, *computation], within) - _covered(computation, within))


def _covered(intervals: Iterable[Interval], within: Interval) -> float:
    """The length of all of them together, where they overlap once."""
    reached, covered = within[0], 0.0
    for began, ended in sorted(intervals):
        began, ended = max(began, reached), min(ended, within[1])
        if ended > began:
            covered += ended - began
            reached = ended
    return covered


# Events are torch's FunctionEvents, which have microseconds.


def _interval(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def _is_step(event: Any) -> bool:
    return bool(event.name == _STEP and event.device_type.name == "CPU")


def _communicated(event: Any) -> bool:
    """Gloo's: on threads of its own."""
    return bool(event.is_async and event.name.startswith("gloo:"))


def _computed(event: Any, thread: int) -> bool:
    """Anything that the training thread does by name: where it waits for Gloo it is in none of it but the step."""
    return bool(event.thread == thread and not event.is_async and not _is_step(event))


def _communicated_there(event: Any) -> bool:
    return _is_kernel(event) and "nccl" in event.name.lower()


def _computed_there(event: Any, thread: int) -> bool:
    return _is_kernel(event) and "nccl" not in event.name.lower()


def _is_kernel(event: Any) -> bool:
    """Or a copy: what ran on the accelerator, not a range that was told about it."""
    return bool(
        event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False) and event.name != _STEP
    )
