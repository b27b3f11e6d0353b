"""Gate hybrid training: embeddings on parameter servers over RPC, dense layers under DDP.

As in the original there are 8 trainers, 8 parameter servers and a master. On a small machine have fewer:

    pytest examples/rpc/test_hybrid.py --ddp-trainers 2 --ddp-parameter-servers 2 --ddp-save-baseline
"""

import os
import random
import time

import pytest
import torch
import torch.distributed.autograd as dist_autograd

from pytest_ddpperf.suite.hybrid import EMBEDDINGS, HybridModel, columns_on, epoch_of_batches

# A regression to plant: the first parameter server takes so many milliseconds more for each look-up.
SLOW_SERVER_MS = float(os.environ.get("DDP_SLOW_SERVER_MS", "0"))


class Table(torch.nn.EmbeddingBag):
    """An embedding table, in a parameter server."""

    def __init__(self, columns, delay):
        super().__init__(EMBEDDINGS, columns, mode="sum")
        self.delay = delay

    def forward(self, indices, offsets):
        time.sleep(self.delay)
        return super().forward(indices, offsets)


@pytest.mark.ddp(warmup=3, steps=10, threshold="p10:40%,p50:50%")
def test_hybrid_epoch(rpc_benchmark, pytestconfig):
    trainers = int(pytestconfig.getoption("--ddp-trainers") or 8)
    parameter_servers = int(pytestconfig.getoption("--ddp-parameter-servers") or 8)

    def master(ctx):  # creates a table on each parameter server
        from torch.distributed.nn import RemoteModule

        servers = ctx.workers["parameter_server"]
        delays = [SLOW_SERVER_MS / 1000, *[0.0] * (len(servers) - 1)]
        return [
            RemoteModule(f"{server}/cpu", Table, args=(columns_on(number, len(servers)), delays[number]))
            for number, server in enumerate(servers)
        ]

    def trainer(ctx, tables):
        from torch.distributed.optim import DistributedOptimizer

        torch.manual_seed(ctx.seed)
        model = HybridModel(tables, ctx.device)
        optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_references(), lr=0.05)
        batches = epoch_of_batches(random.Random(ctx.rank))  # each trainer its own

        def epoch():  # what is timed
            examples = 0
            for indices, offsets, targets in batches:
                with dist_autograd.context() as context:
                    scores = model(indices, offsets)
                    loss = torch.nn.functional.cross_entropy(scores, targets.to(ctx.device))
                    dist_autograd.backward(context, [loss])
                    optimizer.step(context)
                examples += len(targets)
            return examples

        return epoch

    rpc_benchmark(trainer, master=master, trainers=trainers, parameter_servers=parameter_servers)
