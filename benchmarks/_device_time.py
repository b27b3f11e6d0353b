"""A step of known work on a device, with a planted cause: a test of the project that gpu.py
makes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CAUSE = os.environ.get("CAUSE", "none")
MORE = int(os.environ.get("MORE", "0"))  # products, next to 50
PARAMETERS = 200  # small ones, for the optimizer
SENT = 1 << 24  # floats, between several ranks


def setup(ctx: Any) -> Callable[[], None]:
    dtype = torch.float32 if CAUSE == "fp32" else torch.bfloat16
    x = torch.randn(2048, 2048, device=ctx.device, dtype=dtype)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(PARAMETERS // 2)))
    model = DistributedDataParallel(net.to(ctx.device))
    inputs = torch.randn(8, 8, device=ctx.device)
    foreach = CAUSE != "no foreach"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=foreach)
    late = ctx.rank == ctx.world_size - 1
    more = MORE if CAUSE != "rank" or late else 0
    sent = torch.zeros(SENT, device=ctx.device)

    def step() -> None:
        optimizer.zero_grad()
        sending = None
        if ctx.world_size > 1:
            sending = dist.all_reduce(sent, async_op=True)
            if CAUSE == "overlap":
                sending.wait()
        for _ in range(50 + more):
            x @ x
        loss = model(inputs).sum()
        if CAUSE == "item":
            for _ in range(20):
                loss.item()
        loss.backward()
        optimizer.step()
        if sending is not None:
            sending.wait()

    return step


def test_step(ddp_benchmark: Any) -> None:
    ddp_benchmark(setup)
