"""How much the experiments measure, and what they train: a ResNet on images or a GPT on text, both
random."""

import inspect
import math
import resource
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from pytest_ddpperf import Context, DdpBenchmark, Result, node_count
from pytest_ddpperf.suite.models import GPT, RESNETS, GPTConfig

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
# of a parameter on each rank: itself, its gradient, that in a bucket, momentum
COPIES = 4

Loss = Callable[[nn.Module], Tensor]
Step = Callable[[], None]
Fits = Callable[..., None]  # the fixture `fits`
Timed = Callable[..., Result]  # the fixture `timed`


# --- sizes


@dataclass(frozen=True, kw_only=True)
class Size:
    """One of --ddp-suite-size."""

    name: str
    settings: Mapping[str, Any]  # of every test, where the run gives none
    images: int  # per rank and step
    pixels: int  # of an image's edge
    gpts: tuple[str, ...]  # by name
    tokens: int  # of a sequence
    most_bytes: int  # of a collective's buffer
    sequences: int = 4  # per step, over all ranks

    @property
    def gpt(self) -> str:
        """The name of the smallest GPT."""
        return self.gpts[0]


SIZES = {
    "tiny": Size(
        name="tiny",
        settings={
            "launches": 2,
            "max_launches": 4,
            "warmup": 5,
            "steps": 5,
            "min_time": 0,
            # five steps support no other percentile
            "threshold": "p50:300%",
        },
        images=2,
        pixels=32,
        gpts=("mini",),
        tokens=32,
        most_bytes=10_000_000,
    ),
    "small": Size(
        name="small",
        settings={
            "launches": 3,
            "max_launches": 6,
            "warmup": 5,
            "steps": 10,
            "min_time": 0,
            "threshold": "p10:40%,p50:50%",
        },
        images=4,
        pixels=32,
        gpts=("mini", "small"),
        tokens=64,
        most_bytes=1_000_000_000,
    ),
    "full": Size(
        name="full",
        settings={},
        images=32,
        pixels=224,
        gpts=("small", "medium", "large", "xl", "2.7B"),
        tokens=256,
        most_bytes=1_000_000_000,
    ),
}


def read_option(config: pytest.Config, name: str) -> Any:
    """Return an option of the plugin from the command line, else from the ini file; None if it is
    in neither."""
    given = config.getoption(name)
    return config.getini(name) if given is None else given


def largest_world(config: pytest.Config) -> int:
    """Return the most ranks that --ddp-world-size asks for."""
    sizes = read_option(config, "ddp_world_size") or "2"
    parts = sizes if isinstance(sizes, (list, tuple)) else [sizes]
    return max(int(number) for part in parts for number in str(part).split(","))


class SweepRow(NamedTuple):
    """A row of PyTorch's DDP benchmark."""

    machines: int
    ranks: int  # on all machines; 0 for one without DDP

    @property
    def name(self) -> str:
        """The row's name in test ids."""
        return self.title.lower().replace("/", "-").replace(" ", "-")

    @property
    def title(self) -> str:
        """The row's name in the table."""
        if not self.ranks:
            return "no ddp"
        return f"{self.machines}M/{self.ranks // self.machines}G"


def uses_cuda(config: pytest.Config, ranks: int) -> bool:
    """Whether so many ranks of one machine have a CUDA device each, as the plugin chooses."""
    device = read_option(config, "ddp_device") or "auto"
    if device != "auto":
        return device in ("cuda", "cuda:0")
    backend = read_option(config, "ddp_backend") or "auto"
    if backend != "auto":
        return "nccl" in backend
    return torch.cuda.device_count() >= ranks


def chosen_size(config: pytest.Config) -> Size:
    """Return the size of the run."""
    name = read_option(config, "ddp_suite_size") or "auto"
    if name == "auto":
        ranks = math.ceil(largest_world(config) / node_count(config))
        name = "full" if uses_cuda(config, ranks) else "small"
    return SIZES[name]


# --- training


def time_step(
    ddp_benchmark: DdpBenchmark,
    fits: Fits,
    size: Size,
    tokens: int,
    setup: Callable[[Context], Step],
    model: str = "",
    iterations: int = 1,
) -> Result:
    """Time the step of a set-up, unless its model does not fit; by default the model is the first
    GPT of the size. A step may have several iterations."""
    model = model or size.gpt
    batch_size = size.images
    if model in GPTS:
        batch_size = iterations * tokens
        if model not in size.gpts:
            pytest.skip(
                f"GPT {model} is too large for --ddp-suite-size {size.name}"
            )
    fits(model)
    return ddp_benchmark(setup, batch_size=batch_size)


