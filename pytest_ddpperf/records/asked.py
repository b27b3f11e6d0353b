"""What is asked of a measurement: all that options need of the records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pytest_ddpperf.records.collective import Collective

# What a step is counted to do, exactly: see docs/counters.md.
COUNTERS = ("rpc.calls", "rpc.bytes", "all_reduce.count", "all_reduce.bytes", "gradient_bytes")

# The metric of a collective's limit on bandwidth.
BANDWIDTH = "busbw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How much worse than the baseline one metric may get: `p50:5%`, `p95:2ms`, `cpu_p50:5%`, `rpc.bytes:0%`."""

    metric: str  #: "p50", "p99.9", "cpu_p10", "busbw", or one of COUNTERS
    value: float  #: a share for "%" (0.05), seconds for "ms" (0.002)
    unit: Literal["%", "ms"]
    default: bool = False  #: ours, so it may be dropped where the asked steps cannot support it

    @property
    def is_counter(self) -> bool:
        return self.metric in COUNTERS

    @property
    def is_cpu_time(self) -> bool:
        return self.metric.startswith("cpu_")

    @property
    def is_bandwidth(self) -> bool:
        """Whether less is worse: what a collective moves in the time of a step at p50."""
        return self.metric == BANDWIDTH

    @property
    def percentile(self) -> float:
        """The q of pNN, from 0 to 100."""
        if self.is_bandwidth:
            return 50.0
        return float(self.metric.removeprefix("cpu_").removeprefix("p"))

    def __str__(self) -> str:
        scale = 100.0 if self.unit == "%" else 1000.0
        return f"{self.metric}:{self.value * scale:.10g}{self.unit}"


# On time, unless the user names others.
TIME_LIMITS = tuple(Limit(metric=metric, value=0.1, unit="%", default=True) for metric in ("p10", "p50"))
# On counters, unless the user names another for the same one.
COUNTER_LIMITS = (Limit(metric="rpc.bytes", value=0.0, unit="%", default=True),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that a launch needs to know; the same for every launch of a test but for the window: see `exactly`."""

    world_size: int  # of the process group whose steps are timed: all ranks, or an RPC launch's trainers
    nodes: int = 1  # that these are dealt over, in equal parts
    backend: str  # a name torch knows, never "auto"; "" for no process group (the probe)
    device: str  # a device type: "cpu", "cuda", ...
    warmup: int = 0  # steps
    steps: int = 1  # timed, at least
    min_seconds: float = 0.0  # that the timed steps shall take, where `most_steps` allow it; 0: exactly `steps`
    most_steps: int = 0  # timed; less than `steps` has no effect
    timing: Literal["free", "step"] = "step"
    timeout_seconds: float = 300.0
    seed: int = 0
    preload: tuple[str, ...] = ()
    parameter_servers: int = 0  # with some it is an RPC launch: trainers, then these, then the master
    master: bool = False
    collective: Collective | None = None  # is the step, instead of what a set-up makes
    # "action:message:category:module:line", message and module as patterns; the last that fits holds
    warning_filters: tuple[str, ...] = ()

    @property
    def rpc(self) -> bool:
        return self.parameter_servers > 0

    @property
    def processes(self) -> int:
        return self.world_size + self.parameter_servers + self.master

    def part(self, node: int) -> tuple[int, ...]:
        """The processes of a node: its share of those that are timed and, of the first node, all others."""
        share = self.world_size // self.nodes
        others = range(self.world_size, self.processes if node == 0 else self.world_size)
        return (*range(node * share, (node + 1) * share), *others)

    def node_of(self, process: int) -> int:
        """The node that has a process."""
        return process // (self.world_size // self.nodes) if process < self.world_size else 0

    @property
    def room(self) -> int:
        """How many steps there may be in a window."""
        return max(self.steps, self.most_steps)

    def steps_for(self, step_seconds: float) -> int:
        """How many steps a window takes where one lasts so long."""
        return max(self.steps, min(math.ceil(self.min_seconds / step_seconds), self.most_steps))

    def exactly(self, steps: int) -> Plan:
        """With a window of so many steps, however long they take: percentiles of few steps lie elsewhere than those
        of many (the p10 of 15 is 3 to 5 % above that of 60), so what is compared has as many."""
        return replace(self, steps=steps, min_seconds=0.0)

    def measured_as(self, other: Plan) -> Plan:
        """With the group, the warm-up, the windows and the timing of another."""
        return replace(
            self,
            world_size=other.world_size,
            backend=other.backend,
            device=other.device,
            parameter_servers=other.parameter_servers,
            warmup=other.warmup,
            steps=other.steps,
            min_seconds=other.min_seconds,
            most_steps=other.most_steps,
            timing=other.timing,
        )

    def name(self, process: int) -> str:
        """A process in words: "rank 3"; in an RPC launch its name there, "trainer0", "ps0" or "master"."""
        if not self.rpc:
            return f"rank {process}"
        if process < self.world_size:
            return f"trainer{process}"
        server = process - self.world_size
        return f"ps{server}" if server < self.parameter_servers else "master"

    @property
    def roles(self) -> str:
        """Who takes part in an RPC launch: "2 trainers 4 ps master"; "" where all are ranks."""
        if not self.rpc:
            return ""
        trainers = f"{self.world_size} trainer{'s' * (self.world_size > 1)}"
        return f"{trainers} {self.parameter_servers} ps" + " master" * self.master


def limits_for(plan: Plan, asked: Sequence[Limit]) -> tuple[Limit, ...]:
    """Those asked for that matter to it, for limits on RPC and on bandwidth do to what has it; where none does, the
    default ones on time. With them the default ones on counters."""

    def matters(limit: Limit) -> bool:
        return (plan.rpc or not limit.metric.startswith("rpc.")) and (
            plan.collective is not None or not limit.is_bandwidth
        )

    named = {limit.metric for limit in asked}
    ours = (limit for limit in COUNTER_LIMITS if limit.metric not in named)
    chosen = tuple(filter(matters, asked)) or (TIME_LIMITS if asked else ())
    return (*chosen, *filter(matters, ours))
