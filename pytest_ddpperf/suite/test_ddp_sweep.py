"""PyTorch's DDP benchmark (pytorch/benchmarks/distributed/ddp): step times of four ResNets over
numbers of ranks."""

import socket
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf import Context, DdpBenchmark, DdpRun, Result
from pytest_ddpperf.suite.models import RESNETS
from pytest_ddpperf.suite.tables import (
    PERCENTILES,
    Plot,
    Scaling,
    Tables,
    describe,
    percentile_cells,
    topology,
)
from pytest_ddpperf.suite.workloads import (
    Fits,
    Size,
    Step,
    SweepRow,
    no_buffers,
    read_option,
    training,
    workload,
)


class SweepTable:
    """The table of the original with the same columns, and the efficiency of the ranks."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[SweepRow, Result]] = {}  # by model and row
        self._images = 0
        self._bucket_mb = 0
        # topologies of all machines but the first, which is in the heading
        self.others: dict[str, list[str]] = {}

    def add(
        self,
        model: str,
        row: SweepRow,
        result: Result,
        images: int,
        bucket_mb: int,
    ) -> None:
        self._rows.setdefault(model, {})[row] = result
        self._images = images
        self._bucket_mb = bucket_mb

    def lines(self) -> Iterator[str]:
        result = next(iter(next(iter(self._rows.values())).values()))
        yield "-----------------------------------"
        yield "PyTorch distributed benchmark suite"
        yield "-----------------------------------"
        yield ""
        yield from describe(
            result,
            f"* Distributed backend: {result.backend}",
            f"* Maximum bucket size: {self._bucket_mb}MB",
            heading="--- nvidia-smi topo -m ---",
        )
        for machine, topology_there in self.others.items():
            yield ""
            yield f"{machine}:"
            yield from topology_there
        yield "--------------------------"
        titles = f"{'sec/iter':>14}{'ex/sec':>10}" * len(PERCENTILES)
        for model in RESNETS:
            by_row = self._rows.get(model)
            if by_row is None:
                continue
            yield ""
            yield f"Benchmark: {model} with batch size {self._images}"
            yield ""
            yield f"{'':22}{titles}  efficiency"
            for row, result in sorted(by_row.items()):
                yield self._row(row, result, by_row.get(SweepRow(1, 1)))

    def plots(self) -> Iterable[Plot]:
        return ()

    def _row(self, row: SweepRow, result: Result, alone: Result | None) -> str:
        kind = (
            "GPUs"
            if result.environment.key.get("device_type") == "cuda"
            else "CPUs"
        )
        text = f"{max(row.ranks, 1):4d} {kind} -- {row.title:>8}:"
        text += percentile_cells(result.percentile, self._images)
        # A single rank may have a device that many have not.
        if alone is None or alone.backend != result.backend or not row.ranks:
            return text
        return f"{text}  {alone.p50 / result.p50:9.0%}"


def topology_of_machine(ctx: Context) -> tuple[str, list[str]] | None:
    """Return the name and the topology of a machine, from its first rank."""
    if ctx.local_rank:
        return None
    return f"machine {ctx.node_rank + 1}, {socket.gethostname()}", topology()


# each parameter has a world size of its own
@pytest.mark.ddp(world_size=1, timing="step")
@pytest.mark.parametrize("model", RESNETS)
def test_ddp_sweep(
    ddp_benchmark: DdpBenchmark,
    ddp_run: DdpRun,
    model: str,
    sweep_row: SweepRow,
    size: Size,
    tables: Tables,
    pytestconfig: pytest.Config,
    fits: Fits,
) -> None:
    """A training step of a ResNet over numbers of ranks, and one without DDP (PyTorch's DDP
    benchmark)."""
    bucket_mb = int(read_option(pytestconfig, "ddp_suite_bucket_mb") or 25)
    fits(model)

    def setup(ctx: Context) -> Step:
        net, loss = workload(ctx, model, size)
        optimizer = torch.optim.SGD(
            net.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4
        )
        if sweep_row.ranks:
            net = DistributedDataParallel(
                net, bucket_cap_mb=bucket_mb, **no_buffers()
            )
        return training(net, loss, optimizer)

    # By these, `ddpperf diff --form pytorch` shows what the original's does.
    facts: dict[str, Any] = {"model": model, "row": sweep_row.title}
    if sweep_row.ranks:
        facts["bucket_size"] = bucket_mb
    result = ddp_benchmark(setup, batch_size=size.images, facts=facts)
    tables.get(SweepTable).add(model, sweep_row, result, size.images, bucket_mb)
    if sweep_row.machines > 1:
        _, *others = filter(None, ddp_run(topology_of_machine))
        tables.get(SweepTable).others.update(others)
    if sweep_row.ranks:
        tables.get(Scaling).add(model, result)
