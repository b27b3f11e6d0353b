"""Where the steps of a program that owns its loop end, by its optimizers and backward passes."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import ref

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pytest_ddpperf.rank import torch_names
from pytest_ddpperf.rank.modules import find_objects, replicas
from pytest_ddpperf.records.errors import DdpPerfError

# So many updates show how a program's steps end. An event that ends steps is over if others have
# come for so many times as long as it usually takes.
_RUNS = 3
# So many, at most, if an optimizer has not taken a step yet: that of a GAN's generator comes after
# several of the other.
_MOST_RUNS = 10
# So many of the last runs are kept: many more than a step has.
_KEPT = 1_000
# So many backward passes without an optimizer that is seen show that there is none, and so many
# that it cannot be seen: large batches are rarely made of more.
_FEW_PASSES = 10
_MOST_PASSES = 256


class StepEnd:
    """The event that ends steps.

    An update is a run of optimizer steps, also of those that a GradScaler skips, without a backward
    pass between them. The runs of some updates show with which event each kind of them ends. Of
    several kinds (a GAN's), the rarest ends a step. When it no longer happens (another stage of the
    training, an optimizer made anew), those that come end steps.
    """

    def __init__(self) -> None:
        self.event: object = None  # until it is known
        self._known: set[object] = set()  # the events that have happened
        # of the last runs, the event that ended each
        self._runs: deque[object] = deque(maxlen=_KEPT)
        self._since = 0  # runs since the one that ended the last step
        # after how many runs such a one comes, at the latest
        self._longest = _RUNS

    def is_ended_by(self, event: object) -> bool:
        """Return whether a step ends with this event, which has happened."""
        if event not in self._known and self._longest == 1:
            self.event = event  # every update ends a step, this one, too
        self._known.add(event)
        return event == self.event

    def awaits_any_of(self, events: Sequence[object]) -> bool:
        """Return whether some of these events have not happened, and may be the rarest ones."""
        return len(self._runs) < _MOST_RUNS and not self._known.issuperset(
            events
        )

    def is_overdue(self, event: object) -> bool:
        """Note how a run ended; return whether the event that ends a step should have come by
        now."""
        self._runs.append(event)
        self._since += 1
        if event == self.event:
            self._longest = max(self._since, self._longest)
            self._since = 0
            return False
        return self._since >= self._longest

    def learn(self) -> None:
        """Let the first runs say which event ends steps."""
        self.follow_all()
        self._longest = 1  # until it is seen

    def is_over(self, event: object) -> bool:
        """Return whether the event that ended steps no longer comes, where runs end with this
        one."""
        runs = [*self._runs]
        is_known = event in runs[: -self._since] and self.event in runs
        return not is_known or self._since >= _RUNS * self._longest

    def follow_last(self) -> bool:
        """Let steps end as the runs since the last step say; return whether one has ended now."""
        self._longest = 1
        self._follow([*self._runs][-self._since :])
        return not self._since

    def follow_all(self) -> None:
        """Let steps end as all runs say that are kept."""
        self._follow([*self._runs])

    def _follow(self, runs: list[object]) -> None:
        """Let steps end with the rarest event of these last runs, of several with the latest."""
        self.event = min(reversed(runs), key=runs.count)
        self._longest = max(self._longest, len(runs) // runs.count(self.event))
        self._since = runs[::-1].index(self.event)


class UnseenUpdates:
    """Updates without an optimizer that is seen (compiled, of another library).

    A step ends then with a backward pass that synchronises gradients. Others accumulate gradients,
    which leaves the parameters as they are."""

    def __init__(self) -> None:
        # whether a backward pass that synchronises gradients is an event
        self.are_known = False
        # synchronising passes since the last event; all of them where nothing synchronises
        self._passes = 0
        # of the parameters after the last pass
        self._versions: list[int] = []
        # of the modules as they are when some are first found: the program may drop them
        self._replicas: list[ref[torch.nn.Module]] = []

    def clear(self) -> None:
        """An event has happened."""
        self._passes = 0
        self._versions = []

    def passed(self) -> bool:
        """Return whether a backward pass that has ended is an event. Raises DdpPerfError after many
        of them without one."""
        found = [each() for each in self._replicas]
        models = [model for model in found if model is not None]
        if not models:
            sharded = filter(_is_fsdp, find_objects(torch.nn.Module))
            models = [*replicas(), *sharded]
            self._replicas = [ref(model) for model in models]
        synchronises = any(map(_synchronises, models))
        if self.are_known:
            return synchronises
        if synchronises or not models:
            self._passes += 1
        before = self._versions
        self._versions = [
            each._version for model in models for each in model.parameters()
        ]
        has_none = self._passes == _FEW_PASSES and not find_objects(
            torch.optim.Optimizer
        )
        self.are_known = has_none or before not in ([], self._versions)
        if (has_none and not synchronises) or self._passes >= _MOST_PASSES:
            raise DdpPerfError(
                f"{self._passes} backward passes without an optimizer's update: if it"
                " accumulates gradients over as many, or its optimizer cannot be seen, say"
                ' where a step ends (boundary="mark")'
            )
        return False


def _synchronises(module: Any) -> bool:
    """Return whether a backward pass of now synchronises the gradients of a DDP or FSDP2 module."""
    if not _is_fsdp(module):
        return bool(vars(module).get("require_backward_grad_sync"))
    state = module._get_fsdp_state()
    shared = getattr(state, "_state_ctx", None)
    # an older torch has one
    groups = getattr(state, "_fsdp_param_groups", None) or [
        getattr(state, "_fsdp_param_group", None)
    ]
    return getattr(shared, "is_last_backward", False) and any(
        getattr(each, "all_reduce_grads", False) for each in groups
    )


def _is_fsdp(module: object) -> bool:
    """Whether it is an FSDP2 module, by its type: a module's own `__getattr__` may raise
    anything."""
    return hasattr(type(module), "_get_fsdp_state")


def _optimizers() -> list[object]:
    """Return the events of the optimizers whose steps are seen: not of those that wrap another."""
    return [
        ref(each)
        for each in find_objects(torch.optim.Optimizer)
        if hasattr(type(each).step, "hooked")
    ]


@dataclass
class Updates:
    """Watches the backward passes and optimizers of this process."""

    # called where a step ends, with the number of its backward passes
    _on_end: Callable[[int], None]
    # Called when it is known, or turns out to be otherwise, where steps end, with the times of
    # those so far, in ns; if it returns False, they end as before.
    _on_learned: Callable[[list[int]], bool]
    _fail: Callable[[BaseException], None]  # gets what either raises
    _end: StepEnd = field(default_factory=StepEnd)
    _unseen: UnseenUpdates = field(default_factory=UnseenUpdates)
    _last: object = None  # of this run, the last event
    _last_ns: int = 0
    # how and when the first runs ended, until it is known where steps end
    _first_runs: list[tuple[object, int]] = field(default_factory=list)
    # backward passes that have not ended: one may call another
    _open: int = 0
    # since the last step ended; those within an optimizer's step, as LBFGS has, are one
    _passes: int = 0
    # as many as there were when the optimizer's step under way began
    _before_step: int | None = None
    # whether an optimizer took a step within this backward pass
    _within: bool = False

    def install(self) -> None:
        """Watch from here on."""
        for name in torch_names.ENGINE:
            torch_names.replace(name, self._around)
        for own in (self._optimizer_begins, self._optimizer_ended):
            torch_names.keep_from_compiler(own)
        register_optimizer_step_pre_hook(self._optimizer_begins)
        register_optimizer_step_post_hook(self._optimizer_ended)
        torch_names.replace("torch.amp:GradScaler.step", self._scaling)

    @property
    def has_passed(self) -> bool:
        """Whether a backward pass has ended since the last step, or since the program began."""
        return self._passes > 0

    def _scaling(self, step: Any) -> Any:
        """Watch also the steps that a scaler skips. Several optimizers may share it, or have one
        each."""

        @wraps(step)
        def scaled(
            scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
        ) -> Any:
            result = step(scaler, optimizer, *args, **kwargs)
            # what wraps one may be anything
            if isinstance(optimizer, torch.optim.Optimizer):
                self._happened(ref(optimizer))
            return result

        return scaled

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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin_pass(self) -> None:
        if not self._open and self._last is not None:
            self._end_run()
        self._open += 1

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end_pass(self) -> None:
        self._open -= 1
        if self._open:
            return
        self._passes += 1
        if self._within:
            self._within = False
            self._happened("a backward pass")
        elif (
            self._before_step is None
            and (
                self._end.event is None
                or self._unseen.are_known
                or self._passes > _MOST_PASSES
            )
            and self._call(self._unseen.passed)
        ):
            self._happened("a synchronisation")

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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _happened(self, event: object) -> None:
        if self._open:
            self._within = True
            return
        self._last = event
        self._last_ns = time.monotonic_ns()
        self._unseen.clear()
        # what was taken for an unseen update may be a change between two passes of one that is seen
        self._unseen.are_known = event == "a synchronisation"
        if self._end.is_ended_by(event):
            self._end_step()

    def _end_step(self) -> None:
        passes, self._passes = self._passes, 0
        if passes:
            self._call(self._on_end, passes)

    def _end_run(self) -> None:
        """Find out which event ends a step, unless the known one may still come."""
        end = self._end
        event = self._last
        self._last = None
        if end.event is None:
            self._first_runs.append((event, self._last_ns))
        if not end.is_overdue(event):
            return
        if end.event is None:
            if end.awaits_any_of(_optimizers()):
                return
            end.learn()
            ends = [
                when for each, when in self._first_runs if each == end.event
            ]
            self._call(self._on_learned, ends)
        elif end.is_over(event):
            if end.follow_last():
                self._end_step()
        elif self._call(self._on_learned, []):
            # it is a kind of updates that comes more often
            end.follow_all()

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # which the program might catch
            self._fail(error)
