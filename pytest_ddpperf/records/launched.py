"""What one launch brought back: of each rank, and of all together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_ddpperf.records.measured import Counters, RankFigures, Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """What one launch cost, in seconds, by phase: from the request until every rank had ended."""

    start: float = 0.0  # fork, environment, unpickling
    group: float = 0.0  # init_process_group
    setup: float = 0.0
    warmup: float = 0.0
    steps: float = 0.0
    end: float = 0.0  # results, clean-up, exit

    @property
    def total(self) -> float:
        return self.start + self.group + self.setup + self.warmup + self.steps + self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """Why one rank did not deliver, as far as the rank or the rank server could tell."""

    rank: int  # of the launch's processes, from 0
    when: float  # CLOCK_MONOTONIC, seconds
    phase: str  # "setup", "warm-up step 2 of 5", "step 7 of 30", ...
    summary: str  # one line: "ValueError: bad shape", "killed by SIGSEGV", "exit status 3"
    traceback: str = ""  # the rank's own
    lost_connection: bool = False  # a consequence of another rank's end, most likely
    waits: bool = False  # of one that hung: for another, most likely
    name: str = ""  # as `Plan.name`; "" is "rank N"

    @property
    def who(self) -> str:
        return self.name or f"rank {self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutput:
    """What a rank wrote, cut in the middle where it was long."""

    rank: int
    name: str  # as `Plan.name`
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Where the modules of one process came from; empty where it is not asked."""

    files: tuple[str, ...] = ()  # of the user's repository: paths from its top
    others: tuple[str, ...] = ()  # from elsewhere: top-level modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one rank measured, as it delivers it."""

    marks_ns: tuple[tuple[int, ...], ...]  # of each stretch: the start, then the end of each step, CLOCK_MONOTONIC
    cpu_ns: tuple[int, ...] | None  # CPU time of the training thread by step; None off CPU
    examples: tuple[int, ...] | None  # by step, if every step told
    blocked_ns: tuple[int, ...]  # by step, what it waited for RPC
    counters: Counters
    compiled_at: int  # the first timed step, from 1, that handed something to torch.compile; 0 for none
    unsettled: str  # what was still changing when the warm-up ended at its cap, in words
    warmup: int  # steps it took
    recorded: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)  # by name and step
    facts: Mapping[str, Scalar] = field(default_factory=dict)  # the environment, of rank 0
    imported: Imported = Imported()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSamples:
    """What one launch brought back."""

    step_seconds: tuple[float, ...]  # of several nodes, on the first's clock
    rank_seconds: tuple[tuple[float, ...], ...]  # rank x step
    stretches: tuple[int, ...]  # of the steps, how many were taken in a row each time
    cpu_seconds: tuple[tuple[float, ...], ...] | None  # rank x step
    examples: tuple[tuple[int, ...], ...] | None  # rank x step
    blocked_seconds: tuple[tuple[float, ...], ...] | None  # trainer x step
    counters: Counters
    phases: Phases
    facts: Mapping[str, Scalar]  # the environment: rank 0's, the machine's, the user's variables
    output: tuple[RankOutput, ...]
    recorded: Mapping[str, RankFigures] = field(default_factory=dict)  # by name, what steps recorded
    notes: tuple[str, ...] = ()  # what went oddly without making it a failure
    unfit: str = ""  # why it says little of steady training: "rank 0 recompiled at step 17"
    unsettled: str = ""  # what still changed when the warm-up ended at its cap: "compiling"
    warmup: int = 0  # steps it took
    node_seconds: tuple[float, ...] | None = None  # of several nodes, the steps of the first node's ranks alone
    clock_seconds: float | None = None  # by how much marks of several nodes may be apart
    files: Mapping[str, str] = field(default_factory=dict)  # `Imported.files` of any process: path -> digest
    others: tuple[str, ...] = ()  # `Imported.others` of any process
