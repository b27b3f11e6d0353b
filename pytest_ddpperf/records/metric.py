"""What a limit can be on. Each kind of metric is a class: a new one is a class in METRICS, and a
row in docs/options.md. If it has percentiles, `options.parse` has to know its prefix."""

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Protocol

from pytest_ddpperf.records.figure import FigureValues, split_name
from pytest_ddpperf.records.quantiles import (
    LaunchRanks,
    LaunchRankSteps,
    LaunchSteps,
    OfLaunches,
    launch_means,
    launch_quantiles,
    quantile,
)
from pytest_ddpperf.records.step_phases import PHASES, RANK_WAIT, StepPhases

POINT_TO_POINT = ("send", "recv")
# The operations that have counters of their own.
SENT = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    *POINT_TO_POINT,
)
# between the host and an accelerator
COPIES = ("host_syncs", "h2d.bytes", "d2h.bytes")
# What a step does. More of it may be meant, so none has a limit unless the user names one.
KERNELS = "kernels.count"
FLOPS = "flops"
WORK = (KERNELS, "operators.count", FLOPS)
# They have noise, so the largest of all launches counts.
MEMORY_COUNTERS = ("peak_rss.bytes", "peak_memory.bytes")
# What is counted of a step: see docs/counters.md. Of several that rise alike, the first is reported
# first.
COUNTERS = (
    "rpc.calls",
    "rpc.bytes",
    *(f"{kind}.{figure}" for kind in SENT for figure in ("count", "bytes")),
    "gradient_bytes",
    "buckets",
    "buckets.largest_bytes",
    "parameters.bytes",
    "collectives.count",
    "collectives.bytes",
    "recompilations",
    "graph_breaks",
    *COPIES,
    *WORK,
    *MEMORY_COUNTERS,
)
MEAN = "mean"
DEVICE = "device"
WALL = "wall"


def without_totals(counters: Sequence[str]) -> list[str]:
    """Return the names of counters without those of all collectives together, if others are among
    them."""
    return [
        name for name in counters if not name.startswith("collectives.")
    ] or list(counters)


# What a metric reads of `Plan`, `Collective`, `Samples` and `Measurement`, which know metrics by
# their limits.


class PlannedCollective(Protocol):
    def busbw(self, seconds: float) -> float: ...


class PlannedLaunch(Protocol):
    @property
    def rpc(self) -> bool: ...
    @property
    def collective(self) -> PlannedCollective | None: ...
    @property
    def has_device_time(self) -> bool: ...
    @property
    def command(self) -> bool: ...


class StepTimes(Protocol):
    @property
    def step_seconds(self) -> LaunchSteps: ...
    @property
    def cpu_seconds(self) -> LaunchRankSteps | None: ...
    @property
    def device_seconds(self) -> LaunchRanks | None: ...
    @property
    def figures(self) -> Mapping[str, FigureValues]: ...


class MeasuredLaunches(Protocol):
    @property
    def samples(self) -> StepTimes: ...
    @property
    def phases(self) -> tuple[StepPhases, ...]: ...


