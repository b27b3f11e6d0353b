"""Training steps with a planted cause of a slowdown, and what should be named: for explain.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

Step = Callable[[], Any]
WIDTH, DEPTH = 256, 6
SECONDS = 0.002  # that is lost in a step, where it is lost in one place


def busy(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def lost_in(
    place: str, rank: int | None, lose: Callable[[float], None] = busy
) -> Callable[..., Step]:
    """A set-up whose step loses time in one place, on one rank or on all."""

    def setup(ctx: Any, changed: bool) -> Step:
        import torch

        model = layers()
        is_lost = changed and rank in (None, ctx.rank)
        if is_lost and place == "forward":
            model[2].register_forward_hook(lambda *_: lose(SECONDS))
        if is_lost and place == "backward":
            model[2].register_full_backward_hook(lambda *_: lose(SECONDS))

        class Optimizer(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                if is_lost and place == "optimizer":
                    lose(SECONDS)
                return super().step(closure)

        train = training(model, optimizer=Optimizer)

        def step() -> None:
            if is_lost and place == "data":
                lose(SECONDS)
            train()

        return step

    return setup


def layers(width: int = WIDTH, depth: int = DEPTH) -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(torch.nn.Linear(width, width) for _ in range(depth))
    )


def training(
    model: Any,
    *,
    optimizer: Any = None,
    wrapped: Any = None,
    width: int = WIDTH,
    **options: Any,
) -> Step:
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP

    ddp = wrapped if wrapped is not None else DDP(model, **options)
    updates = (optimizer or torch.optim.SGD)(ddp.parameters(), lr=0.01)
    x = torch.randn(64, width)

    def train() -> None:
        updates.zero_grad()
        ddp(x).square().mean().backward()
        updates.step()

    return train


def buckets(ctx: Any, changed: bool) -> Step:
    return training(layers(), bucket_cap_mb=0.01 if changed else 25)


def no_sync(ctx: Any, changed: bool) -> Step:
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP

    ddp = DDP(layers())
    optimizer, x = (
        torch.optim.SGD(ddp.parameters(), lr=0.01),
        torch.randn(16, WIDTH),
    )

    def step() -> None:
        optimizer.zero_grad()
        for micro in range(4):
            with ddp.no_sync() if micro < 3 and not changed else nullcontext():
                ddp(x).square().mean().backward()
        optimizer.step()

    return step


def all_reduce(ctx: Any, changed: bool) -> Step:
    import torch
    import torch.distributed as dist

    train, figures = training(layers()), torch.ones(1_000_000)

    def step() -> None:
        train()
        if changed:
            dist.all_reduce(figures)

    return step


def hook(ctx: Any, changed: bool) -> Step:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel as DDP

    ddp = DDP(layers(2 * WIDTH))
    if not changed:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return training(None, wrapped=ddp, width=2 * WIDTH)


def larger(ctx: Any, changed: bool) -> Step:
    width = WIDTH + 128 * changed
    return training(layers(width), width=width)


def buffers(ctx: Any, changed: bool) -> Step:
    import torch

    model = layers()
    if changed:
        model.register_buffer("statistics", torch.zeros(1_000_000))
    return training(model)


def unused(ctx: Any, changed: bool) -> Step:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(60)))
    return training(model, width=32, find_unused_parameters=changed)


def sharded(ctx: Any, changed: bool) -> Step:
    """FSDP2's reduce-scatter becomes DDP's all-reduce."""
    from torch.distributed.fsdp import fully_shard

    model = layers()
    if changed:
        return training(model)
    for layer in model:
        fully_shard(layer)
    return training(None, wrapped=fully_shard(model))


def sharded_waits(ctx: Any, changed: bool) -> Step:
    """32 waits of 1 ms on one rank under FSDP2."""
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        for _ in range(8)
    ]
    model = torch.nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block)
        if changed and ctx.rank == 1:
            for layer in block:
                layer.register_forward_hook(lambda *_: time.sleep(0.001))
    return training(None, wrapped=fully_shard(model), width=64)


def overlap(ctx: Any, changed: bool) -> Step:
    """Buckets are reduced one after the other, each awaited in its hook: as many bytes."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    ddp = DDP(layers(depth=24), bucket_cap_mb=0.25)  # a bucket a layer

    def reduce(state, bucket):  # type: ignore[no-untyped-def]  # DDP would refuse annotations that are strings
        tensor = bucket.buffer()
        if not changed:
            return (
                dist.all_reduce(tensor, async_op=True)
                .get_future()
                .then(lambda done: done.value()[0])
            )
        dist.all_reduce(tensor)
        reduced: Any = torch.futures.Future()
        reduced.set_result(tensor)
        return reduced

    ddp.register_comm_hook(None, reduce)
    return training(None, wrapped=ddp)


def recompiling(ctx: Any, changed: bool) -> Step:
    import torch

    train = training(layers())
    numbers: Iterator[int] = iter(range(1_000_000))

    def step() -> None:
        train()
        if changed and (number := next(numbers)) >= 0:
            added = eval(f"lambda x: x + {number}")
            compiled: Any = torch.compile(added, backend="eager")
            compiled(torch.ones(2))

    return step


def turns(ctx: Any, changed: bool) -> Step:
    """Ranks are late in turns: the phase is named, and no rank."""
    train, numbers = training(layers()), iter(range(1_000_000))

    def step() -> None:
        if changed and next(numbers) % ctx.world_size == ctx.rank:
            busy(SECONDS)
        train()

    return step


