"""What was measured: of each rank, of a launch, and of all together, and the decision about it."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from statistics import fmean
from typing import Any

from pytest_ddpperf.records.device import DeviceWork, Kernel
from pytest_ddpperf.records.figure import FigureValues
from pytest_ddpperf.records.plan import Limit, Limits
from pytest_ddpperf.records.quantiles import LaunchRanks, RankSteps, percentile
from pytest_ddpperf.records.quantiles import LaunchRankSteps as LaunchRankSteps
from pytest_ddpperf.records.quantiles import LaunchSteps as LaunchSteps
from pytest_ddpperf.records.reason import Reason as Reason
from pytest_ddpperf.records.reason import Text
from pytest_ddpperf.records.record import record
from pytest_ddpperf.records.step_phases import (
    Means,
    RankPhases,
    StepPhases,
    by_rank,
    over_ranks,
)

Scalar = str | int | float | bool | None
Digests = Mapping[str, str]  # of files, by path or by name
Facts = Mapping[str, Scalar]  # about a machine, a run or a measurement, by name
FoundFacts = dict[str, Scalar]  # facts, while they are gathered
# of each pair of launches, how many steps were taken in a row each time
StretchLengths = Sequence[Sequence[int]]
# by COUNTERS: of a step, the largest over ranks; None where it is unknown
Counters = Mapping[str, int | None]
StepFigures = tuple[float | None, ...]  # by step; None where there is none
RankCounts = tuple[tuple[int, ...], ...]  # rank x step
# rank x step; None where a step recorded none
RankFigures = tuple[StepFigures, ...]
# by the name of the figure, launch x rank x step
Recorded = Mapping[str, tuple[RankFigures, ...]]

# The kind of doubt that work of steps goes on after them.
GOES_ON = "goes on"

# So many a baseline keeps: enough to know the drift between them, few enough for a file that is
# reviewed.
SESSIONS_KEPT = 10


class Status(Text):
    """What a measurement came to."""

    PASS = "PASS"
    IMPROVED = "IMPROVED"
    REGRESSED = "REGRESSED"
    INCONCLUSIVE = "INCONCLUSIVE"
    NO_BASELINE = "NO BASELINE"
    INCOMPARABLE = "INCOMPARABLE"
    NOT_GATED = "NOT GATED"

    @property
    def compared(self) -> bool:
        """Whether figures were compared with a baseline at all."""
        return self in (
            Status.PASS,
            Status.IMPROVED,
            Status.REGRESSED,
            Status.INCONCLUSIVE,
        )


@record
class Samples:
    """The raw durations of a measurement, in seconds. All launches have the same ranks and
    steps."""

    # the group's step times (completion to completion)
    step_seconds: LaunchSteps
    rank_seconds: LaunchRankSteps  # each rank's own step durations
    # CPU time of each rank's Python threads; None off CPU
    cpu_seconds: LaunchRankSteps | None = None
    # launch x rank x step, if steps return it
    examples: tuple[RankCounts, ...] | None = None
    # each trainer's wait for RPC; None where there is none
    blocked_seconds: LaunchRankSteps | None = None
    # Launch x step: the first after the asked warm-up, each the mean over ranks; None where it is
    # not finite.
    losses: tuple[StepFigures, ...] | None = None
    # launch x rank: minor ones, the mean over steps
    page_faults: LaunchRanks | None = None
    # launch x rank: of Python's garbage collector, the mean over steps
    collector_seconds: LaunchRanks | None = None
    # Launch x rank, of a step: computation and copies on the device, how long it did either, and
    # how long it only communicated; None where they are unknown.
    device_seconds: LaunchRanks | None = None
    busy_seconds: LaunchRanks | None = None
    exposed_seconds: LaunchRanks | None = None
    # of the user's own, by name
    figures: Mapping[str, FigureValues] = field(default_factory=dict)

    @property
    def launches(self) -> int:
        return len(self.step_seconds)

    @property
    def steps(self) -> int:
        """Of each launch."""
        return len(self.step_seconds[0])

    @property
    def p50(self) -> float:
        """The step time at p50: see `percentile`."""
        return percentile(self.step_seconds, 50)

    @property
    def most_collector_seconds(self) -> list[float]:
        """By launch, of the rank that has most; [] where they are unknown."""
        return [max(ranks) for ranks in self.collector_seconds or ()]

    @property
    def most_page_faults(self) -> list[float]:
        """By launch, of the rank that has most; [] where they are unknown."""
        return [max(ranks) for ranks in self.page_faults or ()]

    def first(self, steps: int) -> "Samples":
        """With so many steps of each launch, those that came first."""
        tables: dict[str, Any] = {
            "step_seconds": tuple(
                launch[:steps] for launch in self.step_seconds
            )
        }
        for name in (
            "rank_seconds",
            "cpu_seconds",
            "examples",
            "blocked_seconds",
        ):
            if (table := getattr(self, name)) is not None:
                tables[name] = tuple(
                    tuple(rank[:steps] for rank in launch) for launch in table
                )
        return replace(self, **tables)


@record
class Environment:
    """Facts about where figures were taken, in the three classes that decide what may be
    compared."""

    #: another key is another baseline
    key: Facts = field(default_factory=dict)
    #: a difference is INCOMPARABLE
    must_match: Facts = field(default_factory=dict)
    #: a difference is reported
    recorded: Facts = field(default_factory=dict)


@record
class Measurement:
    """One side of a comparison."""

    samples: Samples
    environment: Environment = field(default_factory=Environment)
    counters: Counters = field(default_factory=dict)
    phases: tuple[StepPhases, ...] = ()  # by launch; () where they are unknown
    # of the rank whose device works longest: the mean over launches, the longest first; () where
    # they are unknown
    kernels: tuple[Kernel, ...] = ()

    @property
    def mean_phases(self) -> Means:
        """The mean over launches and ranks; {} if nothing is known."""
        return over_ranks(by_rank(self.phases))

    @property
    def busy_share(self) -> float | None:
        """For which share of a step a device computes or copies: the mean over launches and ranks;
        None where it is unknown."""
        return self._share(self.samples.busy_seconds)

    @property
    def waiting_share(self) -> float | None:
        """For which share of a step a device does nothing, as `busy_share`; None where that is
        unknown."""
        busy = self.busy_share
        exposed = self._share(self.samples.exposed_seconds)
        if busy is None or exposed is None:
            return None
        return max(1 - busy - exposed, 0.0)

    def _share(self, seconds: LaunchRanks | None) -> float | None:
        if seconds is None:
            return None
        shares = [
            fmean(ranks) / fmean(steps)
            for ranks, steps in zip(
                seconds, self.samples.step_seconds, strict=True
            )
        ]
        return min(fmean(shares), 1.0)


Measurements = Sequence[Measurement]


@record
class TestId:
    """Whose measurement it is, independent of how pytest was called."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    # path from rootdir with "/", without ".py"; the import name outside rootdir, or
    # installed
    module: str
    name: str  # "TestClass::test_step[param]", world size excluded
    label: str = ""  # the `name` of a ddp_benchmark call, "" for the first

    def __str__(self) -> str:
        label = f" ({self.label})" if self.label else ""
        return f"{self.module}::{self.name}{label}"


