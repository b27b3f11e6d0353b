"""Time stamps at the boundaries of a step's phases, without a profiler, and the phases that they
make.

A stamp is taken where a forward pass of a module that the step calls itself begins and ends, a
backward pass, an optimizer's step, and a wait for a collective or a message. They cost a few
microseconds a step, so every launch takes them. When collectives were started comes from torch's
flight recorder, which on Gloo has no `send` and `recv`.

On a device a stamp is an event in its current stream: a phase lasts until the device has done its
work. The host starts a collective long before that, so waits are not known there.
"""

from __future__ import annotations

import threading
import time
import warnings
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed._functional_collectives as functional
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pytest_ddpperf.rank.clock import StepClock
from pytest_ddpperf.rank.counters import entries, has_compiled, replicas
from pytest_ddpperf.rank.group import OwnGroup
from pytest_ddpperf.records.step_phases import (
    BACKWARD,
    DATA,
    EXPOSED,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PHASES,
    RankPhases,
)

# What begins, or ends with the opposite sign.
_FORWARD, _BACKWARD, _OPTIMIZER, _WAIT = 1, 2, 3, 4
# when, in nanoseconds or as an event that is not placed yet, and what begins or ends
Stamp = tuple[Any, int]


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
        # whether this process has a DDP module, which the step then trains
        self.has_ddp = False
        self._thread = threading.get_ident()
        self._modules: list[torch.nn.Module] = []  # that a step calls itself
        self._depth = 0  # of forward passes, in the step that finds them
        # When each `send` and `recv` was issued, and again when this thread began to wait for it,
        # with its name.
        self.messages: list[tuple[int, str]] = []
        self._issued: Counter[str] = Counter()  # messages by group, ranks and tag
        # of messages, by what is waited for
        self._names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self.knows_partners = True  # whether every message has a name

    def install(self) -> None:
        """Stamp backward passes, optimizers and waits from here on.

        Before the first step: torch.compile would compile an optimizer's step once more. Nothing is
        stamped in what it compiles."""
        torch.autograd.backward = self._around(torch.autograd.backward, _BACKWARD)
        torch.autograd.grad = self._around(torch.autograd.grad, _BACKWARD)
        # Of every collective that Python waits for, also in a `dist.all_reduce` without `async_op`.
        work: Any = torch._C._distributed_c10d.Work
        work.wait = self._around(work.wait, _WAIT)
        if self._device.type == "cpu":
            # Of a functional collective, as DTensor uses them.
            functional.wait_tensor = self._around(functional.wait_tensor, _WAIT)
            group: Any = torch._C._distributed_c10d.ProcessGroup
            for name in ("send", "recv", "recv_anysource"):
                setattr(
                    group,
                    name,
                    self._naming(getattr(group, name), sends=name == "send"),
                )
        register_optimizer_step_pre_hook(self._hook(_OPTIMIZER))
        register_optimizer_step_post_hook(self._hook(-_OPTIMIZER))

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
        if self._device.type != "cpu":
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
        self.has_ddp = bool(replicas())
        for module in {id(module): module for module in self._modules}.values():
            # TorchScript's modules take no hooks, nor does a RemoteModule
            with suppress(Exception):
                module.register_forward_pre_hook(self._hook(_FORWARD), prepend=True)
                module.register_forward_hook(self._hook(-_FORWARD), always_call=True)

    def _enter(self, module: torch.nn.Module, arguments: Any) -> None:
        if self._is_ours():
            if not self._depth and not sum(
                kind for _, kind in self.taken if abs(kind) == _BACKWARD
            ):
                self._modules.append(module)
            self._depth += 1

    def _leave(self, module: torch.nn.Module, arguments: Any, result: Any) -> None:
        self._depth -= self._is_ours()

    def _is_ours(self) -> bool:
        """Whether a call is to be stamped. In this order: what torch.compile traces must not reach
        the second part."""
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return False
        return not self._is_capturing()

    def _around(self, function: Any, kind: int) -> Any:
        append, now, is_ours = self.taken.append, self._now, self._is_ours
        messages, names = self.messages, self._names

        @wraps(function)
        def stamped(*args: Any, **kwargs: Any) -> Any:
            if not is_ours():
                return function(*args, **kwargs)
            if kind == _WAIT and args[:1] and args[0] in names:
                messages.append((time.monotonic_ns(), names[args[0]]))
            append((now(), kind))
            try:
                return function(*args, **kwargs)
            finally:
                append((now(), -kind))

        return stamped

    def _hook(self, kind: int) -> Callable[..., None]:
        append, now, is_ours = self.taken.append, self._now, self._is_ours

        def stamp(*_: Any) -> None:
            if is_ours():
                append((now(), kind))

        return stamp


