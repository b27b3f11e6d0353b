"""What a measurement is compared with where that is a baseline of the store."""

from __future__ import annotations

from dataclasses import replace

from pytest_ddpperf.baseline import Store
from pytest_ddpperf.measuring.judging import Before, View
from pytest_ddpperf.measuring.launches import Launches
from pytest_ddpperf.records import (
    Baseline,
    Environment,
    Measurement,
    Outcome,
    Splits,
    StoredSession,
    TestId,
)
from pytest_ddpperf.verdict import in_percentiles

# Two measurements of one step hardly ever have the same number of steps; with twice as many, more is lost than that.
_MUCH_LONGER = 2


class Stored:
    """The other side of a measurement, as `turns.Turns`, but for that nothing is launched for it."""

    interleaved = False
    replaced = False

    def __init__(self, store: Store, test: TestId, *, to_extend: bool) -> None:
        self._store, self._test, self._to_extend = store, test, to_extend
        self._path = ""
        self._begins = False  # there is none to which a session could be added
        self._baseline: Baseline | None = None

    def take(self, now: Launches, count: int, *, of: int) -> None:
        """Launch until there are `count`, `of` so many that are asked for."""
        now.take(count, of=of)

    def seconds(self, now: Launches, count: int) -> float:
        return now.seconds(count)

    def read(self, environment: Environment, why_not: str | None) -> None:
        """Not where it will not be used: a run that replaces an unreadable baseline must be able to."""
        self._path = str(self._store.path(environment, self._test))
        if why_not is None:
            self._baseline = self._store.read(environment, self._test)
        elif why_not == "saving" and self._to_extend:
            # Before launches are spent on what could not be added.
            self._begins = self._store.read_alike(environment, self._test) is None

    def kept(self, start: int = 0, stop: int | None = None) -> tuple[Measurement, ...]:
        """The same sessions for whichever launches."""
        return self._baseline.measurements if self._baseline is not None else ()

    as_taken = kept
    beside = ()

    def baseline(self, before: Before) -> Baseline | None:
        return self._baseline

    def end(self) -> None:
        """Nothing goes on."""

    def _cut(self, steps: int) -> tuple[str, ...]:
        """That windows of so many `steps` were cut to the baseline's, where much was lost by it."""
        shortest = min(session.samples.steps for session in self.kept())
        if steps < _MUCH_LONGER * shortest:
            return ()
        return (
            f"compared by the first {shortest} of {steps} steps a launch, as many as the baseline has: "
            "--ddp-save-baseline records longer windows",
        )

    def told(self, outcome: Outcome, now: Launches, view: View, *, splits: Splits | None) -> Outcome:
        """With where it is and, where there is none for this environment, where there is one."""
        notes = outcome.notes
        if outcome.verdict == "NO BASELINE":
            notes += tuple(f"there is a baseline for {name}" for name in self._store.others(self._test))
        if outcome.verdict is not None and outcome.verdict.status.compared:
            notes += self._cut(len(now.kept[0].step_seconds))
        if self._begins:
            notes += ("there was no baseline to extend: the first session begins one",)
        return replace(outcome, baseline_path=self._path, sessions=self._told(now), notes=notes)

    def _told(self, now: Launches) -> tuple[StoredSession, ...]:
        """The sessions, all launches cut to as many steps as those that were compared."""
        if self._baseline is None:
            return ()
        steps = min(len(now.kept[0].step_seconds), *(session.samples.steps for session in self.kept()))
        return tuple(in_percentiles(session, steps) for session in self._baseline.sessions)
