"""Seeds, device, threads and process group of one rank: everything before the user's code."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pytest_ddpperf.rank import store
from pytest_ddpperf.rank.context import Context
from pytest_ddpperf.rank.environment import pci_address
from pytest_ddpperf.records import Plan

# The timeouts of process group and RPC must not fire before ours, which dumps every rank's stack first.
GRACE = timedelta(seconds=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlace:
    """The place of a process in its launch."""

    number: int  # of the plan's processes
    index: int  # of those on its node
    node: int
    folder: Path  # of the launch, on this node
    store: tuple[str, int] | None  # where ranks of several nodes meet
    threads: int  # unless the environment asks for others; 0: torch's choice


def start(plan: Plan, place: ProcessPlace) -> Context:
    """Seed, choose the device, pin, and join the group."""
    device = prepare(plan, place.index, place.threads)
    if plan.backend:
        join(plan, place.number, plan.world_size, place, "store", device)
    return Context(
        rank=place.number,
        local_rank=place.index,
        world_size=plan.world_size,
        local_world_size=plan.world_size // plan.nodes,
        node_rank=place.node,
        device=device,
        backend=plan.backend,
        seed=plan.seed,
    )


def prepare(plan: Plan, index: int, threads: int) -> torch.device:
    """Seed, choose the device of that index, pin; the device."""
    _seed(plan.seed)
    if plan.device == "cpu":
        if threads and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads)
        return torch.device("cpu")
    device = torch.device(plan.device, index)
    torch.accelerator.set_device_index(index)
    _pin_near(device)
    return device


def timeout_of(plan: Plan) -> timedelta:
    """Return the timeout of operations that wait for other ranks."""
    return timedelta(seconds=plan.timeout_seconds) + GRACE


def join(plan: Plan, rank: int, world_size: int, place: ProcessPlace, name: str, device: torch.device) -> None:
    """Join the default process group, over the store of that name."""
    # Bound to its device, NCCL connects at once (in this phase, not in the first step).
    bound = device if dist.get_default_backend_for_device(device) == plan.backend else None
    dist.init_process_group(
        plan.backend,
        store=store.store_of(name, world_size, place.folder, place.store, timeout_of(plan)),
        rank=rank,
        world_size=world_size,
        timeout=timeout_of(plan),
        device_id=bound if device.type != "cpu" else None,
    )


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def _pin_near(device: torch.device) -> None:
    """Pin this process, and the threads it will start, to the cores of the device's NUMA node (Linux, CUDA)."""
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    try:
        text = Path(f"/sys/bus/pci/devices/{pci_address(device.index)}/local_cpulist").read_text()
    except OSError:
        return  # a virtual machine may not have it
    near = parse_cpulist(text) & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)


def parse_cpulist(text: str) -> set[int]:
    """The kernel's list format: "0-3,8,10-11"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
