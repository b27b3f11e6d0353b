"""One test's measurement: launch, summarize, compare, judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from pytest_ddpperf import baseline as store_room
from pytest_ddpperf import verdict as verdicts
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.measuring.baseline_side import Here, Interleaved, PausedSide, SideFacts, Stored
from pytest_ddpperf.measuring.judging import Judge, Terms, schedule
from pytest_ddpperf.measuring.launches import Launches, measurement, recorded
from pytest_ddpperf.options import Settings
from pytest_ddpperf.records import (
    Baseline,
    Counters,
    Environment,
    LaunchRankSteps,
    LaunchSamples,
    LaunchSteps,
    Outcome,
    Plan,
    RankOutput,
    Recorded,
    Recording,
    Scalar,
    TestId,
    Verdict,
)
from pytest_ddpperf.records.asked import Collective, limits_for
from pytest_ddpperf.remote.version import BaseSide
from pytest_ddpperf.verdict.stats import geometric_mean, launch_quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A measurement and its verdict. All times are in seconds."""

    step_seconds: LaunchSteps  #: launch x step: the group's step times
    samples: LaunchRankSteps  #: launch x rank x step: each rank's own step durations
    world_size: int
    backend: str
    verdict: Verdict
    environment: Environment
    counters: Counters  #: per step, the largest over ranks; None where it is unknown
    recorded: Recorded  #: by name, launch x rank x step: the values of `ctx.record`; None if there is none

    def percentile(self, q: float) -> float:
        """The q-th percentile (0 to 100) of the group's step time: per launch, then the geometric mean over
        launches, as the verdict has it (of fewer steps, where a baseline has fewer)."""
        if not 0 <= q <= 100:
            raise ValueError(f"percentile({q!r}): from 0 to 100")
        return geometric_mean(launch_quantiles(self.step_seconds, q))

    @property
    def p10(self) -> float:
        return self.percentile(10)

    @property
    def p50(self) -> float:
        return self.percentile(50)

    @property
    def p75(self) -> float:
        return self.percentile(75)

    @property
    def p90(self) -> float:
        return self.percentile(90)

    @property
    def p95(self) -> float:
        return self.percentile(95)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveResult(Result):
    """A measurement of one collective over one size, in nccl-tests' terms too; all times are in seconds."""

    collective: Collective

    @property
    def size(self) -> int:
        """Bytes: of the largest buffer of a rank."""
        return self.collective.size

    @property
    def algbw(self) -> float:
        """GB/s (1e9 bytes), at p50: the size over the time."""
        return self.collective.algbw(self.p50)

    @property
    def busbw(self) -> float:
        """GB/s (1e9 bytes), at p50: what a link carries, for every number of ranks."""
        return self.collective.busbw(self.p50)


# All launches of a measurement, but those that confirm a suspicion: twenty launches of half a minute. One that takes
# longer would hold up the job for what is rarely decided by more launches.
MAX_SECONDS = 600.0

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
    file: str = ""  # of the test, as `Outcome` has it
    line: int = 0
    setup: Callable[..., Any] | None  # None where the plan says all
    others: tuple[Callable[..., Any] | None, ...] = ()  # of an RPC launch: the master's and the parameter servers'
    settings: Settings
    plan: Plan
    launches: int  # before the first look
    level: float  # this measurement's error rate
    steps: int | None = None  # of each window; None: as the first launch has it
    batch_size: int | None
    gate: bool
    facts: Mapping[str, Scalar]  # recorded with the measurement, beyond what the ranks tell
    notes: tuple[str, ...] = ()
    max_seconds: float = MAX_SECONDS
    confirms: bool = False  # a suspicion, next to the baseline's own code


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A job that was carried out."""

    result: Result
    outcome: Outcome
    baseline: Baseline | None  # what it was compared with
    candidate: Baseline  # what would be stored
    output: tuple[tuple[RankOutput, ...], ...]  # launch x rank
    shown: Sequence[LaunchSamples] = ()  # that the verdict is about
    other_launches: Sequence[LaunchSamples] = ()  # of the baseline side, if both were interleaved


class Progress(Observer, Protocol):
    """An observer that sees which launch begins and what it measured."""

    def begin(self, launch: int, launches: int) -> None: ...

    def launched(self, samples: LaunchSamples) -> None: ...


def carry_out(
    job: Job,
    launcher: Launcher,
    store: Store,
    progress: Progress,
    base: BaseSide | None = None,
) -> Measured:
    """Launch, judge, and go on where the verdict is open: against the store or, with `base`, against launches there
    that take turns with these. Raises LaunchError and the other errors of a launch, and BaselineError."""
    reference: Stored | Interleaved = Stored(store, job.test, to_extend=job.settings.extend_baseline)
    if base is not None and job.gate:
        here = Here(
            hold=lambda number, of, steps: paused(job, launcher, _begun(progress, number, of), steps),
            alone=lambda: launcher.alone(job.plan, progress),
            launched=progress.launched,
        )
        begin = partial(_begun, progress)
        reference = Interleaved(
            base,
            job.nodeid,
            job.test,
            begin=begin,
            plan=job.plan,
            here=here if job.settings.in_stretches(job.plan) else None,
            why_apart=_why_apart(job.plan) if job.settings.turns == "stretches" else "",
        )
    try:
        return _compared(job, own_launches(job, launcher, progress), reference)
    finally:
        reference.end()


def _why_apart(plan: Plan) -> str:
    """Why its launches take no turns in stretches; "" where nothing forbids it."""
    if plan.nodes > 1:
        return "a launch over several nodes has no stretches"
    return "an RPC launch has no stretches" if plan.rpc else ""


def _compared(job: Job, launches: Launches, reference: Stored | Interleaved) -> Measured:
    looks = schedule(job.launches, job.settings.max_launches)
    reference.take(launches, looks[0], planned=looks[0])
    facts = {**launches.facts, **job.facts}
    environment = store_room.environment(facts, job.plan, batch_size=job.batch_size)
    reason = _not_gated(job, facts)
    reference.read(environment, reason)
    terms = Terms(
        limits=limits_for(job.plan, job.settings.limits),
        level=job.level,
        interleaved=reference.interleaved,
        not_gated=reason,
        confirming=2 * job.launches,
        max_seconds=job.max_seconds,
        stops_early=reference.interleaved and reason is None and _may_stop_early(job),
    )
    judge = Judge(terms, launches, reference, environment)
    verdict = _looked(judge, launches, reference, looks)
    return replace(
        measured(job, launches, environment, verdict, reference.facts(verdict, launches)),
        baseline=reference.baseline(),
        candidate=Baseline(test=job.test, sessions=(judge.recording(),)),
        other_launches=reference.launches,
    )


def _may_stop_early(job: Job) -> bool:
    """Whether an interleaved comparison may end between two looks. Calling suspected code as fast as the baseline's is
    a claim, and the smallest detectable change of `--ddp-against self` has to rest on all pairs."""
    return not job.confirms and job.settings.against != "self"


def _looked(judge: Judge, launches: Launches, reference: Stored | Interleaved, looks: Sequence[int]) -> Verdict:
    """Launch until a look or an early stop ends it, or until there is no time for the next look."""
    for number, look in enumerate(looks, 1):
        if judge.stops_early and (early := _stopped_early(judge, launches, reference, look)) is not None:
            return early
        reference.take(launches, look, planned=look)
        further = number < len(looks) and judge.affords(looks[number])
        verdict, ended = judge(looks[:number], final=not further)
        if ended or not further:
            break
    return verdict


def _stopped_early(judge: Judge, launches: Launches, reference: Stored | Interleaved, look: int) -> Verdict | None:
    """Launch until one is missing to the next look; return the verdict that ended the measurement there, if any."""
    for count in range(len(launches.taken) + 1, look):
        reference.take(launches, count, planned=look)
        verdict, ended = judge.early(count)
        if ended:
            return verdict
    return None


def own_launches(job: Job, launcher: Launcher, progress: Progress) -> Launches:
    """Launches of this process's own ranks."""

    def launch(number: int, of: int, steps: int | None) -> LaunchSamples:
        plan = job.plan if steps is None else job.plan.exactly(steps)
        launched = launcher.measure(plan, job.setup, _begun(progress, number, of), job.others)
        progress.launched(launched)
        return launched

    return Launches(job.plan, launch, steps=job.steps)


