"""Data parallelism written out (the assignment of Stanford's CS336): the cost of naive, flat,
overlapped and bucketed gradient averaging on GPTs, and the part of a step that waits for
communication."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from pytest_ddpperf import Context, DdpBenchmark, Result
from pytest_ddpperf.suite.tables import Tables, slowest_ranks
from pytest_ddpperf.suite.workloads import (
    GPTS,
    Size,
    Step,
    Timed,
    ddp_training,
    share_of,
    workload,
)
from pytest_ddpperf.suite.wrappers import Blocking, Bucketed, Wrapper

Wrap = Callable[[nn.Module], Wrapper]

VARIANTS: dict[str, Wrap] = {
    "Naive": partial(Blocking, flat=False),
    "Flat": partial(Blocking, flat=True),
    "Overlap": partial(Bucketed, bucket_mb=0),
}
BUCKETS_MB = (1, 10, 100, 1000)


def _add_costs(
    tables: Tables,
    model: str,
    variant: str,
    result: Result,
    size: Size,
    waits: Sequence[tuple[float, float]],
) -> None:
    """Add a column to the table of the notebook. `waits` has the seconds of each step, and of the
    wait in it."""
    steps = [seconds for launch in result.step_seconds for seconds in launch]
    cells = {
        "": variant,
        "model": model,
        "backend": result.backend,
        "world_size": result.world_size,
        "global_batch_size": share_of(size, result.world_size)
        * result.world_size,
        "warmup_steps": result.environment.must_match.get("warmup"),
        "benchmark_steps": len(steps),
    }
    figures = {
        "step_time_{}_s": steps,
        "comm_time_{}_s": [waited for _, waited in waits],
        "comm_frac_{}": [waited / seconds for seconds, waited in waits],
    }
    for name, values in figures.items():
        deviation = stdev(values) if len(values) > 1 else 0.0
        cells[name.format("avg")] = f"{fmean(values):.6g}"
        cells[name.format("std")] = f"{deviation:.3g}"
    tables.add(
        f"Data parallel training of GPT {model} on {result.world_size} ranks",
        cells,
        column=True,
    )


# --- communication that is not hidden, by torch's profiler

_STEP = "ddpperf step"

Interval = tuple[float, float]


def profiled(ctx: Context, step: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a step, and of the communication in it during which nothing is
    computed."""
    on_cpu = ctx.device.type == "cpu"
    activities = [ProfilerActivity.CPU]
    if not on_cpu:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as taken, record_function(_STEP):
        step()
        if not on_cpu:
            torch.accelerator.synchronize()
    events = list(taken.events() or ())
    (timed,) = [event for event in events if _is_step(event)]
    computation: list[Interval] = []
    communication: list[Interval] = []
    for event in events:
        if _is_communication(event, ctx.backend):
            communication.append(_interval(event))
        elif (
            _is_kernel(event)
            if not on_cpu
            else _is_computation(event, timed.thread)
        ):
            computation.append(_interval(event))
    within = _interval(timed)
    busy = _covered([*communication, *computation], within)
    exposed = busy - _covered(computation, within)
    began, ended = within
    return (ended - began) / 1e6, max(0.0, exposed) / 1e6


def _covered(intervals: Iterable[Interval], within: Interval) -> float:
    """Return the length of the union of the intervals."""
    reached, end = within
    covered = 0.0
    for began, ended in sorted(intervals):
        start = max(began, reached)
        stop = min(ended, end)
        if stop > start:
            covered += stop - start
            reached = stop
    return covered


# Events are torch's FunctionEvents, in microseconds.


