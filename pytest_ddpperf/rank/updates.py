"""Where the steps of a program that owns its loop end, by its optimizers and backward passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from weakref import ref

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pytest_ddpperf.rank.counters import find_objects, replicas
from pytest_ddpperf.records.errors import DdpPerfError

# So many updates show how a program's steps end. An event that ends steps is over if others have
# come for so many times as long as it usually takes.
_RUNS = 3
# So many backward passes without an optimizer that is seen show that there is none, and so many
# that it cannot be seen: large batches are rarely made of more.
_FEW_PASSES = 10
_MOST_PASSES = 256


class Updates:
    """Watches the backward passes and optimizers of this process.

    An update is a run of optimizer steps, and updates of a GradScaler, without a backward pass
    between them. The runs of some updates show with which event each kind of them ends. Of several
    kinds (a GAN's), the rarest ends a step. When it no longer happens (another stage of the
    training, an optimizer made anew), those that come end steps.
    """

    def __init__(
        self,
        on_end: Callable[[int], None],
        on_learned: Callable[[list[int]], bool],
        fail: Callable[[BaseException], None],
    ) -> None:
        """`on_end(passes)` is called where a step ends, with the number of its backward passes.
        `on_learned(ends)` is called when it is known, or turns out to be otherwise, where steps
        end, with the times of those so far, in ns; if it returns False, they end as before. `fail`
        gets what either raises."""
        self._on_end, self._on_learned, self._fail = on_end, on_learned, fail
        self._ender: object = None  # the event that ends a step, once it is known
        self._last: object = None  # of this run, the last event
        self._last_ns = 0
        self._known: set[object] = set()  # the events that have happened
        self._runs: list[object] = []  # of each the last event
        self._ended_ns: list[int] = []
        self._since = 0  # runs since the one that ended the last step
        self._longest = _RUNS  # after how many runs such a one comes, at the latest
        self._open = 0  # backward passes that have not ended: one may call another
        # since the last step ended; those within an optimizer's step, as LBFGS has, are
        # one
        self._passes = 0
        # as many as there were when the optimizer's step under way began
        self._before_step: int | None = None
        # synchronising passes since the last event; all of them where nothing
        # synchronises
        self._unanswered = 0
        # of the parameters after the last pass without an event since
        self._versions: list[int] = []
        # whether an optimizer took a step within this backward pass
        self._within = False
        # whether a backward pass that synchronises gradients is an event
        self._synchronised = False

    def install(self) -> None:
        """Watch from here on."""
        torch.autograd.backward = self._around(torch.autograd.backward)
        torch.autograd.grad = self._around(torch.autograd.grad)
        register_optimizer_step_pre_hook(self._optimizer_begins)
        register_optimizer_step_post_hook(self._optimizer_ended)
        scaler: Any = torch.amp.GradScaler
        for each in (scaler, *scaler.__subclasses__()):
            self._watch_scaler(each)
        # FSDP's is imported by the program
        scaler.__init_subclass__ = classmethod(self._watch_scaler)

    def _watch_scaler(self, scaler: Any) -> None:
        update = vars(scaler).get("update")
        if update is None:
            return

        @wraps(update)
        def updated(*args: Any, **kwargs: Any) -> Any:
            result = update(*args, **kwargs)
            self._happened("GradScaler")
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
        if self._within:
            self._within = False
            self._happened("a backward pass")
        elif self._before_step is None and (
            self._ender is None or self._synchronised or self._passes > _MOST_PASSES
        ):
            self._passed_without_optimizer()

    def _passed_without_optimizer(self) -> None:
        """Where no optimizer is seen (compiled, of another library), a step ends with a backward
        pass that synchronises gradients. Others accumulate gradients, which leaves the parameters
        as they are."""
        replicas = _replicas()
        synchronises = any(map(_synchronises, replicas))
        if self._synchronised:
            if synchronises:
                self._happened("a synchronisation")
            return
        self._unanswered += synchronises or not replicas
        before, self._versions = (
            self._versions,
            [each._version for model in replicas for each in model.parameters()],
        )
        has_none = self._unanswered == _FEW_PASSES and not find_objects(
            torch.optim.Optimizer
        )
        self._synchronised = has_none or before not in ([], self._versions)
        if (has_none and not synchronises) or self._unanswered >= _MOST_PASSES:
            self._fail(
                DdpPerfError(
                    f"{self._unanswered} backward passes without an optimizer's update: if it"
                    " accumulates gradients over as many, or its optimizer cannot be seen, say"
                    ' where a step ends (boundary="mark")'
                )
            )

    def _optimizer_begins(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._before_step = self._passes

    def _optimizer_ended(self, optimizer: object, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        if self._before_step is not None:
            self._passes = min(self._passes, self._before_step + 1)
            self._before_step = None
        self._happened(ref(optimizer))  # another one may get its id

    def _happened(self, event: object) -> None:
        if self._open:
            self._within = True
            return
        self._last, self._last_ns = event, time.monotonic_ns()
        self._unanswered, self._versions = 0, []
        if event not in self._known and self._longest == 1:
            self._ender = event  # every update ends a step, this one, too
        self._known.add(event)
        if event == self._ender:
            self._end_step()

    def _end_step(self) -> None:
        if self._passes:
            passes, self._passes = self._passes, 0
            self._call(self._on_end, passes)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # which the program might catch
            self._fail(error)

    def _end_run(self, event: object) -> None:
        """Note how a run ended, and find out which event ends a step, unless the known one may
        still come."""
        self._last = None
        self._runs.append(event)
        self._ended_ns.append(self._last_ns)
        self._since += 1
        if event == self._ender:
            self._longest = max(self._since, self._longest)
            self._since = 0
        elif self._since < self._longest:
            return
        elif self._ender is None:
            self._follow(self._runs)
            self._longest = 1  # until it is seen
            runs = zip(self._runs, self._ended_ns, strict=True)
            self._call(
                self._on_learned, [when for each, when in runs if each == self._ender]
            )
        elif (
            event not in self._runs[: -self._since]
            or self._ender not in self._runs
            or self._since >= _RUNS * self._longest
        ):
            self._longest = 1
            self._follow(self._runs[-self._since :])
            if not self._since:
                self._end_step()
        elif self._call(self._on_learned, []):
            # it is a kind of updates that comes more often
            self._follow(self._runs)

    def _follow(self, runs: list[object]) -> None:
        """Let steps end with the rarest event of these last runs, of several with the latest."""
        self._ender = min(reversed(runs), key=runs.count)
        self._longest = max(self._longest, len(runs) // runs.count(self._ender))
        self._since = runs[::-1].index(self._ender)


def _synchronises(module: Any) -> bool:
    """Return whether a backward pass of now synchronises the gradients of a DDP or FSDP2 module."""
    state = module._get_fsdp_state() if _is_fsdp(module) else None
    shared = getattr(state, "_state_ctx", None)
    return bool(
        vars(module).get("require_backward_grad_sync")
        or getattr(shared, "is_last_backward", False)
    )


def _is_fsdp(module: object) -> bool:
    """Whether it is an FSDP2 module, by its type: a module's own `__getattr__` may raise
    anything."""
    return hasattr(type(module), "_get_fsdp_state")


_found: list[torch.nn.Module] = []


def _replicas() -> Sequence[torch.nn.Module]:
    """Return the modules of this process that synchronise gradients, as they are when some are
    first found."""
    if not _found:
        _found.extend([*replicas(), *filter(_is_fsdp, find_objects(torch.nn.Module))])
    return _found
