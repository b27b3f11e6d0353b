"""The evaluation of "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (Li
et al., VLDB 2020): the effect of overlap, bucket size, synchronising less often, compression,
options and process groups on the latency of a step. And the same step under DDP, FSDP2 and a
sharded optimizer."""

import time
from contextlib import nullcontext
from itertools import count, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf import Context, DdpBenchmark
from pytest_ddpperf.suite import workloads
from pytest_ddpperf.suite.tables import (
    ALONE,
    NOT_OVERLAPPED,
    OVERLAPPED,
    PHASES,
    BestBuckets,
    Breakdown,
    Scaling,
    Tables,
    spread_of,
)
from pytest_ddpperf.suite.workloads import (
    Fits,
    Hook,
    Size,
    Step,
    Timed,
    add_hook,
    ddp_training,
    training,
    workload,
)
from pytest_ddpperf.suite.wrappers import ddps_buckets, flatten, unflatten

# Megabytes; 0 is an all-reduce a gradient, and the last ones hold all gradients of a model.
BUCKETS_MB = (0, 1, 5, 25, 100, 200)
SYNC_EVERY = (1, 2, 4, 8)
GROUPS = (1, 3, 5)


def name_of(model: str, size: Size) -> str:
    """Return the model's name: a GPT's is the smallest of the size."""
    return size.gpt if model == "gpt" else model


# --- latency


@pytest.mark.parametrize("variant", [ALONE, OVERLAPPED, NOT_OVERLAPPED])
@pytest.mark.parametrize("model", ["resnet50", "gpt"])
def test_latency_breakdown(
    timed: Timed, model: str, variant: str, size: Size, tables: Tables
) -> None:
    """Forward, backward, communication that the backward pass does not hide, optimizer; with and
    without overlap."""
    name = name_of(model, size)

    def setup(ctx: Context) -> Step:
        net, loss = workload(ctx, name, size)
        # Under no_sync buffers are not synchronised either: no variant does, so that forward passes
        # are alike.
        ddp = DistributedDataParallel(net, **workloads.no_buffers())
        reduced_after = ddps_buckets(list(ddp.parameters()))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.001, momentum=0.9)

        def now() -> float:
            if ctx.device.type != "cpu":
                torch.accelerator.synchronize()
            return time.perf_counter()

        def reduce() -> None:
            for bucket in reduced_after:
                gradients = [parameter.grad for parameter in bucket]
                flat = flatten(gradients) / ctx.world_size
                dist.all_reduce(flat)
                unflatten(flat, gradients)

        def step() -> None:
            optimizer.zero_grad()
            with nullcontext() if variant == OVERLAPPED else ddp.no_sync():
                marks = [now()]
                value = loss(ddp)
                marks.append(now())
                value.backward()
                if variant == NOT_OVERLAPPED:
                    reduce()
                marks.append(now())
            optimizer.step()
            marks.append(now())
            for phase, (began, ended) in zip(
                PHASES, pairwise(marks), strict=True
            ):
                ctx.record(phase, ended - began, better=None)

        return step

    result = timed(setup, name)
    tables.get(Breakdown).add(model, variant, result)


@pytest.mark.parametrize(
    "bucket", BUCKETS_MB, ids=lambda megabytes: f"{megabytes}mb"
)
@pytest.mark.parametrize("model", ["gpt", "resnet50", "resnet101"])
def test_bucket_latency(
    compared: Timed, model: str, bucket: int, size: Size, tables: Tables
) -> None:
    """The size of DDP's buckets against the latency of a step, from an all-reduce a gradient to one
    for all."""
    if model == "resnet101" and bucket < 25 and size.name == "tiny":
        pytest.skip(
            "resnet101 in small buckets takes too long for --ddp-suite-size tiny"
        )
    name = name_of(model, size)
    gradients = workloads.gradient_bytes(name, size) / 2**20
    if any(gradients <= smaller < bucket for smaller in BUCKETS_MB):
        pytest.skip("a smaller bucket holds all gradients")
    cap = bucket or 1e-6
    result = compared(
        f"Bucket size, {model}",
        f"{bucket} MB",
        lambda ctx: ddp_training(ctx, name, size, bucket_cap_mb=cap),
        name,
    )
    tables.get(BestBuckets).add(model, gradients, bucket, result)


@pytest.mark.ddp(world_size=1)  # each parameter has its own
def test_scalability(
    ddp_benchmark: DdpBenchmark,
    scaled_ranks: int,
    size: Size,
    tables: Tables,
    fits: Fits,
) -> None:
    """The latency of a GPT's step over numbers of ranks; the sweep has the ResNets'."""
    model = size.gpt
    sequences = size.sequences  # the same work for each
    fits(model, sequences)
    result = ddp_benchmark(
        lambda ctx: ddp_training(ctx, model, size, sequences=sequences),
        batch_size=sequences * size.tokens,
    )
    tables.get(Scaling).add(f"GPT {model}", result)


