"""One test's measurement: launches of both sides, a verdict, and the outcome that is reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from pytest_ddpperf import text
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.compare import launches
from pytest_ddpperf.compare.baseline_side import Interleaved, Stored
from pytest_ddpperf.compare.launches import (
    CurrentSide,
    Job,
    Launches,
    measurement,
    recorded,
)
from pytest_ddpperf.compare.stopping_rule import Judge
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.records.plan import Collective
from pytest_ddpperf.records.samples import (
    Baseline,
    Counters,
    Environment,
    LaunchRankSteps,
    LaunchSteps,
    Measurement,
    RankOutput,
    Recorded,
    Recording,
    Status,
    Verdict,
)
from pytest_ddpperf.records.step_phases import by_rank, over_ranks
from pytest_ddpperf.remote.version import BaseSide
from pytest_ddpperf.verdict import decision, times
from pytest_ddpperf.verdict.stats import geometric_mean, launch_means, launch_quantiles


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result:
    """A measurement and its verdict. All times are in seconds."""

    step_seconds: LaunchSteps  #: launch x step: the group's step times
    samples: LaunchRankSteps  #: launch x rank x step: each rank's own step durations
    world_size: int
    backend: str
    verdict: Verdict
    environment: Environment
    counters: Counters  #: per step, the largest over ranks; None where it is unknown
    # : by name, launch x rank x step: the values of `ctx.record`; None if there is none
    recorded: Recorded
    # : where the time of a typical step goes, in seconds by phase, by rank: all but "rank_wait", a
    # part of : "exposed_communication", add up to the step; None where it is unknown; () if nothing
    # is known
    rank_phases: tuple[Mapping[str, float | None], ...]

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} p50={text.seconds(self.p50)} {self.verdict} on"
            f" {self.world_size} ranks>"
        )

    @property
    def phases(self) -> Mapping[str, float | None]:
        """The same, as the mean over ranks; {} if nothing is known."""
        return over_ranks(self.rank_phases)

    def percentile(self, q: float) -> float:
        """Return the q-th percentile (0 to 100) of the group's step time: per launch, then the
        geometric mean over launches, as the verdict has it (of fewer steps, where a baseline has
        fewer)."""
        if not 0 <= q <= 100:
            raise ValueError(f"percentile({q!r}): from 0 to 100")
        return geometric_mean(launch_quantiles(self.step_seconds, q))

    @property
    def mean(self) -> float:
        """The time of the whole window per step: per launch, then the geometric mean over
        launches."""
        return geometric_mean(launch_means(self.step_seconds))

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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CollectiveResult(Result):
    """A measurement of one collective over one size, in nccl-tests' terms too; all times are in
    seconds."""

    collective: Collective

    @property
    def size(self) -> int:
        """The bytes of the largest buffer of a rank."""
        return self.collective.size

    @property
    def algbw(self) -> float:
        """The size over the time, in GB/s (1e9 bytes), at p50."""
        return self.collective.algbw(self.p50)

    @property
    def busbw(self) -> float:
        """What a link carries for every number of ranks, in GB/s (1e9 bytes), at p50."""
        return self.collective.busbw(self.p50)


# All launches of a measurement, but those that confirm a suspicion: twenty launches of half a
# minute. One that takes longer would hold up the job for what is rarely decided by more launches.
MAX_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A job that was carried out: the launches of the current side, what they were compared with,
    and the verdict."""

    job: Job
    verdict: Verdict
    fails: bool  # the test
    environment: Environment  # of the current side
    current: Launches
    side: Stored | Interleaved
    further_notes: tuple[str, ...] = ()
    # with the stored baseline, if this one confirmed or refuted the suspicion
    suspected: Measured | None = None

    @cached_property
    def measurement(self) -> Measurement:
        """What the current side measured."""
        return measurement(self.current.taken, self.environment)

    @property
    def result(self) -> Result:
        """What the test gets."""
        collective = self.job.plan.collective
        kind = (
            Result
            if collective is None
            else partial(CollectiveResult, collective=collective)
        )
        return kind(
            step_seconds=self.measurement.samples.step_seconds,
            samples=self.measurement.samples.rank_seconds,
            world_size=self.job.plan.world_size,
            backend=self.job.plan.backend,
            verdict=self.verdict,
            environment=self.environment,
            counters=self.measurement.counters,
            recorded=recorded(self.current.taken),
            rank_phases=by_rank(self.measurement.phases),
        )

    @property
    def output(self) -> tuple[tuple[RankOutput, ...], ...]:
        """What ranks wrote, launch x rank."""
        before = self.suspected.output if self.suspected is not None else ()
        return (*before, *(launch.output for launch in self.current.taken))

    @property
    def candidate(self) -> Baseline:
        """The baseline that would be saved, with what a later run needs to know of it."""
        recording = Recording(
            measurement=self.measurement,
            resolution=times.resolutions(
                self.measurement, self.job.limits, level=self.job.level
            ),
            distributions=launches.distributions(
                launches.modules_imported(self.current.taken)
            ),
        )
        return Baseline(test=self.job.test, sessions=(recording,))


def carry_out(
    job: Job,
    launcher: Launcher,
    store: Store,
    observer: Observer,
    base: BaseSide | None = None,
    *,
    steps: int | None = None,
    confirm_seconds: float | None = None,
) -> Measured:
    """Launch, judge, and go on while the verdict is open: compare with the store or, with `base`,
    with launches there that are interleaved with these. Raises LaunchError and the other errors of
    a launch, and BaselineError.

    `steps` is the length of each window; with None the first launch decides. `confirm_seconds`
    limit a comparison that confirms a suspicion."""
    current = CurrentSide(job, launcher, observer, steps=steps)
    side: Stored | Interleaved = Stored(
        store, job.test, to_extend=job.settings.extend_baseline
    )
    if base is not None and job.gate:
        side = Interleaved(base, job, observer)
    # The smallest detectable change of the same code has to rest on all pairs. Calling suspected
    # code as fast as the baseline's is a claim, which needs a look.
    gives_up = job.settings.against != "self"
    max_seconds = (
        MAX_SECONDS if confirm_seconds is None else min(MAX_SECONDS, confirm_seconds)
    )
    judge = Judge(
        job,
        current,
        side,
        max_seconds=max_seconds,
        stops_early=gives_up and confirm_seconds is None,
        gives_up=gives_up,
    )
    try:
        verdict = judge.decide()
        fails, environment = does_fail(job, verdict), judge.environment
        if any(change.status is Status.REGRESSED for change in verdict.comparisons):
            side.sample_stacks(current, max_seconds)
        return Measured(
            job=job,
            verdict=verdict,
            fails=fails,
            environment=environment,
            current=current,
            side=side,
        )
    finally:
        side.end()


def does_fail(job: Job, verdict: Verdict) -> bool:
    """Return whether a verdict fails the test of a job."""
    settings = job.settings
    return decision.fails(
        verdict, fail_on=settings.fail_on, baseline_missing=settings.baseline_missing
    )
