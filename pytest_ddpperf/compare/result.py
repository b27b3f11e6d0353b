"""What a measurement comes to: `Result` for the test, and `Measured` for everything that reports or
saves it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pytest_ddpperf import text
from pytest_ddpperf.compare.job import Job
from pytest_ddpperf.compare.packages import distributions
from pytest_ddpperf.compare.rounds import (
    SILENT,
    Launches,
    Rounds,
    baseline_launches,
    current_launches,
    find_apart,
    find_error,
    find_notes,
    recorded,
)
from pytest_ddpperf.compare.sides import (
    NOTHING_STORED,
    OtherVersion,
    StoredBaseline,
)
from pytest_ddpperf.records import quantiles
from pytest_ddpperf.records.figure import FigureValues
from pytest_ddpperf.records.outcome import BaselineSide
from pytest_ddpperf.records.plan import COUNTER_LIMITS, Collective, Limits
from pytest_ddpperf.records.samples import (
    Baseline,
    Counters,
    Environment,
    LaunchRankSteps,
    LaunchSteps,
    Measurement,
    Outputs,
    Ratio,
    Recorded,
    Recording,
    Status,
    Verdict,
)
from pytest_ddpperf.records.step_phases import by_rank, over_ranks
from pytest_ddpperf.remote.worktree import differing_files
from pytest_ddpperf.verdict import times
from pytest_ddpperf.wire.source_trees import is_code


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result:
    """A measurement and its verdict. All times are in seconds."""

    step_seconds: LaunchSteps  #: launch x step: the group's step times
    #: launch x rank x step: each rank's own step durations
    samples: LaunchRankSteps
    world_size: int  #: 0 of a command, whose ranks are its own
    backend: str  #: "" of a command
    verdict: Verdict
    environment: Environment
    #: per step, the largest over ranks; None where it is unknown
    counters: Counters
    #: by name, launch x rank x step: the values of `ctx.record`; None if there is none
    recorded: Recorded
    #: by name, those that have a direction, and those that a program writes: `values` is launch x
    #: rank x value
    figures: Mapping[str, FigureValues]
    #: where the time of a typical step goes, in seconds by phase, by rank: all but "rank_wait", a
    #: part of "exposed_communication", add up to the step; None where it is unknown; () if nothing
    #: is known
    rank_phases: tuple[Mapping[str, float | None], ...]
    #: to the reference, at p50 or, where p50 has no limit, of the first limit; None without a
    #: reference, or if the sides were not compared (`--ddp-disable`, `INCOMPARABLE`)
    ratio: Ratio | None = None

    def __repr__(self) -> str:
        figures = f"p50={text.seconds(self.p50)} {self.verdict}"
        ranks = f" on {self.world_size} ranks" if self.world_size else ""
        return f"<{type(self).__name__} {figures}{ranks}>"

    @property
    def phases(self) -> Mapping[str, float | None]:
        """Where the time of a typical step goes, in seconds by phase, as the mean over ranks; {} if
        nothing is known."""
        return over_ranks(self.rank_phases)

    def percentile(self, q: float) -> float:
        """Return the q-th percentile (0 to 100) of the group's step time: per launch, then the
        geometric mean over launches, as the verdict has it (of fewer steps, where a baseline has
        fewer)."""
        if not 0 <= q <= 100:
            raise ValueError(f"percentile({q!r}): from 0 to 100")
        return quantiles.percentile(self.step_seconds, q)

    @property
    def mean(self) -> float:
        """The time of the whole window per step: per launch, then the geometric mean over
        launches."""
        return quantiles.mean(self.step_seconds)

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


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A job that was carried out: its rounds, what they were compared with, and the verdict."""

    job: Job
    verdict: Verdict
    fails: bool  # the test
    rounds: Rounds
    measurement: Measurement  # what the current side measured
    before: tuple[Measurement, ...] = ()  # what the verdict compares it with
    stored: StoredBaseline = NOTHING_STORED
    other: OtherVersion | None = None  # whose launches were interleaved
    # of both sides, the current one first: they sampled stacks
    sampled: Launches = ()
    further_notes: tuple[str, ...] = ()
    # with the stored baseline, if this one confirmed or refuted the suspicion
    suspected: "Measured | None" = None

    @property
    def launches(self) -> Launches:
        """The launches of the current side."""
        return current_launches(self.rounds)

    @property
    def limits(self) -> Limits:
        """The limits that it is judged by."""
        return self.job.limits([self.measurement, *self.before])

    @property
    def steps(self) -> int:
        """The steps of each window of the current side."""
        return len(self.launches[0].step_seconds)

    @property
    def result(self) -> Result:
        """What the test gets."""
        plan = self.job.plan
        collective = plan.collective
        kind = (
            Result
            if collective is None
            else partial(CollectiveResult, collective=collective)
        )
        return kind(
            step_seconds=self.measurement.samples.step_seconds,
            samples=self.measurement.samples.rank_seconds,
            world_size=0 if plan.command else plan.world_size,
            backend=plan.backend,
            verdict=self.verdict,
            environment=self.measurement.environment,
            counters=self.measurement.counters,
            recorded=recorded(self.launches),
            figures=self.measurement.samples.figures,
            rank_phases=by_rank(self.measurement.phases),
            ratio=self.ratio,
        )

    @property
    def ratio(self) -> Ratio | None:
        """As `Result` has it."""
        comparisons = self.verdict.comparisons
        is_comparable = self.verdict.status is not Status.INCOMPARABLE
        if self.job.reference is None or not comparisons or not is_comparable:
            return None
        at_p50 = [each for each in comparisons if each.limit.metric == "p50"]
        change = text.changed([*at_p50, *comparisons][0])
        return Ratio(
            estimate=1 + change.estimate,
            lower=1 + change.low,
            upper=1 + change.high,
        )

    @property
    def output(self) -> tuple[Outputs, ...]:
        """What ranks wrote, launch x rank."""
        before = self.suspected.output if self.suspected is not None else ()
        return (*before, *(launch.output for launch in self.launches))

    @property
    def candidate(self) -> Baseline:
        """The baseline that would be saved, with what a later run needs to know of it."""
        limits = self.job.limits([self.measurement])
        recording = Recording(
            measurement=self.measurement,
            resolution=times.resolutions(
                self.measurement, limits, level=self.job.level
            ),
            limits=tuple(
                limit
                for limit in limits
                if limit not in COUNTER_LIMITS  # which are the same for all
            ),
            launches=self.job.launches,
            distributions=distributions(self.launches),
            why=self.job.settings.why or "",
        )
        return Baseline(test=self.job.test, sessions=(recording,))

    # --- the other version

    @property
    def error(self) -> str:
        """What went wrong in the other version, "" if nothing did."""
        began = self.other.error if self.other is not None else ""
        return began or find_error(self.rounds)

    @property
    def differing(self) -> tuple[str, ...]:
        """The files that ranks used and that are not the same on both sides. Of a reference, all
        that both use are."""
        there = baseline_launches(self.rounds)
        if not there or self.job.reference is not None:
            return ()
        files = self.launches[0].files, there[0].files
        return tuple(
            file
            for file in differing_files(*files)
            # data may be read by one side, or written
            if is_code(file)
            or all(side.get(file) for side in files)
            or (self.other is not None and file in self.other.changed)
        )

    @property
    def baseline_side(self) -> BaselineSide | None:
        """What the other version measured; None if there is none."""
        if self.other is None:
            return None
        stretches = tuple(launch.stretches for launch in self.launches)
        were_interleaved = any(len(pair) > 1 for pair in stretches)
        first = (*self.launches[:1], *baseline_launches(self.rounds)[:1])
        read = {file for launch in first for file in launch.files}
        return BaselineSide(
            version=self.other.version,
            order="".join(each.order for each in self.rounds),
            stretches=stretches if were_interleaved else (),
            measurement=self.before[0] if self.before else None,
            imported=sum(map(is_code, read)),
            read=tuple(sorted(read)),
            differing=self.differing,
            error=self.error,
        )

    def notes(self, rootdir: Path) -> tuple[str, ...]:
        """Return all notes on it, with paths from `rootdir`; of the other version's launches those
        that do not hold for the current side, too."""
        job = self.job
        advise = not job.settings.disable
        own = find_notes(self.launches, job.plan, advise=advise)
        notes = [*job.notes, *own]
        if self.other is None:
            notes += self.stored.notes(self.verdict, self.steps, rootdir)
            return (*notes, *self.further_notes)
        apart = find_apart(self.rounds)
        if apart and not self.error:
            notes.append(
                f"measured one launch after the other: with both sides alive, {apart}"
            )
        is_over_nodes = job.plan.nodes > 1 and not self.error
        if is_over_nodes and job.settings.wants_stretches(job.plan):
            notes.append(
                "measured one launch after the other: the ranks are on several nodes"
            )
        there = baseline_launches(self.rounds)
        version = self.other.version
        # a reference may be without communication on purpose
        said = {*own, SILENT} if version.is_reference else {*own}
        for note in find_notes(there, self.other.job.plan, advise=advise):
            if note not in said:
                notes.append(f"{version}: {note}")
        return (*notes, *self.further_notes)
