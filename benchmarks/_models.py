"""Training steps of three small DDP models, as fast as they are or slower by a share of each step,
in several ways."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

MODELS = ("mlp", "conv", "transformer")
# Where a step's time may be lost: what is not called when it is, who computes, who talks, who does
# so now and then, and who feeds it: one worker, or four, each of which takes four times as long.
PLANTS = ("sleeping", "computing", "collective", "fourth", "loader", "loaders")
# more than the step takes, so that the loader is what it waits for
_LOAD_SECONDS = 0.008
_CALIBRATION = 12  # steps, half of them to warm up

Step = Callable[[], None]


def training(model: str, slowdown: float) -> Callable[[Any], Step]:
    """The set-up of a model's step; every rank computes for a share of what each step took after
    it."""
    return planted("computing", model, slowdown)


def planted(plant: str, model: str, slowdown: float) -> Callable[[Any], Step]:
    """The set-up of a model's step that is slower by a share, on every rank, in one of PLANTS; with
    0 what that is compared with."""

    def setup(ctx: Any) -> Step:
        train = step_of(model)
        if plant.startswith("loader"):
            return _fed(train, slowdown, workers=4 if plant == "loaders" else 1)
        if not slowdown:
            return train
        if plant == "collective":
            return _talking(train, slowdown)
        lose = time.sleep if plant == "sleeping" else _compute
        every, numbers = (4, count(1)) if plant == "fourth" else (1, count())

        def slower() -> None:
            began = time.perf_counter()
            train()
            if next(numbers) % every == 0:
                lose(slowdown * every * (time.perf_counter() - began))

        return slower

    return setup


def step_of(model: str) -> Step:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    net: nn.Module
    if model == "mlp":
        net, inputs = (
            nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)),
            torch.randn(64, 256),
        )
    elif model == "conv":
        layers = (
            nn.Conv2d(3, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        net, inputs = (
            nn.Sequential(*layers, nn.Linear(16, 10)),
            torch.randn(16, 3, 24, 24),
        )
    else:
        layer = nn.TransformerEncoderLayer(
            64, 4, 128, dropout=0.0, batch_first=True
        )
        net, inputs = (
            nn.Sequential(layer, nn.Flatten(), nn.Linear(64 * 16, 10)),
            torch.randn(8, 16, 64),
        )
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    targets = torch.randint(10, (len(inputs),))

    def train() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()

    return train


def _compute(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def _talking(train: Step, slowdown: float) -> Step:
    """With all-reduces after it, as many as take that share of it."""
    import torch
    import torch.distributed as dist

    small = torch.zeros(64)

    def seconds(step: Step) -> float:
        for _ in range(_CALIBRATION // 2):
            step()
        began = time.perf_counter()
        for _ in range(_CALIBRATION // 2):
            step()
        return (time.perf_counter() - began) / (_CALIBRATION // 2)

    many = torch.tensor(
        slowdown * seconds(train) / seconds(lambda: dist.all_reduce(small))
    )
    dist.broadcast(many, 0)

    def talking() -> None:
        train()
        for _ in range(max(1, round(many.item()))):
            dist.all_reduce(small)

    return talking


def _fed(train: Step, slowdown: float, workers: int) -> Step:
    """Behind a loader whose workers take longer than it; several take more or less by chance, else
    all would be ready at once."""
    from torch.utils.data import DataLoader, IterableDataset

    class Slow(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                uneven = random.uniform(0.5, 1.5) if workers > 1 else 1.0
                time.sleep(_LOAD_SECONDS * workers * uneven * (1 + slowdown))
                yield 0

    batches = iter(
        DataLoader(
            Slow(),
            batch_size=1,
            num_workers=workers,
            multiprocessing_context="fork",
        )
    )

    def fed() -> None:
        next(batches)
        train()

    return fed
