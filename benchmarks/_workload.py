"""Three DDP steps of a small model, the same for every launcher; a script for torchrun, a function
for the others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train() -> float:
    """Three steps on the process group that has been joined; the last loss."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = torch.randn(8, 64), torch.randint(8, (8,))
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item()


RPC_NAMES = ("trainer0", "trainer1", "ps0", "ps1", "master")
_table = torch.zeros(100, 8)


def look_up(rows: torch.Tensor) -> torch.Tensor:
    """In a parameter server."""
    return _table[rows]


def rpc_step() -> None:
    """A trainer's: look up in both parameter servers, then an all-reduce with the other trainer."""
    import torch.distributed.rpc as rpc

    looked_up = [
        rpc.rpc_async(name, look_up, (torch.arange(8),))
        for name in RPC_NAMES
        if name.startswith("ps")
    ]
    total = torch.stack([future.wait() for future in looked_up]).sum()
    dist.all_reduce(total)


def spawned_rpc(process: int, folder: str) -> None:
    """A process of torch.multiprocessing.spawn in an RPC world of two trainers, two parameter
    servers and a master."""
    import torch.distributed.rpc as rpc

    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/rpc"
    )
    rpc.init_rpc(
        RPC_NAMES[process],
        rank=process,
        world_size=len(RPC_NAMES),
        rpc_backend_options=options,
    )
    if RPC_NAMES[process].startswith("trainer"):
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=process,
            world_size=2,
        )
        for _ in range(3):
            rpc_step()
        dist.destroy_process_group()
    rpc.shutdown()


def spawned(rank: int, world_size: int, store: str) -> None:
    """A rank of torch.multiprocessing.spawn."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    train()
    dist.destroy_process_group()


if __name__ == "__main__":  # a rank of torchrun
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
