"""What a trainer exchanges by RPC, and how long it waits for it, told by torch's own Python layer.

`watch` puts a few functions of torch.distributed.rpc in front of themselves, in this process, once. What they see:

- Calls: every request that this process issues (rpc_sync, rpc_async, remote, RRef.to_here), whatever is called.
- Bytes: those of the tensors that leave and arrive, of Python functions in the pickler of torch's RPC, of builtin and
  TorchScript functions in their arguments and results; and of the gradients of backward, by hooks on the functions
  that torch's distributed autograd put where a tensor came in or left. What is not a tensor (names, numbers, pickled
  objects) is not counted: its size differs with the ids that torch gives out.
- Time: what the main thread spends in the waits of futures but those of collectives, in RRef.to_here, and in a
  distributed backward from when a gradient has left until one comes back or it ends.

What leaves the bytes unknown: a backward that did not go through `torch.distributed.autograd.backward`, another's
backward through functions that this process ran for it, outputs that got no gradient, sparse tensors, answers that
failed or did not come.
"""

from __future__ import annotations

import io
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed.autograd
import torch.distributed.rpc
from torch.distributed.rpc import api, internal

from pytest_ddpperf.rank import collectives
from pytest_ddpperf.rank.collectives import Count

# As their type hints leave out what is used of them here.
dist_autograd: Any = torch.distributed.autograd
PyRRef: Any = torch.distributed.rpc.PyRRef  # type: ignore[attr-defined]
Future: Any = torch._C.Future
Work: Any = torch._C._distributed_c10d.Work

# What bytes are counted as.
_FORWARD, _BACKWARD = "forward", "backward"
ROLES = ("trainer", "parameter_server", "master")

# For the answers to what a counted step asked and did not wait for; then the bytes are unknown.
_ANSWERS_SECONDS = 5.0


