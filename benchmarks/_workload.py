"""Three DDP steps of a small model, the same for every launcher; a script for torchrun, a function for the others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train() -> float:
    """Three steps on the process group that has been joined; the last loss."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = torch.randn(8, 64), torch.randint(8, (8,))
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item()


def spawned(rank: int, world_size: int, store: str) -> None:
    """A rank of torch.multiprocessing.spawn."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    train()
    dist.destroy_process_group()


if __name__ == "__main__":  # a rank of torchrun
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
