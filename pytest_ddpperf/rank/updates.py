"""Where the steps of a program that owns its loop end, by its optimizers and backward passes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from pytest_ddpperf.rank.counters import count_compilations, find_objects, replicas
from pytest_ddpperf.records.errors import DdpPerfError

Ended = tuple[int, int]  # when a step ended, in ns, and how many backward passes it had
# So many updates show how a program's steps end; with so many backward passes between two of them, none is expected.
_RUNS = 3
_MOST_PASSES = 10


class Updates:
    """Watches the backward passes and optimizers of this process.

    An update is a run of optimizer steps, and updates of a GradScaler, without a backward pass between them. The runs
    of some updates show with which event each kind of them ends. Of several kinds (a GAN's), the rarest ends a step.
    """

    def __init__(
        self,
        on_end: Callable[[int], None],
        on_learned: Callable[[Sequence[Ended]], bool],
        fail: Callable[[BaseException], None],
    ) -> None:
        """`on_end(passes)` is called where a step ends, with the number of its backward passes. `on_learned(steps)` is
        called when it is known, or turns out to be otherwise, where steps end, with those so far; if it returns False,
        they end as before. `fail` gets what either raises."""
        self._on_end, self._on_learned, self._fail = on_end, on_learned, fail
        self._ender: object = None  # the event that ends a step, once it is known
        self._last: object = None  # of this run, the last event
        self._last_ns = 0
        self._runs: list[tuple[object, Ended]] = []  # of each the last event, and the backward passes before it
        self._open = 0  # backward passes that have not ended: one may call another
        self._passes = 0  # since the last step ended
        self._run_passes = 0  # since the last run ended
        self._unanswered = 0  # synchronising passes since the last event; all of them where nothing synchronises
        self._within = False  # whether an optimizer took a step within this backward pass
        self._synchronised = False  # whether a backward pass that synchronises gradients is an event

    def install(self) -> None:
        """Watch from here on."""
        torch.autograd.backward = self._around(torch.autograd.backward)
        torch.autograd.grad = self._around(torch.autograd.grad)
        register_optimizer_step_post_hook(lambda optimizer, *_: self._optimizer_ended(id(optimizer)))
        scaler: Any = torch.amp.GradScaler
        for each in (scaler, *scaler.__subclasses__()):
            self._watch_scaler(each)
        scaler.__init_subclass__ = classmethod(self._watch_scaler)  # FSDP's is imported by the program

    def _watch_scaler(self, scaler: Any) -> None:
        update = vars(scaler).get("update")
        if update is None:
            return

        @wraps(update)
        def updated(*args: Any, **kwargs: Any) -> Any:
            result = update(*args, **kwargs)
            self._optimizer_ended("GradScaler")
            return result

        scaler.update = updated

    def _around(self, function: Any) -> Any:
        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            self._begin_pass()
            try:
                result = function(*args, **kwargs)
            except BaseException:
                self._open -= 1
                self._within = False
                raise
            self._end_pass()
            return result

        return watched

    def _begin_pass(self) -> None:
        if not self._open and self._last is not None:
            self._end_run(self._last)
        self._open += 1

    def _end_pass(self) -> None:
        self._open -= 1
        if self._open:
            return
        self._passes += 1
        self._run_passes += 1
        if self._within:
            self._within = False
            self._happened("a backward pass")
        elif self._ender is None or self._synchronised:
            self._passed_without_optimizer()

    def _passed_without_optimizer(self) -> None:
        """Where no optimizer is seen (compiled, of another library), a step ends with a backward pass that synchronises
        gradients."""
        replicas = _replicas()
        synchronises = any(map(_synchronises, replicas))
        if self._synchronised:
            if synchronises:
                self._happened("a synchronisation")
            return
        self._unanswered += synchronises or not replicas
        if self._unanswered >= _MOST_PASSES:
            self._synchronised = True
            if not synchronises or (find_objects(torch.optim.Optimizer) and not count_compilations()):
                error = DdpPerfError(
                    f"{_MOST_PASSES} backward passes without an optimizer's update: if it accumulates gradients over "
                    'as many, or its optimizer cannot be seen, say where a step ends (boundary="mark")'
                )
                self._fail(error)

    def _optimizer_ended(self, which: object) -> None:
        if torch.compiler.is_compiling():
            return
        if self._open:
            self._within = True
        else:
            self._happened(which)

    def _happened(self, event: object) -> None:
        self._last, self._last_ns, self._unanswered = event, time.monotonic_ns(), 0
        if event == self._ender and self._passes:
            passes, self._passes = self._passes, 0
            self._call(self._on_end, passes)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # which the program might catch
            self._fail(error)

    def _end_run(self, event: object) -> None:
        """Note how a run ended, and find out which event ends a step, unless it is known and this is no new one."""
        run = event, (self._last_ns, self._run_passes)
        self._last, self._run_passes = None, 0
        if self._ender is not None and any(event == each for each, _ in self._runs):
            return
        self._runs.append(run)
        if len(self._runs) < _RUNS:
            return
        counts = Counter(each for each, _ in self._runs)
        rarest = min(counts.values())
        ender = next(each for each, _ in reversed(self._runs) if counts[each] == rarest)
        steps, passes = [], 0
        for each, (when, of_run) in self._runs:
            passes += of_run
            if each == ender:
                steps.append((when, passes))
                passes = 0
        if self._call(self._on_learned, steps):
            self._ender, self._passes = ender, passes


def _synchronises(module: Any) -> bool:
    """Return whether a backward pass of now synchronises the gradients of a DDP or FSDP2 module."""
    state = module._get_fsdp_state() if _is_fsdp(module) else None
    shared = getattr(state, "_state_ctx", None)
    return bool(vars(module).get("require_backward_grad_sync") or getattr(shared, "is_last_backward", False))


def _is_fsdp(module: object) -> bool:
    """Whether it is an FSDP2 module, by its type: a module's own `__getattr__` may raise anything."""
    return hasattr(type(module), "_get_fsdp_state")


_found: list[torch.nn.Module] = []


def _replicas() -> Sequence[torch.nn.Module]:
    """Return the modules of this process that synchronise gradients, as they are when some are first found."""
    if not _found:
        _found.extend([*replicas(), *filter(_is_fsdp, find_objects(torch.nn.Module))])
    return _found
