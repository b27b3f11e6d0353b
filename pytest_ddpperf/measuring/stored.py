"""What a measurement is compared with where that is a baseline of the store."""

from __future__ import annotations

from dataclasses import replace

from pytest_ddpperf.baseline import Store
from pytest_ddpperf.measuring.launches import Launches
from pytest_ddpperf.records import (
    Baseline,
    Environment,
    Measurement,
    Outcome,
    StoredSession,
    TestId,
)
from pytest_ddpperf.verdict import in_percentiles

# Two measurements of one step hardly ever have the same number of steps; with twice as many, more is lost than that.
_MUCH_LONGER = 2


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

    def described(self, outcome: Outcome, current: Launches) -> Outcome:
        """With where it is and, where there is none for this environment, where there is one."""
        notes = outcome.notes
        if outcome.verdict == "NO BASELINE":
            notes += tuple(f"there is a baseline for {name}" for name in self._store.others(self._test))
        if outcome.verdict is not None and outcome.verdict.status.compared:
            notes += self._cut(len(current.taken[0].step_seconds))
        if self._begins:
            notes += ("there was no baseline to extend: the first session begins one",)
        return replace(outcome, baseline_path=self._path, sessions=self._sessions(current), notes=notes)

    def _sessions(self, current: Launches) -> tuple[StoredSession, ...]:
        """The sessions, all launches cut to as many steps as those that were compared."""
        if self._baseline is None:
            return ()
        steps = min(len(current.taken[0].step_seconds), *(session.samples.steps for session in self.measurements()))
        return tuple(in_percentiles(session, steps) for session in self._baseline.sessions)
