"""What the experiments train: a ResNet on images or a GPT on text, both random."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf import Context
from pytest_ddpperf.suite.gpt import GPT, GPTConfig
from pytest_ddpperf.suite.resnet import MODELS as RESNETS
from pytest_ddpperf.suite.sizes import Size

# Width, layers, heads.
GPTS = {
    "mini": (128, 4, 4),
    "small": (768, 12, 12),
    "medium": (1024, 24, 16),
    "large": (1280, 36, 20),
    "xl": (1600, 48, 25),
    "2.7B": (2560, 32, 32),
}
VOCABULARY = 10_000
# What a parameter takes on each rank: itself, its gradient, a bucket's copy, momentum; float32.
BYTES = 4 * 4

Loss = Callable[[nn.Module], Tensor]
Step = Callable[[], None]


def rank(ctx: Context) -> int:
    """For `ddp_run`: one result a rank tells how many there are."""
    return ctx.rank


def share_of(size: Size, world_size: int) -> int:
    """Sequences of a rank: the size's dealt evenly, without what does not divide, and at least one."""
    return max(1, size.sequences // world_size)


def tokens_of(size: Size, world_size: int) -> int:
    """Of a rank's sequences: a GPT's batch size, as `Size.images` is a ResNet's. It tells sizes apart in a baseline."""
    return share_of(size, world_size) * size.tokens


def workload(ctx: Context, model: str, size: Size, *, sequences: int | None = None) -> tuple[nn.Module, Loss]:
    """The model, alike on all ranks, and its loss on data of this rank's own, whatever it is wrapped in. A GPT has so
    many `sequences` a rank, else its share of the size's."""
    torch.manual_seed(ctx.seed)
    net = _net(model, size).to(ctx.device)
    torch.manual_seed(ctx.seed + 1 + ctx.rank)
    if model in GPTS:
        share = sequences or share_of(size, ctx.world_size)
        text = torch.randint(VOCABULARY, (share, size.tokens + 1), device=ctx.device)
        return net, lambda wrapped: F.cross_entropy(wrapped(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    images = torch.randn(size.images, 3, size.pixels, size.pixels, device=ctx.device)
    labels = torch.randint(1000, (size.images,), device=ctx.device)
    return net, lambda wrapped: F.cross_entropy(wrapped(images), labels)


def _net(model: str, size: Size) -> nn.Module:
    if model not in GPTS:
        return RESNETS[model]()
    width, layers, heads = GPTS[model]
    return GPT(GPTConfig(vocabulary=VOCABULARY, context=size.tokens, layers=layers, heads=heads, width=width))


def training(net: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer | None = None) -> Step:
    """A step of a net in whatever wrapper, with SGD if nothing else is said."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss(net).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def needed_bytes(gpt: str) -> float:
    """Of each rank, in training, about."""
    width, layers, _ = GPTS[gpt]
    return (12.0 * width**2 * layers + VOCABULARY * width) * BYTES


def no_buffers() -> dict[str, bool]:
    """DDP's argument for not synchronising buffers, by the name that this torch has for it."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}
