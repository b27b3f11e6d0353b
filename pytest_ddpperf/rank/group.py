"""How a rank joins its process group, and the store where ranks meet."""

import json
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from pytest_ddpperf.rank import torch_names
from pytest_ddpperf.rank.context import Context
from pytest_ddpperf.rank.environment import pci_address
from pytest_ddpperf.records.codec import Json
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.messages import Address
from pytest_ddpperf.records.plan import NCCL, Plan
from pytest_ddpperf.records.record import record
from pytest_ddpperf.wire import boot, opened
from pytest_ddpperf.wire.channels import Lines

_SCHEME = "ddpperf"


def serve(descriptor: int) -> NoReturn:
    """Hold the store of a launch on a bound socket, until the rank server ends it."""
    server = os.getppid()
    os.setsid()
    boot.die_with_parent(server, signal.SIGKILL)
    with socket.socket(fileno=descriptor) as bound:
        host, port = bound.getsockname()[:2]
        bound.detach()
    _owned = _tcp_store(host, port, master_listen_fd=descriptor)
    while True:
        signal.pause()


def _tcp_store(host: str, port: int, **options: Any) -> Any:
    """Return a store that listens on a bound descriptor, or a client of one."""
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    options["is_master"] = "master_listen_fd" in options
    options["wait_for_workers"] = False
    try:
        return store(host, port, **options)
    except NotImplementedError:
        # In torch 2.6, libuv's server takes no descriptor.
        return store(host, port, use_libuv=False, **options)


def store_of(
    name: str, size: int, place: "ProcessPlace", timeout: timedelta
) -> Any:
    """Return the store of a group of so many ranks: a file in the launch's folder or, on several
    nodes, where they meet."""
    if place.store is None:
        file = dist.FileStore(str(place.folder / name), size)  # type: ignore[attr-defined]
        file.set_timeout(timeout)
        return file
    client = _tcp_store(*place.store, timeout=timeout)
    return dist.PrefixStore(name, client)  # type: ignore[attr-defined]


def url_for_rpc(size: int, place: "ProcessPlace", timeout: timedelta) -> str:
    """Return the URL of such a store for RPC, which takes an `init_method` only. It is no
    file's URL: torch does not unquote its path."""
    name = "store-rpc"

    def rendezvous(url: str, **_: object) -> Iterator[tuple[Any, int, int]]:
        yield store_of(name, size, place, timeout), -1, size

    dist.register_rendezvous_handler(_SCHEME, rendezvous)  # type: ignore[attr-defined, no-untyped-call]
    return f"{_SCHEME}://{name}"


def wrong_size(size: int, ranks: int) -> DdpPerfError:
    """Return the error of a program whose process group is not one of all its ranks."""
    return DdpPerfError(
        f"the program's process group has size {size} instead of {ranks}: call"
        " init_process_group() without rank and world_size, or set --ddp-world-size"
        " (rpc_benchmark measures what uses RPC)"
    )