@record
class Distribution:
    """An installed distribution."""

    version: str
    # of the files that it brought, by its RECORD: 16 hex digits; "" where it has none
    digest: str


@record
class Recording:
    """What one session left in a baseline, and where it came from."""

    measurement: Measurement
    created: str = ""  # ISO 8601, UTC
    # "" outside a git repository; "-dirty" appended with uncommitted changes
    commit: str = ""
    # by metric, as `Comparison.resolution`
    resolution: Mapping[str, float] = field(default_factory=dict)
    # that it is judged by, and how many launches were asked for; () and 0 if it does not say
    limits: Limits = ()
    launches: int = 0
    # git's, of all files in the repository but baselines; "" if it does not identify
    # the code
    tree: str = ""
    # by name, those that ranks imported from
    distributions: Mapping[str, Distribution] = field(default_factory=dict)
    # files in no commit that ranks read: path -> digest
    inputs: Digests = field(default_factory=dict)
    why: str = ""  # it was saved, in the user's words; "" if nobody said


@record
class Baseline:
    """What is stored of one test in one environment: its sessions, oldest first, at least one."""

    test: TestId
    sessions: tuple[Recording, ...]

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        return tuple(session.measurement for session in self.sessions)

    @property
    def environment(self) -> Environment:
        """Return the environment that all sessions share; recorded facts are those of the first."""
        return self.sessions[0].measurement.environment


