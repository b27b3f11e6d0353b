"""What a machine has, how steady it is, and what keeps it from being steadier: what `ddpperf doctor` tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_ddpperf.records.asked import Limit
from pytest_ddpperf.records.measured import Scalar

Cores = tuple[int, ...]  # the kernel's numbers of hardware threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """As nvidia-smi has it; None is what it does not tell."""

    index: int
    name: str
    persistence: bool | None = None
    power_limit_watts: float | None = None
    default_power_watts: float | None = None
    clock_mhz: float | None = None
    most_clock_mhz: float | None = None
    slowed_by: tuple[str, ...] = ()  # what holds its clocks down now: "power cap"
    busy: float | None = None  # share of the last moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A NUMA node."""

    number: int
    cores: Cores  # those of them that this process may use
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the system tells of itself; what it does not tell is None or empty."""

    usable: Cores  # by this process
    online: int  # cores there are
    siblings: tuple[Cores, ...] = ()  # usable hardware threads, those of one core together
    packages: int | None = None
    nodes: tuple[Node, ...] = ()
    governors: tuple[str, ...] = ()  # of the usable cores' clocks
    boost: bool | None = None  # whether clocks go beyond the base clock where heat allows
    virtual: bool | None = None
    memory_bytes: int | None = None
    available_bytes: int | None = None
    swap_used_bytes: int | None = None
    huge_pages: str = ""  # "always", "madvise" or "never"
    quota_cores: float | None = None  # CPU time a second that its cgroup may use
    memory_limit_bytes: int | None = None  # of its cgroup
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLoad:
    """What a core did, as shares of the time."""

    core: int
    busy: float
    stolen: float  # by the hypervisor, for others


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """A process that uses CPU time."""

    pid: int
    name: str
    cores: float  # CPU time a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What went on for so long."""

    seconds: float
    cores: tuple[CoreLoad, ...] = ()  # the usable ones
    processes: tuple[Busy, ...] = ()  # other than this one, the busiest first
    throttled: int | None = None  # periods in which the cgroup's quota was used up
    throttled_seconds: float = 0.0
    swapped_pages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What there is and what goes on, before anything is measured."""

    machine: Machine
    load: Load
    world_size: int
    device: str = ""  # that ranks run on; "" where none can
    gpus: tuple[int, ...] = ()  # nvidia-smi's numbers of those that ranks run on
    place: str = ""  # where ranks run, in words
    crowded: int = 0  # threads that the environment asks for in each rank, where its share of cores has fewer
    timing: tuple[str, ...] = ()  # cores and devices on which others time steps now: "cpu0, held by pid 12"
    facts: Mapping[str, Scalar] = field(default_factory=dict)  # of a probe rank
    problem: str = ""  # why no rank could be started


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What a gate can tell, by metric: shares, 0.05 is 5 % slower."""

    launches: int  # a side
    spread: Mapping[str, float]  # standard deviation of launches, or of what sets both sides of a pair apart
    resolution: Mapping[str, float]  # the slowdown that would be found four times out of five


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Launches on some of the cores, taken in turns with as many on all."""

    code: str  # of the finding that it is about
    cores: Cores
    here: Resolved | None = None  # None where time was too short for two launches
    all_cores: Resolved | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How far launches of the same code differ here."""

    seconds: float  # that it took
    steps: int = 0  # of a window
    step_seconds: float = 0.0  # median
    limits: tuple[Limit, ...] = ()
    stored: tuple[Resolved, ...] = ()  # against a stored baseline of one session, with more and more launches
    drift: float = 0.0  # between sessions, as it is assumed for the last of these
    turns: tuple[Resolved, ...] = ()  # with both sides in turns
    in_stretches: bool = False  # how these take turns
    trials: tuple[Trial, ...] = ()
    during: Load | None = None
    problem: str = ""  # why it ended early


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What could be steadier."""

    code: str  # "governor", "load", ...
    problem: str
    remedy: str
    gain: str | None = ""  # what it brings, as it was measured; "" where it was not, None where nothing gets steadier


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that the doctor found."""

    survey: Survey
    noise: Noise | None  # None where nothing could be measured
    findings: tuple[Finding, ...]
