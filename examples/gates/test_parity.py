"""Lightning Fabric may cost 5 % over plain PyTorch. Run it with --ddp-preload lightning.fabric."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def parts(ctx):
    model = torch.nn.Linear(1024, 1024).to(ctx.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, torch.randn(512, 1024, device=ctx.device)


def step_of(model, optimizer, x, backward):
    def step():
        optimizer.zero_grad()
        backward(model(x).square().mean())
        optimizer.step()

    return step


def plain(ctx):
    model, optimizer, x = parts(ctx)
    return step_of(DDP(model), optimizer, x, torch.Tensor.backward)


def with_fabric(ctx):
    from lightning.fabric import Fabric, strategies

    strategy = strategies.DDPStrategy(process_group_backend=ctx.backend)
    fabric = Fabric(
        strategy=strategy, accelerator=ctx.device.type, devices=ctx.world_size
    )
    fabric.launch()
    model, optimizer, x = parts(ctx)
    return step_of(*fabric.setup(model, optimizer), x, fabric.backward)


def test_fabric_is_as_fast_as_pytorch(ddp_benchmark):
    ddp_benchmark(with_fabric, reference=plain, threshold="p50:5%")
