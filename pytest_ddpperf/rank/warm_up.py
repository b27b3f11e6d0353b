"""The warm-up of one rank: steps until nothing changes any more, and until a device's clock is
up."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import field, replace
from typing import Any

import torch

from pytest_ddpperf.rank import context, environment, torch_names
from pytest_ddpperf.rank.context import Context
from pytest_ddpperf.rank.counters import compilation_state
from pytest_ddpperf.rank.group import NoGroup
from pytest_ddpperf.rank.sent import recorded
from pytest_ddpperf.rank.timed_rank import TimedRank
from pytest_ddpperf.records.record import record
from pytest_ddpperf.records.samples import Counters
from pytest_ddpperf.wire.channels import Board, Phase

Step = Callable[[], Any]


@record
class WarmUp:
    steps: int  # it took
    unsettled: str  # what its last step still changed, in words
    # of a step; nothing is known of less than three
    counters: Counters
    notes: Sequence[str]  # those of the meter, which may become more
    sent: Sequence[int] = ()  # as `Window` has it
    # of the steps beyond those asked, None where one recorded none
    losses: list[Any] = field(default_factory=list)
    # the shortest of its last steps, with what it left the device to do
    step_ns: int = 0
    is_slowed: bool = False  # the device, as the warm-up ended


# Of the warm-up, the steps that tell how long one takes: enough for one of them to be undisturbed,
# and late enough for what only the first steps do to be over.
TELLING = 3
# Of the warm-up, the step in which is counted: the last but one asked, for counting should not be
# the last thing that happens before the window. DDP rebuilds its buckets in the second step, so
# counts hold from the third on.
_COUNTED_FROM = 3


def warm_up(step: Step, rank: TimedRank) -> WarmUp:
    """Take the asked steps, and more until no rank's last one changed anything, up to a cap."""
    ctx = rank.ctx
    own = rank.own
    asked = rank.plan.warmup
    rank.enter(Phase.WARMUP)
    counters: Counters = {}
    if asked == 0:
        return WarmUp(
            steps=0, unsettled="", counters=counters, notes=rank.meter.notes
        )
    watch = Steadiness(ctx.device)
    step_ns = []
    sent = []
    losses = []
    counted = max(asked - 2, _COUNTED_FROM - 1)
    watched = (0, counted) if asked >= _COUNTED_FROM else ()
    for index in range(asked + WARMUP_BEYOND):
        if index >= asked - 1:
            watch.changed()
        rank.row[Board.STEP_CELL] = index
        before = recorded(own) if index in watched else None
        began = time.monotonic_ns()
        if index and index in watched:
            with rank.meter.counting(own, ctx.device) as counters:
                step()
        else:
            # Before the step that is counted: what this makes torch.compile do is over then.
            finds = index == max(asked - 4, 0)
            with rank.phases.finding_modules() if finds else nullcontext():
                context.read_returned(step(), ctx.keep)
        if not rank.on_cpu:
            torch.accelerator.synchronize()
        step_ns.append(time.monotonic_ns() - began)
        loss = ctx.figures.pop("loss", None)
        if index >= asked:
            losses.append(loss)
        if index in watched and (after := recorded(own)) is not None:
            sent.append(len(after.keys() - (before or {}).keys()))
        if index >= asked - 1:
            unsettled = watch.unsettled(own)
            if not unsettled:
                break
    return WarmUp(
        steps=index + 1,
        unsettled=unsettled,
        counters=counters,
        notes=rank.meter.notes,
        sent=sent,
        losses=losses,
        step_ns=min(step_ns[-TELLING:]),
    )


# Of steps that do not wait for the device: its clock is slow after a pause, and rises within a
# second.
_FREELY_SECONDS = 1.0


def count_free_steps(step_ns: int) -> int:
    """Return how many steps of that length are taken before the window without waiting for the
    device after each."""
    return max(TELLING, math.ceil(_FREELY_SECONDS * 1e9 / max(step_ns, 1)))


def warm_up_freely(step: Step, warmed: WarmUp, rank: TimedRank) -> WarmUp:
    """Take more steps as the window does, without waiting for the device after each: its queue
    fills, and memory that is in use until then is allocated now."""
    ctx = rank.ctx
    slowed = False
    losses = [*warmed.losses]
    (step_ns,) = rank.own.maximum([warmed.step_ns])
    for index in range(count_free_steps(step_ns)):
        context.read_returned(step(), ctx.keep)
        losses.append(ctx.figures.get("loss"))
        ctx.figures.clear()
        if index == 0:
            slowed = is_slowed(ctx)  # while the device works
    torch.accelerator.synchronize()
    return replace(warmed, losses=losses[: context.LOSSES], is_slowed=slowed)


# How many steps the warm-up may go on beyond those asked, until nothing changes any more.
WARMUP_BEYOND = 20
_CAUSES = (
    "compiling",
    "allocating device memory",
    "rebuilding gradient buckets",
)


class Steadiness:
    """One rank's view of whether its last step changed anything that later steps find done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rebuilds = 0
        # DDP reports the rebuilds of its buckets to its log only, whatever log level the user set.
        with suppress(AttributeError):  # of another version of torch
            torch_names.replace(
                "torch.nn.parallel.distributed:logger.info",
                self._counting_rebuilds,
            )
        self._before = self._counts()

    def _counts(self) -> tuple[object, ...]:
        """Return what differs after a change, by cause."""
        return (
            compilation_state(),
            allocator_growth(self._device),
            self._rebuilds,
        )

    def _counting_rebuilds(
        self, info: Callable[..., None]
    ) -> Callable[..., None]:
        def counting(
            message: object, *arguments: object, **options: Any
        ) -> None:
            if "buckets have been rebuilt" in str(message):
                self._rebuilds += 1
            info(message, *arguments, **{"stacklevel": 2, **options})

        return counting

    def changed(self) -> list[bool]:
        """Return whether anything changed since the last call, by cause."""
        now = self._counts()
        before = self._before
        self._before = now
        return [
            after != earlier for after, earlier in zip(now, before, strict=True)
        ]

    def unsettled(self, own: NoGroup) -> str:
        """Describe what the last step changed in any rank; all ranks call it together. Without a
        group of our own, of this rank."""
        causes = zip(_CAUSES, own.maximum(self.changed()), strict=True)
        return ", ".join(cause for cause, has_changed in causes if has_changed)


def allocator_growth(device: torch.device) -> int:
    """Return how often the caching allocator asked the device for memory, plus how often it tried
    again because there was too little. The number of segments would not do: an expandable segment
    grows without a new one."""
    if device.type == "cpu":
        return 0
    try:
        stats = torch_names.allocator().memory_stats(device)
    except RuntimeError:  # an allocator of another kind has none
        return 0
    names = ("num_device_alloc", "num_alloc_retries")
    return sum(int(stats.get(name, 0)) for name in names)


def is_slowed(ctx: Context) -> bool:
    """Whether heat or a lack of power slows the device of a rank down now."""
    return bool(environment.device(ctx.device).get("slowdown"))