class Traffic(collectives.Meter):
    """The meter of a trainer. Calls and bytes are counted in one step, time is always."""

    def __init__(self) -> None:
        self.names: Sequence[str] = ()  # of all workers, by their number
        self._blocked_ns = 0  # of the main thread
        self._main = threading.main_thread()
        self._depth = 0
        self._lock = threading.Lock()  # answers are counted on torch's threads
        self.counting = False
        self._pending: list[threading.Event] = []  # of each request: its answer was counted
        self._calls: Counter[str] = Counter()  # by role
        self._bytes: Counter[str] = Counter()  # forward and backward; and once more by role
        self._known = True
        self._went_back: set[int] = set()  # contexts whose backward was seen

    def blocked_ns(self) -> int:
        return self._blocked_ns

    def begin(self) -> None:
        self._pending, self._calls, self._bytes, self._known = [], Counter(), Counter(), True
        self.counting = True

    def end(self) -> None:
        """Wait for the answers to the step's requests: nobody else need do so, and none may come."""
        until = time.monotonic() + _ANSWERS_SECONDS
        if not all(counted.wait(max(0.0, until - time.monotonic())) for counted in self._pending):
            self._known = False

    def close(self) -> dict[str, Count]:
        self.counting, self._pending = False, []
        forward, backward = self._bytes[_FORWARD], self._bytes[_BACKWARD]
        # Both ways of counting must come to the same: who is called by others does not know by whom.
        whole = sum(self._bytes[role] for role in ROLES) == forward + backward
        calls = {"rpc.calls": sum(self._calls.values()), **{f"rpc.calls.{role}": self._calls[role] for role in ROLES}}
        carried = {
            "rpc.bytes": forward + backward,
            "rpc.bytes.forward": forward,
            "rpc.bytes.backward": backward,
            **{f"rpc.bytes.{role}": self._bytes[role] if whole else None for role in ROLES},
        }
        return {**calls, **(carried if self._known else dict.fromkeys(carried))}

    def called(self, name: str) -> None:
        if self.counting:
            self._calls[role_of(name)] += 1

    def carried(self, tensors: Iterable[Any], what: str) -> None:
        """Tensors have left or arrived, forward, backward or (the same ones again) to or from a role; what is None, or
        sparse, has a size that is not theirs to tell."""
        if not self.counting:
            return
        for tensor in tensors:
            if tensor is None or tensor.layout is not torch.strided:
                self._known = False
            else:
                with self._lock:
                    self._bytes[what] += tensor.numel() * tensor.element_size()

    def answered(self, future: Any, name: str, *, in_python: bool) -> None:
        """Count what `future` will bring; the pickler sees what Python functions return."""
        counted = threading.Event()  # later than that it is done, which torch says first

        def arrived(done: Any) -> None:
            tensors = self.found(done.value)
            self.carried(tensors, role_of(name))
            if not in_python:
                self.carried(tensors, _FORWARD)
            counted.set()

        if self.counting:
            self._pending.append(counted)
            future.add_done_callback(arrived)

    def found(self, value: Callable[[], Any]) -> list[torch.Tensor]:
        """The tensors in a value; where it cannot be looked into the bytes are unknown, and the step goes on."""
        try:
            return tensors_in(value())
        except Exception:  # a call that failed, which whoever waits for it is told, or what pickle cannot take
            self._known = False
            return []

    def serves(self) -> None:
        """This process is called; gradients that pass it in another's backward are not seen."""
        if self.counting:
            with suppress(RuntimeError):  # there is none, most often
                dist_autograd._current_context()
                self._known = False

    def waiting(self, wait: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`wait(...)`, its time counted where the main thread does."""
        if threading.current_thread() is not self._main or self._depth:
            return wait(*args, **kwargs)
        self._depth += 1
        began = time.monotonic_ns()
        try:
            return wait(*args, **kwargs)
        finally:
            self._blocked_ns += time.monotonic_ns() - began
            self._depth -= 1

    def backward(self, backward: Callable[..., None], context: int, *args: Any, **kwargs: Any) -> None:
        """A distributed backward; gradients that leave and arrive pass the hooks."""
        functions = dist_autograd._retrieve_context(context)
        left = [0]  # when the last gradient did that nothing has come back for

        def leaving(message: int) -> Callable[[Any, Any], None]:
            # The upper 16 bits of a message's number are the worker that sent it, here the answer.
            to = role_of(self.names[message >> 48])

            def out(_: Any, gradients: Any) -> None:
                left[0] = time.monotonic_ns()
                self.carried(gradients, _BACKWARD)
                self.carried(gradients, to)

            return out

        def into(gradients: Any, _: Any) -> None:
            came_back()
            self.carried(gradients, _BACKWARD)
            self.carried(gradients, asked)

        def came_back() -> None:
            if left[0]:
                self._blocked_ns += time.monotonic_ns() - left[0]
                left[0] = 0

        # Whom a request went to is not told; where all are of one role there is no doubt.
        others = {role_of(self.names[worker]) for worker in functions._known_worker_ids()}
        asked = others.pop() if len(others) == 1 else ""
        self._went_back.add(context)
        received = [function.register_hook(leaving(n)) for n, function in functions._recv_functions().items()]
        sent = [function.register_hook(into) for function in functions._send_functions().values()]
        self._depth += 1  # waits inside are of this one
        try:
            backward(context, *args, **kwargs)
        finally:
            self._depth -= 1
            came_back()
            for handle in received + sent:
                handle.remove()

    def ended(self, context: int) -> None:
        """A distributed autograd context ends."""
        seen = context in self._went_back
        self._went_back.discard(context)
        if self.counting and not seen and dist_autograd._retrieve_context(context)._recv_functions():
            self._known = False


def watch(traffic: Traffic) -> None:
    """Put the meter in place, in this process."""
    for kind in ("rpc", "remote"):
        for what in ("builtin", "torchscript", "python_udf"):
            name = f"_invoke_{kind}_{what}"
            setattr(api, name, _requesting(traffic, getattr(api, name), in_python=what == "python_udf"))
    pickler: Any = internal._internal_rpc_pickler
    serialize, deserialize = pickler.serialize, pickler.deserialize
    wait, to_here = Future.wait, PyRRef.to_here
    backward, leave = dist_autograd.backward, dist_autograd.context.__exit__

    run: Any = internal._run_function

    @wraps(run)
    def ran(function: Any) -> Any:
        traffic.serves()
        return run(function)

    internal._run_function = ran
    unpickled = threading.local()  # whether this thread's last fetch was: a reference's value is unpickled in it

    @wraps(serialize)
    def serialized(value: Any) -> Any:
        made = serialize(value)
        traffic.carried(made[1], _FORWARD)
        return made

    @wraps(deserialize)
    def deserialized(data: Any, tensors: Any) -> Any:
        unpickled.here = True
        traffic.carried(tensors, _FORWARD)
        return deserialize(data, tensors)

    get_future = Work.get_future
    collectives_own: WeakSet[Any] = WeakSet()

    @wraps(get_future)
    def got_future(work: Any) -> Any:
        future = get_future(work)
        collectives_own.add(future)
        return future

    @wraps(wait)
    def waited(future: Any) -> Any:
        return wait(future) if future in collectives_own else traffic.waiting(wait, future)

    @wraps(to_here)
    def fetched(reference: Any, *args: Any, **kwargs: Any) -> Any:
        if reference.is_owner():
            return to_here(reference, *args, **kwargs)
        owner = reference.owner_name()
        traffic.called(owner)
        unpickled.here = False
        value = traffic.waiting(to_here, reference, *args, **kwargs)
        if traffic.counting:
            tensors = traffic.found(lambda: value)
            traffic.carried(tensors, role_of(owner))
            if not unpickled.here:  # what a builtin or TorchScript function returned
                traffic.carried(tensors, _FORWARD)
        return value

    @wraps(backward)
    def went_back(context: int, *args: Any, **kwargs: Any) -> None:
        traffic.backward(backward, context, *args, **kwargs)

    @wraps(leave)
    def left(context: Any, *error: Any) -> Any:
        traffic.ended(context.autograd_context._context_id())
        return leave(context, *error)

    pickler.serialize, pickler.deserialize = serialized, deserialized
    Future.wait, PyRRef.to_here, Work.get_future = waited, fetched, got_future
    dist_autograd.backward, dist_autograd.context.__exit__ = went_back, left


def _requesting(traffic: Traffic, invoke: Callable[..., Any], *, in_python: bool) -> Callable[..., Any]:
    @wraps(invoke)
    def request(to: Any, *args: Any, **kwargs: Any) -> Any:
        if not traffic.counting:
            return invoke(to, *args, **kwargs)
        name = to if isinstance(to, str) else to.name
        traffic.called(name)
        tensors = args[1] if in_python else traffic.found(lambda: (args, kwargs))  # the function, then its tensors
        traffic.carried(tensors, role_of(name))
        if not in_python:
            traffic.carried(tensors, _FORWARD)
        made = invoke(to, *args, **kwargs)
        if isinstance(made, Future):
            traffic.answered(made, name, in_python=in_python)
        return made

    return request


def role_of(name: str) -> str:
    """The role of a process by its name: see `Plan.name`."""
    stem = name.rstrip("0123456789")
    return "parameter_server" if stem == "ps" else stem


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in a value that can be pickled; references are left alone, for to pickle one makes another."""
    finder = _Finder(io.BytesIO())
    finder.dump(value)
    return finder.tensors


class _Finder(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
            return "a tensor"
        return "a reference" if isinstance(obj, PyRRef) else None