class Metric:
    """One figure of each launch, or a count. The defaults are those of the step time.

    Statistics are on the logarithms of figures, and more of a figure is worse. So a metric of which
    less is worse has the figures of its reciprocal: the time that a bandwidth is computed from."""

    # all, as users write them; () if `has` knows a pattern
    names: tuple[str, ...] = ()
    # by name, as a share: limits that hold unless the user names others
    default_limits: Mapping[str, float] = {}
    # of the error rate of a test, what a default limit on it has relative to others
    default_weight = 1.0
    unit = "s"  # as reports show it; limits in ms are on seconds only
    lower_is_worse = False
    # a count: it has no noise, and the largest of all launches and ranks is compared
    is_exact = False
    is_wall_time = True  # of the step, or of a part of it
    is_part = False  # of the step
    own_figure = ""  # the figure of the user's own that it is of
    is_of_steps = True  # each of which has one value
    percentile = 50.0  # from 0 to 100: launches need steps enough for it
    # whether the stretches of interleaved launches show it better than all steps together
    is_in_stretches = False
    timed_as = ""  # the metric of time that it is computed from; "" for itself
    title = ""  # before its name, in a sentence
    # what it needs that is measured on CPU only, in words; "" for nothing
    on_cpu_only = ""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def has(cls, name: str) -> bool:
        """Whether this is a name of it."""
        return name in cls.names

    def applies_to(self, plan: PlannedLaunch) -> bool:
        """Whether such launches have it; else the default limits hold instead of one on it."""
        return not plan.command

    def figures(self, measurement: MeasuredLaunches) -> OfLaunches:
        """Return the figure of each launch, in seconds; () if it is unknown, 0 for a launch
        that does not know it."""
        return launch_quantiles(_step_seconds(measurement), self.percentile)

    def shown(
        self, figure: float, collective: PlannedCollective | None
    ) -> float:
        """Return a figure in `unit`, if that is not seconds."""
        return figure


def _step_seconds(measurement: MeasuredLaunches) -> LaunchSteps:
    """Return the step times of each launch; raises ValueError if one is no duration."""
    launches = measurement.samples.step_seconds
    for value in chain.from_iterable(launches):
        if not 0 < value < math.inf:  # nan is neither
            raise ValueError(f"{value!r} is not a duration in seconds")
    return launches


class Percentile(Metric):
    """A percentile of something of each step."""

    prefix: str

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.percentile = float(name.removeprefix(self.prefix))

    @classmethod
    def has(cls, name: str) -> bool:
        return (
            re.fullmatch(rf"{cls.prefix}\d+(\.\d+)?", name, re.ASCII)
            is not None
        )


# The percentiles that are compared stretch by stretch; those beyond are few steps of each.
_MIDDLE = 25, 75


class StepPercentile(Percentile):
    """A percentile of the group's step time: "p50", "p99.9"."""

    prefix = "p"
    title = "step time "
    default_limits = {"p10": 0.1, "p50": 0.1}

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.is_in_stretches = _MIDDLE[0] <= self.percentile <= _MIDDLE[1]


class CpuPercentile(Percentile):
    """A percentile of the CPU time of a step, of the rank that uses the most: "cpu_p50"."""

    prefix = "cpu_p"
    is_wall_time = False
    on_cpu_only = "CPU time is"

    def figures(self, measurement: MeasuredLaunches) -> OfLaunches:
        return tuple(
            max(quantile(rank, self.percentile) for rank in launch)
            for launch in measurement.samples.cpu_seconds or ()
        )


class Mean(Metric):
    """The time of a whole window per step: it shows slow steps, however few they are."""

    names = (MEAN,)
    title = "step time "
    # docs/evidence.md says why it is wider than others.
    default_limits = {MEAN: 0.25}
    # It is wide, for few steps that are much slower, and the others lose hardly any power by it.
    default_weight = 0.1

    def figures(self, measurement: MeasuredLaunches) -> OfLaunches:
        return launch_means(_step_seconds(measurement))


class Wall(Metric):
    """The wall time of a command, of which a launch is one run: one step."""

    names = (WALL,)
    is_of_steps = False

    def applies_to(self, plan: PlannedLaunch) -> bool:
        return plan.command


class DeviceTime(Metric):
    """What kernels take on the device in a step, without communication, which waits for others; of
    the rank whose device works longest."""

    names = (DEVICE,)
    title = "kernels' time on the "
    # A first guess: it differs by 0.3 % between processes of an hour, and was not measured over
    # several.
    default_limits = {DEVICE: 0.03}
    is_wall_time = False

    def applies_to(self, plan: PlannedLaunch) -> bool:
        return plan.has_device_time

    def figures(self, measurement: MeasuredLaunches) -> OfLaunches:
        return tuple(map(max, measurement.samples.device_seconds or ()))


