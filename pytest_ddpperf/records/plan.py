"""What is asked for: plans, limits, and collectives."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Literal

from pytest_ddpperf.records.figure import NamedFigures
from pytest_ddpperf.records.metric import METRICS, WALL, Metric, metric_of
from pytest_ddpperf.records.record import record


@record
class Limit:
    """How much worse than the baseline one metric may get: `p50:5%`, `mean:25%`, `cpu_p50:5%`,
    `rpc.bytes:0%`."""

    metric: str  #: its name: "p50", "p99.9", "mean", "busbw", "rpc.bytes", "tps", ...
    value: float  #: a share for "%" (0.05), seconds for "ms" (0.002)
    unit: Literal["%", "ms"]
    #: ours, so it may be dropped where the asked steps cannot support it
    default: bool = False
    #: of a figure of the user's own, once that is known: "higher" or "lower"
    better: str = ""

    @property
    def kind(self) -> Metric:
        """What it is on."""
        return metric_of(self.metric, self.better)

    def __str__(self) -> str:
        scale = 100.0 if self.unit == "%" else 1000.0
        return f"{self.metric}:{self.value * scale:.10g}{self.unit}"


Limits = tuple[Limit, ...]


def _default_limits(*, is_exact: bool) -> Limits:
    return tuple(
        Limit(metric=name, value=share, unit="%", default=True)
        for kind in METRICS
        if kind.is_exact is is_exact
        for name, share in kind.default_limits.items()
    )


# On time, unless the user names others.
TIME_LIMITS = _default_limits(is_exact=False)
# On the time of a command.
COMMAND_LIMITS = (Limit(metric=WALL, value=0.1, unit="%", default=True),)
# On counters, unless the user names another for the same one.
COUNTER_LIMITS = _default_limits(is_exact=True)


OF_TEST = "test:"  # the names of facts that a test gives begin with it
_ASKED = ("batch_size", "warmup", "timing", "collective", "program")


def is_asked(fact: str) -> bool:
    """Whether a fact that must match is one that a test asks for: with another, its step times are
    not alike."""
    return fact in _ASKED or fact.startswith(OF_TEST)


# All names of NCCL. Which implementation "nccl" is depends on torch: from 2.15 on it is "nccl2".
# "ncclx" is that of torchcomms.
NCCL = ("nccl", "nccl2", "nccl-lazy", "nccl-legacy", "ncclx")
# Backends that torch knows by name, whether or not a build has them.
KNOWN_BACKENDS = ("gloo", *NCCL, "xccl", "ucc", "mpi")


def backends_by_device(asked: str) -> dict[str, str]:
    """Return the backends of a composite one, "cpu:gloo,cuda:nccl", by device type; {} for a single
    one."""
    if ":" not in asked:
        return {}
    pairs = (each.partition(":") for each in asked.split(","))
    return {device: backend for device, _, backend in pairs}


# what ends a step: an optimizer's update, or a call of `pytest_ddpperf.step_end`
UPDATE, MARK = "update", "mark"


Variables = Mapping[str, str]  # of the environment


@record
class Program:
    """A Python program, as it is called."""

    path: str  # absolute, or of a module its name
    is_module: bool  # as after `python -m`
    args: tuple[str, ...]
    cwd: str  # absolute
    env: Variables  # variables beyond those of pytest


@record
class Command:
    """A command that brings its own launcher, as it is called."""

    words: tuple[str, ...]
    cwd: str  # absolute
    env: Variables  # variables beyond those of pytest


Function = Callable[..., Any]
# what ranks run; None if the plan says everything
Setup = Function | Program | Command | None


@record
class Plan:
    """All that a launch needs to know; the same for every launch of a test but for the window: see
    `exactly`."""

    # of the process group whose steps are timed: all ranks, or an RPC launch's trainers
    world_size: int
    nodes: int = 1  # that these are dealt over, in equal parts
    # A name torch knows, or a composite of them; never "auto". "" for no process group (the probe).
    backend: str
    device: str  # a device type: "cpu", "cuda", ...
    # whether each rank sees its own CUDA device alone, as cuda:0
    sees_one_device: bool = False
    warmup: int = 0  # steps
    steps: int = 1  # timed, at least
    # that the timed steps shall take, where `most_steps` allow it; 0: exactly `steps`
    min_seconds: float = 0.0
    # timed or, if the window `spreads`, kept; less than `steps` has no effect
    most_steps: int = 0
    timing: Literal["free", "step"] = "step"
    timeout_seconds: float = 300.0
    # by its name where it was made, for messages
    timeout_setting: str = "--ddp-timeout"
    seed: int = 0
    preload: tuple[str, ...] = ()
    # with some it is an RPC launch: trainers, then these, then the master
    parameter_servers: int = 0
    master: bool = False
    # is the step, instead of what a set-up makes
    collective: "Collective | None" = None
    # the beginning of the paths of traces of further steps, in a launch that takes some
    trace: str = ""
    # whether the launch samples Python stacks; its times are not compared
    stacks: bool = False
    # whether it is of a test's reference, which the names of its ranks say
    is_reference: bool = False
    # Of a program that owns its loop, what ends a step: UPDATE, MARK or "module:function"; "" of a
    # function.
    boundary: str = ""
    program: str = ""  # its command line
    # Whether a launch is one run of a command. It has one process of ours, which is no rank, and
    # one step: the run.
    command: bool = False
    # That the test gives by name, and that must match the baseline's.
    facts: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    # that a program writes, by name
    figures: NamedFigures = field(default_factory=dict)

    @property
    def device_backend(self) -> str:
        """The backend between the devices of ranks, by its name alone."""
        return backends_by_device(self.backend).get(self.device, self.backend)

    @property
    def rpc(self) -> bool:
        return self.parameter_servers > 0

    @property
    def has_device_time(self) -> bool:
        """Whether the work of a device in a step is measured. A program takes no further steps, nor
        does a command, a collective waits for others, and a launch that samples stacks is not
        compared."""
        others = self.rpc, self.collective, self.boundary, self.stacks
        return self.device != "cpu" and self.warmup > 0 and not any(others)

    @property
    def processes(self) -> int:
        return self.world_size + self.parameter_servers + self.master

    def part(self, node: int) -> tuple[int, ...]:
        """The processes of a node: its share of those that are timed and, of the first node, all
        others."""
        every = range(self.processes)
        return tuple(each for each in every if self.node_of(each) == node)

    @property
    def over_nodes(self) -> str:
        """The group in words, "4 ranks on 2 nodes", if it has several nodes; else ""."""
        if self.nodes == 1:
            return ""
        return f"{self.world_size} ranks on {self.nodes} nodes"

    def node_of(self, process: int) -> int:
        """The node that has a process."""
        if process >= self.world_size:
            return 0
        return process // (self.world_size // self.nodes)

    @property
    def room(self) -> int:
        """How many steps of a window are kept, at most."""
        return max(self.steps, self.most_steps)

    @property
    def spreads(self) -> bool:
        """Whether steps that are kept are spread over more that are timed: those of a device may be
        short."""
        return self.device != "cpu" and self.timing == "free"

    def steps_for(self, step_seconds: float) -> int:
        """How many steps a window takes where one lasts so long."""
        asked = math.ceil(self.min_seconds / step_seconds)
        return max(
            self.steps, asked if self.spreads else min(asked, self.most_steps)
        )

    def exactly(self, steps: int) -> "Plan":
        """With a window of so many steps, however long they take: percentiles of few steps differ
        from those of many (the p10 of 15 is 3 to 5 % above that of 60), so what is compared has as
        many."""
        return replace(
            self,
            steps=steps,
            most_steps=steps,
            min_seconds=self.min_seconds if self.spreads else 0.0,
        )

    def measured_as(self, other: "Plan") -> "Plan":
        """With the group, the warm-up, the windows and the timing of another."""
        names = """
            world_size backend device sees_one_device parameter_servers
            warmup steps min_seconds most_steps timing
        """.split()
        return replace(self, **{name: getattr(other, name) for name in names})

    def name(self, process: int) -> str:
        """A process in words: "rank 3", "command"; in an RPC launch its name there, "trainer0",
        "ps0" or "master"."""
        if self.is_reference:
            return f"rank {process} of the reference"
        if self.command:
            return "command"
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
        trainers = (
            f"{self.world_size} trainer{'s' if self.world_size > 1 else ''}"
        )
        master = " master" if self.master else ""
        return f"{trainers} {self.parameter_servers} ps{master}"


# A limit that holds for each figure of the user's own unless that is named.
OWN_LIMIT = 0.1


def limits_for(
    plan: Plan, asked: Sequence[Limit], figures: NamedFigures
) -> Limits:
    """Return the limits that apply to this plan and these figures of the user's own: those that
    were asked for and, if none of them does, the default ones on time; and the default ones on
    other figures and counters."""

    def applying(limits: Sequence[Limit]) -> list[Limit]:
        found = []
        for limit in limits:
            if own := limit.kind.own_figure:
                if own in figures:
                    found.append(replace(limit, better=figures[own].better))
            elif limit.kind.applies_to(plan):
                found.append(limit)
        return found

    named = {limit.kind.own_figure or limit.metric for limit in asked}
    chosen = applying(asked)
    if asked and not chosen:
        chosen = applying(COMMAND_LIMITS if plan.command else TIME_LIMITS)
    own = [
        Limit(metric=name, value=OWN_LIMIT, unit="%", default=True)
        for name in figures
        if name not in named
    ]
    counted = [limit for limit in COUNTER_LIMITS if limit.metric not in named]
    return (*chosen, *applying(own), *applying(counted))


_GB = 1e9
OPS = tuple(
    "all_reduce all_gather reduce_scatter all_to_all broadcast reduce send_recv".split()
)
# Whose size is that of the blocks of all ranks together.
_IN_BLOCKS = ("all_gather", "reduce_scatter", "all_to_all")
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_ROOTED = ("broadcast", "reduce")
_DTYPE = r"bool|(?:float|bfloat|int|uint|complex)(\d+)(?:_[a-z0-9]+)?"


@record
class Collective:
    """One operation over buffers of one size."""

    #: of OPS; send_recv: every rank sends to the next and receives from the one before
    op: str
    dtype: str  #: torch's name without "torch."
    ranks: int
    #: elements: of the buffer, or of the block of each rank where the operation has such
    count: int

    @property
    def elements(self) -> int:
        """Of the largest buffer of a rank."""
        return self.count * (self.ranks if self.op in _IN_BLOCKS else 1)

    @property
    def size(self) -> int:
        """Of the largest buffer of a rank, in bytes."""
        return self.elements * itemsize(self.dtype)

    @property
    def redop(self) -> str:
        return "sum" if self.op in _REDUCING else "none"

    @property
    def root(self) -> int:
        """-1 where there is none."""
        return 0 if self.op in _ROOTED else -1

    def algbw(self, seconds: float) -> float:
        """In GB/s (1e9 bytes), where one operation takes `seconds`."""
        return self.size / seconds / _GB

    def busbw(self, seconds: float) -> float:
        """In GB/s (1e9 bytes), where one operation takes `seconds`."""
        crosses = 1.0  # a link, of `algbw`
        if self.op == "all_reduce":
            crosses = 2 * (self.ranks - 1) / self.ranks
        elif self.op in _IN_BLOCKS:
            crosses = (self.ranks - 1) / self.ranks
        return self.algbw(seconds) * crosses

    def __str__(self) -> str:
        return f"{self.op} of {in_words(self.size)} {self.dtype}"


def collective(op: str, size: int, dtype: str, ranks: int) -> Collective:
    """Of `size` bytes, or the next size below that divides into elements, and into blocks where the
    operation has such; raises ValueError."""
    if op not in OPS:
        raise ValueError(f"{op!r}: one of {', '.join(OPS)}")
    if op == "send_recv" and ranks < 2:
        raise ValueError("send_recv needs at least two ranks")
    count = size // itemsize(dtype) // (ranks if op in _IN_BLOCKS else 1)
    if count < 1:
        each = f" for each of {ranks} ranks" if op in _IN_BLOCKS else ""
        raise ValueError(
            f"{op} of {in_words(size)}: less than one element of {dtype}{each}"
        )
    return Collective(op=op, dtype=dtype, ranks=ranks, count=count)


def itemsize(dtype: str) -> int:
    """Bytes of an element; raises ValueError for what is no dtype whose name says it."""
    match = re.fullmatch(_DTYPE, dtype)
    if match is None or (match[1] and int(match[1]) % 8):
        raise ValueError(
            f"{dtype!r}: one of torch's dtypes by name: float32, bfloat16, int8, ..."
        )
    return int(match[1] or 8) // 8


def in_bytes(size: object) -> int:
    """Return a number of bytes, written as nccl-tests is asked for it ("8K") or as `in_words` has
    it; raises ValueError."""
    match = re.fullmatch(
        r"([0-9]{1,15})(?:([kmg])(?:ib)?|b)?", str(size).lower()
    )
    if match is None:
        raise ValueError(
            f'{size!r}: a size is a number of bytes, or a text like "8K" or "1MiB"'
        )
    return int(match[1]) << 10 * " kmg".index(match[2] or " ")


def in_words(size: int) -> str:
    """A number of bytes as nccl-tests is asked for it: "4MiB", "1000B"."""
    for unit in ("B", "KiB", "MiB"):
        if size % 1024 or not size:
            return f"{size}{unit}"
        size //= 1024
    return f"{size}GiB"
