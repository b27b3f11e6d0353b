"""Unit tests of distributed code: a fresh process group for each costs a tenth of a second.

pytest examples/gates/test_units.py
"""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def average(ctx, size):
    value = torch.full((size,), float(ctx.rank), device=ctx.device)
    dist.all_reduce(value, op=dist.ReduceOp.SUM)
    return value / ctx.world_size


@pytest.mark.parametrize("size", [1, 7, 1024])
def test_average(ddp_run, size):
    for value in ddp_run(average, size):  # one result of each rank
        assert (value == 0.5).all()


def gradient(ctx):
    torch.manual_seed(ctx.seed)
    model = DDP(torch.nn.Linear(4, 1, bias=False).to(ctx.device))
    x = torch.full((1, 4), float(ctx.rank + 1), device=ctx.device)
    model(x).sum().backward()
    return model.module.weight.grad


def test_gradients_are_averaged(ddp_run):
    first, second = ddp_run(gradient)
    assert first.equal(second)
    assert (first == 1.5).all()
