"""Training steps of three small DDP models, as fast as they are or slower by a share of each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

MODELS = ("mlp", "conv", "transformer")


def training(model: str, slowdown: float) -> Callable[[Any], Callable[[], None]]:
    """The set-up of a model's step; every rank computes for a share of what each step took after it."""

    def setup(ctx: Any) -> Callable[[], None]:
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        net: nn.Module
        if model == "mlp":
            net, inputs = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)), torch.randn(64, 256)
        elif model == "conv":
            layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
            net, inputs = nn.Sequential(*layers, nn.Linear(16, 10)), torch.randn(16, 3, 24, 24)
        else:
            layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
            net, inputs = nn.Sequential(layer, nn.Flatten(), nn.Linear(64 * 16, 10)), torch.randn(8, 16, 64)
        ddp = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        targets = torch.randint(10, (len(inputs),))

        def train() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        def slower() -> None:
            began = time.perf_counter()
            train()
            ended = time.perf_counter()
            until = ended + slowdown * (ended - began)
            while time.perf_counter() < until:
                pass

        return slower if slowdown else train

    return setup