def late(ctx: Any, changed: bool) -> Step:
    """One rank begins each step of about 0.1 s with a delay of 5 %. Of a shorter step that is less
    than what an all-reduce of Gloo gains on two cores if one rank comes after the other, and the
    step is not slower."""
    import torch
    import torch.distributed as dist

    model, x = torch.nn.Linear(8, 8), torch.ones(2, 8)

    def step() -> None:
        if changed and ctx.rank == 1:
            busy(0.005)
        model.zero_grad()
        model(x).sum().backward()
        time.sleep(0.1)
        dist.all_reduce(model.weight.grad)

    return step


def of_file(ctx: Any, changed: bool) -> Step:
    """Of two modules that differ, one is slower."""
    import loss
    import net

    train = training(layers())

    def step() -> None:
        net.forward()
        loss.loss()
        train()

    return step


def moved(ctx: Any, changed: bool) -> Step:
    """A function moved to another module, and the loader became slower."""
    import loss
    import net

    train, work = training(layers()), (net if changed else loss).work

    def step() -> None:
        if changed:
            busy(SECONDS)
        work()
        train()

    return step


_BUSY = """import time

def {name}():
    until = time.perf_counter() + {seconds}
    while time.perf_counter() < until:
        pass

"""


def modules(changed: bool) -> dict[str, str]:
    """Return the modules of `of_file` and `moved`, which both differ."""
    work = _BUSY.format(name="work", seconds=0.002)
    net = _BUSY.format(name="forward", seconds=0.004 if changed else 0.002)
    loss = _BUSY.format(name="loss", seconds=0.002)
    return {
        "net.py": net + work * changed,
        "loss.py": loss + work * (not changed),
    }


def serve(seconds: float) -> None:
    """What a parameter server does for a trainer."""
    time.sleep(seconds)


def trainer(ctx: Any, changed: bool) -> Step:
    import torch.distributed.rpc as rpc

    servers = ctx.workers["parameter_server"]

    def step() -> None:
        busy(0.002)
        for server in servers:
            rpc.rpc_sync(server, serve, (2 * SECONDS if changed else SECONDS,))

    return step


def unchanged(ctx: Any, changed: bool) -> Step:
    return training(layers())


CAUSES: dict[str, Callable[[Any, bool], Step]] = {
    "slow data loading": lost_in("data", None),
    "slow forward pass": lost_in("forward", None),
    "slow backward pass": lost_in("backward", None),
    "slow optimizer": lost_in("optimizer", None),
    "tiny buckets": buckets,
    "no_sync is missing": no_sync,
    "one more all-reduce": all_reduce,
    "fp32 instead of an fp16 hook": hook,
    "rank 1 computes more": lost_in("forward", 1),
    "rank 1 sleeps": lost_in("data", 1, time.sleep),
    "rank 1 sleeps in backward": lost_in("backward", 1, time.sleep),
    "a larger model": larger,
    "a buffer is broadcast": buffers,
    "find_unused_parameters": unused,
    "reduce-scatter becomes all-reduce": sharded,
    "32 waits of 1 ms (FSDP2)": sharded_waits,
    "overlap is lost": overlap,
    "recompilation": recompiling,
    "rank 1 is late by 5 %": late,
    "one of two files": of_file,
    "slow parameter server": trainer,
    "ranks are late in turns": turns,
    "a function moved": moved,
    "unchanged": unchanged,
}
RPC = ("slow parameter server",)
SMALL = ("rank 1 is late by 5 %",)  # below the usual limit
# Their findings are looked for whatever the verdict is.
WITHOUT_VERDICT = (*SMALL, "unchanged")
Named = dict[str, Any]  # a finding, as the JSON has it


def is_named(cause: str, findings: Sequence[Named]) -> bool:
    """Whether the first finding is the planted cause; of unchanged code and the like, whether none
    is wrong."""
    if cause == "unchanged":
        return not findings
    if cause == "ranks are late in turns":
        return all(each["rank"] is None for each in findings)
    if cause == "a function moved":
        return not any(each["file"] for each in findings)
    if cause == "one of two files":
        return any(each["file"].endswith("net.py") for each in findings)
    if not findings:
        return False
    phases, rank = set(findings[0]["phases"]), findings[0]["rank"]
    counters = {name for name, *_ in findings[0]["counters"]}
    wanted_counter, wanted_phases, wanted_rank = _NAMED[cause]
    if wanted_counter:
        return any(name.startswith(wanted_counter) for name in counters)
    return bool(phases & set(wanted_phases)) and rank == wanted_rank


# The beginning of a counter, or a phase and a rank.
_NAMED: dict[str, tuple[str, tuple[str, ...], int | None]] = {
    "slow data loading": ("", ("data",), None),
    "slow forward pass": ("", ("forward",), None),
    "slow backward pass": ("", ("backward",), None),
    "slow optimizer": ("", ("optimizer",), None),
    "tiny buckets": ("buckets", (), None),
    "no_sync is missing": ("all_reduce.count", (), None),
    "one more all-reduce": ("all_reduce.count", (), None),
    "fp32 instead of an fp16 hook": ("all_reduce.bytes", (), None),
    "rank 1 computes more": ("", ("forward",), 1),
    "rank 1 sleeps": ("", ("data",), 1),
    "rank 1 sleeps in backward": ("", ("backward",), 1),
    "a larger model": ("parameters.bytes", (), None),
    "a buffer is broadcast": ("broadcast", (), None),
    "find_unused_parameters": ("collectives.count", (), None),
    "reduce-scatter becomes all-reduce": ("reduce_scatter", (), None),
    "32 waits of 1 ms (FSDP2)": ("", ("forward",), 1),
    "overlap is lost": ("", ("exposed_communication",), None),
    "rank 1 is late by 5 %": ("", ("data",), 1),
    "slow parameter server": ("", ("waiting_for_RPC",), None),
    "recompilation": ("recompilations", (), None),
}
