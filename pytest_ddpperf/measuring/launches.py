"""The launches of one side of a measurement, one after the other, and what they come to together.

Knows neither limits nor what they are compared with, nor where a launch happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from pytest_ddpperf.records import (
    Counters,
    Environment,
    LaunchSamples,
    Measurement,
    Plan,
    RankFigures,
    Recorded,
    Samples,
    Scalar,
)


class Launches:
    """The launches of one side.

    `launch(place, launches, steps)` takes one: `place` counts from 0, `launches` is how many are planned, and `steps`
    is the length of the window. With None the first launch decides how many steps each window has.
    """

    def __init__(
        self,
        plan: Plan,
        launch: Callable[[int, int, int | None], LaunchSamples],
        *,
        steps: int | None = None,
    ) -> None:
        self._plan, self._launch = plan, launch
        self.steps = steps  # of each launch
        self.taken: list[LaunchSamples] = []

    @property
    def facts(self) -> Mapping[str, Scalar]:
        return self.taken[-1].facts

    def take(self, count: int, *, planned: int | None = None) -> None:
        """Launch until there are `count` launches; progress shows `planned` as their number."""
        while len(self.taken) < count:
            self.add(self._launch(len(self.taken), planned or count, self.steps))

    def add(self, launch: LaunchSamples) -> None:
        """Add the next launch, which was taken by the caller."""
        self.taken.append(launch)
        self.steps = len(launch.step_seconds)

    def seconds(self, count: int) -> float:
        """Return how long `count` launches take, estimated from those so far."""
        seconds = [launch.phases.total for launch in self.taken]
        return sum(seconds) + (count - len(self.taken)) * fmean(seconds)

    @property
    def mostly_recompiled(self) -> bool:
        """Whether more than half of the launches recompiled within their window."""
        return sum(bool(launch.unfit) for launch in self.taken) > len(self.taken) / 2

    def notes(self, *, advise: bool = True) -> tuple[str, ...]:
        """Return the notes on the launches; with `advise` also what would make their figures better."""
        notes = [note for launch in self.taken for note in launch.notes]
        if not advise:
            return tuple(notes)
        unfit = [launch.unfit for launch in self.taken if launch.unfit]
        if unfit:
            notes.append(f"{len(unfit)} of {len(self.taken)} launches: {unfit[0]}: raise --ddp-warmup")
        unsettled = [(launch.unsettled, launch.warmup) for launch in self.taken if launch.unsettled]
        if unsettled:
            cause, steps = unsettled[0]
            notes.append(f"after {steps} warm-up steps ({self._plan.warmup} asked) ranks were still {cause}")
        return tuple(notes)


def measurement(launches: Sequence[LaunchSamples], environment: Environment) -> Measurement:
    return Measurement(samples=samples(launches), environment=environment, counters=_counters(launches))


def samples(launches: Sequence[LaunchSamples]) -> Samples:
    cpu = [launch.cpu_seconds for launch in launches if launch.cpu_seconds is not None]
    examples = [launch.examples for launch in launches if launch.examples is not None]
    blocked = [launch.blocked_seconds for launch in launches if launch.blocked_seconds is not None]
    of_node = [launch.node_seconds for launch in launches if launch.node_seconds is not None]
    clocks = [launch.clock_seconds for launch in launches if launch.clock_seconds is not None]
    return Samples(
        step_seconds=tuple(launch.step_seconds for launch in launches),
        rank_seconds=tuple(launch.rank_seconds for launch in launches),
        cpu_seconds=tuple(cpu) if len(cpu) == len(launches) else None,
        examples=tuple(examples) if len(examples) == len(launches) else None,
        blocked_seconds=tuple(blocked) if len(blocked) == len(launches) else None,
        node_seconds=tuple(of_node) if len(of_node) == len(launches) else None,
        clock_seconds=tuple(clocks) if len(clocks) == len(launches) else None,
    )


def recorded(launches: Sequence[LaunchSamples]) -> Recorded:
    """Every figure that steps of any of them recorded, by name."""
    figures: dict[str, tuple[RankFigures, ...]] = {}
    for name in dict.fromkeys(name for launch in launches for name in launch.recorded):
        figures[name] = tuple(
            launch.recorded.get(name, tuple((None,) * len(steps) for steps in launch.rank_seconds))
            for launch in launches
        )
    return figures


def _counters(launches: Sequence[LaunchSamples]) -> Counters:
    """Unknown where one does not know, or where they differ: that has noise, and would be gated as if it had none."""
    counted = {name: {launch.counters.get(name) for launch in launches} for name in launches[0].counters}
    return {name: counts.pop() if len(counts) == 1 else None for name, counts in counted.items()}
