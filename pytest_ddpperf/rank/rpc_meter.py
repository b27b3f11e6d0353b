"""What a trainer sends and waits for by RPC: calls and bytes of one step, blocked time of all
steps, seen in the Python layer of torch.distributed.rpc.

Imported only where RPC is used, as `rank.rpc`.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed.autograd
from torch.distributed.rpc import internal

from pytest_ddpperf.rank import torch_names
from pytest_ddpperf.rank.context import noting
from pytest_ddpperf.rank.counters import Meter
from pytest_ddpperf.rank.modules import Figures, bytes_of

ROLES = ("trainer", "parameter_server", "master")
_RPC = "torch.distributed.rpc"
_AUTOGRAD = "torch.distributed.autograd"

# For the answers to requests that a step did not wait for; then the bytes are unknown.
_ANSWERS_SECONDS = 5.0


class RpcMeter(Meter):
    """The meter of a trainer. `install` replaces functions of torch, in this process, once; each of
    the methods that do so says what it sees.

    Anything else leaves the bytes unknown: builtin and TorchScript functions and modules, a
    backward that did not go through `torch.distributed.autograd.backward`, another process's
    backward through functions that ran here, outputs without a gradient, sparse tensors, answers
    that failed or did not come. Only tensors are counted: the size of pickled objects varies with
    the ids that torch gives out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_installed = False
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
        self._is_over = False  # the step that is counted
        # by role of the process that is called
        self._calls: Counter[str] = Counter()
        # requests, less those that passed the pickler: builtin and TorchScript functions do not
        self._unpickled_requests = 0
        self._bytes: Counter[str] = Counter()  # forward and backward
        self._bytes_known = True

    def install(self) -> None:
        """Replace torch's functions, in this process."""
        pickler = f"{_RPC}.internal:_internal_rpc_pickler"
        replacements: dict[str, Any] = {
            f"{_RPC}.api:_to_worker_info": self._request,
            f"{_RPC}.api:_invoke_rpc_python_udf": self._invoke,
            f"{_RPC}.internal:_run_function": self._serve,
            f"{pickler}.serialize": self._serialize,
            f"{pickler}.deserialize": self._deserialize,
            f"{_AUTOGRAD}:backward": self._backward,
            f"{_AUTOGRAD}:context.__exit__": self._end_context,
            "torch._C:Future.wait": self._wait,
            f"{_RPC}:PyRRef.to_here": self._fetch,
            "torch._C._distributed_c10d:Work.get_future": self._mark_collective,
        }
        with noting("what a step sends by RPC is", self.notes):
            self._retrieve_context = torch_names.need(
                f"{_AUTOGRAD}:_retrieve_context"
            )
            self._current_context = torch_names.need(
                f"{_AUTOGRAD}:_current_context"
            )
            for path, replacement in replacements.items():
                torch_names.replace(
                    path, partial(_bound_to, replacement=replacement)
                )
            self._is_installed = True

    def blocked_ns(self) -> int:
        return self._blocked_ns

    def begin(self) -> None:
        # of an earlier step's requests, which would be counted in this one
        self.end()
        self._reset()
        self._counting = True

    def end(self) -> None:
        """Wait for the answers to the step's requests: the step itself need not, and an answer may
        never come."""
        until = time.monotonic() + _ANSWERS_SECONDS
        for answer in self._answers:
            while not answer.done() and time.monotonic() < until:
                time.sleep(0.001)
            has_come = False
            with suppress(Exception):  # whoever waits for it sees it
                if answer.done():
                    answer.value()
                    has_come = True
            self._bytes_known &= has_come

    def close(self) -> Figures:
        self._counting = False
        self._is_over = True
        self._answers.clear()
        if not self._is_installed:
            return {}
        figures: Figures = {"rpc.calls": self._calls.total()}
        for role in ROLES:
            figures[f"rpc.calls.{role}"] = self._calls[role]
        known = self._bytes_known and not self._unpickled_requests
        figures["rpc.bytes"] = self._bytes.total() if known else None
        for way in ("forward", "backward"):
            figures[f"rpc.bytes.{way}"] = self._bytes[way] if known else None
        return figures

    # The methods below replace functions of torch, which each of them calls as `original`.

    def _request(self, original: Any, to: Any) -> Any:
        """Count a request to another process: each rpc_sync, rpc_async and remote is one."""
        worker = original(to)
        if self._counting:
            with self._lock:
                self._unpickled_requests += 1
                self._calls[role_of(worker.name)] += 1
        return worker

    def _invoke(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep the future of an answer, which is waited for before bytes are reported."""
        answer = original(*args, **kwargs)
        if not self._is_over:
            if not self._counting:
                self._answers = [
                    each for each in self._answers if not each.done()
                ]
            self._answers.append(answer)
        return answer

    def _serialize(self, original: Any, value: Any) -> Any:
        """Count what Python functions send: a request of this process, or its answer to
        another's."""
        made = original(value)
        if self._counting:
            self._carry("forward", made[1])
            if isinstance(value, internal.PythonUDF):
                with self._lock:
                    self._unpickled_requests -= 1
        return made

    def _deserialize(self, original: Any, data: Any, tensors: Any) -> Any:
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
        if not self._counting:
            return
        for tensor in tensors:
            if tensor is None or tensor.layout is not torch.strided:
                self._bytes_known = False
                continue
            with self._lock:
                self._bytes[way] += bytes_of([tensor])

    def _serve(self, original: Any, function: Any) -> Any:
        """Answer another process; gradients that pass through here in its backward are not seen."""
        if self._counting:
            # there is no autograd context, most often
            with suppress(RuntimeError):
                self._current_context()
                self._bytes_known = False
        # sets it in this thread, which is not Python's: see `group.prepare`
        torch.get_num_threads()
        return original(function)

    def _mark_collective(self, original: Any, work: Any) -> Any:
        """Remember the future of a collective: to wait for it does not count."""
        future = original(work)
        self._of_collectives.add(future)
        return future

    def _wait(self, original: Any, future: Any) -> Any:
        """Count the time of a wait for an answer."""
        if future in self._of_collectives:
            return original(future)
        return self._timed(original, future)

    def _timed(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Count the time of a call as blocked, on the main thread only."""
        if (
            threading.current_thread() is not threading.main_thread()
            or self._waits
        ):
            return original(*args, **kwargs)
        self._waits += 1
        began = time.monotonic_ns()
        try:
            return original(*args, **kwargs)
        finally:
            self._blocked_ns += time.monotonic_ns() - began
            self._waits -= 1

    def _fetch(
        self, original: Any, reference: Any, *args: Any, **kwargs: Any
    ) -> Any:
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

    def _backward(
        self, original: Any, context: int, *args: Any, **kwargs: Any
    ) -> None:
        """Run a distributed backward, and count the gradients that leave and arrive.

        It counts as blocked from when a gradient has left until one comes back or the backward
        ends.
        """
        last_left = 0

        def leaves(_: Any, gradients: Any) -> None:
            nonlocal last_left
            last_left = time.monotonic_ns()
            self._carry("backward", gradients)

        def arrives(gradients: Any, _: Any) -> None:
            come_back()
            self._carry("backward", gradients)

        def come_back() -> None:
            nonlocal last_left
            if last_left:
                self._blocked_ns += time.monotonic_ns() - last_left
                last_left = 0

        self._seen_backwards.add(context)
        functions = self._retrieve_context(context)
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

    def _end_context(self, original: Any, context: Any, *error: Any) -> Any:
        """Look for gradients that were not seen when a distributed autograd context ends."""
        number = context.autograd_context._context_id()
        if number in self._seen_backwards:
            self._seen_backwards.remove(number)
        elif (
            self._counting and self._retrieve_context(number)._recv_functions()
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
