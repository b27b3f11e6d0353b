"""Data parallelism written out (the assignment of Stanford's CS336): what naive, flat, overlapped and bucketed gradient
averaging cost on GPTs, and how much of a step is spent waiting for communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import fmean, stdev

import pytest
import torch
from torch import nn

from pytest_ddpperf import Context, DdpBenchmark, Result
from pytest_ddpperf.suite.sizes import Size
from pytest_ddpperf.suite.tables import Table, Tables, columns
from pytest_ddpperf.suite.workloads import GPTS, needed_bytes, workload
from pytest_ddpperf.suite.wrappers import Bucketed, Flat, Naive, Overlapped, Wrapper

VARIANTS: dict[str, Callable[[nn.Module], Wrapper]] = {
    "Naive": Naive,
    "Flat": Flat,
    "Overlap": Overlapped,
}
BUCKETS_MB = (1, 10, 100, 1000)
COLUMNS = (*VARIANTS, *(f"{megabytes} MB" for megabytes in BUCKETS_MB))


class Costs(Table):
    """The notebook's tables: variants, then bucket sizes, a column each."""

    def __init__(self) -> None:
        self._columns: dict[str, dict[str, dict[str, object]]] = {}  # by model, then column, then figure

    def add(self, model: str, column: str, result: Result, sequences: int) -> None:
        steps = [seconds for launch in result.step_seconds for seconds in launch]
        figures: dict[str, object] = {
            "model": model,
            "backend": result.backend,
            "world_size": result.world_size,
            "global_batch_size": sequences,
            "warmup_steps": result.environment.must_match.get("warmup"),
            "benchmark_steps": len(steps),
            **_spread("step_time", steps, "_s"),
        }
        if "comm_seconds" in result.recorded:
            # Of each step, of the rank that waited longest.
            waited = [
                max(told for told in step if told is not None)
                for launch in result.recorded["comm_seconds"]
                for step in zip(*launch, strict=True)
            ]
            shares = [seconds / step for seconds, step in zip(waited, steps, strict=True)]
            figures |= _spread("comm_time", waited, "_s") | _spread("comm_frac", shares, "")
        self._columns.setdefault(f"{model} on {result.world_size} ranks", {})[column] = figures

    def lines(self) -> Iterator[str]:
        for model, taken in sorted(self._columns.items(), key=lambda column: list(GPTS).index(column[0].split()[0])):
            yield f"Data parallel training of GPT {model}"
            yield from columns({name: taken[name] for name in COLUMNS if name in taken})


def _spread(name: str, values: list[float], unit: str) -> dict[str, object]:
    deviation = stdev(values) if len(values) > 1 else 0.0
    return {f"{name}_avg{unit}": f"{fmean(values):.6g}", f"{name}_std{unit}": f"{deviation:.3g}"}


def training(ctx: Context, model: str, wrap: Callable[[nn.Module], Wrapper], size: Size) -> Callable[[], None]:
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


def measured(
    ddp_benchmark: DdpBenchmark,
    model: str,
    column: str,
    wrap: Callable[..., Wrapper],
    size: Size,
    tables: Tables,
    roomy: Callable[..., None],
) -> Result:
    if model not in size.gpts:
        pytest.skip(f"GPT {model} is not in --ddp-suite-size {size.name}")
    roomy(needed_bytes(model))
    result = ddp_benchmark(lambda ctx: training(ctx, model, wrap, size))
    tables.of(Costs).add(model, column, result, size.sequences)
    return result


@pytest.mark.parametrize("model", GPTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant(
    ddp_benchmark: DdpBenchmark, model: str, variant: str, size: Size, tables: Tables, roomy: Callable[..., None]
) -> None:
    """Gradient averaging written out, naive, flat and overlapped, on GPTs: step time and time waited (CS336)."""
    result = measured(ddp_benchmark, model, variant, VARIANTS[variant], size, tables, roomy)
    assert set(result.recorded) == {"comm_seconds"}


@pytest.mark.parametrize("model", GPTS)
@pytest.mark.parametrize("bucket", BUCKETS_MB, ids=lambda megabytes: f"{megabytes}mb")
def test_bucket_size(
    ddp_benchmark: DdpBenchmark, model: str, bucket: int, size: Size, tables: Tables, roomy: Callable[..., None]
) -> None:
    """Overlapped averaging in buckets of 1 to 1000 MB, on GPTs: step time and time waited (CS336)."""
    measured(ddp_benchmark, model, f"{bucket} MB", lambda module: Bucketed(module, bucket), size, tables, roomy)
