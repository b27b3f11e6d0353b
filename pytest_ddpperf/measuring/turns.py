"""Launches of two sides in turns: pairs of one a side, stretch by stretch or one after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

from pytest_ddpperf.against.side import BaseSide
from pytest_ddpperf.baseline import environment
from pytest_ddpperf.launch import Observer
from pytest_ddpperf.led.sources import differing
from pytest_ddpperf.measuring.judging import Before, View
from pytest_ddpperf.measuring.launches import Launches, measurement
from pytest_ddpperf.measuring.pairs import Held, in_turns
from pytest_ddpperf.records import (
    Baseline,
    Beside,
    Environment,
    LaunchSamples,
    Measurement,
    Outcome,
    Plan,
    Recording,
    Splits,
    TestId,
)
from pytest_ddpperf.records.errors import BaseSideError, DdpPerfError, LaunchError

_APART = "some steps each: --ddp-turns launches measures one launch after the other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """How the side at hand is held for a pair in stretches."""

    hold: Callable[[int, int, int | None], AbstractContextManager[Held]]  # launch, of so many, with so many steps
    alone: Callable[[], AbstractContextManager[None]]  # nothing else is timed on its cores meanwhile
    launched: Callable[[LaunchSamples], None]  # is told what came of it


class _NotBeside(Exception):
    """A launch that cannot be while the other side's is alive: whether it can be alone is to be seen."""


