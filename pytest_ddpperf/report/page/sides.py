"""Both sides of a comparison, by the percentiles of their launches: all that a page draws of step times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pytest_ddpperf.records import Comparison, Interval, Limit, Measurement, Outcome, Samples, StoredSession
from pytest_ddpperf.report import text
from pytest_ddpperf.verdict import judge_times, of_one_length, shift, stats, unsupported

# Of launches: those that reports keep of the sessions of a stored baseline.
PERCENTILES = tuple(range(5, 100, 5))
SHIFTED = (10, 25, 50, 75, 90, 95)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison: the sessions of a stored baseline, or one session."""

    name: str
    sessions: tuple[Mapping[int, Sequence[float]], ...]  # by percentile, seconds, a launch each
    descriptions: tuple[str, ...] = ("",)  # of each session: date, commit, host

    @cached_property
    def launches(self) -> int:
        return sum(len(session[50]) for session in self.sessions)

    def at(self, q: int) -> list[float]:
        """Return the percentile of each launch, in seconds."""
        return [seconds for session in self.sessions for seconds in session[q]]

    def middle(self, q: int) -> float:
        """Return the mean over launches, then over sessions, as the verdict computes it."""
        return stats.geometric_mean([stats.geometric_mean(session[q]) for session in self.sessions])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """The change of one metric."""

    metric: str
    change: Interval
    level: float  # of each of its bounds
    limit: Limit | None = None  # None: nothing was asked of it
    limit_share: float | None = None  # as a change


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """What is compared: the first steps of each launch, as many as the side with the fewest has."""

    now: Side
    base: Side | None  # None: nothing was compared


def sides_of(outcome: Outcome) -> Sides | None:
    """Return both sides, or None if nothing was measured."""
    if outcome.measurement is None:
        return None
    own = outcome.measurement.samples
    if outcome.baseline_side is not None and outcome.baseline_side.measurement is not None:
        own, other = of_one_length([own, outcome.baseline_side.measurement.samples])
        name = text.shortened(str(outcome.baseline_side.version), 60)
        return Sides(now=_measured("now", own), base=_measured(name, other))
    if outcome.baseline_side is not None or not outcome.sessions:
        return Sides(now=_measured("now", own), base=None)
    own = own.first(min(session.steps for session in outcome.sessions))
    return Sides(now=_measured("now", own), base=_stored(outcome.sessions))


def _stored(sessions: Sequence[StoredSession]) -> Side:
    return Side(
        name="baseline",
        sessions=tuple({q: session.launch_seconds[f"p{q}"] for q in PERCENTILES} for session in sessions),
        descriptions=tuple(f"{session.created} {session.commit[:12]} {session.host}".strip() for session in sessions),
    )


def _measured(name: str, samples: Samples) -> Side:
    return Side(name=name, sessions=(launch_quantiles(samples.step_seconds),))


def launch_quantiles(
    launches: Iterable[Sequence[float]], percentiles: Sequence[int] = PERCENTILES
) -> dict[int, list[float]]:
    """Return the percentiles of each launch, by percentile."""
    ordered = [sorted(launch) for launch in launches]  # once, for sorting again costs next to nothing
    return {q: [stats.quantile(launch, q) for launch in ordered] for q in percentiles}


def shifts(outcome: Outcome) -> list[Shift]:
    """Return the change at each percentile: the verdict's own where there is a limit, else computed by the same rule at
    the same level. Empty if nothing was compared."""
    verdict = outcome.verdict
    if verdict is None or not verdict.comparisons:
        return []
    gated = {c.limit.metric: _gated(c) for c in verdict.comparisons}
    level = min(c.level for c in verdict.comparisons)
    others = {f"p{q}": change for q in SHIFTED if f"p{q}" not in gated and (change := _change(outcome, q, level))}
    free = {metric: Shift(metric=metric, change=change, level=level) for metric, change in others.items()}
    return sorted((gated | free).values(), key=lambda shift: _place(shift.metric))


def _gated(comparison: Comparison) -> Shift:
    limit = comparison.limit
    share = limit.value if limit.unit == "%" else limit.value / comparison.baseline_seconds
    return Shift(
        metric=limit.metric,
        change=text.changed(comparison),
        level=comparison.level,
        limit=limit,
        limit_share=-share if limit.is_bandwidth else share,
    )


def _place(metric: str) -> tuple[bool, float]:
    """Sort percentiles of step times first."""
    others = Limit(metric=metric, value=0.0, unit="%")
    plain = metric.startswith("p") and metric[1:2].isdigit()
    return not plain, others.percentile


def _change(outcome: Outcome, q: int, level: float) -> Interval | None:
    """Return the change, or None if launches are too few or too short for that percentile."""
    assert outcome.measurement is not None
    limit = Limit(metric=f"p{q}", value=0.1, unit="%", default=True)
    if outcome.baseline_side is None:
        return _since(outcome.sessions, outcome.measurement, limit, level)
    if outcome.baseline_side.measurement is None:
        return None
    verdict = judge_times(
        outcome.measurement,
        [outcome.baseline_side.measurement],
        [limit],
        level=level,
        interleaved=True,
        stretches=outcome.baseline_side.stretches,
    )
    return verdict.comparisons[0].change if verdict.comparisons else None


def _since(sessions: Sequence[StoredSession], current: Measurement, limit: Limit, level: float) -> Interval | None:
    """Return the change since stored sessions, over the first steps that the verdict compared."""
    if not sessions or any(limit.metric not in session.launch_seconds for session in sessions):
        return None
    steps = min(current.samples.steps, *(session.steps for session in sessions))
    now = stats.launch_quantiles(current.samples.first(steps).step_seconds, limit.percentile)
    sides = [now, *(session.launch_seconds[limit.metric] for session in sessions)]
    if any(unsupported(limit, steps=steps, launches=len(side)) for side in sides):
        return None
    here = str(current.environment.recorded.get("host") or "")
    hosts = [session.host for session in sessions]
    return shift(now, sides[1:], here=here, hosts=hosts, level=level)