@record
class Interval:
    """A relative change between two one-sided bounds: 0.05 is 5 % slower."""

    estimate: float
    low: float
    high: float


@record
class Ratio:
    """The step time of a test over that of its reference, between two one-sided bounds: 1.05 is 5 %
    slower."""

    estimate: float
    lower: float
    upper: float


@record
class Speeds:
    """The launches of both sides have two speeds: how many have the slow one."""

    fast_seconds: float  #: of fast launches, the geometric mean
    slow_seconds: float
    slow: int  #: of `launches` now
    launches: int
    slow_before: int  #: of `launches_before` of the baseline
    launches_before: int
    p_value: float  #: one-sided: that the share of slow ones is no larger now
    least_p_value: float  #: the same, if all slow ones that it can were of now


@record
class Comparison:
    """One limit, applied to figures."""

    limit: Limit
    status: Status
    reason: Reason
    baseline_seconds: float
    now_seconds: float
    #: its bounds are at `level`: they exclude 0 where there is evidence
    change: Interval
    p_value: float  #: one-sided, in the direction of the estimate
    #: that `p_value` is compared with: the limit's share of the test's error rate
    level: float
    #: the relative slowdown that would be found four times out of five
    resolution: float
    #: how likely unchanged code is beyond the limit with evidence, by this error
    alarm_rate: float
    settled: bool  #: whether further launches would hardly bring another status
    #: the relative spread between sessions that was reckoned with; None: one occasion
    drift: float | None = None
    #: about, now, for `resolution` to reach the limit; None: it does, or none do
    launches_needed: int | None = None
    #: relative change from the fastest launches of sessions to now's; None: one occasion
    fastest: float | None = None
    #: None: launches have one speed, or another limit shows their speeds
    speeds: Speeds | None = None


@record
class CounterChange:
    """One limit on a counter, compared with the baseline's. Counts have no noise: there is no
    evidence to weigh."""

    limit: Limit
    status: Status
    baseline: int
    now: int

    @property
    def change(self) -> float:
        """Relative: 0.05 is 5 % more. From nothing to something it is endless, which no limit
        allows: 1e9."""
        if self.baseline == 0:
            return 1e9 if self.now else 0.0
        return self.now / self.baseline - 1


Change = Comparison | CounterChange


@record
class LossChange:
    """The means of the losses of both sides, which differ by more than launches of the same code
    do."""

    before: float | None  #: None: a loss of this side is not finite
    now: float | None


EXAMPLES = "examples"


@record
class Fall:
    """What a step does less of than the baseline's: "flops", "gradient_bytes" or EXAMPLES."""

    name: str
    before: float
    now: float


@record
class FactChange:
    """A fact of the environment that differs."""

    name: str
    before: str  #: "unset" if it is not known
    now: str

    def __str__(self) -> str:
        """ "torch 2.12 -> 2.13"."""
        return f"{self.name} {self.before} -> {self.now}"


