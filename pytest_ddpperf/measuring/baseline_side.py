"""The baseline side of a measurement: a stored baseline, or another version whose launches are interleaved."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pytest_ddpperf.baseline import Store, environment
from pytest_ddpperf.launch import Observer
from pytest_ddpperf.measuring.launches import Launches, measurement
from pytest_ddpperf.records import (
    Baseline,
    BaselineSide,
    Environment,
    LaunchSamples,
    Measurement,
    Plan,
    Recording,
    StoredSession,
    TestId,
    Verdict,
)
from pytest_ddpperf.records.errors import BaseSideError, LaunchError
from pytest_ddpperf.remote.checkout import differing
from pytest_ddpperf.remote.version import BaseSide
from pytest_ddpperf.verdict import in_percentiles

# Two measurements of one step hardly ever have the same number of steps; with twice as many, more is lost than that.
_MUCH_LONGER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFacts:
    """What the baseline side adds to an outcome: the fields of the same names."""

    baseline_side: BaselineSide | None = None
    baseline_path: str = ""
    sessions: tuple[StoredSession, ...] = ()
    notes: tuple[str, ...] = ()


class Stored:
    """The other side of a measurement, like `Interleaved`, but nothing is launched for it."""

    interleaved = False
    mostly_recompiled = False

    def __init__(self, store: Store, test: TestId, *, to_extend: bool) -> None:
        self._store, self._test, self._to_extend = store, test, to_extend
        self._path = ""
        self._begins = False  # there is none to which a session could be added
        self._baseline: Baseline | None = None

    def take(self, current: Launches, count: int, *, planned: int) -> None:
        """Launch until there are `count` launches; progress shows `planned` as their number."""
        current.take(count, planned=planned)

    def seconds(self, current: Launches, count: int) -> float:
        return current.seconds(count)

    def read(self, environment: Environment, why_not: str | None) -> None:
        """Not where it will not be used: a run that replaces an unreadable baseline must be able to."""
        self._path = str(self._store.path(environment, self._test))
        if why_not is None:
            self._baseline = self._store.read(environment, self._test)
        elif why_not == "saving" and self._to_extend:
            # Before launches are spent on what could not be added.
            self._begins = self._store.read_alike(environment, self._test) is None

    def measurements(self, start: int = 0, stop: int | None = None) -> tuple[Measurement, ...]:
        """Return the sessions of the baseline, whichever launches are compared."""
        return self._baseline.measurements if self._baseline is not None else ()

    launches = ()

    def baseline(self) -> Baseline | None:
        return self._baseline

    def end(self) -> None:
        """Nothing goes on."""

    def _cut(self, steps: int) -> tuple[str, ...]:
        """That windows of so many `steps` were cut to the baseline's, where much was lost by it."""
        shortest = min(session.samples.steps for session in self.measurements())
        if steps < _MUCH_LONGER * shortest:
            return ()
        return (
            f"compared by the first {shortest} of {steps} steps a launch, as many as the baseline has: "
            "--ddp-save-baseline records longer windows",
        )

    def facts(self, verdict: Verdict, current: Launches) -> SideFacts:
        """Return where the baseline is and, if there is none for this environment, which others there are."""
        notes: tuple[str, ...] = ()
        if verdict == "NO BASELINE":
            notes += tuple(f"there is a baseline for {name}" for name in self._store.others(self._test))
        if verdict.status.compared:
            notes += self._cut(len(current.taken[0].step_seconds))
        if self._begins:
            notes += ("there was no baseline to extend: the first session begins one",)
        return SideFacts(baseline_path=self._path, sessions=self._sessions(current), notes=notes)

    def _sessions(self, current: Launches) -> tuple[StoredSession, ...]:
        """The sessions, all launches cut to as many steps as those that were compared."""
        if self._baseline is None:
            return ()
        steps = min(len(current.taken[0].step_seconds), *(session.samples.steps for session in self.measurements()))
        return tuple(in_percentiles(session, steps) for session in self._baseline.sessions)


# A stretch is as short as it may be: what goes on around it, longer than that, is in both sides. But what wakes up,
# stops and is fetched into caches at its beginning must be small compared with it.
_STRETCH_SECONDS = 0.03
_STRETCH_STEPS = 3
# Of short windows, for the median over them to leave some out.
_STRETCHES = 8


class PausedSide(Protocol):
    """A launch that has warmed up and rests."""

    @property
    def steps(self) -> int:
        """Of its window."""

    @property
    def step_seconds(self) -> float:
        """What one takes, about; 0 where that is not known."""

    def stretch(self, steps: int) -> None:
        """Run so many, of which the first is not counted."""

    def deliver(self) -> LaunchSamples:
        """Its end, and what came of it."""