def meet_at_launch(folder: str) -> None:
    """Let the ranks of a program meet at the store of their launch, whatever port or file the
    program names; note if its children meet.

    Nobody listens at its port, as torchrun's variables say that a store is there, and another
    launch may use the same. Its file would stay for the next launch: torch removes it when a
    process ends in order, which a rank does not."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    ours = {name: os.environ[name] for name in names}
    ranks = int(os.environ["WORLD_SIZE"])
    own_pid = os.getpid()

    def meeting_at_launch(rendezvous: Any) -> Any:
        # some ranks may meet for RPC only, and others for a group as well
        meetings = count()
        noting = opened.noting_group(rendezvous, folder)

        def meet(
            url: str, rank: int = -1, world_size: int = -1, **options: Any
        ) -> Iterator[tuple[Any, int, int]]:
            if os.getpid() != own_pid:
                yield from noting(url, rank, world_size=world_size, **options)
                return
            os.environ.update(ours)
            # a group that is formed again must not find what the first one left
            name = str(next(meetings))
            url = f"env://?{urlsplit(url).query}"
            met = rendezvous(url, rank, world_size, **options)
            for store, own_rank, size in met:
                if size > ranks:  # the ranks would wait for others
                    raise wrong_size(size, ranks)
                own = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
                yield own, own_rank, size

        return meet

    # init_rpc calls the second one
    for module in ("torch.distributed.distributed_c10d", "torch.distributed"):
        torch_names.replace(f"{module}:rendezvous", meeting_at_launch)


def main(descriptor: int, start: Json) -> NoReturn:
    """Publish a value or wait for it; then stay until pytest closes the connection: this process
    may own the store."""
    boot.die_with_parent(start["parent"], signal.SIGKILL)
    control = Lines(socket.socket(fileno=descriptor))
    try:
        store, answered = _asked(start)
        control.send(answered)
    except Exception as error:
        control.send({"error": f"{type(error).__name__}: {error}"})
        store = None
    while control.receive() is not None:
        pass
    if start["tell"] and store is not None:
        with suppress(Exception):  # it may be gone, and nobody asks
            # a second pytest of the same run would find the first one
            store.delete_key(start["key"])
    os._exit(0)


def _asked(start: Json) -> tuple[Any, Json]:
    timeout = timedelta(seconds=start["seconds"])
    if start["hosts"]:
        # On one interface: torch by itself would listen on all of them.
        address = start["tell"]["address"]
        descriptor = boot.listen(address, start["port"]).detach()
        store = _tcp_store(
            address, start["port"], timeout=timeout, master_listen_fd=descriptor
        )
    else:
        store = _tcp_store(start["address"], start["port"], timeout=timeout)
    if start["tell"] is not None:
        store.set(start["key"], json.dumps(start["tell"]))
        if not start["tell"]:
            heard = [
                f"{start['key']}/{node}" for node in range(1, start["nodes"])
            ]
            store.wait(heard, timeout)
        return store, {"set": True}
    store.wait([start["key"]], timeout)
    found = json.loads(store.get(start["key"]))
    if not found:
        store.set(f"{start['key']}/{start['node']}", "")
    return store, {"found": found}


# The timeouts of process group and RPC must not fire before ours, which dumps every rank's stack
# first.
GRACE = timedelta(seconds=60)


@record
class ProcessPlace:
    """The place of a process in its launch."""

    number: int  # of the plan's processes
    index: int  # of those on its node
    node: int
    folder: Path  # of the launch, on this node
    store: Address | None  # where ranks of several nodes meet
    threads: int  # unless the environment asks for others; 0: torch's choice


def start(plan: Plan, place: ProcessPlace) -> Context:
    """Seed, choose the device, pin, and join the group, unless a program does."""
    device = prepare(plan, place.index, place.threads)
    if plan.backend and not plan.boundary:
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
    """Seed, choose the device of that index, or the only one that is visible; pin; the device."""
    _seed(plan.seed)
    if threads and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
        threading.setprofile(_begin_thread)
        # as torchrun says it to programs, which may choose otherwise
        if plan.boundary:
            os.environ["OMP_NUM_THREADS"] = str(threads)
    if plan.device == "cpu":
        return torch.device("cpu")
    if plan.sees_one_device:
        index = 0
    device = torch.device(plan.device, index)
    torch.accelerator.set_device_index(index)
    _pin_near(device)
    return device


def _begin_thread(*_: object) -> None:
    """Give a new thread this process's number of threads before its first operation. By itself it
    would have OpenMP's: one for each core of the machine, and they would wait for each other on the
    cores of the rank."""
    sys.setprofile(None)
    # this call sets it, also after a torch.set_num_threads() of the user's
    torch.get_num_threads()


def timeout_of(plan: Plan) -> timedelta:
    """Return the timeout of operations that wait for other ranks."""
    return timedelta(seconds=plan.timeout_seconds) + GRACE


def join(
    plan: Plan,
    rank: int,
    world_size: int,
    place: ProcessPlace,
    name: str,
    device: torch.device,
) -> None:
    """Join the default process group, over the store of that name."""
    # Bound to its device, NCCL connects at once (in this phase, not in the first step), and
    # torchcomms connects at all.
    bound = None
    if device.type != "cpu":
        binding = (*NCCL, dist.get_default_backend_for_device(device))
        if plan.device_backend in binding:
            bound = device
    pinned_to = cores()
    dist.init_process_group(
        plan.backend,
        store=store_of(name, world_size, place, timeout_of(plan)),
        rank=rank,
        world_size=world_size,
        timeout=timeout_of(plan),
        device_id=bound,
    )
    # NCCL pins this thread while it connects, and 2.29 leaves it there.
    if pinned_to:
        os.sched_setaffinity(0, pinned_to)


class NoGroup:
    """Without collectives of ours: the ranks of a program need not keep together."""

    name = ""  # in the flight recorders

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.maximum([0])

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return, for each of `values`, the largest of any rank."""
        return [*values]


class OwnGroup(NoGroup):
    """The process group of this plugin's own collectives, which on the default one would meet those
    of the user's threads. A collective is over when all ranks have joined it."""

    def __init__(self, plan: Plan, place: ProcessPlace, ctx: Context) -> None:
        size = ctx.world_size
        timeout = timeout_of(plan)
        store = store_of("store-own", size, place, timeout)
        gloo = (
            dist.ProcessGroupGloo(store, ctx.rank, size, timeout)
            if dist.is_gloo_available()
            else None
        )
        self._device = torch.device("cpu") if gloo is not None else ctx.device
        # Not by `new_group`, if possible: `destroy_process_group` in the user's code would end it.
        self._group: Any = gloo or dist.new_group(timeout=timeout)
        self.name = str(getattr(self._group, "group_name", ""))

    def maximum(self, values: Sequence[int]) -> list[int]:
        largest = torch.tensor(values, dtype=torch.int64, device=self._device)
        self._group.allreduce([largest], dist.ReduceOp.MAX).wait()
        return [int(value) for value in largest.tolist()]


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def cores() -> set[int]:
    """Return the cores that this thread may run on; none where the system does not say (macOS)."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    return os.sched_getaffinity(0)


def _pin_near(device: torch.device) -> None:
    """Pin this process, and the threads it will start, to the cores of the device's NUMA node
    (Linux, CUDA)."""
    if device.type != "cuda":
        return
    listed = boot.contents(
        Path(f"/sys/bus/pci/devices/{pci_address(device.index)}/local_cpulist")
    )
    # a virtual machine may not have the list
    near = cores().intersection(boot.kernel_numbers(listed))
    if near:
        os.sched_setaffinity(0, near)