@pytest.mark.parametrize("every", SYNC_EVERY)
def test_sync_every(compared: Timed, every: int, size: Size) -> None:
    """Gradients reduced every 1, 2, 4 and 8 iterations: what skipping synchronisation saves an
    iteration."""
    iterations = max(SYNC_EVERY)

    def setup(ctx: Context) -> Step:
        net, loss = workload(ctx, size.gpt, size)
        ddp = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.001)

        # as many iterations whatever the interval, so that steps are alike
        def step() -> None:
            for iteration in range(1, iterations + 1):
                last = iteration % every == 0
                with nullcontext() if last else ddp.no_sync():
                    loss(ddp).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()

        return step

    compared(
        "Synchronisation every n iterations",
        f"every {every}",
        setup,
        iterations=iterations,
    )


# --- compression, options, groups

HOOKS: dict[str, Hook | None] = {
    "none": None,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "PowerSGD": powerSGD_hook.powerSGD_hook,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_compression(compared: Timed, hook: str, size: Size) -> None:
    """Gradients compressed by DDP's communication hooks: fp16, bf16, PowerSGD."""
    if hook == "PowerSGD":
        pytest.importorskip("numpy", reason="torch's PowerSGD needs NumPy")
    chosen = HOOKS[hook]

    def setup(ctx: Context) -> Step:
        net, loss = workload(ctx, size.gpt, size)
        # One bucket: of several, PowerSGD's further all-reduces would begin in another order on
        # each rank.
        ddp = DistributedDataParallel(net, bucket_cap_mb=1000)
        state = None
        if hook == "PowerSGD":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=1, start_powerSGD_iter=2
            )
        if chosen is not None:
            add_hook(ddp, chosen, state)
        return training(ddp, loss)

    compared("Gradient compression", hook, setup)


OPTIONS: dict[str, dict[str, bool]] = {
    "none": {},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "buffers not synchronised": workloads.no_buffers(),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(compared: Timed, option: str, size: Size) -> None:
    """What DDP's options cost or save: static_graph, gradient_as_bucket_view,
    find_unused_parameters, buffers."""
    compared(
        "Options",
        option,
        lambda ctx: ddp_training(ctx, "resnet50", size, **OPTIONS[option]),
        "resnet50",
    )


class LeftOut(nn.Module):
    """A block that is left out every second time, the same ones on all ranks: of several, every
    other one at a time."""

    def __init__(self, block: nn.Module, place: int) -> None:
        super().__init__()
        self.block = block
        self._turns = count(place)

    def forward(self, values: Tensor) -> Tensor:
        return values if next(self._turns) % 2 else self.block(values)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_layer_dropping(compared: Timed, share: float, size: Size) -> None:
    """Half of the blocks left out, the same on all ranks: they are not computed, and zeros are
    reduced for them."""

    def setup(ctx: Context) -> Step:
        net, loss = workload(ctx, size.gpt, size)
        blocks = net.get_submodule("blocks")
        if share:
            for number, block in list(blocks.named_children()):
                setattr(blocks, number, LeftOut(block, int(number)))
        return training(
            DistributedDataParallel(net, find_unused_parameters=True), loss
        )

    compared("Layer dropping", f"{share:.0%}", setup)


@pytest.mark.parametrize("groups", GROUPS)
def test_round_robin(compared: Timed, groups: int, size: Size) -> None:
    """Buckets dealt to 1, 3 and 5 process groups in turn, which torch's own round-robin group once
    did."""

    def setup(ctx: Context) -> Step:
        net, loss = workload(ctx, size.gpt, size)
        ddp = DistributedDataParallel(net, bucket_cap_mb=1)
        dealt = [dist.new_group() for _ in range(groups)]
        turns = count()

        def reduce(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
            group: Any = dealt[next(turns) % groups]
            return default_hooks.allreduce_hook(group, bucket)

        add_hook(ddp, reduce)
        return training(ddp, loss)

    compared("Process groups in turn", str(groups), setup)


# --- backends

BACKENDS = {
    "gloo-cpu": ("gloo", "cpu"),
    "gloo-cuda": ("gloo", "cuda"),
    "nccl": ("nccl", "cuda"),
}


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            name, marks=pytest.mark.ddp(backend=backend, device=device)
        )
        for name, (backend, device) in BACKENDS.items()
    ],
)
def test_backend(
    timed: Timed, backend: str, size: Size, tables: Tables
) -> None:
    """The same step over each backend that the machine has, in one run."""
    result = timed(lambda ctx: ddp_training(ctx, size.gpt, size))
    tables.add(
        f"A step of GPT {size.gpt} by backend, {result.world_size} ranks (p50)",
        {"backend": backend, "step": spread_of(result)},
    )


# --- sharding

SHARDED = ("DDP", "FSDP2", "DDP, ZeroRedundancyOptimizer")


@pytest.mark.parametrize("kind", SHARDED)
def test_sharding(compared: Timed, kind: str, size: Size) -> None:
    """The same step under DDP, under FSDP2, and with an optimizer whose state is sharded."""

    def setup(ctx: Context) -> Step:
        net, loss = workload(ctx, size.gpt, size)
        if kind == "FSDP2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            # Without it, FSDP takes the machine's accelerator, whatever the device of the test.
            mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
            for block in net.get_submodule("blocks").children():
                fully_shard(block, mesh=mesh)
            fully_shard(net, mesh=mesh)
            return training(net, loss)
        ddp = DistributedDataParallel(net)
        if kind == "DDP":
            return training(ddp, loss)
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.SGD, lr=0.001, momentum=0.9
        )
        return training(ddp, loss, optimizer)

    compared("Sharding", kind, setup)
