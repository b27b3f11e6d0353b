"""Time stamps at the boundaries of a step's phases, without a profiler.

A stamp is taken where a forward pass of a module that the step calls itself begins and ends, a
backward pass, an optimizer's step, and a wait for a collective or a message. They cost a few
microseconds a step, so every launch takes them. When collectives were started comes from torch's
flight recorder, which on Gloo has no `send` and `recv`.

On a device a stamp is an event in its current stream: a phase lasts until the device has done its
work. The host starts a collective long before that, so waits are not known there.
"""

import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pytest_ddpperf.rank import recorder, torch_names
from pytest_ddpperf.rank.clock import StepClock
from pytest_ddpperf.rank.context import Context
from pytest_ddpperf.rank.group import NoGroup
from pytest_ddpperf.rank.modules import holds_parameters, replicas
from pytest_ddpperf.rank.pieces import (
    IN_BACKWARD,
    IN_FORWARD,
    IN_OPTIMIZER,
    IN_WAIT,
    Stamp,
    Starts,
    rank_phases,
    still_open,
)
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.step_phases import RankPhases

_C10D = "torch._C._distributed_c10d"


class Stamps:
    """The stamps of the thread that installs them, from then on to the end of the process.

    Other threads may train nothing, and wait for collectives of their own."""

    def __init__(self, device: torch.device) -> None:
        self.taken: list[Stamp] = []
        self._placed = 0  # of them, those whose times are known
        self._device = device
        # A graph that is captured would record no times, and is replayed without these hooks.
        self._is_capturing = (
            torch.cuda.is_current_stream_capturing
            if device.type == "cuda"
            else lambda: False
        )
        self._now = time.monotonic_ns if device.type == "cpu" else self._record
        self.before: list[int] = []  # what was open when they were cleared
        self._thread = threading.get_ident()
        # that a step calls itself, by id
        self._modules: dict[int, torch.nn.Module] = {}
        self._depth = 0  # of forward passes, in the step that finds them
        # When each `send` and `recv` was issued, and again when this thread began to wait for it,
        # with its name.
        self.messages: list[tuple[int, str]] = []
        # messages by group, ranks and tag
        self._issued: Counter[str] = Counter()
        # of messages, by what is waited for
        self._names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self.knows_partners = True  # whether every message has a name

    def install(self) -> None:
        """Stamp backward passes, optimizers and waits from here on.

        Before the first step: torch.compile would compile an optimizer's step once more. Nothing is
        stamped in what it compiles."""
        for own in (self._is_ours, self._record, self._enter, self._leave):
            torch_names.keep_from_compiler(own)
        for name in torch_names.ENGINE:
            torch_names.replace(name, self._around(IN_BACKWARD))
        # Of every collective that Python waits for, also in a `dist.all_reduce` without `async_op`.
        torch_names.replace(f"{_C10D}:Work.wait", self._around(IN_WAIT))
        torch_names.replace("torch._C:Future.wait", self._around(IN_WAIT))
        if self._device.type == "cpu":
            for name in (
                # of a functional collective, as DTensor uses them
                "torch.distributed._functional_collectives:wait_tensor",
                # DDP's, of buffers, in its forward pass
                "torch.distributed:_broadcast_coalesced",
            ):
                torch_names.replace(name, self._around(IN_WAIT))
            for name in ("send", "recv", "recv_anysource"):
                naming = partial(self._naming, sends=name == "send")
                torch_names.replace(f"{_C10D}:ProcessGroup.{name}", naming)
        register_optimizer_step_pre_hook(self._hook(IN_OPTIMIZER))
        register_optimizer_step_post_hook(self._hook(-IN_OPTIMIZER))

    def clear(self) -> None:
        self.before = still_open(self.taken, self.before)
        self.taken.clear()
        self.messages.clear()
        self._placed = 0

    def _naming(self, function: Any, *, sends: bool) -> Any:
        """Give each message a name that is the same on both ranks: it is the k-th from one to the
        other."""

        @wraps(function)
        def named(group: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.monotonic_ns()
            work = function(group, *args, **kwargs)
            try:
                _, peer, tag = args
                ends = (group.rank(), peer) if sends else (peer, group.rank())
                kind = f"{group.group_name}:{ends}:{tag}"
                self._issued[kind] += 1
                self._names[work] = f"{kind}:{self._issued[kind]}"
                self.messages.append((began, self._names[work]))
            except Exception:  # the sender is unknown, most likely
                self.knows_partners = False
            return work

        return named

    def _record(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def place(self, timer: StepClock) -> None:
        """Place the events since the last call on the host's clock. `timer` has finished the
        stretch they are of."""
        if self._device.type == "cpu":
            return
        latest = 0
        for index in range(self._placed, len(self.taken)):
            event, kind = self.taken[index]
            # Of streams that do not wait for each other, a later event may be reached first.
            latest = max(latest, timer.place(event))
            self.taken[index] = latest, kind
        self._placed = len(self.taken)

    @contextmanager
    def finding_modules(self) -> Iterator[None]:
        """Find the modules that a step calls itself, not within another's forward pass or a
        backward pass (activation checkpointing calls some there), and stamp their forward passes
        afterwards."""
        self.clear()
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore",
                    r"Using `?torch\.compile\(module\)`? when there are global hooks",
                )
                yield
        finally:
            before.remove()
            after.remove()
        called = self._modules.values()
        trained: list[torch.nn.Module] = []
        # the others transform data, or compute a loss
        with suppress(Exception):  # a module may be part of itself
            trained = list(filter(holds_parameters, called))
        for module in trained or called:
            # TorchScript's modules take no hooks, nor does a RemoteModule
            with suppress(Exception):
                module.register_forward_pre_hook(
                    _Unsaved(self._hook(IN_FORWARD)), prepend=True
                )
                module.register_forward_hook(
                    _Unsaved(self._hook(-IN_FORWARD)), always_call=True
                )

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if self._is_ours():
            if not self._depth and IN_BACKWARD not in still_open(
                self.taken, ()
            ):
                self._modules[id(module)] = module
            self._depth += 1

    def _leave(self, *_: Any) -> None:
        if self._is_ours():
            self._depth -= 1

    def _is_ours(self) -> bool:
        """Whether a call is to be stamped. In this order: what torch.compile traces must not reach
        the second part."""
        if (
            torch.compiler.is_compiling()
            or threading.get_ident() != self._thread
        ):
            return False
        return not self._is_capturing()

    def _around(self, kind: int) -> Callable[[Any], Any]:
        """Return what wraps a function, whose calls are stamped."""
        append = self.taken.append
        now = self._now
        is_ours = self._is_ours
        messages = self.messages
        names = self._names

        def wrap(function: Any) -> Any:
            @wraps(function)
            def stamped(*args: Any, **kwargs: Any) -> Any:
                if not is_ours():
                    return function(*args, **kwargs)
                if kind == IN_WAIT and args[:1] and args[0] in names:
                    messages.append((time.monotonic_ns(), names[args[0]]))
                append((now(), kind))
                try:
                    return function(*args, **kwargs)
                finally:
                    append((now(), -kind))

            return stamped

        return wrap

    def _hook(self, kind: int) -> Callable[..., None]:
        append = self.taken.append
        now = self._now
        is_ours = self._is_ours

        def stamp(*_: Any) -> None:
            if is_ours():
                append((now(), kind))

        torch_names.keep_from_compiler(stamp)
        return stamp


class _Unsaved(partial[None]):
    """A hook of a module. A program may save the module as a whole: there it does nothing."""

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


class PhaseWatch:
    """What is known of the phases of steps: nothing in an RPC launch, of one collective, and on a
    device that each step waits for."""

    def __init__(self, plan: Plan, ctx: Context) -> None:
        self.notes: tuple[str, ...] = ()
        self._is_program = bool(plan.boundary)
        self._on_cpu = ctx.device.type == "cpu"
        self._stamps = Stamps(ctx.device)
        self._offset_ns = 0
        shows_phases = self._on_cpu or plan.timing == "free"
        self._is_on = shows_phases and not plan.rpc and plan.collective is None
        if self._is_on:
            try:
                self._stamps.install()
            except Exception as error:
                # of another version of torch: nothing else depends on phases
                self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, why: str) -> None:
        self._is_on = False
        self.notes = (f"phases of the step are unknown: {why}",)

    def finding_modules(self) -> AbstractContextManager[None]:
        """Find the modules that are stamped, in a step of the warm-up."""
        return self._stamps.finding_modules() if self._is_on else nullcontext()

    def begin(self) -> None:
        """The window is about to begin."""
        self._stamps.clear()
        self._offset_ns = recorder.realtime_offset_ns()

    def end(self, timer: StepClock) -> None:
        """A stretch of the window has ended, which was marked by `timer`."""
        if self._is_on:
            try:
                self._stamps.place(timer)
            except RuntimeError as error:
                self._give_up(f"{type(error).__name__}: {error}")

    def phases(
        self, steps: Sequence[tuple[int, int]], own: NoGroup
    ) -> RankPhases | None:
        """Return the phases of the last counted `steps`, each a begin and an end."""
        if not self._is_on:
            return None
        stamps = self._stamps
        found = rank_phases(
            steps,
            stamps.taken,
            self._arrivals(own),
            # the step trains a DDP module that this process has
            has_ddp=bool(replicas()),
            before=stamps.before if self._is_program else None,
        )
        if found is None:
            self._give_up("one of its passes did not end within it")
        return found

    def _arrivals(self, own: NoGroup) -> tuple[Starts, int] | None:
        """Return what was started, collectives and messages, and since when all is known."""
        if not (self._on_cpu and self._stamps.knows_partners):
            return None
        known = recorder.starts(own, self._offset_ns)
        if known is None:
            return None
        collectives, since = known
        return sorted([*collectives, *self._stamps.messages]), since
