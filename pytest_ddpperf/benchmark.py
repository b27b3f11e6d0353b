"""One test's measurement: launch -> summarise -> compare -> judge. Knows nothing of pytest or of how it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Protocol

from pytest_ddpperf import baseline as store_room
from pytest_ddpperf import verdict as verdicts
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.looks import follow, schedule
from pytest_ddpperf.options import Settings
from pytest_ddpperf.records import (
    COUNTER_LIMITS,
    Baseline,
    Counters,
    Environment,
    LaunchSamples,
    Limit,
    Measurement,
    Outcome,
    Plan,
    RankOutput,
    Recording,
    Replacement,
    Samples,
    Scalar,
    TestId,
    Verdict,
)
from pytest_ddpperf.result import Result

# Under these a run is measured, but its figures say nothing about the code.
_DEBUGGING: Mapping[str, tuple[str, ...]] = {
    "env:CUDA_LAUNCH_BLOCKING": ("1",),
    "env:TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "env:NCCL_DEBUG": ("TRACE",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is measured, for which test, and how it shall be judged."""

    test: TestId
    nodeid: str
    setup: Callable[..., Any]
    others: tuple[Callable[..., Any] | None, ...] = ()  # of an RPC launch: the master's and the parameter servers'
    settings: Settings
    plan: Plan
    launches: int  # before the first look
    level: float  # this measurement's share of the run's error rate
    batch_size: int | None
    gate: bool
    facts: Mapping[str, Scalar]  # recorded with the measurement, beyond what the ranks tell
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A job that was carried out."""

    result: Result
    outcome: Outcome
    baseline: Baseline | None
    candidate: Baseline  # what would be stored
    output: tuple[tuple[RankOutput, ...], ...]  # launch x rank


class Progress(Observer, Protocol):
    """An observer that is told which launch begins and what came of it."""

    def begin(self, launch: int, launches: int) -> None: ...

    def launched(self, samples: LaunchSamples) -> None: ...


def carry_out(job: Job, launcher: Launcher, store: Store, progress: Progress) -> Measured:
    """Launch, judge, and go on where the verdict is open; raises LaunchError and the other errors of a launch, and
    BaselineError."""
    launches = _Launches(job, launcher, progress)
    looks = schedule(job.launches, job.settings.max_launches)
    launches.take(looks[0])
    facts = {**launches.facts, **job.facts}
    environment = store_room.environment(facts, job.plan, batch_size=job.batch_size)
    gate = _Gate(job, launches, environment, why_not=_not_gated(job, facts), store=store)
    for number, count in enumerate(looks, 1):
        launches.take(count)
        further = looks[number] if number < len(looks) and gate.affords(looks[number]) else None
        judged, shown, ended = gate.judge(looks[:number], final=further is None)
        if ended:
            break
    current = Measurement(samples=_samples(shown), environment=environment, counters=_counters(shown))
    outcome = replace(
        failed(job, ""),
        verdict=judged,
        fails=verdicts.fails(judged, fail_on=job.settings.fail_on, baseline_missing=job.settings.baseline_missing),
        measurement=current,
        phases=tuple(launch.phases for launch in shown),
        baseline_path=str(store.path(environment, job.test)),
        replaced=launches.replacements(),
        notes=job.notes + launches.notes() + _elsewhere(job, judged, store),
    )
    return Measured(
        result=Result(
            step_seconds=current.samples.step_seconds,
            samples=current.samples.rank_seconds,
            world_size=job.plan.world_size,
            backend=job.plan.backend,
            verdict=judged,
            environment=environment,
            counters=current.counters,
        ),
        outcome=outcome,
        baseline=gate.stored,
        candidate=Baseline(test=job.test, sessions=(gate.recording(current),)),
        output=tuple(launch.output for launch in launches.every),
    )


class _Launches:
    """The launches of one measurement, unfit ones measured again: as many as were asked for the first look at most.

    What is unfit is told by what happened in a launch, never by its times.
    """

    def __init__(self, job: Job, launcher: Launcher, progress: Progress) -> None:
        self._job, self._launcher, self._progress = job, launcher, progress
        self.kept: list[LaunchSamples] = []
        self.every: list[LaunchSamples] = []  # those that were measured again, too
        self._replaced: dict[int, LaunchSamples] = {}  # by place, what was taken first

    @property
    def facts(self) -> Mapping[str, Scalar]:
        return self.kept[-1].facts

    @property
    def as_taken(self) -> list[LaunchSamples]:
        """With the replaced ones in their places."""
        return [self._replaced.get(place, launch) for place, launch in enumerate(self.kept)]

    def take(self, count: int) -> None:
        """Launch until there are `count`."""
        while len(self.kept) < count:
            launch = self._launch(count)
            if launch.unfit and len(self._replaced) < self._job.launches and not self._job.settings.disable:
                self._replaced[len(self.kept)] = launch
                launch = self._launch(count)
            self.kept.append(launch)

    def _launch(self, count: int) -> LaunchSamples:
        self._progress.begin(len(self.kept), count)
        launch = self._launcher.measure(self._job.plan, self._job.setup, self._progress, self._job.others)
        self._progress.launched(launch)
        self.every.append(launch)
        return launch

    def seconds(self, count: int) -> float:
        """What `count` launches come to, by those so far."""
        seconds = [launch.phases.total for launch in self.every]
        return sum(seconds) + (count - len(self.kept)) * fmean(seconds)

    def replacements(self) -> tuple[Replacement, ...]:
        return tuple(
            Replacement(launch=place, reason=launch.unfit, samples=_samples([launch]))
            for place, launch in sorted(self._replaced.items())
        )

    def notes(self) -> tuple[str, ...]:
        """What the user should know of the launches."""
        notes = [note for launch in self.every for note in launch.notes]
        if self._replaced:
            reasons = "; ".join(launch.unfit for launch in self._replaced.values())
            notes.append(f"{len(self._replaced)} unfit launch(es) measured again: {reasons}")
        unfit = [launch.unfit for launch in self.kept if launch.unfit]
        if unfit:
            notes.append(f"{len(unfit)} of {len(self.kept)} launches stayed unfit: {unfit[0]}: raise --ddp-warmup")
        unsettled = [(launch.unsettled, launch.warmup) for launch in self.kept if launch.unsettled]
        if unsettled:
            cause, steps = unsettled[0]
            notes.append(f"after {steps} warm-up steps ({self._job.plan.warmup} asked) ranks were still {cause}")
        return tuple(notes)


class _Gate:
    """Holds the launches against the baseline, look after look."""

    def __init__(
        self, job: Job, launches: _Launches, environment: Environment, *, why_not: str | None, store: Store
    ) -> None:
        self._job, self._launches, self._environment, self._why_not = job, launches, environment, why_not
        # Not read when it will not be used: a run that replaces an unreadable baseline must be able to.
        self.stored = store.read(environment, job.test) if why_not is None else None
        if self._saving and job.settings.extend_baseline:
            store.read_alike(environment, job.test)  # before more launches are spent on what could not be added

    @property
    def _saving(self) -> bool:
        return self._why_not == "saving"

    def affords(self, count: int) -> bool:
        """Whether so many launches fit into the time; those that confirm a suspicion of the first look always do."""
        confirming = count <= 2 * self._job.launches and not self._saving
        return confirming or self._launches.seconds(count) <= self._job.settings.max_seconds

    def judge(self, looks: Sequence[int], *, final: bool) -> tuple[Verdict, list[LaunchSamples], bool]:
        """The verdict, the launches it is about, and whether the measurement ends with it.

        Whoever replaces launches might replace the slow ones. So they are judged as they were taken, too: a
        regression that those show is the verdict, and nothing ends before both have.
        """
        kept, as_taken = self._launches.kept, self._launches.as_taken
        verdict, ended = follow(looks, partial(self._verdict, kept), final=final)
        verdict = self._counted(verdict, kept)
        ended = ended or verdict.reason == "counter-rose"  # which no further launch would change
        if self._saving:
            ended = final or not verdicts.coarse(self._measurement(kept), self._limits, level=self._job.level)
        if kept == as_taken:
            return verdict, kept, ended
        other, other_ended = follow(looks, partial(self._verdict, as_taken), final=final)
        other = self._counted(other, as_taken)
        shown = (other, as_taken) if other == "REGRESSED" else (verdict, kept)
        return *shown, ended and (other_ended or self._saving)

    def _counted(self, verdict: Verdict, launches: list[LaunchSamples]) -> Verdict:
        return verdicts.with_counters(verdict, self._measurement(launches), self._baseline, self._limits)

    def _verdict(self, launches: list[LaunchSamples], start: int, stop: int, ease: float) -> Verdict:
        return verdicts.judge_times(
            self._measurement(launches[start:stop]),
            self._baseline,
            self._limits,
            not_gated=self._why_not,
            level=self._job.level * ease,
        )

    @property
    def _baseline(self) -> tuple[Measurement, ...]:
        return self.stored.measurements if self.stored else ()

    @property
    def _limits(self) -> tuple[Limit, ...]:
        """The settings', with the default ones on counters; those on RPC matter to RPC launches only."""
        asked = self._job.settings.limits
        named = {limit.metric for limit in asked}
        every = (*asked, *(limit for limit in COUNTER_LIMITS if limit.metric not in named))
        return tuple(limit for limit in every if self._job.plan.rpc or not limit.metric.startswith("rpc."))

    def _measurement(self, launches: list[LaunchSamples]) -> Measurement:
        return Measurement(samples=_samples(launches), environment=self._environment, counters=_counters(launches))

    def recording(self, current: Measurement) -> Recording:
        """What would be stored, with its resolution where it will be."""
        resolution = verdicts.resolutions(current, self._limits, level=self._job.level) if self._saving else {}
        return Recording(measurement=current, resolution=resolution)


