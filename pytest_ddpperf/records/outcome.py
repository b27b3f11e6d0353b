"""One measurement as the reports know it, with what it was compared with."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import field

from pytest_ddpperf.records.guard import Loosened
from pytest_ddpperf.records.plan import Limits, Plan
from pytest_ddpperf.records.record import record
from pytest_ddpperf.records.samples import (
    Change,
    Comparison,
    Facts,
    LaunchCost,
    Measurement,
    Recorded,
    Status,
    TestId,
    Verdict,
)
from pytest_ddpperf.records.step_phases import Finding, Means


@record
class Version:
    """The other version that a run is compared with, if it is measured and not stored."""

    # as asked; "" where only the interpreter, the environment or an option differ;
    # "self" for the same code
    ref: str
    commit: str  # that it names, or as `now` where none was asked for
    now: str  # the current commit, as `Recording.commit`
    python: str = ""  # another interpreter's path
    # "NAME=VALUE", or "NAME" of one that is unset
    environ: tuple[str, ...] = ()
    option: tuple[str, ...] = ()  # more arguments for pytest
    is_reference: bool = False  # of a test; all of it is the current code

    def __str__(self) -> str:
        """ "origin/main (1a2b3c4d5e6f), OMP_NUM_THREADS=2"."""
        if self.is_reference:
            return "the reference"
        commit = (
            f" ({self.commit[:7]})"
            if self.commit and not self.commit.startswith(self.ref)
            else ""
        )
        named = self.ref if commit or len(self.ref) < 40 else self.ref[:7]
        ref = "the same code" if self.ref == "self" else named + commit
        variables = (
            each if "=" in each else f"{each} unset" for each in self.environ
        )
        return ", ".join(
            filter(
                None, (ref, self.python, *variables, shlex.join(self.option))
            )
        )


# What stands for another version where a test is compared with its reference.
REFERENCE = Version(ref="", commit="", now="", is_reference=True)


@record
class BaselineSide:
    """The baseline side of a measurement whose launches were interleaved."""

    version: Version
    order: str  # of the launches: "b" for the baseline side, "n" for the current side
    # of each pair, the lengths of its stretches; () if one launch followed the other
    stretches: tuple[tuple[int, ...], ...] = ()
    # None: there is none, for the reason in `error`
    measurement: Measurement | None = None
    # files of the user's package, by the ranks of either side
    imported: int = 0
    # all files of the repository but tests, by the same ranks
    read: tuple[str, ...] = ()
    # of them, those that are not the same on both sides
    differing: tuple[str, ...] = ()
    error: str = ""

    @property
    def same(self) -> bool:
        """Whether nothing differed that was meant to."""
        version = self.version
        otherwise = (
            version.ref == "self"
            or version.python
            or version.environ
            or version.option
            or version.is_reference
        )
        return not (otherwise or self.differing or self.error)


@record
class StoredSession:
    """A session of a stored baseline as reports know it: by percentiles, for its samples are in the
    baseline."""

    created: str  # as of `Recording`
    commit: str
    host: str  # "" where it was not recorded
    steps: int  # of each launch, the first ones that were compared
    # "p5", "p10", ... "p95" of a launch's step times, a launch each
    launch_seconds: Mapping[str, tuple[float, ...]]
    phases: Means = field(default_factory=dict)  # the mean over ranks
    limits: Limits = ()  # as of `Recording`
    launches: int = 0  # as of `Recording`
    why: str = ""  # as of `Recording`


@record
class RunInfo:
    """What all measurements of a run share."""

    # another for each run; "" in a report from before there were any
    id: str = ""
    created: str = ""  # when it ended, ISO 8601, UTC
    version: str = ""  # of pytest-ddpperf
    commit: str = ""  # that was checked out, as of `Recording`
    # when that was committed, ISO 8601, UTC; "" outside git
    committed: str = ""
    # the machine's, from a probe rank
    facts: Facts = field(default_factory=dict)
    skipped: int = 0  # tests
    # tests that passed without a call of the fixture that they ask for
    never_measured: int = 0
    # tests that failed, and files that could not be collected, though no measurement
    # fails
    other_failures: int = 0
    # why pytest ended with a usage error, before or after its tests
    problem: str = ""
    messages: tuple[str, ...] = ()  # of it as a whole, a line each
    # what is weaker than before
    guard: tuple[Loosened, ...] = ()
    too_weak: str = ""  # why that makes the run red; "" if it does not
    # of `add_section`: lines by title
    sections: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


# What reports show instead of the status of a verdict; FAILED without one.
SAVED = "SAVED"
DIVERGED = "DIVERGED"
FAILED = "failed"


@record
class Outcome:
    """One measurement as the reports know it. Crosses from an xdist worker as JSON (see
    `codec`)."""

    nodeid: str
    test: TestId
    plan: Plan
    launches: int  # asked, for the first look
    batch_size: int | None  # examples per rank and step
    verdict: Verdict | None  # None: the measurement itself failed
    # its test: by the verdict, or because the measurement, or the saving of its
    # baseline, failed
    fails: bool
    error: str = ""  # why these did, one line
    measurement: Measurement | None = None
    # whether most launches say little of steady training
    unfit: bool = False
    costs: tuple[LaunchCost, ...] = ()  # one a launch
    # that all launches of both sides took, with the waits for locks
    seconds: float = 0.0
    waited_seconds: float = 0.0  # of these, for locks
    # what steps recorded of themselves
    recorded: Recorded = field(default_factory=dict)
    # relative to rootdir where it is below it; "" where nothing stored was asked for
    baseline_path: str = ""
    # What it was compared with instead or, after the baseline, to confirm a suspicion.
    baseline_side: BaselineSide | None = None
    # of the baseline alone, where `baseline_side` confirmed or refuted it
    stored_verdict: Verdict | None = None
    # sessions that its baseline now holds; 0: nothing was written
    saved: int = 0
    why: str = ""  # baselines are saved in this run, as of `Recording`
    # of the test, from the top of the git working tree, or from rootdir outside git
    file: str = ""
    line: int = 0  # in it, from 1; 0 if it is unknown
    # that it was compared with, or would have been
    limits: Limits = ()
    level: float | None = None  # the error rate of the measurement
    # of the stored baseline that it was compared with
    sessions: tuple[StoredSession, ...] = ()
    # what explains its change, the most important first
    findings: tuple[Finding, ...] = ()
    # in words: what a change rests on, and what ranks say of it; () where there is none
    evidence: tuple[str, ...] = ()
    # the command that makes its figures the baseline; "" where there is nothing to
    # accept
    accept: str = ""
    # the folder of traces, as `baseline_path`; "" where none were asked for
    traces: str = ""
    # what the user should know: "marker world_size=2 over --ddp-world-size"
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> Measurement:
        """The measurement of an outcome that has one."""
        assert self.measurement is not None, "the measurement failed"
        return self.measurement

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Those of the verdict, if there is one."""
        return self.verdict.comparisons if self.verdict else ()

    @property
    def shown(self) -> Change | None:
        """The change that every report shows, as of the verdict, if there is one."""
        return self.verdict.shown if self.verdict else None

    @property
    def other_side(self) -> Measurement | None:
        """What was measured of `baseline_side`."""
        return self.baseline_side.measurement if self.baseline_side else None

    @property
    def has_reference(self) -> bool:
        """Whether it was compared with a reference of its test."""
        side = self.baseline_side
        return side is not None and side.version.is_reference

    @property
    def shown_status(self) -> str:
        """The status that reports show. DIVERGED: the test fails because its losses differ, and
        not because it is slower."""
        if self.saved:
            return SAVED
        verdict = self.verdict
        if verdict is None:
            return FAILED
        others = (Status.REGRESSED, Status.INCOMPARABLE)
        fails = self.fails and not self.error
        if fails and verdict.diverged and verdict.status not in others:
            return DIVERGED
        return verdict.status.value


Outcomes = Sequence[Outcome]
