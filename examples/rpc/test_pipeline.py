"""Gate a pipeline of two stages over RPC, each stage replicated by DDP: the trainers run the first, and as many
parameter servers the second.

    pytest examples/rpc/test_pipeline.py --ddp-trainers 4 --ddp-parameter-servers 4
"""

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.nn.parallel import DistributedDataParallel as DDP

WIDTH = 256
second_stage: list[DDP] = []  # in a parameter server


def run_second_stage(values):
    return second_stage[0](values)


def second_stage_parameters():
    return [rpc.RRef(parameter) for parameter in second_stage[0].parameters()]


@pytest.mark.ddp(warmup=3, threshold="p10:40%,p50:50%")
def test_two_stages(rpc_benchmark):
    batch_size = 32

    def parameter_server(ctx):
        torch.manual_seed(ctx.seed)
        stage = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10))
        second_stage.append(DDP(stage))  # over the parameter servers, which have a process group of their own

    def trainer(ctx):
        from torch.distributed.optim import DistributedOptimizer

        if ctx.world_size != len(ctx.workers["parameter_server"]):
            raise ValueError("as many --ddp-parameter-servers as --ddp-trainers: each pair is a pipeline")
        torch.manual_seed(ctx.seed)
        next_stage = ctx.workers["parameter_server"][ctx.rank]
        first_stage = DDP(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()))
        parameters = rpc.rpc_sync(next_stage, second_stage_parameters)
        parameters += [rpc.RRef(parameter) for parameter in first_stage.parameters()]
        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
        inputs, targets = torch.randn(batch_size, WIDTH), torch.randint(10, (batch_size,))

        def step():
            with dist_autograd.context() as context:
                scores = rpc.rpc_sync(next_stage, run_second_stage, (first_stage(inputs),))
                dist_autograd.backward(context, [torch.nn.functional.cross_entropy(scores, targets)])
                optimizer.step(context)

        return step

    rpc_benchmark(trainer, parameter_server=parameter_server, batch_size=batch_size)
