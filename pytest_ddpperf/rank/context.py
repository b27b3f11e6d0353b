"""What a rank tells the user's code about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pytest_ddpperf.rank.figures import Figures


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
    seed: int  #: random, numpy and torch are seeded with it, alike in every rank
    # What `record` keeps of the step under way; for the timed loop to take.
    figures: Figures = field(default_factory=Figures, init=False, repr=False, compare=False)

    def record(self, name: str, value: Any) -> None:
        """Keep a figure of the step under way: `result.recorded[name]` has it by launch, rank and step.

        `value` is a number, or a tensor with one element, which is read after the window where it is on an
        accelerator. The last figure counts that a step records under a name; those of warm-up steps are not kept.
        Raises TypeError or ValueError for what is no number or no name.
        """
        self.figures.record(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcContext(Context):
    """The `ctx` of an RPC launch. `rank` and `world_size` count the processes of the same role, which have a process
    group of their own; the master has none."""

    role: Literal["trainer", "parameter_server", "master"]
    name: str  #: for torch.distributed.rpc: "trainer0", "ps0", "master"
    workers: Mapping[str, tuple[str, ...]]  #: names by role
