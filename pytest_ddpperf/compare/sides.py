"""The sides of a measurement: the current code, and a stored baseline or another version.

Another version launches, as the current code does. Of a stored baseline nothing is launched: it is
read once.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pytest_ddpperf import text
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.baseline.content import environment_name
from pytest_ddpperf.compare.job import Job
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.launch.paused_launch import PausedLaunch
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.records.outcome import StoredSession, Version
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.reason import Reason
from pytest_ddpperf.records.record import record
from pytest_ddpperf.records.samples import (
    Environment,
    LaunchSamples,
    Measurement,
    Recording,
    Status,
    Verdict,
)
from pytest_ddpperf.remote.version import BaseSide, RemotePausedLaunch
from pytest_ddpperf.verdict.observed import in_percentiles

PausedSide = PausedLaunch | RemotePausedLaunch


class CurrentSide(NamedTuple):
    """The current code in one launch, number `place` from 0, by this process's own ranks."""

    job: Job
    launcher: Launcher
    place: int

    @property
    def reference(self) -> "CurrentSide | None":
        """The same launch of what the job is compared with in the same run, if it is."""
        if self.job.reference is None:
            return None
        return self._replace(job=self.job.reference)

    def measure(self, observer: Observer, steps: int | None) -> LaunchSamples:
        """Take a launch with a window of so many steps; None leaves that to the launch. Raises
        DdpPerfError."""
        setup, *others = self.job.setups
        return self.launcher.measure(self._plan(steps), setup, observer, others)

    def pause(
        self, observer: Observer, steps: int | None
    ) -> AbstractContextManager[PausedLaunch]:
        """Yield the same launch, which has warmed up and is paused; it ends with the context."""
        return self.launcher.pause(
            self._plan(steps), self.job.setups[0], observer
        )

    def _plan(self, steps: int | None) -> Plan:
        plan = self.job.plan if steps is None else self.job.plan.exactly(steps)
        return plan if self.place else replace(plan, trace=self.job.trace)


Side = CurrentSide | BaseSide  # that launches


# --- what the current side is compared with


class OtherVersion(NamedTuple):
    """A version whose launches are interleaved with those of the current side."""

    version: Version
    job: Job  # as its own test asks for it
    error: str = ""  # why its test did not come to its measurement
    # files that differ between the trees, by git
    changed: tuple[str, ...] = ()


def begin(base: BaseSide, job: Job) -> OtherVersion:
    """Let the test of a job run in another version up to its measurement."""
    try:
        ready = base.begin(job.nodeid, job.test.label, job.plan)
    except BaseSideError as error:
        return OtherVersion(base.version, job, str(error))
    there = replace(
        job, plan=ready.plan, batch_size=ready.batch_size, facts=ready.facts
    )
    return OtherVersion(base.version, there, changed=base.checkout.changed)


# Two measurements of one step hardly ever have the same number of steps; with twice as many, more
# is lost than that.
_MUCH_LONGER = 2


@record
class StoredBaseline:
    """What the store has of a test, as read after the first look."""

    path: str = ""  # "" if nothing was read
    sessions: tuple[Recording, ...] = ()  # () if there is no baseline
    # Without a baseline:
    # another machine's name, and what it counted
    counted_elsewhere: tuple[str, Measurement] | None = None
    # the file of a test of that name by another path or rootdir
    nearby: Path | None = None
    # names of the environments that have a baseline of this test
    others: tuple[str, ...] = ()
    own: str = ""  # the name of the current environment

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The sessions whose times are compared."""
        return tuple(session.measurement for session in self.sessions)

    def percentiles(self, steps: int) -> tuple[StoredSession, ...]:
        """Return the sessions, all launches cut to the steps that are compared with launches of so
        many."""
        compared = self._compared_steps(steps)
        return tuple(
            in_percentiles(session, compared) for session in self.sessions
        )

    def _compared_steps(self, steps: int) -> int:
        """Return how many steps of each launch are compared with launches of so many."""
        return min([steps, *(each.samples.steps for each in self.measurements)])

    def notes(
        self, verdict: Verdict, steps: int, rootdir: Path
    ) -> Iterator[str]:
        """Yield where this baseline is missing, and which others there are; and where much was lost
        by comparing it with launches of so many steps."""
        is_missing = verdict.status is Status.NO_BASELINE
        if is_missing:
            yield f"there is no baseline {shown(self.path, rootdir)}"
        if self.nearby is not None:
            yield (
                "there is one for another path or rootdir:"
                f" {shown(str(self.nearby), rootdir)} (an ini file at the top keeps the rootdir)"
            )
        if self.counted_elsewhere is not None and verdict.counters:
            machine = self.counted_elsewhere[0]
            yield f"only counters were compared, with the baseline of {machine}"
        elif is_missing and self.others:
            yield f"a baseline exists for {text.some(self.others)}, not for {self.own}"
        compared = self._compared_steps(steps)
        if verdict.status.compared and steps >= _MUCH_LONGER * compared:
            yield (
                f"only the first {compared} of {steps} steps of each launch were compared,"
                " because the baseline has no more: --ddp-save-baseline records longer windows"
            )


NOTHING_STORED = StoredBaseline()


def read_stored(
    store: Store, job: Job, environment: Environment, not_gated: Reason | None
) -> StoredBaseline:
    """Read the baseline of a test if it will be used: a run that replaces an unreadable one must be
    able to. Raises BaselineError."""
    test = job.test
    path = str(store.path(environment, test))
    if not_gated is not None:
        if not_gated == Reason.SAVING and job.settings.extend_baseline:
            # Before launches are spent on what could not be added.
            store.read_alike(environment, test)
        return StoredBaseline(path=path)
    baseline = store.read(environment, test)
    if baseline is not None:
        return StoredBaseline(path=path, sessions=baseline.sessions)
    return StoredBaseline(
        path=path,
        counted_elsewhere=store.read_counted(environment, test),
        nearby=store.nearby(environment, test),
        own=environment_name(environment),
        others=store.others(test),
    )


def shown(path: str, rootdir: Path) -> str:
    """Return a path from rootdir, if it is below."""
    if path and Path(path).is_relative_to(rootdir):
        return os.path.relpath(path, rootdir)
    return path
