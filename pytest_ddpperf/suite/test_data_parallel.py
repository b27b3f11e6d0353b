"""Data parallelism written out (the assignment of Stanford's CS336): the cost of naive, flat, overlapped and bucketed
gradient averaging on GPTs, and the part of a step that waits for communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import fmean, stdev

import pytest
import torch
from torch import nn

from pytest_ddpperf import Context, Result
from pytest_ddpperf.suite.tables import Tables, slowest_ranks
from pytest_ddpperf.suite.workloads import GPTS, Size, Step, Timed, ddp_training, share_of, workload
from pytest_ddpperf.suite.wrappers import Blocking, Bucketed, Wrapper

VARIANTS: dict[str, Callable[[nn.Module], Wrapper]] = {
    "Naive": partial(Blocking, flat=False),
    "Flat": partial(Blocking, flat=True),
    "Overlap": partial(Bucketed, bucket_mb=0),
}
BUCKETS_MB = (1, 10, 100, 1000)


def _add_costs(
    tables: Tables, model: str, variant: str, result: Result, size: Size, waited: Mapping[str, object]
) -> None:
    """Add a column to the table of the notebook; `waited` are its cells about communication."""
    steps = [seconds for launch in result.step_seconds for seconds in launch]
    cells = {
        "model": model,
        "backend": result.backend,
        "world_size": result.world_size,
        "global_batch_size": share_of(size, result.world_size) * result.world_size,
        "warmup_steps": result.environment.must_match.get("warmup"),
        "benchmark_steps": len(steps),
        **_spread("step_time", steps, "_s"),
        **waited,
    }
    tables.add_column(f"Data parallel training of GPT {model} on {result.world_size} ranks", variant, cells)


def _spread(name: str, values: list[float], unit: str) -> dict[str, object]:
    deviation = stdev(values) if len(values) > 1 else 0.0
    return {f"{name}_avg{unit}": f"{fmean(values):.6g}", f"{name}_std{unit}": f"{deviation:.3g}"}


def _waited_by_ddp(result: Result) -> dict[str, object]:
    """Return the cells of the time waited in DDP's steps, on average, on the rank that waits longest; "-" on devices,
    where it is unknown."""
    cells: dict[str, object] = dict.fromkeys(
        ("comm_time_avg_s", "comm_time_std_s", "comm_frac_avg", "comm_frac_std"), "-"
    )
    waited = max((phases["exposed_communication"] or 0.0 for phases in result.rank_phases), default=0.0)
    if waited:
        cells |= {"comm_time_avg_s": f"{waited:.6g}", "comm_frac_avg": f"{waited / result.mean:.6g}"}
    return cells


# --- experiments


def written_out(ctx: Context, model: str, wrap: Callable[[nn.Module], Wrapper], size: Size) -> Step:
    net, loss = workload(ctx, model, size)
    wrapped = wrap(net)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        before = wrapped.seconds_waited
        optimizer.zero_grad()
        loss(wrapped).backward()  # type: ignore[no-untyped-call]
        wrapped.finish()
        optimizer.step()
        ctx.record("comm_seconds", wrapped.seconds_waited - before)

    return step


Measured = Callable[[str, str, Callable[[nn.Module], Wrapper]], Result]


@pytest.fixture
def measured(timed: Timed, size: Size, tables: Tables) -> Measured:
    """Call it with a model, the name of a variant and its wrapper."""

    def measure(model: str, variant: str, wrap: Callable[[nn.Module], Wrapper]) -> Result:
        result = timed(lambda ctx: written_out(ctx, model, wrap, size), model)
        waited = [seconds for launch in slowest_ranks(result.recorded["comm_seconds"]) for seconds in launch]
        steps = [seconds for launch in result.step_seconds for seconds in launch]
        shares = [wait / seconds for wait, seconds in zip(waited, steps, strict=True)]
        cells = {**_spread("comm_time", waited, "_s"), **_spread("comm_frac", shares, "")}
        _add_costs(tables, model, variant, result, size, cells)
        return result

    return measure


@pytest.mark.parametrize("model", GPTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant(measured: Measured, model: str, variant: str) -> None:
    """Gradient averaging written out, naive, flat and overlapped, on GPTs: step time and time waited (CS336)."""
    assert set(measured(model, variant, VARIANTS[variant]).recorded) == {"comm_seconds"}


@pytest.mark.parametrize("model", GPTS)
@pytest.mark.parametrize("bucket", BUCKETS_MB, ids=lambda megabytes: f"{megabytes}mb")
def test_bucket_size(measured: Measured, model: str, bucket: int) -> None:
    """Overlapped averaging in buckets of 1 to 1000 MB, on GPTs: step time and time waited (CS336)."""
    measured(model, f"{bucket} MB", lambda module: Bucketed(module, bucket))


@pytest.mark.parametrize("model", GPTS)
def test_torchs(timed: Timed, model: str, size: Size, tables: Tables) -> None:
    """torch's DDP, compared with those written out; its phases say how long steps wait, on CPU."""
    result = timed(lambda ctx: ddp_training(ctx, model, size), model)
    _add_costs(tables, model, "torch's DDP", result, size, _waited_by_ddp(result))
