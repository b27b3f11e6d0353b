"""The step that `ddpperf doctor` measures a machine by. Imported where there is no torch, too: for its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_ddpperf.rank.context import Context


def setup(ctx: Context) -> Callable[[], None]:
    """A transformer layer under DDP: some milliseconds of small operations and an all-reduce of its gradients. On an
    accelerator it is wider, so that it is not launching of kernels alone that takes time."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    width, batch, length = (64, 8, 16) if ctx.device.type == "cpu" else (1024, 32, 128)
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
    model = DistributedDataParallel(nn.Sequential(layer, nn.Flatten(), nn.Linear(width * length, 10)).to(ctx.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs = torch.randn(batch, length, width, device=ctx.device)
    targets = torch.randint(10, (batch,), device=ctx.device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step
