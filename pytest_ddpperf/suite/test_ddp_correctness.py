"""What the DDP paper says beside latency: what synchronising less often costs in learning, and the two ways to hang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf import Context, DdpRun
from pytest_ddpperf.suite.plots import Lines, Plot, Spread
from pytest_ddpperf.suite.sizes import Size
from pytest_ddpperf.suite.tables import Table, Tables
from pytest_ddpperf.suite.workloads import rank, workload

SYNC_EVERY = (1, 2, 4, 8)
SEEDS = 3


class Losses(Table):
    """How training goes on the same samples, by how often it is synchronised; over seeds."""

    def __init__(self) -> None:
        self._curves: dict[int, dict[int, list[list[float]]]] = {}  # by ranks and interval, then seed x iteration

    def add(self, ranks: int, every: int, curves: list[list[float]]) -> None:
        self._curves.setdefault(ranks, {})[every] = curves

    def lines(self) -> Iterator[str]:
        for ranks, by_interval in self._curves.items():
            iterations = len(next(iter(by_interval.values()))[0]) - 1
            seeds = f"mean, and from the least to the most of {SEEDS} seeds"
            yield f"Loss after {iterations} iterations, {ranks} ranks ({seeds})"
            for every, curves in by_interval.items():
                last = [curve[-1] for curve in curves]
                yield f"  synchronised every {every}: {fmean(last):.4f} ({min(last):.4f} to {max(last):.4f})"

    def plots(self) -> Iterator[Plot]:
        for ranks, by_interval in self._curves.items():
            yield Lines(
                title=f"Loss against samples, {ranks} ranks",
                across="iterations, each of as many samples",
                upwards="loss",
                lines={
                    f"synchronised every {every}": {
                        iteration: Spread(fmean(losses), min(losses), max(losses))
                        for iteration, losses in enumerate(zip(*curves, strict=True))
                    }
                    for every, curves in by_interval.items()
                },
            )


def losses(ctx: Context, size: Size, every: int, iterations: int) -> list[list[float]]:
    """Seed x iteration: the mean loss over ranks on the same batches before each of so many iterations and after the
    last, synchronised `every` of them."""
    curves = []
    for seed in range(SEEDS):
        net, loss = workload(replace(ctx, seed=ctx.seed + 1000 * seed), size.gpts[0], size)
        ddp = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        curve = []
        for iteration in range(1, iterations + 1):
            last = iteration % every == 0
            with nullcontext() if last else ddp.no_sync():
                value = loss(ddp)
                (value / every).backward()  # type: ignore[no-untyped-call]
            curve.append(_mean(ctx, value))
            if last:
                optimizer.step()
                optimizer.zero_grad()
        curves.append([*curve, _mean(ctx, loss(ddp))])
    return curves


def _mean(ctx: Context, value: Tensor) -> float:
    mean = value.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / ctx.world_size


def test_convergence(ddp_run: DdpRun, size: Size, tables: Tables) -> None:
    """The loss over the same samples, synchronised every 1, 2, 4 and 8 iterations: what latency alone hides."""
    curves = {}
    for every in SYNC_EVERY:
        told = ddp_run(losses, size, every, 48)
        curves[every] = told[0]
        tables.of(Losses).add(len(told), every, told[0])
    learned, seldom = ([curve[-1] for curve in curves[every]] for every in (SYNC_EVERY[0], SYNC_EVERY[-1]))
    assert max(learned) < min(seldom), "more updates on the same samples learn more here"


class Crossed(nn.Module):
    """Uses its layers in another order than it made them in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(6))

    def forward(self, values: Tensor) -> Tensor:
        for number in (3, 0, 5, 1, 4, 2):
            values = self.layers[number](values)
        return values


def order_of_buckets(ctx: Context) -> list[list[int]]:
    """Of parameters by number, in the second iteration: in the buckets, and as their gradients were ready."""
    net = Crossed().to(ctx.device)
    numbers = {parameter.data_ptr(): number for number, parameter in enumerate(net.parameters())}
    in_buckets: list[int] = []
    ready: list[int] = []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda parameter: ready.append(numbers[parameter.data_ptr()])
        )
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.002)

    def noting(bucket: Any) -> torch.futures.Future[Tensor]:
        in_buckets.extend(numbers[parameter.data_ptr()] for parameter in bucket.parameters())
        assert dist.group.WORLD is not None
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    # Without annotations, which DDP would compare with its own types.
    ddp.register_comm_hook(None, lambda state, bucket: noting(bucket))
    for _ in range(2):
        in_buckets.clear()
        ready.clear()
        ddp(torch.ones(1, 16, device=ctx.device)).sum().backward()
    return [in_buckets, ready]


def test_order_of_buckets(ddp_run: DdpRun) -> None:
    """The paper's order prediction: after one iteration buckets follow the order in which gradients are ready."""
    for in_buckets, ready in ddp_run(order_of_buckets):
        assert in_buckets == ready == [2, 4, 1, 5, 0, 3]


def reduce_in_another_order(ctx: Context) -> None:
    """Each rank waits for a reduction that the others begin only after the one that waits for it."""
    gradient = torch.ones(4, device=ctx.device)
    groups = [dist.new_group(), dist.new_group()]
    for group in groups if ctx.rank == 0 else reversed(groups):
        dist.all_reduce(gradient, group=group)
        if ctx.device.type != "cpu":
            torch.accelerator.synchronize()


class TwoLayers(nn.Module):
    """Of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, values: Tensor, both: bool) -> Tensor:
        values = self.first(values)
        return torch.as_tensor(self.second(values)) if both else values


def leave_out_a_parameter(ctx: Context) -> None:
    """Rank 0 never has a gradient of the second layer, and DDP was not told: its bucket is never ready."""
    net = DistributedDataParallel(TwoLayers().to(ctx.device))
    for _ in range(2):
        net(torch.ones(1, 4, device=ctx.device), ctx.rank > 0).sum().backward()


@pytest.mark.ddp(timeout=30)
def test_hang_of_another_reduction_order(ddp_run: DdpRun) -> None:
    """The paper's first way to hang, reductions in another order, is red with the line in which each rank waits."""
    if len(ddp_run(rank)) == 1:
        pytest.skip("one rank waits for nobody")
    with pytest.raises(pytest.fail.Exception) as caught:
        ddp_run(reduce_in_another_order)
    told = str(caught.value)
    assert "did not end within 30 s" in told
    assert "in reduce_in_another_order" in told
    assert "other ranks:" in told


@pytest.mark.ddp(timeout=30)
def test_hang_of_a_parameter_that_is_never_ready(ddp_run: DdpRun) -> None:
    """The paper's second way to hang, a parameter that is never ready, is red with DDP's own words."""
    with pytest.raises(pytest.fail.Exception) as caught:
        ddp_run(leave_out_a_parameter)
    told = str(caught.value)
    assert told.startswith("rank 0 failed")
    assert "Expected to have finished reduction in the prior iteration" in told
    assert "leave_out_a_parameter" in told