# By more than so much, the recorder's clock moved against ours while the window was timed.
_CLOCK_MOVED_NS = 50_000
# Of a window, the steps of which phases are known: enough for their mean, and cheap to follow
# through all ranks.
_LAST = 200


class Arrivals:
    """When collectives and messages of the window are started, on the clock of the stamps."""

    def __init__(self) -> None:
        self._offset_ns = _realtime_offset_ns()

    def read(
        self, own: OwnGroup | None, messages: list[tuple[int, str]]
    ) -> tuple[list[tuple[int, str]], int] | None:
        """Return as `_starts`, after the window, with the `messages`; None also if the clocks moved
        against each other."""
        offset_ns = _realtime_offset_ns()
        if (
            abs(offset_ns - self._offset_ns) > _CLOCK_MOVED_NS
            or (known := _starts(own)) is None
        ):
            return None
        found, since = known
        collectives = [(when - offset_ns, name) for when, name in found]
        return sorted([*collectives, *messages]), since - offset_ns if since else 0


def _starts(own: OwnGroup | None) -> tuple[list[tuple[int, str]], int] | None:
    """Return when each collective was started, in order, with a name that is the same on all ranks;
    and since when all are known. None as `entries`. Point-to-point operations are left out."""
    if (known := entries(own)) is None:
        return None
    kept, since = known
    found = [
        (
            int(entry["time_created_ns"]),
            f"{entry['process_group'][0]}:{entry['collective_seq_id']}",
        )
        for entry in kept
        if not entry["is_p2p"]
    ]
    return sorted(found), since


def _realtime_offset_ns() -> int:
    """Return CLOCK_REALTIME less CLOCK_MONOTONIC, by the quickest of five readings."""
    readings = []
    for _ in range(5):
        before, real, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, real - (before + after) // 2))
    return min(readings)[1]


def rank_phases(
    steps: Sequence[tuple[int, int]],
    stamps: Sequence[Stamp],
    arrivals: tuple[list[tuple[int, str]], int] | None,
    *,
    has_ddp: bool,
    before: Sequence[int] | None = None,
) -> RankPhases | None:
    """Return the phases of the last `steps`, each a begin and an end; None if the stamps are not
    nested.

    `arrivals` are those of `Arrivals.read`. If the step `has_ddp`, backward passes end with a wait.
    Steps of a program may end within something: `before` is what was open before the first stamp;
    None of others."""
    started, since = arrivals if arrivals is not None else ([], 0)
    known = [step for step in steps[-_LAST:] if step[0] >= since]
    times = [when for when, _ in stamps]
    starts = [when for when, _ in started]
    found, seen, place, open_kinds = [], set[str](), 0, list(before or ())
    for begin, end in known:
        first, last = (
            _first_after(times, stamps, begin),
            _first_after(times, stamps, end),
        )
        own_starts = starts[bisect_right(starts, begin) : bisect_right(starts, end)]
        open_kinds = still_open(stamps[place:first], open_kinds)
        step = _Step(
            begin,
            own_starts if has_ddp else (),
            open_kinds,
            knows_waits=arrivals is not None,
        )
        if not step.take(stamps[first:last], end) or (step.open and before is None):
            return None
        place, open_kinds = last, step.open
        seen |= {phase for phase, _ in step.pieces}
        found.append(
            tuple((PHASES.index(phase), until) for phase, until in step.pieces)
        )
    if started and EXPOSED not in seen and not has_ddp and has_compiled():
        arrivals = None  # compiled code waits unseen
    # of which there may be none
    seen |= {OTHER} if arrivals is None else {OTHER, EXPOSED}
    first = known[0][0] if known else 0
    return RankPhases(
        steps=tuple(found),
        seen=tuple(phase for phase in PHASES if phase in seen),
        arrivals=None
        if arrivals is None
        else tuple(started[bisect_left(starts, first) :]),
    )


