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
from pytest_ddpperf.looks import Looks, schedule
from pytest_ddpperf.options import Settings
from pytest_ddpperf.records import (
    Baseline,
    Environment,
    LaunchSamples,
    Measurement,
    Outcome,
    Plan,
    RankOutput,
    Recording,
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
    launches.take(job.launches)
    facts = {**launches.facts, **job.facts}
    environment = store_room.environment(facts, job.plan, batch_size=job.batch_size)
    why_not = _not_gated(job, facts)
    # Not read when it will not be used: a run that replaces an unreadable baseline must be able to.
    stored = store.read(environment, job.test) if why_not is None else None
    sessions = stored.measurements if stored else ()
    limits = job.settings.limits

    def judge(start: int, stop: int) -> Verdict:
        return launches.judge(
            start, stop, environment, partial(verdicts.judge, baseline=sessions, limits=limits, not_gated=why_not,
                                              level=job.level)
        )  # fmt: skip

    looks = schedule(job.launches, launches.affordable(job.settings))
    way = Looks(looks)
    for look, count in enumerate(looks):
        launches.take(count)
        judged, ended = way.take(look, judge)
        if why_not == "saving":
            ended = not verdicts.coarse(launches.measurement(environment), limits, level=job.level)
        if ended:
            break
    current = launches.measurement(environment)
    outcome = replace(
        failed(job, ""),
        verdict=judged,
        fails=verdicts.fails(judged, fail_on=job.settings.fail_on, baseline_missing=job.settings.baseline_missing),
        measurement=current,
        phases=tuple(launch.phases for launch in launches.all),
        baseline_path=str(store.path(environment, job.test)),
        replaced=tuple(launch.unfit for launch in launches.replaced.values()),
        notes=job.notes + launches.notes() + _elsewhere(job, judged, store),
    )
    recording = Recording(measurement=current, resolution=verdicts.resolutions(current, limits, level=job.level))
    return Measured(
        result=Result(
            step_seconds=current.samples.step_seconds,
            samples=current.samples.rank_seconds,
            world_size=job.plan.world_size,
            backend=job.plan.backend,
            verdict=judged,
            environment=environment,
        ),
        outcome=outcome,
        baseline=stored,
        candidate=Baseline(test=job.test, sessions=(recording,)),
        output=tuple(launch.output for launch in launches.all),
    )


class _Launches:
    """The launches of one measurement, unfit ones measured again: as many as were asked for the first look at most.

    What is unfit is told by what happened in it, never by its times. And since whoever replaces launches might
    replace the slow ones, a regression that the launches show as they were taken remains one.
    """

    def __init__(self, job: Job, launcher: Launcher, progress: Progress) -> None:
        self._job, self._launcher, self._progress = job, launcher, progress
        self.all: list[LaunchSamples] = []
        self.replaced: dict[int, LaunchSamples] = {}  # by place, what was taken first

    @property
    def facts(self) -> Mapping[str, Scalar]:
        return self.all[-1].facts

    def take(self, count: int) -> None:
        """Launch until there are `count`."""
        while len(self.all) < count:
            launch = self._launch(count)
            if launch.unfit and len(self.replaced) < self._job.launches and not self._job.settings.disable:
                self.replaced[len(self.all)] = launch
                launch = self._launch(count)
            self.all.append(launch)

    def _launch(self, count: int) -> LaunchSamples:
        self._progress.begin(len(self.all), count)
        launch = self._launcher.measure(self._job.plan, self._job.setup, self._progress)
        self._progress.launched(launch)
        return launch

    def affordable(self, settings: Settings) -> int:
        """How many launches there may be, by the cost of those so far; never fewer than were asked."""
        if settings.disable:
            return self._job.launches
        cost = fmean(launch.phases.total for launch in self.all)
        return max(self._job.launches, min(settings.max_launches, int(settings.max_seconds / cost)))

    def measurement(self, environment: Environment) -> Measurement:
        return Measurement(samples=_samples(self.all), environment=environment)

    def judge(
        self, start: int, stop: int, environment: Environment, judge: Callable[[Measurement], Verdict]
    ) -> Verdict:
        """The verdict on some of the launches, or REGRESSED where they show that with the replaced ones."""
        taken = [self.replaced.get(place, launch) for place, launch in enumerate(self.all)]
        verdict = judge(Measurement(samples=_samples(self.all[start:stop]), environment=environment))
        if self.replaced and verdict.status.compared and verdict != "REGRESSED":
            as_taken = judge(Measurement(samples=_samples(taken[start:stop]), environment=environment))
            verdict = as_taken if as_taken == "REGRESSED" else verdict
        return verdict

    def notes(self) -> tuple[str, ...]:
        """What the user should know of the launches."""
        notes = [note for launch in self.all for note in launch.notes]
        if self.replaced:
            reasons = "; ".join(launch.unfit for launch in self.replaced.values())
            notes.append(f"{len(self.replaced)} unfit launch(es) measured again: {reasons}")
        unfit = [launch.unfit for launch in self.all if launch.unfit]
        if unfit:
            notes.append(f"{len(unfit)} of {len(self.all)} launches stayed unfit: {unfit[0]}: raise --ddp-warmup")
        unsettled = [launch.unsettled for launch in self.all if launch.unsettled]
        if unsettled:
            asked = self._job.plan.warmup
            notes.append(f"after {asked} asked and 20 further warm-up steps ranks were still {unsettled[0]}")
        return tuple(notes)


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
    return Samples(
        step_seconds=tuple(launch.step_seconds for launch in launches),
        rank_seconds=tuple(launch.rank_seconds for launch in launches),
        cpu_seconds=tuple(cpu) if len(cpu) == len(launches) else None,
        examples=tuple(examples) if len(examples) == len(launches) else None,
    )


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