@record
class Dropped:
    """A limit that is not applied."""

    limit: Limit
    why: str

    def __str__(self) -> str:
        """ "p95:10%: needs at least 59 timed steps"."""
        return f"{self.limit}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdict:
    """The decision about one measurement: a status and a reason code, with what it rests on.

    Equal to its status's text, so that a test may say `result.verdict == "PASS"`.
    """

    status: Status
    reason: Reason
    comparisons: tuple[Comparison, ...] = ()
    dropped_limits: tuple[Dropped, ...] = ()  #: default ones without support
    facts: tuple[FactChange, ...] = ()  #: of the environment, those that differ
    #: of INCOMPARABLE, what the reason code does not say: "rpc.bytes is unknown now"
    details: tuple[str, ...] = ()
    counters: tuple[CounterChange, ...] = ()
    less: tuple[Fall, ...] = ()  #: what a step does less of
    #: of the baseline; with one, the drift between sessions was assumed, not measured
    sessions: int = 0
    #: the losses, if they show that both sides compute something else
    diverged: LossChange | None = None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Verdict):
            return all(
                getattr(self, name) == getattr(other, name)
                for name in self.__slots__
            )
        return self.status.value == other

    def __hash__(self) -> int:
        return hash(self.status.value)

    def __str__(self) -> str:
        return self.status.value

    @property
    def differences(self) -> tuple[str, ...]:
        """The details, and the facts that differ, as text: "torch 2.12 -> 2.13"."""
        return (*self.details, *map(str, self.facts))

    @property
    def dropped(self) -> tuple[str, ...]:
        """The dropped limits as text."""
        return tuple(map(str, self.dropped_limits))

    @property
    def shown(self) -> Change | None:
        """The change that every report shows: of the counter that decided, else of a time."""
        if self.reason in (Reason.COUNTER_ROSE, Reason.COUNTER_FELL):
            decisive = [c for c in self.counters if c.status is self.status]
            return max(decisive, key=lambda c: abs(c.change))
        return self.worst

    @property
    def worst(self) -> Comparison | None:
        """A comparison that decided, if any did: of several p50, else the largest change."""
        decisive = [c for c in self.comparisons if c.status is self.status]
        same = decisive or self.comparisons
        at_p50 = [c for c in same if c.limit.metric == "p50"]
        which = min if self.status is Status.IMPROVED else max
        return which(
            at_p50 or same, key=lambda c: c.change.estimate, default=None
        )


@record
class LaunchCost:
    """What one launch cost, in seconds, by phase: from the request until every rank had ended."""

    start: float = 0.0  # fork, environment, unpickling
    group: float = 0.0  # init_process_group
    setup: float = 0.0
    warmup: float = 0.0
    steps: float = 0.0
    end: float = 0.0  # results, clean-up, exit

    @property
    def total(self) -> float:
        total: float = sum(astuple(self))
        return total


@record
class RankError:
    """Why one rank did not deliver, as the rank or the rank server saw it."""

    rank: int  # of the launch's processes, from 0
    when: float  # CLOCK_MONOTONIC, seconds
    phase: str  # "setup", "warm-up step 2 of 5", "step 7 of 30", ...
    # one line: "ValueError: bad shape", "killed by SIGSEGV", "exit status 3"
    summary: str
    traceback: str = ""  # the rank's own
    # a consequence of another rank's end, most likely
    lost_connection: bool = False
    waits: bool = False  # of one that hung: for another, most likely
    # of a program that ended early: what helps if it did in all ranks
    advice: str = ""
    name: str = ""  # as `Plan.name`; "" is "rank N"

    @property
    def who(self) -> str:
        return self.name or f"rank {self.rank}"


@record
class RankOutput:
    """What a rank wrote, cut in the middle where it was long."""

    rank: int
    name: str  # as `Plan.name`
    stdout: str
    stderr: str


Outputs = tuple[RankOutput, ...]  # of the ranks of a launch


@record
class Imported:
    """Where the modules of one process came from, where that is asked; and which variables its code
    read."""

    files: tuple[str, ...] = ()  # of the user's repository: paths from its top
    # top-level modules from outside of it, as `Trees.others`
    others: tuple[str, ...] = ()
    # as `wire.variables` has them
    variables: Mapping[str, str] = field(default_factory=dict)


@record
class StackSamples:
    """Where one rank's training thread was while its steps were timed, at random times."""

    taken: int  # how often it was looked at
    # The functions of the repository on the stack, the innermost first, as "file:name" with the
    # file from the top, and how often they were seen.
    functions: tuple[tuple[tuple[str, ...], int], ...]


