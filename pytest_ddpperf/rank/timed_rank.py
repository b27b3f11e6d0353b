"""A rank that times steps, as all parts of a measurement share it."""

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pytest_ddpperf import text
from pytest_ddpperf.rank import modules
from pytest_ddpperf.rank.context import Context
from pytest_ddpperf.rank.counters import Meter
from pytest_ddpperf.rank.group import NoGroup, cores
from pytest_ddpperf.rank.stamps import PhaseWatch
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.wire.channels import Board, Phase
from pytest_ddpperf.wire.figures import FigureReader

# How many steps each stretch of a window of so many steps has, one after the other; a step lasts so
# many nanoseconds.
Stretches = Callable[[int, int], Iterable[int]]


@dataclass(slots=True, kw_only=True)
class TimedRank:
    """A rank that times steps. From here on its phases are stamped."""

    plan: Plan
    ctx: Context
    board: Board
    meter: Meter
    own: NoGroup  # for collectives of ours
    pinned_to: set[int]  # cores of its main thread, before the user's code
    stretches: Stretches | None  # None: the window is one stretch
    # of a program that writes figures
    written: FigureReader | None = None
    phases: PhaseWatch = field(init=False)
    row: memoryview = field(init=False)  # of the board
    on_cpu: bool = field(init=False)

    def __post_init__(self) -> None:
        self.phases = PhaseWatch(self.plan, self.ctx)
        self.row = self.board.row(self.ctx.rank)
        self.on_cpu = self.ctx.device.type == "cpu"

    def begin_window(self) -> None:
        """Collect garbage, stamp phases from here on, and note if the user's code or a library, as
        NCCL does, has pinned this thread to other cores than it had."""
        collections = gc.get_stats()[-1]["collections"]
        if collections > self.meter.collections and not modules.frozen:
            # A step lets Python look through all objects. As in training, what was imported before
            # the fork is among them. Other ranks are spared the tenths of a second that it takes.
            gc.unfreeze()
        gc.collect()
        now = cores()
        if now != self.pinned_to:
            self.meter.notes.append(
                f"{self.plan.name(self.ctx.rank)} has left its cores: its code or a library pinned"
                f" it to {text.several(len(now), 'core')}, and it had {len(self.pinned_to)}"
            )
        self.phases.begin()

    def enter(self, phase: Phase) -> None:
        self.board.enter(self.ctx.rank, phase)