_H = TypeVar("_H", bound=PausedSide)


def interleave(sides: tuple[_H, _H], source: random.Random) -> None:
    """Run the windows of both sides, which have the same number of steps, to their ends."""
    for side in source.sample(sides, 2):
        side.stretch(1)  # which counts nothing
    lengths = Lengths(sides[0].steps, max(side.step_seconds for side in sides), source)
    while counted := lengths.draw():
        began = time.monotonic()
        for side in source.sample(sides, 2):
            side.stretch(counted + 1)
        lengths.took((time.monotonic() - began) / len(sides) / (counted + 1))


class Lengths:
    """How many steps each stretch of a window counts. They are drawn, from a least to twice that, so that what a step
    does every second or fourth time is left out, at the beginning of stretches, as often as not.

    A step is taken to last as long as those of the stretches so far did in the median: warm-up shows steps that
    nothing disturbed, and where many are, stretches by that would be few.
    """

    def __init__(self, steps: int, step_seconds: float, source: random.Random) -> None:
        """`step_seconds`: of a step, for the first stretch; 0 where it is not known."""
        self._left = self._steps = steps
        self._source = source
        self._first, self._seen = step_seconds, list[float]()

    def draw(self) -> int:
        """The next one's; 0 when the window is over."""
        least = self._least()
        length = min(self._source.randint(least, 2 * least), self._left)
        if self._left - length < least:
            length = self._left
        self._left -= length
        return length

    def took(self, step_seconds: float) -> None:
        """A step of the last one, about."""
        self._seen.append(step_seconds)

    def _least(self) -> int:
        step = statistics.median(self._seen) if self._seen else self._first
        long_enough = math.ceil(_STRETCH_SECONDS / step) if step > 0 else 0
        return max(_STRETCH_STEPS, min(long_enough, self._steps // _STRETCHES))


_ONE_BY_ONE = "--ddp-turns launches measures one launch after the other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """How the current side is paused for a pair in stretches."""

    hold: Callable[[int, int, int | None], AbstractContextManager[PausedSide]]  # launch, of so many, with so many steps
    alone: Callable[[], AbstractContextManager[None]]  # nothing else is timed on its cores meanwhile
    launched: Callable[[LaunchSamples], None]  # called with what it measured


class Interleaved:
    """The baseline side of a measurement that is interleaved with another version.

    If something goes wrong on the other side, `error` says it, and the current side goes on alone.
    """

    interleaved = True

    def __init__(
        self,
        base: BaseSide,
        nodeid: str,
        test: TestId,
        *,
        begin: Callable[[int, int], Observer],
        plan: Plan,
        here: Here | None,
        why_apart: str = "",
    ) -> None:
        """`begin(launch, launches)` is called before each launch of the other side and returns its observer.

        `here` interleaves stretches of both sides' launches; with None one launch follows the other, for the reason
        `why_apart` if stretches were asked for.
        """
        self._base, self._nodeid, self._test, self._begin, self._plan = base, nodeid, test, begin, plan
        self._here, self._why_apart = here, why_apart
        self._seed = random.SystemRandom().randrange(2**32)
        self._random = random.Random(self._seed)
        self._order = ""
        self._theirs: Launches | None = None
        self.error = ""

    def take(self, current: Launches, count: int, *, planned: int) -> None:
        """Launch until both sides have `count` launches, or the current side alone where the other cannot.

        Progress shows `planned` as their number.
        """
        if self._theirs is None and not self.error:
            self._begin_there(current.steps)  # first, so that nothing works there while a launch here is timed
        while len(current.taken) < count:
            order = "".join(self._random.sample("bn", 2))
            if self._here is None or self._theirs is None or self.error:
                self._one_by_one(order, current, planned)
                continue
            try:
                pair = self._pair(self._here, order, current, planned)
            except BaseSideError as error:
                self.error = str(error)
            else:
                for launches, launch in zip((current, self._theirs), pair, strict=True):
                    launches.add(launch)
                self._order += order

    def _one_by_one(self, order: str, current: Launches, planned: int) -> None:
        """Take a launch of each side, one after the other."""
        place = len(current.taken)
        for side in order:
            if side == "n":
                current.take(place + 1, planned=planned)
            elif self._theirs is not None and not self.error:
                self._take(self._theirs, place + 1, planned)
            if self._theirs is not None:  # the first launch decides how long windows are
                current.steps = self._theirs.steps = current.steps or self._theirs.steps
            self._order += side if side == "n" or not self.error else ""

    def _pair(self, here: Here, order: str, current: Launches, planned: int) -> tuple[LaunchSamples, LaunchSamples]:
        """Take a launch of each side, both alive, in stretches: the current side's and the baseline side's.

        Raises BaseSideError and the errors of a launch. If the sides may not fit side by side, the error says how to
        measure them one by one.
        """
        place, steps, sides = len(current.taken), current.steps, dict[str, PausedSide]()
        with ExitStack() as alive:
            alive.enter_context(here.alone())
            try:
                for side in order:
                    hold = here.hold if side == "n" else self._pause_other
                    sides[side] = alive.enter_context(hold(place, planned, steps))
                    steps = sides[side].steps  # the first launch decides how long windows are
                interleave((sides["n"], sides["b"]), self._random)
                launched = sides["n"].deliver(), sides["b"].deliver()
            except LaunchError as error:
                if sides and error.needs_room:
                    error.hint = f"it was interleaved with {self._base.version}: {_ONE_BY_ONE}"
                raise
            except BaseSideError as error:
                if not (sides and error.needs_room):
                    raise
                raise BaseSideError(f"{error}\nit was interleaved with the current code: {_ONE_BY_ONE}") from None
        here.launched(launched[0])
        return launched

    def _pause_other(self, launch: int, launches: int, steps: int | None) -> AbstractContextManager[PausedSide]:
        return self._base.hold(self._begin(launch, launches), steps)

    def _begin_there(self, steps: int | None) -> None:
        try:
            self._ready = self._base.begin(self._nodeid, self._test.label, self._plan)
            self._theirs = Launches(self._ready.plan, self._launch, steps=steps)
        except BaseSideError as error:
            self.error = str(error)

    def _take(self, theirs: Launches, count: int, planned: int) -> None:
        try:
            theirs.take(count, planned=planned)
        except BaseSideError as error:
            self.error = str(error)

    @property
    def _environment(self) -> Environment:
        assert self._theirs is not None
        facts = {**self._theirs.facts, **self._ready.facts}
        return environment(facts, self._ready.plan, batch_size=self._ready.batch_size)

    def _launch(self, launch: int, launches: int, steps: int | None) -> LaunchSamples:
        return self._base.measure(self._begin(launch, launches), steps)

    def read(self, environment: Environment, why_not: str | None) -> None:
        """There is nothing to read."""

    def seconds(self, current: Launches, count: int) -> float:
        """Return how long `count` launches of each side take."""
        theirs = self._theirs.seconds(count) if self._theirs is not None and self._theirs.taken else 0.0
        return current.seconds(count) + theirs

    @property
    def mostly_recompiled(self) -> bool:
        """Whether more than half of the other side's launches recompiled within their window."""
        return self._theirs is not None and self._theirs.mostly_recompiled

    def measurements(self, start: int = 0, stop: int | None = None) -> tuple[Measurement, ...]:
        """Return the other side's launches start..stop; () if something went wrong there."""
        if self._theirs is None or self.error:
            return ()
        return (measurement(self._theirs.taken[start:stop], self._environment),)

    @property
    def launches(self) -> Sequence[LaunchSamples]:
        """The other side's launches."""
        return self._theirs.taken if self._theirs is not None else ()

    def baseline(self) -> Baseline | None:
        """Return the other side as if it had been stored."""
        commit = self._base.version.commit
        sessions = tuple(Recording(measurement=measured, commit=commit) for measured in self.measurements())
        return Baseline(test=self._test, sessions=sessions) if sessions else None

    def end(self) -> None:
        """The test may go on there, too."""
        if self._theirs is not None:
            self._base.done()

    def facts(self, verdict: Verdict, current: Launches) -> SideFacts:
        """Return what the other side measured."""
        stretches = tuple(launch.stretches for launch in current.taken)
        files = [side[0].files if side else {} for side in (current.taken, self.launches)]
        other = BaselineSide(
            version=self._base.version,
            seed=self._seed,
            order=self._order,
            stretches=stretches if any(len(of_pair) > 1 for of_pair in stretches) else (),
            measurement=next(iter(self.measurements()), None),
            imported=len({*files[0], *files[1]}),
            differing=differing(*files) if self.launches else (),
            error=self.error,
        )
        notes = self._theirs.notes() if self._theirs is not None else ()
        notes = tuple(f"{self._base.version}: {note}" for note in notes)
        if self._why_apart and not self.error:
            notes += (f"launches were measured one after the other: {self._why_apart}",)
        return SideFacts(baseline_side=other, notes=notes)
