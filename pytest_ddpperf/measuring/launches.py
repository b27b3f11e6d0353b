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
    Replacement,
    Samples,
    Scalar,
)

# Of a launch that took turns with one of the other side.
_BESIDE_UNFIT = "the launch beside it was unfit"


class Launches:
    """The launches of one side, unfit ones taken again: `most_again` times at most.

    What is unfit is told by what happened in a launch, never by its times. `launch` takes one; it is told its place,
    from 0, how many there will be, and how many steps its window has: `steps`, or as many as the first, to which None
    leaves that.
    """

    def __init__(
        self,
        plan: Plan,
        launch: Callable[[int, int, int | None], LaunchSamples],
        *,
        most_again: int,
        steps: int | None = None,
    ) -> None:
        self._plan, self._launch, self._most_again = plan, launch, most_again
        self.steps = steps  # of each launch
        self.kept: list[LaunchSamples] = []
        self.every: list[LaunchSamples] = []  # those that were taken again, too
        self._replaced: dict[int, LaunchSamples] = {}  # by place, what was taken first

    @property
    def facts(self) -> Mapping[str, Scalar]:
        return self.kept[-1].facts

    @property
    def as_taken(self) -> list[LaunchSamples]:
        """With the replaced ones in their places."""
        return [self._replaced.get(place, launch) for place, launch in enumerate(self.kept)]

    def take(self, count: int, *, of: int | None = None) -> None:
        """Launch until there are `count`, `of` so many that are asked for."""
        while len(self.kept) < count:
            taken = [self._one(of or count)]
            if taken[0].unfit and self.may_replace:
                taken.append(self._one(of or count))
            self.add(*taken)

    def _one(self, of: int) -> LaunchSamples:
        launch = self._launch(len(self.kept), of, self.steps)
        self.steps = len(launch.step_seconds)
        return launch

    @property
    def may_replace(self) -> bool:
        """Whether a launch may still be taken again."""
        return len(self._replaced) < self._most_again

    def add(self, *taken: LaunchSamples) -> None:
        """The next launch; where it was taken again, after the one in whose place it is."""
        if len(taken) > 1:
            self._replaced[len(self.kept)] = taken[0]
        self.every += taken
        self.kept.append(taken[-1])
        self.steps = len(taken[-1].step_seconds)

    def seconds(self, count: int) -> float:
        """What `count` launches come to, by those so far."""
        seconds = [launch.phases.total for launch in self.every]
        return sum(seconds) + (count - len(self.kept)) * fmean(seconds)

    def replacements(self) -> tuple[Replacement, ...]:
        return tuple(
            Replacement(launch=place, reason=launch.unfit or _BESIDE_UNFIT, samples=samples([launch]))
            for place, launch in sorted(self._replaced.items())
        )

    def notes(self, *, advise: bool = True) -> tuple[str, ...]:
        """What the user should know of the launches; what would make better figures of them only to `advise`."""
        notes = [note for launch in self.every for note in launch.notes]
        if not advise:
            return tuple(notes)
        if self._replaced:
            reasons = "; ".join(dict.fromkeys(launch.unfit or _BESIDE_UNFIT for launch in self._replaced.values()))
            count = len(self._replaced)
            notes.append(f"{count} unfit launch{'es' * (count > 1)} measured again: {reasons}")
        unfit = [launch.unfit for launch in self.kept if launch.unfit]
        if unfit:
            notes.append(f"{len(unfit)} of {len(self.kept)} launches stayed unfit: {unfit[0]}: raise --ddp-warmup")
        unsettled = [(launch.unsettled, launch.warmup) for launch in self.kept if launch.unsettled]
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
