"""A model of two parts: sparse embeddings on parameter servers, dense layers replicated by DDP.

The hybrid of PyTorch's "DDP and RPC" benchmark (torch/distributed/benchmarks/benchmark_ddp_rpc.py, and the tutorial
"Combining Distributed DataParallel with Distributed RPC Framework"): the same tables, layers and varying batches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.rpc import RRef
from torch.nn.parallel import DistributedDataParallel

EMBEDDINGS = 300  # rows of each table
FEATURES = 512  # of an example, over all tables together
CLASSES = 8
BATCHES = 10  # of an epoch

Batch = tuple[Tensor, Tensor, Tensor]  # indices, offsets of the bags, a target for each bag


class HybridModel(nn.Module):
    """Looks its examples up in every table, then runs the dense layers on what came back."""

    def __init__(self, tables: Sequence[Any], device: torch.device) -> None:
        super().__init__()
        self.tables = tables  # RRefs of EmbeddingBags
        self._device = device
        # As the original has them, one ReLU in all.
        layers = [
            *(nn.Linear(FEATURES, 256), nn.Linear(256, 128), nn.ReLU()),
            *(nn.Linear(128, 64), nn.Linear(64, 32), nn.Linear(32, CLASSES)),
        ]
        self.dense: nn.Module = DistributedDataParallel(nn.Sequential(*layers).to(device))

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """Classes' scores: bags x CLASSES."""
        lookups = [table.rpc_sync().forward(indices, offsets) for table in self.tables]  # one after another
        scores: Tensor = self.dense(torch.cat(lookups, dim=1).to(self._device))
        return scores

    def parameter_references(self) -> list[RRef[Any]]:
        """Of all parameters, wherever they are: for a DistributedOptimizer."""
        references = [RRef(parameter) for parameter in self.dense.parameters()]
        for table in self.tables:
            references += rpc.rpc_sync(table.owner(), parameters_of, (table,))
        return references


def parameters_of(table: RRef[Any]) -> list[RRef[Any]]:
    """Called where it is."""
    return [RRef(parameter) for parameter in table.local_value().parameters()]


def columns_on(server: int, servers: int) -> int:
    """A parameter server's share of the features: the columns of its table."""
    return FEATURES // servers + (server < FEATURES % servers)


def epoch_of_batches(source: random.Random) -> list[Batch]:
    """Batches of 20 to 50 indices in bags of 1 to 10."""
    batches = []
    for _ in range(BATCHES):
        count = source.randint(20, 50)
        offsets = [0]
        while (start := offsets[-1] + source.randint(1, 10)) < count:
            offsets.append(start)
        indices = torch.tensor([source.randrange(EMBEDDINGS) for _ in range(count)])
        targets = torch.tensor([source.randrange(CLASSES) for _ in offsets])
        batches.append((indices, torch.tensor(offsets), targets))
    return batches
