"""The DDP paper apart from latency: what synchronising less often costs in learning, and the two
ways to hang."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf import Context, DdpRun
from pytest_ddpperf.suite.tables import (
    Spread,
    Tables,
    lines,
    spread_around_mean,
)
from pytest_ddpperf.suite.workloads import Fits, Size, add_hook, workload

SYNC_EVERY = (1, 2, 4, 8)
SEEDS = 3
ITERATIONS = 48
BATCHES = {"small": 1, "large": 8}  # sequences of a rank
# a hang is waited for: more than ranks need to start, and to form three groups over
# NCCL
HANG_SECONDS = 15


class Learned(NamedTuple):
    """What a rank learned, synchronising every so many iterations."""

    # seed x iteration: the mean loss over ranks on the same batches, before each iteration and
    # after the last
    curves: list[list[float]]
    seconds: float  # of an iteration: the mean, the median over seeds


def learn(ctx: Context, size: Size, every: int, sequences: int) -> Learned:
    """Train once for each seed."""
    curves = []
    seconds = []
    for seed in range(SEEDS):
        seeded = replace(ctx, seed=ctx.seed + 1000 * seed)
        net, loss = workload(seeded, size.gpt, size, sequences=sequences)
        ddp = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        values = []
        began = time.perf_counter()
        for iteration in range(1, ITERATIONS + 1):
            last = iteration % every == 0
            with nullcontext() if last else ddp.no_sync():
                value = loss(ddp)
                (value / every).backward()
            values.append(value.detach())
            if last:
                optimizer.step()
                optimizer.zero_grad()
        means = torch.stack([*values, loss(ddp).detach()])
        dist.all_reduce(means)
        # tolist() waits for a device.
        curves.append((means / ctx.world_size).tolist())
        seconds.append((time.perf_counter() - began) / ITERATIONS)
    return Learned(curves, median(seconds))


@pytest.mark.parametrize("batch", BATCHES)
def test_convergence(
    ddp_run: DdpRun, batch: str, size: Size, tables: Tables, fits: Fits
) -> None:
    """The loss against iterations and time, synchronised every 1, 2, 4 and 8 iterations: does
    slower convergence erase what latency gains?"""
    sequences = BATCHES[batch]
    fits(size.gpt, sequences)
    seconds: dict[int, float] = {}  # of an iteration, in the slowest rank
    # over seeds, by iteration
    losses: dict[int, list[Spread]] = {}
    ranks = 0
    for every in SYNC_EVERY:
        of_ranks = ddp_run(learn, size, every, sequences)
        ranks = len(of_ranks)
        seconds[every] = max(each.seconds for each in of_ranks)
        curves = zip(*of_ranks[0].curves, strict=True)
        losses[every] = [spread_around_mean(each) for each in curves]
    _show_losses(tables, f"{batch} batch", ranks, seconds, losses)
    often, seldom = losses[SYNC_EVERY[0]][-1], losses[SYNC_EVERY[-1]][-1]
    assert often.most < seldom.least, (
        "more updates on the same samples learn more here"
    )


def _show_losses(
    tables: Tables,
    batch: str,
    ranks: int,
    seconds: dict[int, float],
    losses: dict[int, list[Spread]],
) -> None:
    """Add the table and the figures, and how often to synchronise to be first at a loss that all
    reach."""
    title = (
        f"{ITERATIONS} iterations of a {batch}, {ranks} ranks ({SEEDS} seeds)"
    )
    target = max(curve[-1].middle for curve in losses.values())
    reached = {}
    for every, curve in losses.items():
        iteration = next(
            n for n, loss in enumerate(curve) if loss.middle <= target
        )
        reached[every] = seconds[every] * iteration
        last = curve[-1]
        tables.add(
            title,
            {
                "synchronised": f"every {every}",
                "loss": f"{last.middle:.4f} ({last.least:.4f} to {last.most:.4f})",
                "iteration": f"{seconds[every]:.6f}s",
                f"to a loss of {target:.2f}": f"{reached[every]:.3f}s",
            },
        )
    first = min(reached, key=reached.__getitem__)
    answer = "it pays to synchronise less often"
    if first == 1:
        answer = "what is saved is lost in learning"
    tables.add_text(
        [
            f"{batch}: synchronised every {first}, the loss is {target:.2f} first: {answer}"
        ]
    )
    for across in ("iterations", "seconds"):
        curves: dict[str, dict[float, Spread]] = {}
        for every, curve in losses.items():
            scale = seconds[every] if across == "seconds" else 1.0
            curves[f"synchronised every {every}"] = {
                iteration * scale: loss for iteration, loss in enumerate(curve)
            }
        title = f"Loss against {across}, {batch}, {ranks} ranks"
        tables.plots.append(lines(title, across, "loss", curves))


class Layers(nn.Module):
    """Linear layers that are used in any order, some of them perhaps not at all."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(count)
        )

    def forward(self, values: Tensor, order: Sequence[int]) -> Tensor:
        for number in order:
            values = self.layers[number](values)
        return values


