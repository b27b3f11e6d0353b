"""An RPC launch: trainers, parameter servers and a master, each with its own set-up, until the
trainers have ended; and the counters of a trainer's traffic.

Imported only where RPC is used: it costs half a second.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed.autograd
import torch.distributed.nn
import torch.distributed.optim
import torch.distributed.rpc as rpc
from torch.distributed.rpc import api, internal

from pytest_ddpperf.rank import group, sampling
from pytest_ddpperf.rank.context import Role, RpcContext
from pytest_ddpperf.rank.counters import Figures, Meter
from pytest_ddpperf.records.plan import Plan

# Typed as Any because torch's type hints leave out what is used here.
dist_autograd: Any = torch.distributed.autograd
PyRRef: Any = rpc.PyRRef  # type: ignore[attr-defined]
Future: Any = torch._C.Future
Work: Any = torch._C._distributed_c10d.Work
_api: Any = api
_internal: Any = internal

ROLES = ("trainer", "parameter_server", "master")

# For the answers to requests that a step did not wait for; then the bytes are unknown.
_ANSWERS_SECONDS = 5.0


class RpcMeter(Meter):
    """The meter of a trainer: calls and bytes of one step, blocked time of all steps, seen in the
    Python layer of torch.distributed.rpc.

    `install` wraps these functions of torch, in this process, once:

    - `rpc.api._to_worker_info`: called once for every request (rpc_sync, rpc_async, remote):
      `rpc.calls`.
    - `rpc.api._invoke_rpc_python_udf`: returns the future of an answer, which is waited for before
      bytes are reported.
    - The RPC pickler's `serialize` and `deserialize`: every tensor that Python functions send and
      receive.
    - `rpc.internal._run_function`: this process is called by another one.
    - `distributed.autograd.backward` and `context`: hooks see the gradients that leave and arrive.
    - `Future.wait`, `RRef.to_here`: the main thread's time blocked in RPC. `Work.get_future` marks
      the futures of collectives, which do not count.

    Anything else leaves the bytes unknown: builtin and TorchScript functions and modules, a
    backward that did not go through `torch.distributed.autograd.backward`, another process's
    backward through functions that ran here, outputs without a gradient, sparse tensors, answers
    that failed or did not come. Only tensors are counted: the size of pickled objects varies with
    the ids that torch gives out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._blocked_ns = 0
        self._waits = 0  # nested waits of the main thread
        self._lock = threading.Lock()  # answers are counted on torch's threads
        self._counting = False
        self._reset()
        self._seen_backwards: set[int] = set()  # ids of autograd contexts
        self._of_collectives: WeakSet[Any] = WeakSet()  # futures
        # whether this thread has unpickled the value of a reference
        self._unpickled = threading.local()

    def _reset(self) -> None:
        self._answers: list[Any] = []  # futures
        self._calls: Counter[str] = Counter()  # by role of the process that is called
        self._requests = self._pickled_requests = 0
        self._bytes: Counter[str] = Counter()  # forward and backward
        self._bytes_known = True

    def blocked_ns(self) -> int:
        return self._blocked_ns

    def begin(self) -> None:
        # to an earlier step's requests, which would be counted in this one
        self._await_answers()
        self._reset()
        self._counting = True

    def end(self) -> None:
        """Wait for the answers to the step's requests: the step itself need not, and an answer may
        never come."""
        self._await_answers()

    def _await_answers(self) -> None:
        until = time.monotonic() + _ANSWERS_SECONDS
        for answer in self._answers:
            while not answer.done() and time.monotonic() < until:
                time.sleep(0.001)
            try:
                self._bytes_known &= answer.done()
                if answer.done():
                    answer.value()
            except Exception:  # whoever waits for it sees it
                self._bytes_known = False

    def close(self) -> Figures:
        self._counting = False
        # Calls of builtin and TorchScript functions do not pass the pickler.
        known = self._bytes_known and self._pickled_requests == self._requests
        return {
            "rpc.calls": sum(self._calls.values()),
            **{f"rpc.calls.{role}": self._calls[role] for role in ROLES},
            "rpc.bytes": self._bytes.total() if known else None,
            "rpc.bytes.forward": self._bytes["forward"] if known else None,
            "rpc.bytes.backward": self._bytes["backward"] if known else None,
        }

    def install(self) -> None:
        """Wrap torch's functions, in this process."""
        pickler = _internal._internal_rpc_pickler
        for owner, name, replacement in (
            (_api, "_to_worker_info", self.request),
            (_api, "_invoke_rpc_python_udf", self.invoke),
            (_internal, "_run_function", self.serve),
            (pickler, "serialize", self.serialize),
            (pickler, "deserialize", self.deserialize),
            (dist_autograd, "backward", self.backward),
            (dist_autograd.context, "__exit__", self.end_context),
            (Future, "wait", self.wait),
            (PyRRef, "to_here", self.fetch),
            (Work, "get_future", self.mark_collective),
        ):
            setattr(owner, name, _bound_to(getattr(owner, name), replacement))

    # The methods below replace functions of torch, which each of them calls as `original`.

    def request(self, original: Any, to: Any) -> Any:
        """Count a request to another process."""
        worker = original(to)
        if self._counting:
            with self._lock:
                self._requests += 1
                self._calls[role_of(worker.name)] += 1
        return worker

    def invoke(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep the future of an answer."""
        answer = original(*args, **kwargs)
        kept = (
            self._answers
            if self._counting
            else [each for each in self._answers if not each.done()]
        )
        self._answers = [*kept, answer]
        return answer

    def serialize(self, original: Any, value: Any) -> Any:
        """Count what leaves: a request of this process, or its answer to another's."""
        made = original(value)
        if self._counting:
            self._carry("forward", made[1])
            with self._lock:
                self._pickled_requests += isinstance(value, internal.PythonUDF)
        return made

    def deserialize(self, original: Any, data: Any, tensors: Any) -> Any:
        """Count what arrives."""
        value = original(data, tensors)
        self._unpickled.last = True
        if self._counting:
            self._carry("forward", tensors)
            # its tensors are part of its pickle
            if isinstance(value, torch.jit.ScriptModule):
                self._bytes_known = False
        return value

    def _carry(self, way: str, tensors: Iterable[Any]) -> None:
        """Count the bytes of tensors on their way forward or backward."""
        for tensor in tensors:
            if tensor is None or tensor.layout is not torch.strided:
                self._bytes_known = False
                continue
            with self._lock:
                self._bytes[way] += tensor.numel() * tensor.element_size()

    def serve(self, original: Any, function: Any) -> Any:
        """Answer another process; gradients that pass through here in its backward are not seen."""
        if self._counting:
            with suppress(RuntimeError):  # there is no autograd context, most often
                dist_autograd._current_context()
                self._bytes_known = False
        # sets it in this thread, which is not Python's: see `group.prepare`
        torch.get_num_threads()
        return original(function)

    def mark_collective(self, original: Any, work: Any) -> Any:
        """Remember the future of a collective."""
        future = original(work)
        self._of_collectives.add(future)
        return future

    def wait(self, original: Any, future: Any) -> Any:
        """Count the time of a wait for an answer."""
        return (
            original(future)
            if future in self._of_collectives
            else self._timed(original, future)
        )

    def _timed(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Count the time of a call as blocked, on the main thread only."""
        if threading.current_thread() is not threading.main_thread() or self._waits:
            return original(*args, **kwargs)
        self._waits += 1
        began = time.monotonic_ns()
        try:
            return original(*args, **kwargs)
        finally:
            self._blocked_ns += time.monotonic_ns() - began
            self._waits -= 1

    def fetch(self, original: Any, reference: Any, *args: Any, **kwargs: Any) -> Any:
        """Fetch the value of a reference; if another process owns it, count a call and the time."""
        if reference.is_owner():
            return original(reference, *args, **kwargs)
        self._unpickled.last = False
        value = self._timed(original, reference, *args, **kwargs)
        if self._counting:
            self._calls[role_of(reference.owner_name())] += 1
            # else a builtin or TorchScript function made the value
            self._bytes_known &= self._unpickled.last
        return value

    def backward(self, original: Any, context: int, *args: Any, **kwargs: Any) -> None:
        """Run a distributed backward.

        It counts as blocked from when a gradient has left until one comes back or the backward
        ends.
        """
        functions = dist_autograd._retrieve_context(context)
        last_left = 0

        def leaves(_: Any, gradients: Any) -> None:
            nonlocal last_left
            last_left = time.monotonic_ns()
            if self._counting:
                self._carry("backward", gradients)

        def arrives(gradients: Any, _: Any) -> None:
            come_back()
            if self._counting:
                self._carry("backward", gradients)

        def come_back() -> None:
            nonlocal last_left
            if last_left:
                self._blocked_ns += time.monotonic_ns() - last_left
                last_left = 0

        self._seen_backwards.add(context)
        hooks = [
            function.register_hook(leaves)
            for function in functions._recv_functions().values()
        ]
        hooks += [
            function.register_hook(arrives)
            for function in functions._send_functions().values()
        ]
        self._waits += 1  # waits inside are part of this one
        try:
            original(context, *args, **kwargs)
        finally:
            self._waits -= 1
            come_back()
            for hook in hooks:
                hook.remove()

    def end_context(self, original: Any, context: Any, *error: Any) -> Any:
        """Look for gradients that were not seen when a distributed autograd context ends."""
        number = context.autograd_context._context_id()
        seen = number in self._seen_backwards
        self._seen_backwards.discard(number)
        if (
            self._counting
            and not seen
            and dist_autograd._retrieve_context(number)._recv_functions()
        ):
            self._bytes_known = False
        return original(context, *error)


def _bound_to(original: Any, replacement: Callable[..., Any]) -> Any:
    """Return a function, which as an attribute of a class is a method, that calls `replacement`
    with `original`."""
    return wraps(original)(
        lambda *args, **kwargs: replacement(original, *args, **kwargs)
    )


def role_of(name: str) -> str:
    """Return the role of a process by its name: see `Plan.name`."""
    stem = name.rstrip("0123456789")
    return "parameter_server" if stem == "ps" else stem


Setup = Callable[..., Any]

meter = RpcMeter()


# Received by RPC: that a parameter server is ready; what the master's set-up returned.
_ready = threading.Semaphore(0)
_shared: queue.SimpleQueue[Any] = queue.SimpleQueue()


def start(plan: Plan, place: group.ProcessPlace) -> RpcContext:
    """Seed, choose the device, pin, join the RPC world, and the process group of one's role."""
    process, timeout = place.number, group.timeout_of(plan)
    role, index, size = _role_of(plan, process)
    devices = 1 if plan.device == "cpu" else torch.accelerator.device_count()
    device = group.prepare(plan, place.index % devices, place.threads)
    url = group.url_of("store-rpc", plan.processes, place.folder, place.store, timeout)
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
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        rpc.init_rpc(  # type: ignore[no-untyped-call]
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
        return "parameter_server", process - plan.world_size, plan.parameter_servers
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
        _call_all([*ctx.workers["master"], *ctx.workers["trainer"]], _take_ready)
    else:
        assert prepared is not None, "there is no master without a set-up"
        _call_all(ctx.workers["trainer"], _take_shared, prepared.made)


def _call_all(names: Sequence[str], what: Callable[..., None], *args: Any) -> None:
    for future in [rpc.rpc_async(name, what, args) for name in names]:
        future.wait()


def _await_servers(ctx: RpcContext) -> None:
    for _ in ctx.workers["parameter_server"]:
        _ready.acquire()


def _take_ready() -> None:
    _ready.release()


def _take_shared(shared: Any) -> None:
    _shared.put(shared)