def paused(job: Job, launcher: Launcher, observer: Observer, steps: int | None) -> AbstractContextManager[PausedSide]:
    """A launch of this process's own ranks that has warmed up and rests."""
    return launcher.hold(job.plan if steps is None else job.plan.exactly(steps), job.setup, observer)


def _begun(progress: Progress, launch: int, launches: int) -> Progress:
    progress.begin(launch, launches)
    return progress


def measured(
    job: Job, launches: Launches, environment: Environment, verdict: Verdict, side: SideFacts | None = None
) -> Measured:
    """Return the result and the outcome of the launches of the current side."""
    shown, side = launches.taken, side or SideFacts()
    current = measurement(shown, environment)
    settings, collective = job.settings, job.plan.collective
    kind: Callable[..., Result] = Result if collective is None else partial(CollectiveResult, collective=collective)
    return Measured(
        result=kind(
            step_seconds=current.samples.step_seconds,
            samples=current.samples.rank_seconds,
            world_size=job.plan.world_size,
            backend=job.plan.backend,
            verdict=verdict,
            environment=environment,
            counters=current.counters,
            recorded=recorded(shown),
        ),
        outcome=_outcome(
            job,
            verdict=verdict,
            fails=verdicts.fails(verdict, fail_on=settings.fail_on, baseline_missing=settings.baseline_missing),
            measurement=current,
            phases=tuple(launch.phases for launch in shown),
            recorded=recorded(shown),
            baseline_side=side.baseline_side,
            baseline_path=side.baseline_path,
            sessions=side.sessions,
            notes=(*job.notes, *launches.notes(advise=not settings.disable), *side.notes),
        ),
        baseline=None,
        candidate=Baseline(test=job.test, sessions=(Recording(measurement=current),)),
        output=tuple(launch.output for launch in shown),
        shown=shown,
    )


def failed(job: Job, error: str) -> Outcome:
    """Return the outcome of a job that could not be carried out."""
    return _outcome(job, verdict=None, fails=True, error=error, notes=job.notes)


def _outcome(job: Job, **found: Any) -> Outcome:
    """Build the outcome of a job from what was `found`."""
    return Outcome(
        nodeid=job.nodeid,
        test=job.test,
        plan=job.plan,
        launches=job.launches,
        batch_size=job.batch_size,
        file=job.file,
        line=job.line,
        limits=limits_for(job.plan, job.settings.limits),
        level=job.level,
        **found,
    )


def _not_gated(job: Job, facts: Mapping[str, Scalar]) -> str | None:
    """Return the reason code of a measurement that is not compared with anything."""
    if job.settings.disable:
        return "disabled"
    if not job.gate:
        return "gate-off"
    if any(str(facts.get(name)).upper() in values for name, values in _DEBUGGING.items()):
        return "debugging-variable"
    return "saving" if job.settings.records else None
