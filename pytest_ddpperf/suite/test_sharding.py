"""The same training under DDP, FSDP2 and a sharded optimizer: which to use is what users now ask."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf import Context, DdpBenchmark
from pytest_ddpperf.suite.latencies import Latencies
from pytest_ddpperf.suite.sizes import Size
from pytest_ddpperf.suite.tables import Tables
from pytest_ddpperf.suite.workloads import Step, training, workload

SHARDED = ("DDP", "FSDP2", "DDP, ZeroRedundancyOptimizer")


@pytest.mark.parametrize("kind", SHARDED)
def test_sharding(ddp_benchmark: DdpBenchmark, kind: str, size: Size, tokens: int, tables: Tables) -> None:
    """The same step under DDP, under FSDP2, and with an optimizer whose state is sharded."""

    def setup(ctx: Context) -> Step:
        net, loss = workload(ctx, size.gpts[0], size)
        if kind == "FSDP2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            # Without, it takes the machine's accelerator, whatever the device of the test.
            mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
            for block in net.get_submodule("blocks").children():
                fully_shard(block, mesh=mesh)
            fully_shard(net, mesh=mesh)
            return training(net, loss)
        ddp = DistributedDataParallel(net)
        if kind == "DDP":
            return training(ddp, loss)
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return training(ddp, loss, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.001, momentum=0.9))

    tables.of(Latencies).add("Sharding", kind, ddp_benchmark(setup, batch_size=tokens), among=SHARDED)