class Turns:
    """What a measurement is compared with where another version takes turns with it.

    What goes wrong on the other side ends its turns, and `error` says it; the side at hand goes on alone.
    """

    interleaved = True

    def __init__(
        self,
        base: BaseSide,
        nodeid: str,
        test: TestId,
        *,
        most_again: int,
        begin: Callable[[int, int], Observer],
        plan: Plan,
        here: Here | None,
        why_apart: str = "",
        alone: bool = True,
    ) -> None:
        """`begin(launch, launches)` is told of each launch of the other side and says who watches it. `here`: to take
        turns in stretches, both sides' launches alive; None: one launch after the other, for the reason `why_apart` if
        stretches were asked for. `alone`: whether the side at hand goes on where the other cannot; else `take` raises
        BaseSideError."""
        self._base, self._nodeid, self._test, self._begin, self._plan = base, nodeid, test, begin, plan
        self._here, self._why_apart, self._alone = here, why_apart, alone
        self._most_again = most_again
        self._seed = random.SystemRandom().randrange(2**32)
        self._random = random.Random(self._seed)
        self._order = ""
        self._theirs: Launches | None = None
        self.error = ""

    def take(self, now: Launches, count: int, *, of: int) -> None:
        """Launch until both sides have `count`, `of` so many that are asked for, or the one at hand alone where the
        other cannot."""
        if self._theirs is None and not self.error:
            self._begin_there(now.steps)  # first, so that nothing works there while a launch here is timed
        while len(now.kept) < count:
            if self.error and not self._alone:
                raise BaseSideError(self.error)
            order = "".join(self._random.sample("bn", 2))
            if self._here is None or self._theirs is None or self.error:
                self._apart(order, now, of)
                continue
            try:
                self._pair(self._here, order, now, self._theirs, of)
            except _NotBeside as error:
                self._here, self._why_apart = None, str(error)
            except BaseSideError as error:
                self.error = str(error)

    def _apart(self, order: str, now: Launches, of: int) -> None:
        """A launch of each side, one after the other."""
        place = len(now.kept)
        for side in order:
            if side == "n":
                now.take(place + 1, of=of)
            elif self._theirs is not None and not self.error:
                self._take(self._theirs, place + 1, of)
            if self._theirs is not None:  # whoever comes first says how long windows are
                now.steps = self._theirs.steps = now.steps or self._theirs.steps
            self._order += side if side == "n" or not self.error else ""

    def _pair(self, here: Here, order: str, now: Launches, theirs: Launches, of: int) -> None:
        """A launch of each side, both alive, in stretches; both again if one was unfit. Raises BaseSideError,
        _NotBeside and the errors of a launch."""
        pairs = [self._held(here, order, now, of)]
        try:
            if any(launch.unfit for launch in pairs[0]) and now.may_replace:
                now.steps = theirs.steps = len(pairs[0][0].step_seconds)
                pairs.append(self._held(here, order, now, of))
        finally:  # what was taken is judged, whatever becomes of the second
            for launches, taken in zip((now, theirs), zip(*pairs, strict=True), strict=True):
                launches.add(*taken)
            self._order += order

    def _held(self, here: Here, order: str, now: Launches, of: int) -> tuple[LaunchSamples, LaunchSamples]:
        """The launch at hand and the other side's. Only what cannot be set up beside the other is tried alone: what
        fails in a stretch fails as in any launch."""
        place, steps, sides = len(now.kept), now.steps, dict[str, Held]()
        with ExitStack() as alive:
            alive.enter_context(here.alone())
            for side in order:
                hold = here.hold(place, of, steps) if side == "n" else self._hold_there(place, of, steps)
                try:
                    sides[side] = alive.enter_context(hold)
                except DdpPerfError as error:
                    if not sides or (side == "b" and self._base.gone):  # alone, or nothing can be asked there any more
                        raise
                    who, problem = (
                        "the side at hand" if side == "n" else self._base.version,
                        str(error).partition("\n")[0],
                    )
                    raise _NotBeside(f"{who} could be set up alone, but not beside the other: {problem}") from None
                steps = sides[side].steps  # whoever comes first says how long windows are
                if len(sides) == 1 and (why := sides[side].fills):
                    raise _NotBeside(f"no launch that needs as much can be beside the other: {why}")
            try:
                in_turns((sides["n"], sides["b"]), self._random)
                launched = sides["n"].deliver(), sides["b"].deliver()
            except LaunchError as error:
                error.hint = f"it took turns with {self._base.version}, {_APART}"
                raise
            except BaseSideError as error:
                raise BaseSideError(f"{error}\nit took turns with the code at hand, {_APART}") from None
        here.launched(launched[0])
        return launched

    def _hold_there(self, launch: int, launches: int, steps: int | None) -> AbstractContextManager[Held]:
        return self._base.hold(self._begin(launch, launches), steps)

    def _begin_there(self, steps: int | None) -> None:
        try:
            self._ready = self._base.begin(self._nodeid, self._test.label, self._plan)
            self._theirs = Launches(self._ready.plan, self._launch, most_again=self._most_again, steps=steps)
        except BaseSideError as error:
            self.error = str(error)

    def _take(self, theirs: Launches, count: int, of: int) -> None:
        try:
            theirs.take(count, of=of)
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

    def seconds(self, now: Launches, count: int) -> float:
        """What `count` launches a side come to."""
        theirs = self._theirs.seconds(count) if self._theirs is not None and self._theirs.every else 0.0
        return now.seconds(count) + theirs

    @property
    def replaced(self) -> bool:
        """Whether launches of the other side were taken again."""
        return self._theirs is not None and self._theirs.kept != self._theirs.as_taken

    def kept(self, start: int = 0, stop: int | None = None) -> tuple[Measurement, ...]:
        """The other side's launches start..stop, unfit ones taken again."""
        return self._measured(self._theirs.kept[start:stop]) if self._theirs is not None else ()

    def as_taken(self, start: int = 0, stop: int | None = None) -> tuple[Measurement, ...]:
        """The other side's launches start..stop as they were taken first."""
        return self._measured(self._theirs.as_taken[start:stop]) if self._theirs is not None else ()

    def _measured(self, launches: Sequence[LaunchSamples]) -> tuple[Measurement, ...]:
        """None where something went wrong there."""
        return () if self.error else (measurement(launches, self._environment),)

    @property
    def beside(self) -> Sequence[LaunchSamples]:
        """The other side's launches."""
        return self._theirs.kept if self._theirs is not None else ()

    def baseline(self, before: Before) -> Baseline | None:
        """The other side in one view as if it had been stored."""
        commit = self._base.version.commit
        sessions = tuple(Recording(measurement=measured, commit=commit) for measured in before())
        return Baseline(test=self._test, sessions=sessions) if sessions else None

    def end(self) -> None:
        """The test may go on there, too."""
        if self._theirs is not None:
            self._base.done()

    def told(self, outcome: Outcome, now: Launches, view: View, *, splits: Splits | None) -> Outcome:
        """With the other side."""
        stretches = tuple(launch.stretches for launch in view.now)
        files = [side[0].files if side else {} for side in (now.kept, self.beside)]
        beside = Beside(
            version=self._base.version,
            seed=self._seed,
            order=self._order,
            stretches=stretches if any(len(of_pair) > 1 for of_pair in stretches) else (),
            measurement=next(iter(view.before()), None),
            replaced=self._theirs.replacements() if self._theirs is not None else (),
            imported=len({*files[0], *files[1]}),
            differing=differing(*files) if self.beside else (),
            splits=splits,
            error=self.error,
        )
        notes = self._theirs.notes() if self._theirs is not None else ()
        told = tuple(f"{self._base.version}: {note}" for note in notes)
        if self._why_apart and not self.error:
            told += (f"launches took turns one after the other: {self._why_apart}",)
        return replace(outcome, beside=beside, notes=outcome.notes + told)
