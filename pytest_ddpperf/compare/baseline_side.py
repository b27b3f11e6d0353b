"""The baseline side of a measurement: a stored baseline, or another version whose launches are
interleaved."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

from pytest_ddpperf.baseline import Store, environment
from pytest_ddpperf.compare.launches import CurrentSide, Job, Launches, measurement
from pytest_ddpperf.launch import Observer
from pytest_ddpperf.launch.paused_launch import PausedLaunch
from pytest_ddpperf.records.errors import BaseSideError, DdpPerfError, LaunchError
from pytest_ddpperf.records.messages import Event
from pytest_ddpperf.records.outcome import BaselineSide, StoredSession, Version
from pytest_ddpperf.records.samples import (
    GOES_ON,
    Baseline,
    Environment,
    LaunchSamples,
    Measurement,
    Reason,
    Recording,
    TestId,
    Verdict,
)
from pytest_ddpperf.remote.version import BaseSide, RemotePausedLaunch
from pytest_ddpperf.remote.worktree import differing_files
from pytest_ddpperf.verdict.times import in_percentiles
from pytest_ddpperf.wire.source_trees import is_code

PausedSide = PausedLaunch | RemotePausedLaunch

# Two measurements of one step hardly ever have the same number of steps; with twice as many, more
# is lost than that.
_MUCH_LONGER = 2
# How long steps run in a launch that samples stacks: hundreds of samples of each rank, in a tenth
# of the time that a comparison takes which ends with a regression.
_SAMPLED_SECONDS = 1.2


class Stored:
    """A stored baseline, for which nothing is launched."""

    interleaved = False
    sampled = None
    mostly_unfit = False
    goes_on = False
    version: Version | None = None

    def __init__(self, store: Store, test: TestId, *, to_extend: bool = False) -> None:
        self._store, self._test, self._to_extend = store, test, to_extend
        self.path = ""
        self.baseline: Baseline | None = None
        # of another machine, where this one has no baseline
        self._counted: tuple[str, Measurement] | None = None
        # a baseline of the same test by another path, if there is none
        self._nearby: Path | None = None

    def take(self, current: CurrentSide, count: int, *, planned: int) -> None:
        """Launch until there are `count` launches; progress shows `planned` as their number."""
        current.take(count, planned=planned)

    def seconds(self, current: Launches, count: int) -> float:
        return current.seconds(count)

    def read(self, environment: Environment, not_gated: Reason | None) -> None:
        """Read the baseline if it will be used: a run that replaces an unreadable one must be able
        to."""
        self.path = str(self._store.path(environment, self._test))
        if not_gated is None:
            self.baseline = self._store.read(environment, self._test)
            if self.baseline is None:
                self._counted = self._store.read_counted(environment, self._test)
                self._nearby = self._store.nearby(environment, self._test)
        elif not_gated == Reason.SAVING and self._to_extend:
            # Before launches are spent on what could not be added.
            self._store.read_alike(environment, self._test)

    def measurements(
        self, start: int = 0, stop: int | None = None
    ) -> tuple[Measurement, ...]:
        """Return the sessions of the baseline, whichever launches are compared."""
        return self.baseline.measurements if self.baseline is not None else ()

    def counted(self) -> tuple[Measurement, ...]:
        """Return the sessions whose counters are compared."""
        return self.measurements() or (
            self._counted[1:] if self._counted is not None else ()
        )

    def sample_stacks(self, current: CurrentSide, max_seconds: float) -> None:
        """There is nothing to compare them with."""

    def end(self) -> None:
        """Nothing goes on."""

    def notes(self, verdict: Verdict, current: Launches) -> tuple[str, ...]:
        """Say where this baseline is missing, and which others there are; and where much was lost
        by comparing."""
        notes: tuple[str, ...] = ()
        if verdict == "NO BASELINE":
            notes += (f"there is no baseline {shown(self.path, self._store.rootdir)}",)
        if self._nearby is not None:
            there = (
                "there is one for another path or rootdir:"
                f" {shown(str(self._nearby), self._store.rootdir)}"
            )
            notes += (f"{there} (an ini file at the top keeps the rootdir)",)
        if self._counted is not None and verdict.counters:
            notes += (
                f"only counters were compared, with the baseline of {self._counted[0]}",
            )
        elif verdict == "NO BASELINE" and (others := self._store.others(self._test)):
            own = Path(self.path).relative_to(self._store.root).parts[0]
            notes += (f"a baseline exists for {', '.join(others)}, not for {own}",)
        steps = len(current.taken[0].step_seconds)
        compared = self.baseline is not None and verdict.status.compared
        if compared and steps >= _MUCH_LONGER * (shortest := self._steps(current)):
            notes += (
                (
                    f"only the first {shortest} of {steps} steps of each launch were compared,"
                    " because the baseline has no more: --ddp-save-baseline records longer windows"
                ),
            )
        return notes

    def _steps(self, current: Launches) -> int:
        """Return how many steps of each launch are compared."""
        return min(
            [
                len(current.taken[0].step_seconds),
                *(each.samples.steps for each in self.measurements()),
            ]
        )

    def sessions(self, current: Launches) -> tuple[StoredSession, ...]:
        """Return the sessions of the baseline, all launches cut to the steps that were compared."""
        if self.baseline is None:
            return ()
        return tuple(
            in_percentiles(session, self._steps(current))
            for session in self.baseline.sessions
        )

    def record(self, current: Launches) -> None:
        """Return nothing: no other version was measured."""


# A stretch is as short as it may be: what goes on around it, longer than that, is in both sides.
# But what wakes up, stops and is fetched into caches at its beginning must be small compared with
# it.
_STRETCH_SECONDS = 0.03
_STRETCH_STEPS = 3
# Of short windows, for the median over them to leave some out.
_STRETCHES = 8


def interleave(sides: tuple[PausedSide, PausedSide], source: random.Random) -> None:
    """Run the windows of both sides, which have the same number of steps, to their ends."""
    for side in source.sample(sides, 2):
        side.stretch(1)  # which counts nothing
    lengths = stretch_lengths(
        sides[0].steps, max(side.step_seconds for side in sides), source
    )
    counted = next(lengths)
    while counted:
        began = time.monotonic()
        for side in source.sample(sides, 2):
            side.stretch(counted + 1)
        counted = lengths.send((time.monotonic() - began) / len(sides) / (counted + 1))


def stretch_lengths(
    steps: int, step_seconds: float, source: random.Random
) -> Generator[int, float, None]:
    """Yield how many steps each stretch of a window counts, then 0; send how long a step of the
    last stretch took.

    Lengths are drawn, from a least to twice that, so that what a step does every second or fourth
    time is left out, at the beginning of stretches, as often as not. `step_seconds` is the
    approximate time of a step for the first stretch, or 0. From then on it is the median over the
    stretches so far: warm-up shows steps that nothing disturbed, and where many are, stretches by
    that would be few.
    """
    left, seen = steps, list[float]()
    while left:
        step = statistics.median(seen) if seen else step_seconds
        long_enough = math.ceil(_STRETCH_SECONDS / step) if step > 0 else 0
        least = max(_STRETCH_STEPS, min(long_enough, steps // _STRETCHES))
        length = min(source.randint(least, 2 * least), left)
        if left - length < least:
            length = left
        left -= length
        seen.append((yield length))
    yield 0


def shown(path: str, rootdir: Path) -> str:
    """Return a path from rootdir, if it is below."""
    return (
        os.path.relpath(path, rootdir)
        if path and Path(path).is_relative_to(rootdir)
        else path
    )


class Interleaved:
    """Another version whose launches are interleaved with the current side's.

    If something goes wrong there, `error` says it, and the current side goes on alone.
    """

    interleaved = True
    path = ""

    def __init__(self, base: BaseSide, job: Job, observer: Observer) -> None:
        self._base, self._job, self._observer = base, job, observer
        self.version = base.version
        self._random = random.Random()
        self._order = ""
        self._ready: Event | None = None  # what the test asks for there, once it runs
        self._launches = Launches(job.plan, self._measure)
        self.error = ""
        # why launches are taken one after the other, if they cannot be alive together
        self._alone_because = ""
        # launches that sampled stacks, now and there
        self.sampled: tuple[LaunchSamples, LaunchSamples] | None = None
        # why there are none, if some were asked for
        self._not_sampled: tuple[str, ...] = ()

    def take(self, current: CurrentSide, count: int, *, planned: int) -> None:
        """Launch until both sides have `count` launches, or the current side alone if the other
        cannot.

        Progress shows `planned` as their number.
        """
        if self._ready is None and not self.error:
            # first, so that nothing works there while a current launch is timed
            self._begin(current.steps)
        while len(current.taken) < count:
            order = "".join(self._random.sample("bn", 2))
            if (
                self._job.settings.in_stretches(self._job.plan)
                and not self.error
                and not self._alone_because
            ):
                self._try_pair(order, current, planned)
            else:
                self._one_by_one(order, current, planned)
            if len(self._launches.taken) == 1 and not self.error:
                self.error = self._base.lacking(current.taken[-1].files)

    def _begin(self, steps: int | None) -> None:
        try:
            self._ready = self._base.begin(
                self._job.nodeid, self._job.test.label, self._job.plan
            )
            self._launches = Launches(self._ready.plan, self._measure, steps=steps)
        except BaseSideError as error:
            self.error = str(error)

    def _measure(self, place: int, planned: int, steps: int | None) -> LaunchSamples:
        self._observer.begin(place, planned)
        return self._base.measure(self._observer, steps)

    def _one_by_one(self, order: str, current: Launches, planned: int) -> None:
        """Take a launch of each side, one after the other."""
        place = len(current.taken)
        for side in order:
            if side == "n":
                current.take(place + 1, planned=planned)
            elif self.error:
                continue
            else:
                try:
                    self._launches.take(place + 1, planned=planned)
                except BaseSideError as error:
                    self.error = str(error)
                    continue
            # The first launch decides how long windows are.
            current.steps = self._launches.steps = current.steps or self._launches.steps
            self._order += side

    def _try_pair(self, order: str, current: CurrentSide, planned: int) -> None:
        """Take a launch of each side, both alive, in stretches; or only note an `error` of the
        baseline side. Where the first pair fails with both alive, they may need what only one can
        have: nothing is taken, and launches are to follow one another. Raises the errors of a
        launch."""
        sides: dict[str, PausedSide] = {}
        try:
            self._pair(order, current, planned, sides)
        except (LaunchError, BaseSideError) as error:
            if sides and not self._launches.taken:
                self._alone_because = str(error).partition("\n")[0]
            elif isinstance(error, LaunchError):
                raise
            else:
                self.error = str(error)

    def _pair(
        self,
        order: str,
        current: CurrentSide,
        planned: int,
        sides: dict[str, PausedSide],
    ) -> None:
        """Take a launch of each side, both alive; `sides` are those that have started."""
        steps = current.steps
        with ExitStack() as alive:
            alive.enter_context(current.alone())
            for side in order:
                launch = (
                    current.pause(planned, steps)
                    if side == "n"
                    else self._pause(planned, steps)
                )
                sides[side] = alive.enter_context(launch)
                # The first launch decides how long windows are. On a device both sides keep what
                # the plan has room for.
                steps = steps if self._job.plan.spreads else sides[side].steps
            both = sides["n"], sides["b"]
            interleave(both, self._random)
            sides.clear()  # they can be alive together, whatever comes now
            launched = both[0].deliver(), both[1].deliver()
        for launches, samples in zip((current, self._launches), launched, strict=True):
            launches.add(samples)
        self._order += order

    def _pause(
        self, planned: int, steps: int | None
    ) -> AbstractContextManager[PausedSide]:
        self._observer.begin(len(self._launches.taken), planned)
        return self._base.pause(self._observer, steps)

    def read(self, environment: Environment, not_gated: Reason | None) -> None:
        """There is nothing to read."""

    def seconds(self, current: Launches, count: int) -> float:
        """Return how long `count` launches of each side take."""
        return current.seconds(count) + (
            self._launches.seconds(count) if self._launches.taken else 0.0
        )

    @property
    def mostly_unfit(self) -> bool:
        """Whether more than half of the baseline side's launches say little of steady training."""
        return self._launches.mostly_unfit

    @property
    def goes_on(self) -> bool:
        """Whether work of steps goes on after them there."""
        return GOES_ON in self._launches.doubts()

    def measurements(
        self, start: int = 0, stop: int | None = None
    ) -> tuple[Measurement, ...]:
        """Return the baseline side's launches start..stop; () if something went wrong there."""
        if self._ready is None or self.error:
            return ()
        facts = {**self._launches.facts, **self._ready.facts}
        found = environment(facts, self._ready.plan, batch_size=self._ready.batch_size)
        return (measurement(self._launches.taken[start:stop], found),)

    counted = measurements

    @property
    def baseline(self) -> Baseline | None:
        """Return the baseline side as if it had been stored."""
        commit = self.version.commit
        sessions = tuple(
            Recording(measurement=measured, commit=commit)
            for measured in self.measurements()
        )
        return Baseline(test=self._job.test, sessions=sessions) if sessions else None

    def end(self) -> None:
        """Let the test go on there, too."""
        if self._ready is not None:
            self._base.end_measurement()

    def notes(self, verdict: Verdict, current: Launches) -> tuple[str, ...]:
        """Return the notes on the baseline side's launches, without those that hold for the current
        side, too."""
        alone = f"measured one launch after the other: with both sides alive, {self._alone_because}"
        notes = tuple(
            f"{self.version}: {note}"
            for note in self._launches.notes()
            if note not in current.notes()
        )
        return (
            *[alone] * bool(self._alone_because and not self.error),
            *notes,
            *self._not_sampled,
        )

    def sessions(self, current: Launches) -> tuple[StoredSession, ...]:
        """Return nothing: no stored baseline was read."""
        return ()

    def sample_stacks(self, current: CurrentSide, max_seconds: float) -> None:
        """If several modules differ, take a further launch of each side, to see whose functions
        take longer; not if all launches then take more than so many seconds."""
        taken = len(current.taken)
        is_affordable = self.seconds(current, taken + 1) < max_seconds
        if self.error or self._ready is None or not is_affordable:
            return
        if len([*filter(is_code, self._differing(current))]) < 2:
            return
        steps = math.ceil(
            _SAMPLED_SECONDS / statistics.median(current.taken[0].step_seconds)
        )
        ours, theirs = (
            replace(plan.exactly(steps), stacks=True)
            for plan in (self._job.plan, self._ready.plan)
        )
        try:
            self.sampled = (
                current.launch(ours),
                self._base.sample_stacks(self._observer, theirs),
            )
        except DdpPerfError as error:  # the verdict stands
            self._not_sampled = (
                f"which file takes longer is unknown: {str(error).splitlines()[0]}",
            )

    def _differing(self, current: Launches) -> list[str]:
        """Return the files that are not the same on both sides."""
        files = [
            side[0].files if side else {}
            for side in (current.taken, self._launches.taken)
        ]
        return [
            file
            for file in (differing_files(*files) if self._launches.taken else ())
            # data may be read by one side, or written
            if is_code(file) or all(side.get(file) for side in files)
        ]

    def record(self, current: Launches) -> BaselineSide:
        """Return what the baseline side measured."""
        stretches = tuple(launch.stretches for launch in current.taken)
        imported = {
            file
            for side in (current, self._launches)
            for file in (side.taken[0].files if side.taken else ())
        }
        return BaselineSide(
            version=self.version,
            order=self._order,
            stretches=stretches if any(len(pair) > 1 for pair in stretches) else (),
            measurement=next(iter(self.measurements()), None),
            imported=len([*filter(is_code, imported)]),
            differing=tuple(self._differing(current)),
            error=self.error,
        )
