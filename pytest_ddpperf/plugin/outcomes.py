"""The measurements of one test, and the outcome of each that is reported. Knows no pytest."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from pytest_ddpperf.compare.job import Job
from pytest_ddpperf.compare.result import Measured, Result
from pytest_ddpperf.compare.rounds import are_mostly_unfit, recorded
from pytest_ddpperf.compare.sides import shown
from pytest_ddpperf.explain import find_slower_file
from pytest_ddpperf.explain.slow_node import describe_slow_node
from pytest_ddpperf.records import quantiles
from pytest_ddpperf.records.outcome import BaselineSide, Outcome
from pytest_ddpperf.records.samples import Status
from pytest_ddpperf.records.step_phases import Finding
from pytest_ddpperf.report import causes
from pytest_ddpperf.verdict.times import TEST_LEVEL


class Took(NamedTuple):
    """The times of a measurement, as `Outcome` has them."""

    seconds: float
    waited_seconds: float


def build_outcome(
    found: Measured, rootdir: Path, accept_command: str, took: Took
) -> Outcome:
    """Return the outcome of a measurement, with its evidence and the command that accepts it."""
    job, verdict, side = found.job, found.verdict, found.baseline_side
    findings, words = _explain(found, side)
    suspected = found.suspected
    is_stored = side is None or suspected is not None
    is_decided = verdict.status not in (Status.NOT_GATED, Status.INCONCLUSIVE)
    # faster code that computes something else is a mistake
    is_meant = verdict.status is not Status.IMPROVED or not verdict.diverged
    accepts = is_stored and is_decided and is_meant
    notes = found.notes(rootdir)
    if side is not None and verdict.status.compared and job.plan.nodes > 1:
        sides = found.measurement, *found.before
        notes += tuple(describe_slow_node(job.plan, sides, job.level))
    return replace(
        build_failure(job, "", took),
        verdict=verdict,
        fails=found.fails,
        measurement=found.measurement,
        limits=found.limits,
        unfit=are_mostly_unfit(found.launches),
        costs=tuple(launch.cost for launch in found.launches),
        recorded=recorded(found.launches),
        baseline_side=side,
        baseline_path=shown(found.stored.path, rootdir),
        traces=shown(os.path.dirname(job.trace), rootdir),
        sessions=found.stored.percentiles(found.steps),
        stored_verdict=suspected.verdict if suspected is not None else None,
        why=job.settings.why or "",
        findings=findings,
        evidence=words,
        accept=accept_command if accepts else "",
        notes=notes,
    )


def _explain(
    found: Measured, side: BaselineSide | None
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return what explains a change, and the same in words."""
    job, before = found.job, found.before
    findings, words = causes.explain(
        found.verdict, job.plan, found.measurement, before, job.level, side
    )
    if not found.sampled or side is None:
        return findings, words
    now, there = (
        quantiles.mean(side.samples.step_seconds)
        for side in (found.measurement, *before)
    )
    slower = find_slower_file(
        [launch.stacks for launch in found.sampled],
        [fmean(launch.step_seconds) for launch in found.sampled],
        findings,
        rise=now - there,
        files=side.differing,
        level=job.level,
    )
    if slower is not None:
        findings = (*findings, slower)
    return findings, words


def build_failure(job: Job, error: str, took: Took) -> Outcome:
    """Return the outcome of a job that could not be carried out: what is known without launches."""
    return Outcome(
        nodeid=job.nodeid,
        test=job.test,
        plan=job.plan,
        launches=job.launches,
        batch_size=job.batch_size,
        file=job.file,
        line=job.line,
        limits=job.limits([]),
        level=job.level,
        seconds=took.seconds,
        waited_seconds=took.waited_seconds,
        verdict=None,
        fails=True,
        error=error,
        notes=job.notes,
    )


@dataclass(slots=True)
class TestMeasurement:
    """One measurement of a test, and what becomes of it when the test ends."""

    __test__ = False

    outcome: Outcome  # as of the measurement
    to_save: Measured | None = None  # what its baseline will hold, if any
    saved: int = 0  # sessions that its baseline now has

    @property
    def label(self) -> str:
        return self.outcome.test.label

    def outcome_at_end(self, unsaved: str, *, is_xfail: bool) -> Outcome:
        """Return what is reported. `unsaved`: why its baseline could not be written, or "".
        `is_xfail`: the test was expected to fail, and did."""
        outcome = self.outcome
        if unsaved:
            return replace(outcome, fails=True, error=unsaved.splitlines()[0])
        if is_xfail and outcome.fails:
            return replace(
                outcome, fails=False, notes=(*outcome.notes, "expected to fail")
            )
        return replace(outcome, saved=self.saved)


class GateFailure(NamedTuple):
    """What `GateFailed` takes."""

    text: str
    result: Result
    headline: str


class TestState:
    """What is known of one test, over its phases and over reruns of it."""

    __test__ = False

    def __init__(self) -> None:
        self.attempt = 0
        # by label; both are kept over reruns
        self.failed_gates: dict[str, GateFailure] = {}
        # why its baseline could not be written
        self.unsaved: dict[str, str] = {}
        self.usage_error = ""
        # of this attempt, after those before
        self.measurements: list[TestMeasurement] = []
        self._clear()

    def _clear(self) -> None:
        # its function runs: a report made meanwhile is one of a part of it, a subtest
        self.calling = False
        self.part_failed = False
        self.passed = False  # the call phase, all parts included
        self.skipped = False
        self.is_xfail = False  # it failed as expected
        self.labels: set[str] = set()  # of measurements that have begun
        self._gates = 0  # of them, those that are compared with a baseline

    def begin_attempt(self) -> None:
        """Forget the last attempt, if this is a rerun, but for what it measured."""
        self.attempt += 1
        self._clear()
        # Reported again: pytest-rerunfailures before 16.6.1 drops the report of a teardown that a
        # rerun follows.
        last = {each.label: each for each in self.measurements}
        self.measurements = list(last.values())

    def count_gate(self, gate: bool) -> float:
        """Count a measurement that is compared, if it has a `gate`, and return its error rate: a
        test's, and from the second on a half, a sixth, a twelfth of it, which add up to once
        more."""
        if gate:
            self._gates += 1
        return TEST_LEVEL / max(1, self._gates * (self._gates - 1))

    def outcomes(self) -> list[Outcome]:
        """Return what is reported, when the test has ended."""
        return [
            each.outcome_at_end(
                self.unsaved.get(each.label, ""), is_xfail=self.is_xfail
            )
            for each in self.measurements
        ]