class Phase(Metric):
    """A part of the step, of the rank that it takes longest."""

    names = (*PHASES, RANK_WAIT)
    is_part = True
    on_cpu_only = "phases are"

    def applies_to(self, plan: PlannedLaunch) -> bool:
        return not (plan.rpc or plan.collective or plan.command)

    def figures(self, measurement: MeasuredLaunches) -> OfLaunches:
        return tuple(
            max(seconds or 0.0 for seconds in launch.own[self.name])
            for launch in measurement.phases
        )


class Bandwidth(Metric):
    """What a collective moves in the time of a step at p50."""

    names = ("busbw",)
    unit = "GB/s"
    lower_is_worse = True
    is_in_stretches = True
    timed_as = "p50"

    def applies_to(self, plan: PlannedLaunch) -> bool:
        return plan.collective is not None

    def shown(
        self, figure: float, collective: PlannedCollective | None
    ) -> float:
        assert collective is not None, "a bandwidth of no collective"
        return collective.busbw(figure)


class Counter(Metric):
    """What is counted of a step."""

    names = COUNTERS
    unit = "count"
    is_exact = True
    # The memory of a process varies, larger buckets are no loss, more work may be meant, and a
    # process may keep parameters that its step does not use: an average, a teacher.
    default_limits = {
        name: 0.05 if name == "peak_memory.bytes" else 0.0
        for name in COUNTERS
        if name
        not in (
            "peak_rss.bytes",
            "buckets.largest_bytes",
            "parameters.bytes",
            *WORK,
        )
    }

    def applies_to(self, plan: PlannedLaunch) -> bool:
        if plan.command:
            return False
        return plan.rpc or not self.name.startswith("rpc.")

    def figures(self, measurement: MeasuredLaunches) -> OfLaunches:
        raise ValueError(f"{self.name} is no figure of a launch")


class OwnFigure(Metric):
    """A figure of the user's own: its mean, "tps", or a percentile of it, "tps_p50"."""

    unit = ""
    is_of_steps = False
    is_wall_time = False

    def __init__(self, name: str, better: str) -> None:
        super().__init__(name)
        self.own_figure, self._percentile = split_name(name)
        self.percentile = self._percentile or self.percentile
        self.lower_is_worse = better == "higher"

    def figures(self, measurement: MeasuredLaunches) -> OfLaunches:
        found = measurement.samples.figures.get(self.own_figure)
        if found is None:
            return ()
        launches = found.by_launch(self._percentile)
        if not self.lower_is_worse:
            return launches
        return tuple(1 / each if each > 0 else 0.0 for each in launches)

    def shown(
        self, figure: float, collective: PlannedCollective | None
    ) -> float:
        return 1 / figure if self.lower_is_worse else figure


METRICS: tuple[type[Metric], ...] = (
    StepPercentile,
    CpuPercentile,
    Mean,
    Wall,
    DeviceTime,
    Phase,
    Bandwidth,
    Counter,
)
# Those whose names are known, by name.
NAMED = {name: kind(name) for kind in METRICS for name in kind.names}


@cache
def metric_of(name: str, better: str = "") -> Metric:
    """Return the metric of that name. A name that is not known is that of a figure of the user's
    own, of which this is `better`, "" if it is not known yet."""
    for kind in METRICS:
        if kind.has(name):
            return kind(name)
    return OwnFigure(name, better)


_NAME = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)  # of a user's figure
# A percentile of step times with a mistake is no figure of the user's.
_LIKE_PERCENTILE = re.compile(r"(cpu_)?p[\dOo.]*", re.ASCII)


def why_no_figure(name: object) -> str:
    """Return why a figure of the user's own cannot have that name; "" if it can."""
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        return 'the name of a figure has letters, digits and "_", "-", ".", "/"'
    if split_name(name)[1] is not None:
        return "such names are those of percentiles of figures"
    if _LIKE_PERCENTILE.fullmatch(name) or not metric_of(name).own_figure:
        return "a metric has that name: choose another"
    return ""
