"""Data parallelism written out (the assignment of Stanford's CS336): what naive, flat, overlapped and bucketed gradient
averaging cost on GPTs, and how much of a step is spent waiting for communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, stdev

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf import Context, DdpBenchmark, Result
from pytest_ddpperf.suite.exposed import profiled
from pytest_ddpperf.suite.sizes import Size
from pytest_ddpperf.suite.tables import Table, Tables, columns
from pytest_ddpperf.suite.workloads import GPTS, Step, needed_bytes, share_of, training, workload
from pytest_ddpperf.suite.wrappers import Bucketed, Flat, Naive, Overlapped, Wrapper

VARIANTS: dict[str, Callable[[nn.Module], Wrapper]] = {
    "Naive": Naive,
    "Flat": Flat,
    "Overlap": Overlapped,
}
BUCKETS_MB = (1, 10, 100, 1000)
TORCHS = "torch's DDP"
COLUMNS = (*VARIANTS, *(f"{megabytes} MB" for megabytes in BUCKETS_MB), TORCHS)


class Costs(Table):
    """The notebook's tables: variants, then bucket sizes, a column each."""

    def __init__(self) -> None:
        self._columns: dict[str, dict[str, dict[str, object]]] = {}  # by model, then column, then figure

    def add(self, model: str, column: str, result: Result, size: Size, waits: Sequence[tuple[float, float]]) -> None:
        """`waits` are of steps: seconds, and those of them that the rank that waited longest did."""
        steps = [seconds for launch in result.step_seconds for seconds in launch]
        self._columns.setdefault(f"{model} on {result.world_size} ranks", {})[column] = {
            "model": model,
            "backend": result.backend,
            "world_size": result.world_size,
            "global_batch_size": share_of(size, result.world_size) * result.world_size,
            "warmup_steps": result.environment.must_match.get("warmup"),
            "benchmark_steps": len(steps),
            **_spread("step_time", steps, "_s"),
            **_spread("comm_time", [waited for _, waited in waits], "_s"),
            **_spread("comm_frac", [waited / seconds for seconds, waited in waits], ""),
        }

    def lines(self) -> Iterator[str]:
        for model, taken in sorted(self._columns.items(), key=lambda column: list(GPTS).index(column[0].split()[0])):
            yield f"Data parallel training of GPT {model}"
            yield from columns({name: taken[name] for name in COLUMNS if name in taken})


def _spread(name: str, values: list[float], unit: str) -> dict[str, object]:
    deviation = stdev(values) if len(values) > 1 else 0.0
    return {f"{name}_avg{unit}": f"{fmean(values):.6g}", f"{name}_std{unit}": f"{deviation:.3g}"}


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


def torchs(ctx: Context, model: str, size: Size) -> Step:
    net, loss = workload(ctx, model, size)
    return training(DistributedDataParallel(net), loss)


def torchs_profiled(ctx: Context, model: str, size: Size) -> Step:
    """A step that records what it waits for communication; profiled, so that it takes longer itself."""
    step = torchs(ctx, model, size)

    def observed() -> None:
        ((seconds, waited),) = profiled(ctx, step, 1)
        ctx.record("seconds", seconds)
        ctx.record("comm_seconds", waited)

    return observed


Measured = Callable[[str, str, Callable[[nn.Module], Wrapper]], Result]


@pytest.fixture
def fitting(size: Size, roomy: Callable[..., None]) -> Callable[[str], None]:
    """Call it with a model: it skips one that is too large for the size or for memory."""

    def check(model: str) -> None:
        if model not in size.gpts:
            pytest.skip(f"GPT {model} is not in --ddp-suite-size {size.name}")
        roomy(needed_bytes(model))

    return check


@pytest.fixture
def measured(
    ddp_benchmark: DdpBenchmark, fitting: Callable[[str], None], size: Size, tokens: int, tables: Tables
) -> Measured:
    """Call it with a model, the name of a column and a wrapper."""

    def measure(model: str, column: str, wrap: Callable[[nn.Module], Wrapper]) -> Result:
        fitting(model)
        result = ddp_benchmark(lambda ctx: written_out(ctx, model, wrap, size), batch_size=tokens)
        waited = [
            max(told for told in step if told is not None)
            for launch in result.recorded["comm_seconds"]
            for step in zip(*launch, strict=True)
        ]
        steps = [seconds for launch in result.step_seconds for seconds in launch]
        tables.of(Costs).add(model, column, result, size, list(zip(steps, waited, strict=True)))
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
def test_torchs(
    ddp_benchmark: DdpBenchmark, fitting: Callable[[str], None], model: str, size: Size, tokens: int, tables: Tables
) -> None:
    """torch's DDP beside those written out; of launches of their own the profiler tells what steps wait."""
    fitting(model)
    result = ddp_benchmark(lambda ctx: torchs(ctx, model, size), batch_size=tokens)
    told = ddp_benchmark(
        lambda ctx: torchs_profiled(ctx, model, size), batch_size=tokens, name="profiled", gate=False
    ).recorded
    waits = [
        max(zip(seconds, waited, strict=True), key=lambda of_rank: of_rank[1])
        for durations, exposed in zip(told["seconds"], told["comm_seconds"], strict=True)
        for seconds, waited in zip(zip(*durations, strict=True), zip(*exposed, strict=True), strict=True)
    ]
    assert all(0 <= waited <= seconds for seconds, waited in waits)
    tables.of(Costs).add(model, TORCHS, result, size, waits)
