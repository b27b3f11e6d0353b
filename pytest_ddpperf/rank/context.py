"""What a rank tells the user's code about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The `ctx` that `setup(ctx)` and `fn(ctx, ...)` receive in every rank. Names and meanings are torchrun's."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    device: torch.device
    backend: str
    seed: int  # random, numpy and torch are seeded with it, alike in every rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcContext(Context):
    """The `ctx` of an RPC launch. `rank` and `world_size` count the processes of the same role, which have a process
    group of their own; the master has none."""

    role: Literal["trainer", "parameter_server", "master"]
    name: str  # for torch.distributed.rpc: "trainer0", "ps0", "master"
    workers: Mapping[str, tuple[str, ...]]  # names by role
