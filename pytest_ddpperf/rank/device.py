"""The work of a device in a step: a short profile after the timed window.

Profiled steps, and those that follow, take longer on the host, so nothing is timed any more by
then. What kernels take does not change by it. Only the device's own activity is recorded.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pytest_ddpperf.rank import context
from pytest_ddpperf.rank.timed_rank import TimedRank
from pytest_ddpperf.rank.warm_up import Step
from pytest_ddpperf.records.device import (
    COMMUNICATION,
    COMPUTATION,
    COPY,
    DeviceWork,
    Kernel,
)
from pytest_ddpperf.records.samples import Window

# The sum over three steps is that over ten within 0.2 %, and a third of their records to read,
# 0.1 ms each.
_LEAST_STEPS, _MOST_STEPS = 3, 10
_SECONDS = 0.05
# The second line has torch's kernels on symmetric memory, which wait for other ranks, too.
_COMMUNICATION = re.compile(
    r"(?:void )?(?:nccl|msccl|rccl|nvshmem)"
    r"|.*(?:multimem_\w*|(?:one|two)_shot_all_reduce\w*|\bbarrier|(?:put|wait)_signal)_kernel",
    re.IGNORECASE,
)
_COPY = re.compile(r"mem(?:cpy|set)\b", re.IGNORECASE)
# Triton's kernels are numbered in the order in which a process compiles them.
_GENERATED = re.compile(r"^(triton_\w+?)_\d+(?:d\w*)?$")
UNKNOWN = "device time is unknown: "


def measure_device(
    step: Step, window: Window, rank: TimedRank
) -> tuple[DeviceWork | None, tuple[str, ...]]:
    """Take some more steps and return what one gave the device to do; None, with a note, where that
    is unknown. All ranks call it together."""
    if rank.ctx.device.type != "cuda":
        return None, (f"{UNKNOWN}it is measured on cuda devices only",)
    steps = _count_steps(window, rank)
    notes: list[str] = []
    profiler: Any = None
    # A rank without a profiler takes its part in collectives.
    with context.noting("device time is", notes):
        profiler = profile(activities=[ProfilerActivity.CUDA])
        profiler.start()
    rank.own.barrier()
    for _ in range(steps):
        context.read_returned(step(), rank.ctx.keep)
    torch.accelerator.synchronize()
    rank.ctx.figures.clear()
    with context.noting("device time is", notes):
        if not notes:
            profiler.stop()
            return read_work(profiler.events(), steps)
    return None, tuple(notes)


def _count_steps(window: Window, rank: TimedRank) -> int:
    """Return how many steps are profiled, the same on all ranks."""
    taken_ns = sum(marks[-1] - marks[0] for marks in window.marks_ns)
    step_ns = taken_ns // sum(len(marks) - 1 for marks in window.marks_ns)
    (slowest_ns,) = rank.own.maximum([max(step_ns, 1)])
    fitting = int(_SECONDS * 1e9 / slowest_ns)
    return max(_LEAST_STEPS, min(fitting, _MOST_STEPS))


def read_work(
    events: Iterable[Any], steps: int
) -> tuple[DeviceWork | None, tuple[str, ...]]:
    """Return what profiled events say of a step, or why that is unknown. `events` are torch's
    FunctionEvent; their times are in microseconds."""
    calls: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    spans = []
    own_spans = []
    for event in events:
        if event.device_type.name == "CPU" or event.is_user_annotation:
            continue
        name = _GENERATED.sub(r"\1", event.name)
        begin, end = event.time_range.start, event.time_range.end
        calls[name] += 1
        seconds[name] += (end - begin) / 1e6
        spans.append((begin, end))
        if _kind(name) != COMMUNICATION:
            own_spans.append((begin, end))
    if not calls:
        return None, (
            f"{UNKNOWN}torch.profiler recorded no kernel: end other profilers (nsys, DCGM), or "
            "allow this one (docs/gpu.md)",
        )
    if any(count % steps for count in calls.values()):
        return None, (
            f"{UNKNOWN}kernels differ between the {steps} profiled steps, or records were lost",
        )
    kernels = [
        Kernel(
            name=name,
            kind=_kind(name),
            calls=count // steps,
            total_seconds=seconds[name] / steps,
        )
        for name, count in calls.items()
    ]
    kernels.sort(key=lambda each: -each.total_seconds)
    busy = _covered(own_spans) / 1e6 / steps
    work = DeviceWork(
        kernels=tuple(kernels),
        busy_seconds=busy,
        exposed_seconds=_covered(spans) / 1e6 / steps - busy,
    )
    return work, ()


def _kind(name: str) -> str:
    if _COMMUNICATION.match(name):
        return COMMUNICATION
    return COPY if _COPY.match(name) else COMPUTATION


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return how long at least one of the spans lasted."""
    covered = 0.0
    until = float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered
