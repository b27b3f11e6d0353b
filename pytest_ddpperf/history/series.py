"""Series of runs that can be compared, and the change points in them that are evidence.

A series has the runs of one test in one environment with the same must-match facts. `change_points`
has the statistics; this module decides what a change point means.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from enum import Enum
from itertools import pairwise
from statistics import fmean, median

from pytest_ddpperf.baseline.content import fact_changes
from pytest_ddpperf.history import change_points
from pytest_ddpperf.history.change_points import (
    MIN_POINTS,
    ChangePoint,
    Observations,
)
from pytest_ddpperf.history.entries import (
    AcceptedChange,
    HistoryEntry,
    HistoryMeasurement,
)
from pytest_ddpperf.records.metric import MEMORY_COUNTERS, Metric
from pytest_ddpperf.records.plan import Limit, Limits
from pytest_ddpperf.records.record import record
from pytest_ddpperf.records.samples import Facts, Interval, Scalar, TestId
from pytest_ddpperf.records.step_phases import PHASES
from pytest_ddpperf.verdict.observed import bound
from pytest_ddpperf.verdict.stats import Part, holm, variance

# The probability of any false change point in a history in which nothing changed.
LEVEL = 0.01
# The index of a change point errs by one or two, and moves as further runs come.
_INDEX_ERROR = 2
_RUNS_BEFORE = 5  # for the time before a change point
_MAIN_PART = 0.5  # of a change, that a phase makes up to be named


@record
class Series:
    """Comparable runs in the order of their commits."""

    test: TestId
    environment: str
    must_match: Facts
    runs: tuple[HistoryEntry, ...]
    measurements: tuple[HistoryMeasurement, ...]  # one of each run
    # The must-match facts that differ from other series of the same test and environment.
    distinction: str = ""

    @property
    def key(self) -> object:
        """The same for those of its runs that have a metric."""
        return self.test, self.environment, frozenset(self.must_match.items())

    def kind(self, metric: str) -> Metric:
        """Return a metric of its last run."""
        return self.measurements[-1].kind(metric)

    def having(self, metric: str) -> "Series":
        """Return the runs that have a metric, in the direction that it had last."""
        known = [
            (run, each)
            for run, each in zip(self.runs, self.measurements, strict=True)
            if each.launches(metric)
        ]
        kept = [
            (run, each)
            for run, each in known
            if each.kind(metric) == known[-1][1].kind(metric)
        ]
        return replace(
            self,
            runs=tuple(run for run, _ in kept),
            measurements=tuple(each for _, each in kept),
        )

    def observe(self, metric: str) -> Observations:
        """Return the logarithm of a metric in each run, with what is known of its error."""
        times = [
            datetime.fromisoformat(run.created).timestamp() for run in self.runs
        ]
        gaps = [abs(after - before) for before, after in pairwise(times)]
        usual = median(gaps) if gaps else 0.0
        # A machine drifts further in a longer time, and from run to run at least.
        moves = [
            max(1.0, gap / usual) if usual > 0 else 1.0 for gap in (0.0, *gaps)
        ]
        means = []
        spreads = []
        for measurement in self.measurements:
            logs = list(map(math.log, measurement.launches(metric)))
            means.append(fmean(logs))
            spread = variance(logs) if len(logs) > 1 else 0.0
            spreads.append(Part(spread, len(logs) - 1))
        return change_points.weigh_runs(means, spreads, moves)


class ChangeStatus(Enum):
    """The meaning of a change point, the worst first."""

    REGRESSED = "REGRESSED"
    IMPROVED = "IMPROVED"
    ACCEPTED = "ACCEPTED"
    # slower, and later change points took back at least half of it
    UNDONE = "UNDONE"
    WITHIN_LIMIT = "WITHIN LIMIT"


@record
class HistoryChange:
    """A change point with its meaning."""

    series: Series
    metric: str
    status: ChangeStatus
    index: int  # of the first run after it
    change: Interval  # relative, with its 95 % interval
    seconds: tuple[float, float]  # before and after
    runs_since: int  # up to the next change point or the end
    why: str = ""  # it was accepted

    @property
    def kind(self) -> Metric:
        """The metric."""
        return self.series.kind(self.metric)

    @property
    def before(self) -> HistoryEntry:
        """The last run before it."""
        return self.series.runs[self.index - 1]

    @property
    def after(self) -> HistoryEntry:
        """The first run after it."""
        return self.series.runs[self.index]

    def phase(self) -> tuple[str, float] | None:
        """Return the phase of the step that makes up at least half of the change, and its change in
        seconds."""
        of_runs = [each.phases for each in self.series.measurements]
        start = max(self.index - _RUNS_BEFORE, 0)
        end = self.index + self.runs_since
        # of those that know them
        before = list(filter(None, of_runs[start : self.index]))
        after = list(filter(None, of_runs[self.index : end]))
        if self.kind.own_figure or not (before and after):
            return None
        change = self.seconds[1] - self.seconds[0]
        moved = {
            name: fmean(phases[name] for phases in after)
            - fmean(phases[name] for phases in before)
            for name in PHASES
            if all(name in phases for phases in (*before, *after))
        }
        name = max(moved, key=lambda name: moved[name] / change, default="")
        if not name or moved[name] / change < _MAIN_PART:
            return None
        return name, moved[name]

    @property
    def why_saved(self) -> str:
        """Why the baseline was saved that runs have since; "" if it is the one from before."""
        before, after = self.series.measurements[
            self.index - 1 : self.index + 1
        ]
        return "" if after.why == before.why else after.why

    def differences(self) -> Iterator[str]:
        """Yield what else changed there: "torch 2.12 -> 2.13", "all_reduce.count 5 -> 6"."""
        before, after = self.series.measurements[
            self.index - 1 : self.index + 1
        ]
        yield from map(str, fact_changes(after.recorded, before.recorded))
        # Another version of the plugin may not have a counter.
        exact = before.counters.keys() & after.counters.keys() - {
            *MEMORY_COUNTERS
        }
        for change in fact_changes(after.counters, before.counters):
            if change.name in exact:
                yield str(change)


@record
class HistoryAnalysis:
    """The series of a history and their change points."""

    series: Sequence[Series]
    metrics: Sequence[str]
    changes: Sequence[HistoryChange]  # the worst first
    # a series, its metric, and the smallest detectable change
    unchanged: Sequence[tuple[Series, str, float]]

    @property
    def short(self) -> int:
        """The number of series that are too short for a change point."""
        return sum(len(series.runs) < MIN_POINTS for series in self.series)


_Run = tuple[HistoryEntry, HistoryMeasurement]


def build_series(entries: Sequence[HistoryEntry]) -> list[Series]:
    """Return all series by test and environment."""
    groups: dict[
        tuple[str, str], dict[frozenset[tuple[str, Scalar]], list[_Run]]
    ] = {}
    for entry in entries:
        for measurement in entry.measurements:
            key = str(measurement.test), measurement.environment
            facts = frozenset(measurement.must_match.items())
            by_facts = groups.setdefault(key, {})
            by_facts.setdefault(facts, []).append((entry, measurement))
    found = []
    for _, by_facts in sorted(groups.items()):
        common = frozenset.intersection(*by_facts)
        for facts, runs in by_facts.items():
            _, last = runs[-1]
            different = sorted(facts - common, key=str)
            found.append(
                Series(
                    test=last.test,
                    environment=last.environment,
                    must_match=last.must_match,
                    runs=tuple(entry for entry, _ in runs),
                    measurements=tuple(measurement for _, measurement in runs),
                    distinction=", ".join(
                        f"{name} {value}" for name, value in different
                    ),
                )
            )
    return found


def analyze(
    series: Sequence[Series],
    limits: Limits,
    accepted: Sequence[AcceptedChange] = (),
) -> HistoryAnalysis:
    """Find the change points of all series in the metrics of `limits`.

    Holm's procedure bounds the error rate over all series and metrics. Further change points of a
    series must pass the level that its largest one had to pass.
    """
    candidates = []
    for each in series:
        for limit in limits:
            part = each.having(limit.metric)
            if len(part.runs) >= MIN_POINTS:
                candidates.append((part, limit))
    observations = [each.observe(limit.metric) for each, limit in candidates]
    largest = [change_points.find_largest(each) for each in observations]
    p_values = [1.0 if point is None else point.p_value for point in largest]
    changes: list[HistoryChange] = []
    unchanged: list[tuple[Series, str, float]] = []
    for (each, limit), observed, evidence in zip(
        candidates, observations, holm(p_values, LEVEL), strict=True
    ):
        points: list[ChangePoint] = []
        if evidence.enough:
            points = change_points.find_change_points(observed, evidence.level)
        if points:
            changes += _judge_points(
                each, limit, observed.values, points, accepted
            )
        else:
            smallest = change_points.smallest_change(observed, evidence.level)
            unchanged.append((each, limit.metric, smallest))
    order = list(ChangeStatus)
    changes.sort(
        key=lambda change: (
            order.index(change.status),
            -abs(change.change.estimate),
        )
    )
    return HistoryAnalysis(
        series=series,
        metrics=[limit.metric for limit in limits],
        changes=changes,
        unchanged=unchanged,
    )


def _judge_points(
    series: Series,
    limit: Limit,
    values: Sequence[float],
    points: Sequence[ChangePoint],
    accepted: Sequence[AcceptedChange],
) -> Iterator[HistoryChange]:
    whys = _match_accepted(series, limit.metric, points, accepted)
    if series.kind(limit.metric).lower_is_worse:
        limit = replace(limit, better="higher")
    ends = [*(point.index for point in points), len(values)]
    start = 0
    for number, (point, end) in enumerate(zip(points, ends[1:], strict=True)):
        first = max(point.index - _RUNS_BEFORE, start)
        start = point.index
        base = fmean(values[first : point.index])
        before = math.exp(base)
        allowed = bound(limit, base)
        later = sum(each.change for each in points[number + 1 :])
        why = whys.get(point.index, "")
        status = ChangeStatus.ACCEPTED
        if not why:
            status = _status_of(point.change, later, allowed)
        yield HistoryChange(
            series=series,
            metric=limit.metric,
            status=status,
            index=point.index,
            change=point.interval(),
            seconds=(before, before * math.exp(point.change)),
            runs_since=end - point.index,
            why=why,
        )


def _status_of(change: float, later: float, allowed: float) -> ChangeStatus:
    """Decide by the change, the sum of later changes, and the change that is allowed, all as
    logarithms."""
    if abs(change) <= allowed:
        return ChangeStatus.WITHIN_LIMIT
    if change < 0:
        return ChangeStatus.IMPROVED
    return (
        ChangeStatus.UNDONE if later <= -change / 2 else ChangeStatus.REGRESSED
    )


def _match_accepted(
    series: Series,
    metric: str,
    points: Sequence[ChangePoint],
    accepted: Sequence[AcceptedChange],
) -> dict[int, str]:
    """Return by index why change points were accepted. A file accepts one change point: the nearest
    one that fits."""
    whys: dict[int, str] = {}
    key = (series.environment, series.test, series.must_match, metric)
    for each in accepted:
        if (each.environment, each.test, each.must_match, each.metric) != key:
            continue
        distances = [
            (abs(point.index - place), point.index)
            for place, run in enumerate(series.runs)
            if run.commit == each.commit
            for point in points
            if _is_no_larger(point, each.change)
        ]
        distance, index = min(distances, default=(math.inf, 0))
        if distance <= _INDEX_ERROR:
            whys[index] = each.why
    return whys


def _is_no_larger(point: ChangePoint, accepted: Interval) -> bool:
    """Whether it has the same direction as the accepted one, and is not evidently larger: their
    intervals overlap."""
    found = point.interval()
    if accepted.estimate > 0:
        return point.change > 0 and found.low <= accepted.high
    return point.change < 0 and found.high >= accepted.low


def make_acceptance(change: HistoryChange, why: str) -> AcceptedChange:
    """Return the record that accepts this change point."""
    return AcceptedChange(
        commit=change.after.commit,
        test=change.series.test,
        environment=change.series.environment,
        must_match=change.series.must_match,
        metric=change.metric,
        change=change.change,
        why=why,
    )
