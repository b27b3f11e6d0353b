"""Interleaved launches of two sides: pairs of one launch a side, stretch by stretch or one after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

from pytest_ddpperf.baseline import environment
from pytest_ddpperf.launch import Observer
from pytest_ddpperf.measuring.launches import Launches, measurement
from pytest_ddpperf.measuring.pairs import Held, interleave
from pytest_ddpperf.records import (
    Baseline,
    BaselineSide,
    Environment,
    LaunchSamples,
    Measurement,
    Outcome,
    Plan,
    Recording,
    TestId,
)
from pytest_ddpperf.records.errors import BaseSideError, LaunchError
from pytest_ddpperf.remote.checkout import differing
from pytest_ddpperf.remote.version import BaseSide

_ONE_BY_ONE = "--ddp-turns launches measures one launch after the other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """How the current side is paused for a pair in stretches."""

    hold: Callable[[int, int, int | None], AbstractContextManager[Held]]  # launch, of so many, with so many steps
    alone: Callable[[], AbstractContextManager[None]]  # nothing else is timed on its cores meanwhile
    launched: Callable[[LaunchSamples], None]  # is told what came of it


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
        """`begin(launch, launches)` is told of each launch of the other side and says who watches it. `here`: to take
        turns in stretches, both sides' launches alive; None: one launch after the other, for the reason `why_apart` if
        stretches were asked for."""
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

        Raises BaseSideError and the errors of a launch. An error says how to measure the sides one by one.
        """
        place, steps, sides = len(current.taken), current.steps, dict[str, Held]()
        with ExitStack() as alive:
            alive.enter_context(here.alone())
            try:
                for side in order:
                    hold = here.hold if side == "n" else self._hold_there
                    sides[side] = alive.enter_context(hold(place, planned, steps))
                    steps = sides[side].steps  # the first launch decides how long windows are
                interleave((sides["n"], sides["b"]), self._random)
                launched = sides["n"].deliver(), sides["b"].deliver()
            except LaunchError as error:
                error.hint = f"it was interleaved with {self._base.version}: {_ONE_BY_ONE}"
                raise
            except BaseSideError as error:
                raise BaseSideError(f"{error}\nit was interleaved with the current code: {_ONE_BY_ONE}") from None
        here.launched(launched[0])
        return launched

    def _hold_there(self, launch: int, launches: int, steps: int | None) -> AbstractContextManager[Held]:
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

    def described(self, outcome: Outcome, current: Launches) -> Outcome:
        """Return the outcome with the other side in it."""
        stretches = tuple(launch.stretches for launch in current.taken)
        files = [side[0].files if side else {} for side in (current.taken, self.launches)]
        beside = BaselineSide(
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
        return replace(outcome, baseline_side=beside, notes=outcome.notes + notes)
