"""One test's measurement: launch -> summarise -> compare -> judge. Knows nothing of pytest or of how it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pytest_ddpperf import baseline as store_room
from pytest_ddpperf import verdict as verdicts
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.options import Settings
from pytest_ddpperf.records import (
    Baseline,
    LaunchSamples,
    Measurement,
    Outcome,
    Plan,
    RankOutput,
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
    launches: int
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
    """Launch, then judge; raises LaunchError and the other errors of a launch, and BaselineError."""
    launches = []
    for number in range(job.launches):
        progress.begin(number, job.launches)
        launches.append(launcher.measure(job.plan, job.setup, progress))
        progress.launched(launches[-1])
    facts = {**launches[-1].facts, **job.facts}
    environment = store_room.environment(facts, job.plan, batch_size=job.batch_size)
    current = Measurement(samples=_samples(launches), environment=environment)
    why_not = _not_gated(job, facts)
    # Not read when it will not be used: a run that replaces an unreadable baseline must be able to.
    stored = store.read(environment, job.test) if why_not is None else None
    judged = verdicts.judge(current, stored.measurement if stored else None, job.settings.limits, not_gated=why_not)
    outcome = Outcome(
        nodeid=job.nodeid,
        test=job.test,
        plan=job.plan,
        launches=job.launches,
        batch_size=job.batch_size,
        verdict=judged,
        fails=verdicts.fails(judged, fail_on=job.settings.fail_on, baseline_missing=job.settings.baseline_missing),
        measurement=current,
        phases=tuple(launch.phases for launch in launches),
        baseline_path=str(store.path(environment, job.test)),
        notes=job.notes + tuple(note for launch in launches for note in launch.notes) + _elsewhere(job, judged, store),
    )
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
        candidate=Baseline(test=job.test, measurement=current),
        output=tuple(launch.output for launch in launches),
    )


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


def _samples(launches: list[LaunchSamples]) -> Samples:
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
    return "saving" if job.settings.save_baseline else None


def _elsewhere(job: Job, judged: Verdict, store: Store) -> tuple[str, ...]:
    """Where there is a baseline for the test, if not for this environment."""
    if judged != "NO BASELINE":
        return ()
    return tuple(f"there is a baseline for {name}" for name in store.others(job.test))
