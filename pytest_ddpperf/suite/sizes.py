"""How much the experiments measure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from pytest_ddpperf import node_count


@dataclass(frozen=True, kw_only=True)
class Size:
    """One of --ddp-suite-size."""

    name: str
    settings: Mapping[str, Any]  # of every test, where a run says nothing else
    images: int  # of a rank and step
    pixels: int  # of an image's edge
    gpts: tuple[str, ...]  # by name
    sequences: int  # of all ranks and a step, where their number divides it
    tokens: int  # of a sequence
    most_bytes: int  # of a collective's buffer


SIZES = {
    size.name: size
    for size in (
        Size(
            name="tiny",
            settings={
                "launches": 2,
                "max_launches": 4,
                "warmup": 3,
                "steps": 5,
                "min_time": 0,
                "threshold": "p50:300%",  # five steps support no other percentile
            },
            images=2,
            pixels=32,
            gpts=("mini",),
            sequences=4,
            tokens=32,
            most_bytes=10_000_000,
        ),
        Size(
            name="small",
            settings={
                "launches": 3,
                "max_launches": 6,
                "warmup": 3,
                "steps": 10,
                "min_time": 0,
                "threshold": "p10:40%,p50:50%",
            },
            images=4,
            pixels=32,
            gpts=("mini", "small"),
            sequences=4,
            tokens=64,
            most_bytes=1_000_000_000,
        ),
        Size(
            name="full",
            settings={},
            images=32,
            pixels=224,
            gpts=("small", "medium", "large", "xl", "2.7B"),
            sequences=4,
            tokens=256,
            most_bytes=1_000_000_000,
        ),
    )
}


def asked(config: pytest.Config, name: str, default: Any) -> Any:
    """An option of the plugin's: from the command line, else from the ini file."""
    given = config.getoption(name)
    if given is None:
        given = config.getini(name)
    return default if given is None else given


def largest_world(config: pytest.Config) -> int:
    """The most ranks that --ddp-world-size asks for."""
    sizes = asked(config, "ddp_world_size", "2")
    parts = sizes if isinstance(sizes, (list, tuple)) else [sizes]
    return max(int(number) for part in parts for number in str(part).split(","))


class SweepRow(NamedTuple):
    """Of PyTorch's DDP benchmark."""

    machines: int
    ranks: int  # of all of them; 0 for one without DDP

    @property
    def name(self) -> str:
        """In ids."""
        return f"{self.machines}m-{self.ranks // self.machines}g" if self.ranks else "no-ddp"


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def on_cuda(config: pytest.Config, ranks: int) -> bool:
    """Whether so many ranks of one machine have a CUDA device each, as the plugin chooses."""
    device, backend = (asked(config, f"ddp_{name}", "auto") for name in ("device", "backend"))
    if device != "auto" or backend != "auto":
        return bool(device == "cuda" or (device == "auto" and backend == "nccl"))
    return torch.cuda.device_count() >= ranks


def of_a_node(item: pytest.Item, ranks: int) -> int:
    """Of the ranks of a test those on one machine."""
    marked = (mark.kwargs["nodes"] for mark in item.iter_markers("ddp") if "nodes" in mark.kwargs)
    return -(-ranks // next(marked, node_count(item.config)))


def chosen(config: pytest.Config) -> Size:
    """That of the run."""
    name = asked(config, "ddp_suite_size", "auto")
    ranks = -(-largest_world(config) // node_count(config))
    return SIZES[("full" if on_cuda(config, ranks) else "small") if name == "auto" else name]