def _first_after(times: Sequence[int], stamps: Sequence[Stamp], mark: int) -> int:
    """Return the place of the first stamp after a step's end. Of those at the same time, for a
    device's clock is coarse, what ends belongs to the step, and what begins does not."""
    first, last = bisect_left(times, mark), bisect_right(times, mark)
    depths = [
        *accumulate(
            (1 if kind > 0 else -1 for _, kind in stamps[first:last]), initial=0
        )
    ]
    return first + depths.index(min(depths))


def still_open(stamps: Sequence[Stamp], before: Sequence[int] = ()) -> list[int]:
    """Return what began and has not ended, where so much was open before; what never began is left
    out."""
    found = list(before)
    for _, kind in stamps:
        if kind > 0:
            found.append(kind)
        elif found and found[-1] == -kind:
            found.pop()
    return found


class _Step:
    """Divides one step into pieces, each a phase and its end."""

    def __init__(
        self,
        begin: int,
        starts: Sequence[int],
        open_kinds: Sequence[int],
        *,
        knows_waits: bool,
    ) -> None:
        self.pieces: list[tuple[str, int]] = []
        self._at = begin
        self._starts = starts  # of collectives that DDP may wait for
        self._knows_waits = knows_waits
        self.open = list(open_kinds)
        self._waited_until = begin
        self._gaps: list[int] = []  # pieces whose phase depends on what follows
        self._last = ""  # phase, gaps and waits left out

    def take(self, stamps: Sequence[Stamp], end: int) -> bool:
        """Divide the step at its `stamps`; return whether they are well nested."""
        for when, kind in stamps:
            self._until(when)
            if kind > 0:
                self.open.append(kind)
            elif self.open and self.open[-1] == -kind:
                self.open.pop()
                if kind == -_WAIT:
                    self._waited_until = when
                if kind == -_BACKWARD and _BACKWARD not in self.open:
                    self._expose(when)
            else:
                return False
        self._until(end)
        self._name_gaps("")
        return bool(self.pieces)

    def _phase(self) -> str:
        """Return the phase that lasts now; "" between those that are known."""
        if _WAIT in self.open:
            return EXPOSED if self._knows_waits else OTHER
        # what activation checkpointing computes anew belongs to it
        if _BACKWARD in self.open:
            return (
                OTHER
                if _OPTIMIZER in self.open[self.open.index(_BACKWARD) :]
                else BACKWARD
            )
        # An optimizer may call a closure, which has the other two, and a module may train within
        # its forward pass.
        return (
            {_FORWARD: FORWARD, _OPTIMIZER: OPTIMIZER}.get(self.open[-1], OTHER)
            if self.open
            else ""
        )

    def _until(self, when: int) -> None:
        """End the phase that lasts now."""
        phase = self._phase()
        if phase in (FORWARD, BACKWARD, OPTIMIZER):
            self._name_gaps(phase)
            self._last = phase
        if when <= self._at:
            return
        if self.pieces and self.pieces[-1][0] == phase:
            self.pieces.pop()
        elif not phase:
            self._gaps.append(len(self.pieces))
        self.pieces.append((phase, when))
        self._at = when

    def _name_gaps(self, following: str) -> None:
        phase = OTHER
        if following == FORWARD:
            phase = FORWARD if self._last == FORWARD else DATA
        elif following == BACKWARD and self._last == FORWARD:  # the loss, most likely
            phase = FORWARD
        for index in self._gaps:
            self.pieces[index] = phase, self.pieces[index][1]
        self._gaps.clear()

    def _expose(self, end: int) -> None:
        """Of a backward pass that ends now, call what follows the start of its last collective a
        wait: DDP waits for all of them then, in C++. Not if Python code has waited since."""
        if not self._knows_waits or not self.pieces or self.pieces[-1][0] != BACKWARD:
            return
        index = bisect_right(self._starts, end) - 1
        if index < 0 or (start := self._starts[index]) <= self._waited_until:
            return
        begin = self.pieces[-2][1] if len(self.pieces) > 1 else 0
        if start > begin:
            self.pieces[-1:] = [(BACKWARD, start), (EXPOSED, end)]
