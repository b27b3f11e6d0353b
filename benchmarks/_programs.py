"""Training steps of many kinds, each to be timed as a step and as a program that owns its loop: for
programs.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

Step = Callable[[], Any]
WIDTH = 256


def layers(depth: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))


def batch() -> torch.Tensor:
    return torch.randn(64, WIDTH)


def trains(model: Any, optimizer: Any = None) -> Step:
    updates, x = (
        optimizer or torch.optim.SGD(model.parameters(), lr=0.01),
        batch(),
    )

    def step() -> None:
        updates.zero_grad()
        model(x).square().mean().backward()
        updates.step()

    return step


def plain() -> Step:
    return trains(DDP(layers()))


def accumulating() -> Step:
    model = DDP(layers())
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), batch()

    def step() -> None:
        optimizer.zero_grad()
        for micro in range(4):
            with model.no_sync() if micro < 3 else nullcontext():
                model(x).square().mean().backward()
        optimizer.step()

    return step


def gan() -> Step:
    critic, generator, x = DDP(layers(4)), DDP(layers(4)), batch()
    of_critic, of_generator = (
        torch.optim.SGD(model.parameters(), lr=0.001)
        for model in (critic, generator)
    )

    def step() -> None:
        for _ in range(2):
            of_critic.zero_grad()
            (critic(generator(x).detach()).mean() - critic(x).mean()).backward()
            of_critic.step()
        of_generator.zero_grad()
        critic(generator(x)).mean().neg().backward()
        of_generator.step()

    return step


def in_backward() -> Step:
    model, x = layers(), batch()

    def of(parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        own = torch.optim.SGD([parameter], lr=0.01)

        def update(parameter: torch.Tensor) -> None:
            dist.all_reduce(parameter.grad)
            own.step()
            own.zero_grad()

        return update

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(of(parameter))
    return lambda: model(x).square().mean().backward()


def zero() -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(layers())
    return trains(
        model,
        ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.SGD, lr=0.01
        ),
    )


def scaled() -> Step:
    """Every eighth update is skipped."""
    model, x, numbers = DDP(layers()), batch(), count()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=10**6)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean() * (
            float("inf") if next(numbers) % 8 == 7 else 1.0
        )
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def compiled() -> Step:
    return trains(torch.compile(DDP(layers()), backend="eager"))


def sharded() -> Step:
    from torch.distributed.fsdp import fully_shard

    model = layers()
    for layer in model:
        fully_shard(layer)
    return trains(fully_shard(model))


def tensor_parallel() -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    plan: dict[str, ParallelStyle] = {
        str(number): RowwiseParallel() if number % 2 else ColwiseParallel()
        for number in range(8)
    }
    return trains(
        parallelize_module(
            layers(), init_device_mesh("cpu", (dist.get_world_size(),)), plan
        )
    )


def bfloat16() -> Step:
    model, x = DDP(layers()), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()

    return step


KINDS: dict[str, Callable[[], Step]] = {
    "plain": plain,
    "accumulation": accumulating,
    "GAN": gan,
    "optimizer in backward": in_backward,
    "ZeroRedundancyOptimizer": zero,
    "GradScaler that skips": scaled,
    "compiled": compiled,
    "fully_shard": sharded,
    "tensor parallel": tensor_parallel,
    "bf16": bfloat16,
}


def train(kind: str, after: Step = lambda: None) -> None:
    dist.init_process_group("gloo")
    step = KINDS[kind]()
    while True:
        step()
        after()


if __name__ == "__main__":
    import sys

    train(sys.argv[1])
