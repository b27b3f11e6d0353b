"""What a rank tells the user's code about itself."""

from __future__ import annotations

from dataclasses import dataclass

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
