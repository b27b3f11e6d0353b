"""One test's measurement: launch -> summarise -> compare -> judge. Knows nothing of pytest or of how it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from pytest_ddpperf import baseline as store_room
from pytest_ddpperf import verdict as verdicts
from pytest_ddpperf.against import BaseSide
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.measuring.launches import Launches, measurement
from pytest_ddpperf.measuring.looks import follow, schedule
from pytest_ddpperf.measuring.result import Result
from pytest_ddpperf.measuring.splits import split
from pytest_ddpperf.measuring.stored import Stored
from pytest_ddpperf.measuring.turns import Turns
from pytest_ddpperf.options import Settings
from pytest_ddpperf.records import (
    COUNTER_LIMITS,
    Baseline,
    Environment,
    LaunchSamples,
    Limit,
    Measurement,
    Outcome,
    Plan,
    RankOutput,
    Recording,
    Scalar,
    Splits,
    TestId,
    Verdict,
)

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

    @property
    def most_again(self) -> int:
        """How many unfit launches of a side may be taken again."""
        return 0 if self.settings.disable else self.launches


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A job that was carried out."""

    result: Result
    outcome: Outcome
    baseline: Baseline | None  # what it was compared with
    candidate: Baseline  # what would be stored
    output: tuple[tuple[RankOutput, ...], ...]  # launch x rank


class Progress(Observer, Protocol):
    """An observer that is told which launch begins and what came of it."""

    def begin(self, launch: int, launches: int) -> None: ...

    def launched(self, samples: LaunchSamples) -> None: ...


def carry_out(job: Job, launcher: Launcher, store: Store, progress: Progress, base: BaseSide | None = None) -> Measured:
    """Launch, judge, and go on where the verdict is open: against the store or, with `base`, against launches there
    that take turns with these. Raises LaunchError and the other errors of a launch, and BaselineError."""
    reference: Stored | Turns = Stored(store, job.test, to_extend=job.settings.extend_baseline)
    if base is not None and job.gate:
        begin = partial(_begun, progress)
        reference = Turns(base, job.nodeid, job.test, most_again=job.most_again, begin=begin)
    try:
        return _compared(job, own_launches(job, launcher, progress, most_again=job.most_again), reference)
    finally:
        reference.end()


def _compared(job: Job, launches: Launches, reference: Stored | Turns) -> Measured:
    looks = schedule(job.launches, job.settings.max_launches)
    reference.take(launches, looks[0])
    facts = {**launches.facts, **job.facts}
    environment = store_room.environment(facts, job.plan, batch_size=job.batch_size)
    gate = _Gate(job, launches, reference, environment, why_not=_not_gated(job, facts))
    for number, count in enumerate(looks, 1):
        reference.take(launches, count)
        further = looks[number] if number < len(looks) and gate.affords(looks[number]) else None
        verdict, as_taken, ended = gate.judge(looks[:number], final=further is None)
        if further is None or (ended and not gate.splits_launches):
            break
    result = measured(job, launches, environment, verdict, as_taken=as_taken)
    splits = gate.splits(looks[:number]) if gate.splits_launches else None
    return replace(
        result,
        outcome=reference.told(result.outcome, launches, as_taken=as_taken, splits=splits),
        baseline=reference.baseline(as_taken=as_taken),
        candidate=Baseline(test=job.test, sessions=(gate.recording(as_taken),)),
    )


def own_launches(job: Job, launcher: Launcher, progress: Progress, *, most_again: int) -> Launches:
    """Launches of this process's own ranks."""

    def launch(number: int, of: int) -> LaunchSamples:
        launched = launcher.measure(job.plan, job.setup, _begun(progress, number, of), job.others)
        progress.launched(launched)
        return launched

    return Launches(job.plan, launch, most_again=most_again)


def _begun(progress: Progress, launch: int, launches: int) -> Progress:
    progress.begin(launch, launches)
    return progress


def measured(
    job: Job, launches: Launches, environment: Environment, verdict: Verdict, *, as_taken: bool = False
) -> Measured:
    """What the launches of this side came to."""
    shown = launches.as_taken if as_taken else launches.kept
    current = measurement(shown, environment)
    settings = job.settings
    return Measured(
        result=Result(
            step_seconds=current.samples.step_seconds,
            samples=current.samples.rank_seconds,
            world_size=job.plan.world_size,
            backend=job.plan.backend,
            verdict=verdict,
            environment=environment,
            counters=current.counters,
        ),
        outcome=replace(
            failed(job, ""),
            verdict=verdict,
            fails=verdicts.fails(verdict, fail_on=settings.fail_on, baseline_missing=settings.baseline_missing),
            measurement=current,
            phases=tuple(launch.phases for launch in shown),
            replaced=launches.replacements(),
            notes=job.notes + launches.notes(),
        ),
        baseline=None,
        candidate=Baseline(test=job.test, sessions=(Recording(measurement=current),)),
        output=tuple(launch.output for launch in launches.every),
    )


