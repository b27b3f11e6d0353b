"""An RPC launch: trainers, parameter servers and a master, each with its own set-up, until the trainers have ended.

Imported only where RPC is used: it costs half a second.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.autograd
import torch.distributed.nn
import torch.distributed.optim
import torch.distributed.rpc as rpc

from pytest_ddpperf.rank import group, sampling, traffic
from pytest_ddpperf.rank.context import RpcContext
from pytest_ddpperf.records import Plan

Role = Literal["trainer", "parameter_server", "master"]
Setup = Callable[..., Any]

meter = traffic.Traffic()


def watch() -> None:
    """Put the meter in place: before the user's code is imported and this process joins the RPC world, so that
    nothing escapes it."""
    traffic.watch(meter)


# What the others told this process, by RPC: that a parameter server is ready; what the master's set-up returned.
_ready = threading.Semaphore(0)
_shared: queue.SimpleQueue[Any] = queue.SimpleQueue()


def start(plan: Plan, process: int, folder: Path, cpus: Sequence[int]) -> RpcContext:
    """Seed, choose the device, pin, join the RPC world, and the process group of one's role."""
    meter.names = [plan.name(other) for other in range(plan.processes)]
    place = _place(plan, process)
    devices = 1 if plan.device == "cpu" else torch.accelerator.device_count()
    device = group.prepare(plan, process % devices, cpus)
    timeout = plan.timeout_seconds + group.GRACE.total_seconds()
    options = rpc.TensorPipeRpcBackendOptions(init_method=(folder / "store-rpc").as_uri(), rpc_timeout=timeout)
    if plan.device != "cpu":
        for other in range(plan.processes):
            options.set_device_map(plan.name(other), {device: torch.device(plan.device, other % devices)})
    with warnings.catch_warnings():
        # torch's own use of a process group as a backend, which is nothing a user can mend.
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        rpc.init_rpc(  # type: ignore[no-untyped-call]
            plan.name(process), rank=process, world_size=plan.processes, rpc_backend_options=options
        )
    if place.role != "master":
        # Trainers have a device each; servers may share theirs, and NCCL takes one rank a device.
        shared = place.role == "parameter_server" and place.size > devices
        joined = replace(plan, backend="gloo") if shared else plan
        group.join(joined, place.index, place.size, folder / f"store-{place.role}", device)
    return RpcContext(
        rank=place.index,
        local_rank=place.index,
        world_size=place.size,
        local_world_size=place.size,
        node_rank=0,
        device=device,
        backend=plan.backend,
        seed=plan.seed,
        role=place.role,
        name=plan.name(process),
        workers=_workers(plan),
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """A process's part in the launch."""

    role: Role
    index: int  # in it
    size: int  # how many have that role


def _place(plan: Plan, process: int) -> _Place:
    if process < plan.world_size:
        return _Place("trainer", process, plan.world_size)
    if process < plan.world_size + plan.parameter_servers:
        return _Place("parameter_server", process - plan.world_size, plan.parameter_servers)
    return _Place("master", 0, 1)


def _workers(plan: Plan) -> dict[str, tuple[str, ...]]:
    workers: dict[str, tuple[str, ...]] = {"trainer": (), "parameter_server": (), "master": ()}
    for process in range(plan.processes):
        workers[_place(plan, process).role] += (plan.name(process),)
    return workers


def prepared(ctx: RpcContext, trainer: Setup, master: Setup | None) -> sampling.Prepared:
    """A trainer's step, once everybody whom it may call is there."""
    _await_servers(ctx)
    return sampling.Prepared(trainer, ctx, *([_shared.get()] if master is not None else []))


def serve(ctx: RpcContext, setup: Setup | None) -> sampling.Prepared | None:
    """Set up a parameter server or the master, and let the others know; handlers run on threads of their own."""
    if ctx.role == "parameter_server":
        made = sampling.Prepared(setup, ctx) if setup is not None else None
        _tell([*ctx.workers["master"], *ctx.workers["trainer"]], _take_ready)
    else:
        _await_servers(ctx)
        assert setup is not None, "there is no master without a set-up"
        made = sampling.Prepared(setup, ctx)
        _tell(ctx.workers["trainer"], _take_shared, made.made)
    return made


def _tell(names: Sequence[str], what: Callable[..., None], *args: Any) -> None:
    for future in [rpc.rpc_async(name, what, args) for name in names]:
        future.wait()


def _await_servers(ctx: RpcContext) -> None:
    for _ in ctx.workers["parameter_server"]:
        _ready.acquire()


def _take_ready() -> None:
    _ready.release()


def _take_shared(shared: Any) -> None:
    _shared.put(shared)