def failed(job: Job, error: str) -> Outcome:
    """The outcome of a job that could not be carried out."""
    return Outcome(
        nodeid=job.nodeid,
        test=job.test,
        plan=job.plan,
        launches=job.launches,
        batch_size=job.batch_size,
        verdict=None,
        fails=True,
        error=error,
        notes=job.notes,
    )


def _samples(launches: Sequence[LaunchSamples]) -> Samples:
    cpu = [launch.cpu_seconds for launch in launches if launch.cpu_seconds is not None]
    examples = [launch.examples for launch in launches if launch.examples is not None]
    blocked = [launch.blocked_seconds for launch in launches if launch.blocked_seconds is not None]
    return Samples(
        step_seconds=tuple(launch.step_seconds for launch in launches),
        rank_seconds=tuple(launch.rank_seconds for launch in launches),
        cpu_seconds=tuple(cpu) if len(cpu) == len(launches) else None,
        examples=tuple(examples) if len(examples) == len(launches) else None,
        blocked_seconds=tuple(blocked) if len(blocked) == len(launches) else None,
    )


def _counters(launches: Sequence[LaunchSamples]) -> Counters:
    """Of the launch that counted most; unknown where one does not know."""
    found: dict[str, int | None] = {}
    for name in launches[0].counters:
        counts = [count for launch in launches if (count := launch.counters.get(name)) is not None]
        found[name] = max(counts) if len(counts) == len(launches) else None
    return found


def _not_gated(job: Job, facts: Mapping[str, Scalar]) -> str | None:
    """The reason code for a measurement that is not held against a baseline."""
    if job.settings.disable:
        return "disabled"
    if any(str(facts.get(name)).upper() in values for name, values in _DEBUGGING.items()):
        return "debugging-variable"
    if not job.gate:
        return "gate-off"
    return "saving" if job.settings.records else None


def _elsewhere(job: Job, judged: Verdict, store: Store) -> tuple[str, ...]:
    """Where there is a baseline for the test, if not for this environment."""
    if judged != "NO BASELINE":
        return ()
    return tuple(f"there is a baseline for {name}" for name in store.others(job.test))