class _Gate:
    """Holds the launches against what they are compared with, look after look."""

    def __init__(
        self,
        job: Job,
        launches: Launches,
        reference: Stored | Turns,
        environment: Environment,
        *,
        why_not: str | None,
    ) -> None:
        self._job, self._launches, self._environment, self._why_not = job, launches, environment, why_not
        self._reference = reference
        reference.read(environment, why_not)

    @property
    def _saving(self) -> bool:
        return self._why_not == "saving"

    @property
    def splits_launches(self) -> bool:
        """Whether the same code is on both sides, to see how far it differs from itself."""
        return self._job.settings.against == "self" and bool(self._compared(0, None, as_taken=False))

    def affords(self, count: int) -> bool:
        """Whether so many launches fit into the time; those that confirm a suspicion of the first look always do."""
        confirming = count <= 2 * self._job.launches and not self._saving
        return confirming or self._reference.seconds(self._launches, count) <= self._job.settings.max_seconds

    def judge(self, looks: Sequence[int], *, final: bool) -> tuple[Verdict, bool, bool]:
        """The verdict, whether it is about the launches as they were taken, and whether the measurement ends with it.

        Whoever replaces launches might replace the slow ones. So they are judged as they were taken, too: a
        regression that those show is the verdict, and nothing ends before both have.
        """
        verdict, ended = self._followed(looks, as_taken=False, final=final)
        ended = ended or verdict.reason == "counter-rose"  # which no further launch would change
        if self._saving:
            current = self._measurement(0, None, as_taken=False)
            ended = final or not verdicts.coarse(current, self._limits, level=self._job.level)
        if self._launches.kept == self._launches.as_taken and not self._reference.replaced:
            return verdict, False, ended
        other, other_ended = self._followed(looks, as_taken=True, final=final)
        as_taken = other == "REGRESSED"
        return other if as_taken else verdict, as_taken, ended and (other_ended or self._saving)

    def _followed(self, looks: Sequence[int], *, as_taken: bool, final: bool) -> tuple[Verdict, bool]:
        verdict, ended = follow(looks, partial(self._verdict, as_taken), final=final)
        current, compared = self._measurement(0, None, as_taken=as_taken), self._compared(0, None, as_taken=as_taken)
        return verdicts.with_counters(verdict, current, compared, self._limits), ended

    def _verdict(self, as_taken: bool, start: int, stop: int, ease: float) -> Verdict:
        return verdicts.judge_times(
            self._measurement(start, stop, as_taken=as_taken),
            self._compared(start, stop, as_taken=as_taken),
            self._limits,
            not_gated=self._why_not,
            level=self._job.level * ease,
            interleaved=self._reference.interleaved,
        )

    def _compared(self, start: int, stop: int | None, *, as_taken: bool) -> tuple[Measurement, ...]:
        return self._reference.measurements(start, stop, as_taken=as_taken)

    @property
    def _limits(self) -> tuple[Limit, ...]:
        """The settings', with the default ones on counters; those on RPC matter to RPC launches only."""
        asked = self._job.settings.limits
        named = {limit.metric for limit in asked}
        every = (*asked, *(limit for limit in COUNTER_LIMITS if limit.metric not in named))
        return tuple(limit for limit in every if self._job.plan.rpc or not limit.metric.startswith("rpc."))

    def _measurement(self, start: int, stop: int | None, *, as_taken: bool) -> Measurement:
        launches = self._launches.as_taken if as_taken else self._launches.kept
        return measurement(launches[start:stop], self._environment)

    def recording(self, as_taken: bool) -> Recording:
        """What would be stored, with its resolution where it will be."""
        current = self._measurement(0, None, as_taken=as_taken)
        resolution = verdicts.resolutions(current, self._limits, level=self._job.level) if self._saving else {}
        return Recording(measurement=current, resolution=resolution)

    def splits(self, looks: Sequence[int]) -> Splits:
        """How the launches of both sides, split otherwise, would have been judged."""
        hand = [self._measurement(place, place + 1, as_taken=False) for place in range(looks[-1])]
        base = [self._compared(place, place + 1, as_taken=False)[0] for place in range(looks[-1])]
        return split(hand, base, self._limits, looks, level=self._job.level)


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


def _not_gated(job: Job, facts: Mapping[str, Scalar]) -> str | None:
    """The reason code for a measurement that is not held against anything."""
    if job.settings.disable:
        return "disabled"
    if any(str(facts.get(name)).upper() in values for name, values in _DEBUGGING.items()):
        return "debugging-variable"
    if not job.gate:
        return "gate-off"
    return "saving" if job.settings.records else None