def share_of(size: Size, world_size: int) -> int:
    """Return the sequences of a rank: the size's in equal parts, at least one."""
    return max(1, size.sequences // world_size)


def workload(
    ctx: Context, model: str, size: Size, *, sequences: int | None = None
) -> tuple[nn.Module, Loss]:
    """Return a model, the same on all ranks, and its loss on this rank's own data, whatever the
    model is wrapped in.

    A GPT has so many `sequences` per rank, or its share of the size's.
    """
    torch.manual_seed(ctx.seed)
    # in its own memory: a large model of each rank need not fit into the host's
    with ctx.device:
        net = _make_net(model, size)
    torch.manual_seed(ctx.seed + 1 + ctx.rank)
    if model in GPTS:
        share = sequences or share_of(size, ctx.world_size)
        text = torch.randint(
            VOCABULARY, (share, size.tokens + 1), device=ctx.device
        )
        return net, lambda wrapped: F.cross_entropy(
            wrapped(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()
        )
    # As those of PyTorch's DDP benchmark.
    images = torch.rand(
        size.images, 3, size.pixels, size.pixels, device=ctx.device
    )
    labels = torch.ones(size.images, dtype=torch.long, device=ctx.device)
    return net, lambda wrapped: F.cross_entropy(wrapped(images), labels)


def _make_net(model: str, size: Size) -> nn.Module:
    if model not in GPTS:
        return RESNETS[model]()
    width, layers, heads = GPTS[model]
    return GPT(
        GPTConfig(
            vocabulary=VOCABULARY,
            context=size.tokens,
            layers=layers,
            heads=heads,
            width=width,
        )
    )


class _Uninitialised(TorchFunctionMode):
    """No random numbers are drawn: on the meta device that imports torch's compiler, for
    seconds."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in ("normal_", "uniform_", "kaiming_uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def gradient_bytes(model: str, size: Size) -> int:
    """Return the bytes of a model's gradients."""
    with torch.device("meta"), _Uninitialised():
        net = _make_net(model, size)
    return sum(parameter.nbytes for parameter in net.parameters())


def training(
    net: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer | None = None
) -> Step:
    """Return a training step of a net in any wrapper, by default with SGD."""
    optimizer = optimizer or torch.optim.SGD(
        net.parameters(), lr=0.001, momentum=0.9
    )

    def step() -> None:
        optimizer.zero_grad()
        loss(net).backward()
        optimizer.step()

    return step


def ddp_training(
    ctx: Context,
    model: str,
    size: Size,
    *,
    sequences: int | None = None,
    **options: Any,
) -> Step:
    """Return a training step of a model under DDP with these options; `sequences` as of a
    `workload`."""
    net, loss = workload(ctx, model, size, sequences=sequences)
    return training(DistributedDataParallel(net, **options), loss)


# The first argument is the hook's state; torch's own hooks take a process group, or None for all
# ranks.
Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]


def add_hook(
    ddp: DistributedDataParallel, hook: Hook, state: object = None
) -> None:
    """Let a hook reduce the buckets of DDP."""
    # Without annotations, which DDP would compare with its own types, and under a name for which it
    # has no rules.
    ddp.register_comm_hook(state, lambda state, bucket: hook(state, bucket))


def no_buffers() -> dict[str, Any]:
    """Return DDP's argument for not synchronising buffers, by its name in this torch."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    if "forward_sync_buffers" in names:
        return {"forward_sync_buffers": False}
    return {"broadcast_buffers": False}


# --- memory


class Need(NamedTuple):
    """The memory that ranks need together, and what there is."""

    each: float  # bytes, of a rank
    ranks: int
    free: float  # bytes

    def require(self) -> None:
        """Skip a test whose ranks need more than is free."""
        if self.each * self.ranks > self.free:
            each = f"about {self.each / 2**30:.1f} GiB"
            if self.ranks > 1:
                each += f" on each of {self.ranks} ranks"
            pytest.skip(f"needs {each}, {self.free / 2**30:.1f} GiB are free")


def free_memory() -> float:
    """Return the bytes of this machine's memory that are free, at most those of this container;
    infinity if unknown."""
    free = math.inf
    with suppress(OSError, ValueError):  # "max"
        free = float(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) * 1024.0)
    return free


def first_step(
    ctx: Context, model: str, size: Size, sequences: int | None
) -> Need | None:
    """Return what a training step needs, by the first one of one rank of each machine, while the
    others wait."""
    if ctx.local_rank:
        return None
    if ctx.device.type == "cpu":
        free: float = free_memory()
        ranks = ctx.local_world_size
    else:
        free, _ = torch.get_device_module(ctx.device).mem_get_info(ctx.device)
        ranks = 1  # each has a device of its own
    gradients = gradient_bytes(model, size)
    if COPIES * gradients * ranks > free:  # too much to be tried
        return Need(COPIES * gradients, ranks, free)
    before = _peak_memory(ctx)
    try:
        net, loss = workload(ctx, model, size, sequences=sequences)
        training(net, loss)()
    except torch.OutOfMemoryError:  # of a device
        return Need(free + 1, ranks, free)
    # DDP's buckets were not there
    return Need(_peak_memory(ctx) - before + gradients, ranks, free)


def _peak_memory(ctx: Context) -> int:
    """Return the most bytes of this rank so far, in memory or on its device."""
    if ctx.device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    module = torch.get_device_module(ctx.device)
    return int(module.max_memory_allocated(ctx.device))