def order_of_buckets(ctx: Context) -> list[list[int]]:
    """Return the order of parameters in the second iteration: in the buckets, and as their
    gradients were ready."""
    net = Layers(6, 16).to(ctx.device)
    numbers: dict[int, int] = {}
    in_buckets: list[int] = []
    ready: list[int] = []

    def note_ready(parameter: Tensor) -> None:
        ready.append(numbers[parameter.data_ptr()])

    def note_bucket(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        for parameter in bucket.parameters():
            in_buckets.append(numbers[parameter.data_ptr()])
        return default_hooks.allreduce_hook(group, bucket)

    for number, parameter in enumerate(net.parameters()):
        numbers[parameter.data_ptr()] = number
        parameter.register_post_accumulate_grad_hook(note_ready)
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.002)
    add_hook(ddp, note_bucket)
    for _ in range(2):
        in_buckets.clear()
        ready.clear()
        ddp(
            torch.ones(1, 16, device=ctx.device), (3, 0, 5, 1, 4, 2)
        ).sum().backward()
    return [in_buckets, ready]


def test_order_of_buckets(ddp_run: DdpRun) -> None:
    """The paper's order prediction: after one iteration buckets follow the order in which gradients
    are ready."""
    for in_buckets, ready in ddp_run(order_of_buckets):
        assert in_buckets == ready == [2, 4, 1, 5, 0, 3]


def reduce_in_another_order(ctx: Context) -> None:
    """Start two reductions in another order on rank 0: each rank waits for one that others start
    later."""
    gradient = torch.ones(4, device=ctx.device)
    groups = [dist.new_group(), dist.new_group()]
    for group in groups if ctx.rank == 0 else reversed(groups):
        dist.all_reduce(gradient, group=group)
        if ctx.device.type != "cpu":
            torch.accelerator.synchronize()


def leave_out_a_parameter(ctx: Context) -> None:
    """Leave out the second layer on rank 0 without DDP's find_unused_parameters: its bucket is
    never ready."""
    net = DistributedDataParallel(Layers(2, 4).to(ctx.device))
    order = (0, 1) if ctx.rank > 0 else (0,)
    for _ in range(2):
        net(torch.ones(1, 4, device=ctx.device), order).sum().backward()


def train_with_unused(
    ctx: Context, unused_on: tuple[int, ...]
) -> tuple[float, float]:
    """Return the gradients of two layers after three steps with `find_unused_parameters`, in which
    some ranks leave out the second one. Before each step its gradient is 7."""
    net = DistributedDataParallel(
        Layers(2, 1).to(ctx.device), find_unused_parameters=True
    )
    first, second = net.parameters()
    nn.init.ones_(first)
    nn.init.ones_(second)
    order = (0,) if ctx.rank in unused_on else (0, 1)
    for _ in range(3):
        first.grad = None
        second.grad = torch.full_like(second, 7.0)
        net(torch.ones(1, 1, device=ctx.device), order).sum().backward()
    assert first.grad is not None
    assert second.grad is not None
    return float(first.grad), float(second.grad)


def test_a_parameter_that_one_rank_does_not_use(
    ddp_run: DdpRun, ddp_world_size: int
) -> None:
    """With `find_unused_parameters` training goes on: the other ranks add 1 to the gradient, and
    all get the mean."""
    others = ddp_world_size - 1
    for _, second in ddp_run(train_with_unused, (0,)):
        assert second == pytest.approx(
            (7.0 * ddp_world_size + others) / ddp_world_size
        )


def test_a_parameter_that_no_rank_uses_keeps_its_gradient(
    ddp_run: DdpRun, ddp_world_size: int
) -> None:
    """With `find_unused_parameters` the gradient of a parameter that no rank uses stays as it
    was."""
    all_ranks = tuple(range(ddp_world_size))
    assert (
        ddp_run(train_with_unused, all_ranks) == [(1.0, 7.0)] * ddp_world_size
    )


@pytest.mark.ddp(timeout=HANG_SECONDS)
def test_hang_of_another_reduction_order(
    ddp_run: DdpRun, ddp_world_size: int
) -> None:
    """The paper's first way to hang, reductions in another order, is red with the line in which
    each rank waits."""
    if ddp_world_size == 1:
        pytest.skip("needs at least two ranks")
    with pytest.raises(pytest.fail.Exception) as caught:
        ddp_run(reduce_in_another_order)
    message = str(caught.value)
    assert f"did not end within {HANG_SECONDS} s" in message
    assert "in reduce_in_another_order" in message
    assert "other ranks:" in message


@pytest.mark.ddp(timeout=HANG_SECONDS)
def test_hang_of_a_parameter_that_is_never_ready(ddp_run: DdpRun) -> None:
    """The paper's second way to hang, a parameter that is never ready, is red with DDP's own
    words."""
    with pytest.raises(pytest.fail.Exception) as caught:
        ddp_run(leave_out_a_parameter)
    message = str(caught.value)
    assert message.startswith("rank 0 failed")
    assert (
        "Expected to have finished reduction in the prior iteration" in message
    )
    assert "leave_out_a_parameter" in message
