"""An RPC launch: trainers, parameter servers and a master, each with its own set-up, until the
trainers have ended.

Imported only where RPC is used: it costs half a second.
"""

import queue
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.nn
import torch.distributed.optim
import torch.distributed.rpc as rpc

from pytest_ddpperf.rank import group, sampling
from pytest_ddpperf.rank.context import Role, RpcContext
from pytest_ddpperf.rank.rpc_meter import ROLES, RpcMeter
from pytest_ddpperf.records.plan import Function, Plan

Setup = Function

meter = RpcMeter()


# Received by RPC: that a parameter server is ready; what the master's set-up returned.
_ready = threading.Semaphore(0)
_shared: queue.SimpleQueue[Any] = queue.SimpleQueue()


def start(plan: Plan, place: group.ProcessPlace) -> RpcContext:
    """Seed, choose the device, pin, join the RPC world, and the process group of one's role."""
    process = place.number
    timeout = group.timeout_of(plan)
    role, index, size = _role_of(plan, process)
    devices = 1 if plan.device == "cpu" else torch.accelerator.device_count()
    device = group.prepare(plan, place.index % devices, place.threads)
    url = group.url_for_rpc(plan.processes, place, timeout)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=url, rpc_timeout=timeout.total_seconds()
    )
    if plan.device != "cpu":
        for node in range(plan.nodes):
            for place_there, other in enumerate(plan.part(node)):
                options.set_device_map(
                    plan.name(other),
                    {device: torch.device(plan.device, place_there % devices)},
                )
    with warnings.catch_warnings():
        # torch's own use of a process group as a backend, which is nothing a user can mend.
        warnings.filterwarnings(
            "ignore", "You are using a Backend", UserWarning
        )
        rpc.init_rpc(
            plan.name(process),
            rank=process,
            world_size=plan.processes,
            rpc_backend_options=options,
        )
    if role != "master":
        # Trainers have a device each; servers may share theirs, and NCCL takes one rank a device.
        shared = role == "parameter_server" and size > devices
        joined = replace(plan, backend="gloo") if shared else plan
        group.join(joined, index, size, place, f"store-{role}", device)
    trains = role == "trainer"
    return RpcContext(
        rank=index,
        local_rank=place.index if trains else index,
        world_size=size,
        local_world_size=size // plan.nodes if trains else size,
        node_rank=place.node,
        device=device,
        backend=plan.backend,
        seed=plan.seed,
        role=role,
        name=plan.name(process),
        workers={
            role: tuple(
                plan.name(other)
                for other in range(plan.processes)
                if _role_of(plan, other)[0] == role
            )
            for role in ROLES
        },
    )


def _role_of(plan: Plan, process: int) -> tuple[Role, int, int]:
    """Return the role of a process in the launch, its index in the role, and how many have that
    role."""
    if process < plan.world_size:
        return "trainer", process, plan.world_size
    if process < plan.world_size + plan.parameter_servers:
        return (
            "parameter_server",
            process - plan.world_size,
            plan.parameter_servers,
        )
    return "master", 0, 1


def prepared(
    ctx: RpcContext, trainer: Setup, master: Setup | None
) -> sampling.Prepared:
    """Return a trainer's step, once all processes that it may call are ready."""
    _await_servers(ctx)
    return sampling.Prepared(
        trainer, ctx, *([_shared.get()] if master is not None else [])
    )


def served(ctx: RpcContext, setup: Setup | None) -> sampling.Prepared | None:
    """Set up what a parameter server or the master serves."""
    if ctx.role == "master":
        _await_servers(ctx)
    return sampling.Prepared(setup, ctx) if setup is not None else None


def announce(ctx: RpcContext, prepared: sampling.Prepared | None) -> None:
    """Let the others know that this process can be called, and what the master made; handlers run
    on threads of their own, and the first call may come before the last of the others knows."""
    if ctx.role == "parameter_server":
        _call_all(
            [*ctx.workers["master"], *ctx.workers["trainer"]], _take_ready
        )
    else:
        assert prepared is not None, "there is no master without a set-up"
        _call_all(ctx.workers["trainer"], _take_shared, prepared.made)


def _call_all(
    names: Sequence[str], what: Callable[..., None], *args: Any
) -> None:
    for future in [rpc.rpc_async(name, what, args) for name in names]:
        future.wait()


def _await_servers(ctx: RpcContext) -> None:
    for _ in ctx.workers["parameter_server"]:
        _ready.acquire()


def _take_ready() -> None:
    _ready.release()


def _take_shared(shared: Any) -> None:
    _shared.put(shared)