@record
class Window:
    """What one rank measured, as it delivers it."""

    # of each stretch: the start, then the end of each step, CLOCK_MONOTONIC
    marks_ns: tuple[tuple[int, ...], ...]
    # CPU time of the Python threads by step; None off CPU
    cpu_ns: tuple[int, ...] | None
    examples: tuple[int, ...] | None  # by step, if every step returned it
    blocked_ns: tuple[int, ...]  # by step, what it waited for RPC
    counters: Counters
    # what was still changing when the warm-up ended at its cap, in words
    unsettled: str
    warmup: int  # steps it took
    # collectives of the first warm-up step and of the counted one, where they are known
    sent: tuple[int, ...] = ()
    # of the first timed step to the median of the others; 0 if it says nothing
    first_ratio: float = 0.0
    # by name and step
    recorded: Mapping[str, StepFigures] = field(default_factory=dict)
    # of one launch and one rank: those that have a direction, and those of a program
    figures: Mapping[str, FigureValues] = field(default_factory=dict)
    phases: RankPhases | None = None  # None where they are unknown
    # of the first steps after the asked warm-up; None: not finite
    losses: StepFigures = ()
    stacks: StackSamples | None = None  # of a launch that samples them
    page_faults: float = 0.0  # minor ones, the mean over steps
    collector_seconds: float = 0.0  # as `Samples` has it
    # whether this process or its children were busy after the steps
    goes_on: bool = False
    # why it says little of steady training, in words, by what happened and not by its
    # times
    unfit: str = ""
    device: DeviceWork | None = None  # None where it is unknown
    left_out: int = 0  # updates of a program that were shorter than others
    # of the steps, how many were taken in a row each time
    stretches: tuple[int, ...] = ()
    # why phases, or a trace that was asked for, are missing
    notes: tuple[str, ...] = ()
    # the environment, of rank 0
    facts: Facts = field(default_factory=dict)
    imported: Imported = Imported()


Windows = Sequence[Window]  # of a launch, by rank


@record
class LaunchSamples:
    """What one launch brought back."""

    step_seconds: tuple[float, ...]  # of several nodes, on the first's clock
    rank_seconds: RankSteps  # rank x step
    # of the steps, how many were taken in a row each time
    stretches: tuple[int, ...]
    cpu_seconds: RankSteps | None  # rank x step
    examples: RankCounts | None  # rank x step
    blocked_seconds: RankSteps | None  # trainer x step
    counters: Counters
    cost: LaunchCost
    # the environment: rank 0's, the machine's, the user's variables
    facts: Facts
    output: Outputs
    # by name, what steps recorded
    recorded: Mapping[str, RankFigures] = field(default_factory=dict)
    # of one launch: those that are judged
    figures: Mapping[str, FigureValues] = field(default_factory=dict)
    losses: StepFigures | None = None  # as `Samples` has them
    # by rank: minor ones, the mean over steps
    page_faults: tuple[float, ...] | None = None
    collector_seconds: tuple[float, ...] | None = None  # by rank
    # by rank, as `Samples` has them
    device_seconds: tuple[float, ...] | None = None
    busy_seconds: tuple[float, ...] | None = None
    exposed_seconds: tuple[float, ...] | None = None
    kernels: tuple[tuple[Kernel, ...], ...] = ()  # by rank, if all know them
    notes: tuple[str, ...] = ()  # what went oddly without making it a failure
    # why it says little of steady training: "rank 0 recompiled at step 17"
    unfit: str = ""
    # what still changed when the warm-up ended at its cap: "compiling"
    unsettled: str = ""
    warmup: int = 0  # steps it took
    # by kind, why steps may differ in their work, in words
    doubts: Mapping[str, str] = field(default_factory=dict)
    phases: StepPhases | None = None  # None where they are unknown
    # whether several ranks are known to send nothing to each other
    is_silent: bool = False
    # by rank, of a launch that samples them
    stacks: tuple[StackSamples, ...] = ()
    # of the repository: path from its top -> digest
    files: Digests = field(default_factory=dict)
    # other shared libraries: name -> digest
    libraries: Digests = field(default_factory=dict)
    others: tuple[str, ...] = ()  # `Imported.others` of any process