def _interval(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def _is_step(event: Any) -> bool:
    return event.name == _STEP and event.device_type.name == "CPU"


def _is_communication(event: Any, backend: str) -> bool:
    """Whether it is a kernel of NCCL, or Gloo did it, on its own threads."""
    if "nccl" in backend:
        return _is_kernel(event) and "nccl" in event.name.lower()
    return event.is_async and event.name.startswith("gloo:")


def _is_computation(event: Any, thread: int) -> bool:
    """Whether the training thread did it: while it waits for Gloo it is in no event but the
    step."""
    return event.thread == thread and not event.is_async and not _is_step(event)


def _is_kernel(event: Any) -> bool:
    """Whether it is a kernel or a copy that ran on the accelerator, not an annotation."""
    return (
        event.device_type.name == "CUDA"
        and not getattr(event, "is_user_annotation", False)
        and event.name != _STEP
    )


# --- experiments


Measured = Callable[[str, str, Wrap], Result]


@pytest.fixture
def measured(timed: Timed, size: Size, tables: Tables) -> Measured:
    """Call it with a model, the name of a variant and its wrapper."""

    def measure(model: str, variant: str, wrap: Wrap) -> Result:
        def setup(ctx: Context) -> Step:
            net, loss = workload(ctx, model, size)
            wrapped = wrap(net)
            optimizer = torch.optim.SGD(
                wrapped.parameters(), lr=0.01, momentum=0.9
            )

            def step() -> None:
                before = wrapped.seconds_waited
                optimizer.zero_grad()
                loss(wrapped).backward()
                wrapped.finish()
                optimizer.step()
                ctx.record(
                    "comm_seconds", wrapped.seconds_waited - before, better=None
                )

            return step

        result = timed(setup, model)
        steps = chain.from_iterable(result.step_seconds)
        waited = chain.from_iterable(
            slowest_ranks(result.recorded["comm_seconds"])
        )
        waits = list(zip(steps, waited, strict=True))
        _add_costs(tables, model, variant, result, size, waits)
        return result

    return measure


@pytest.mark.parametrize("model", GPTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant(measured: Measured, model: str, variant: str) -> None:
    """Gradient averaging written out, naive, flat and overlapped, on GPTs: step time and time
    waited (CS336)."""
    assert set(measured(model, variant, VARIANTS[variant]).recorded) == {
        "comm_seconds"
    }


@pytest.mark.parametrize("model", GPTS)
@pytest.mark.parametrize(
    "bucket", BUCKETS_MB, ids=lambda megabytes: f"{megabytes}mb"
)
def test_bucket_size(measured: Measured, model: str, bucket: int) -> None:
    """Overlapped averaging in buckets of 1 to 1000 MB, on GPTs: step time and time waited
    (CS336)."""
    measured(model, f"{bucket} MB", lambda module: Bucketed(module, bucket))


@pytest.mark.parametrize("model", GPTS)
def test_torchs(
    timed: Timed,
    ddp_benchmark: DdpBenchmark,
    model: str,
    size: Size,
    tokens: int,
    tables: Tables,
) -> None:
    """torch's DDP, compared with those written out; the profiler measures in other launches how
    long steps wait."""

    def setup(ctx: Context) -> Step:
        """Return a step that records how long it waits for communication. The profiler makes it
        slower."""
        step = ddp_training(ctx, model, size)

        def observed() -> None:
            seconds, waited = profiled(ctx, step)
            ctx.record("seconds", seconds, better=None)
            ctx.record("comm_seconds", waited, better=None)

        return observed

    result = timed(lambda ctx: ddp_training(ctx, model, size), model)
    recorded = ddp_benchmark(
        setup, batch_size=tokens, name="profiled", gate=False
    ).recorded
    waits: list[Any] = []
    launches = zip(recorded["seconds"], recorded["comm_seconds"], strict=True)
    for durations, exposed in launches:
        # by rank, then by step
        pairs = [
            list(zip(*rank, strict=True))
            for rank in zip(durations, exposed, strict=True)
        ]
        for step in zip(*pairs, strict=True):
            waits.append(max(step, key=lambda pair: pair[1]))
    assert all(0 <= waited <= seconds for seconds, waited in waits)
    _add_costs(tables, model, "torch's DDP", result, size, waits)
