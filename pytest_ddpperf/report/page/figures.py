"""The figures of a measurement: changes, step times, launches; the sides that they show; the table of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pytest_ddpperf.records import (
    Comparison,
    Interval,
    LaunchRankSteps,
    Limit,
    Measurement,
    Outcome,
    Samples,
    StoredSession,
)
from pytest_ddpperf.report import text
from pytest_ddpperf.report.page import drawing
from pytest_ddpperf.report.page.drawing import BASELINE, CURRENT, FAINT, INK, LIMIT, Figure, Key, Sheet, Table
from pytest_ddpperf.verdict import judge_times, of_one_length, shift, stats, unsupported

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Marks differ in shape and in colour: the current side is a filled circle, the baseline side a hollow square.
_CURRENT: Mapping[str, Any] = {"color": CURRENT, "marker": "o", "linestyle": "none"}
_BASELINE: Mapping[str, Any] = {"color": BASELINE, "marker": "s", "linestyle": "none", "markerfacecolor": "white"}
_IN_TABLE = (5, 10, 25, 50, 75, 90, 95)
# Bounds may be so wide that nothing else could be seen: the axis ends at so many times the largest change or limit.
_MOST = 3.0


def draw_shifts(sheet: Sheet, found: Sequence[Shift], name: str) -> Figure:
    """Draw the change of each percentile with its bounds and its limit."""
    limits = {at: shift.limit_share for at, shift in enumerate(found) if shift.limit_share is not None}
    most = _MOST * max(map(abs, (*(shift.change.estimate for shift in found), *limits.values())))

    def draw(axes: Axes) -> None:
        estimates = [shift.change.estimate for shift in found]
        below = [shift.change.estimate - shift.change.low for shift in found]
        above = [shift.change.high - shift.change.estimate for shift in found]
        axes.errorbar(range(len(found)), estimates, yerr=(below, above), elinewidth=2.5, **_CURRENT)
        free = [at for at, shift in enumerate(found) if shift.limit is None]
        axes.plot(free, [estimates[at] for at in free], **{**_CURRENT, "markerfacecolor": "white"})
        axes.hlines(
            list(limits.values()),
            [at - 0.35 for at in limits],
            [at + 0.35 for at in limits],
            LIMIT,
            linestyles="dashed",
        )
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_xticks(range(len(found)), [shift.metric for shift in found])
        low, high = axes.get_ylim()
        if most:
            axes.set_ylim(max(low, -most), min(high, most))
        drawing.show_shares(axes.yaxis)

    gated = [shift for shift in found if shift.limit is not None]
    keys = [Key(mark="now", text="change and its bounds"), Key(mark="limit", text="limit")]
    if len(gated) < len(found):
        keys.insert(1, Key(mark="open", text="without a limit"))
    return sheet.figure(
        draw,
        f"Change against {name}",
        "; ".join(f"{shift.metric} {text.interval(shift.change)}, limit {shift.limit}" for shift in gated),
        keys=tuple(keys),
        head=("metric", "change", "least", "most", "limit", "bounds at"),
        rows=tuple(
            (
                shift.metric,
                *(text.share(value) for value in (shift.change.estimate, shift.change.low, shift.change.high)),
                str(shift.limit).partition(":")[2] if shift.limit is not None else "-",
                text.amount(shift.level),
            )
            for shift in found
        ),
    )


def draw_distributions(sheet: Sheet, now: Side, base: Side | None) -> Figure:
    """Draw the step times of both sides: each percentile over launches, and from the fastest launch to the slowest."""
    sides = [now] if base is None else [now, base]

    def draw(axes: Axes) -> None:
        for side, colour, line in ((base, BASELINE, "--"), (now, CURRENT, "-")):
            if side is not None:
                least, most = ([end(side.at(q)) for q in PERCENTILES] for end in (min, max))
                axes.fill_betweenx(PERCENTILES, least, most, color=colour, alpha=0.15, linewidth=0)
                axes.plot([side.middle(q) for q in PERCENTILES], PERCENTILES, color=colour, linewidth=2, linestyle=line)
        axes.set_yticks((10, 25, 50, 75, 90), ("p10", "p25", "p50", "p75", "p90"))
        axes.locator_params(axis="x", nbins=5)
        drawing.show_seconds(axes.xaxis)

    return sheet.figure(
        draw,
        "Step times",
        "; ".join(
            f"{side.name}: p50 {text.seconds(side.middle(50))}, p95 {text.seconds(side.middle(95))}" for side in sides
        ),
        keys=tuple(Key(mark="now-line" if side is now else "base-line", text=side.name) for side in sides)
        + (Key(mark="band", text="fastest to slowest launch"),),
        head=("", *(f"p{q}" for q in _IN_TABLE)),
        rows=tuple((side.name, *(text.seconds(side.middle(q)) for q in _IN_TABLE)) for side in sides),
    )


def draw_pairs(sheet: Sheet, order: str, now: Side, base: Side, q: int) -> Figure:
    """Draw a percentile of each launch of both sides, joined in pairs. `order` has a letter for each launch."""
    found = list(zip(base.at(q), now.at(q), strict=True))

    def draw(axes: Axes) -> None:
        places = range(1, len(found) + 1)
        axes.vlines(places, [min(pair) for pair in found], [max(pair) for pair in found], FAINT, linewidth=2)
        axes.plot(places, base.at(q), **_BASELINE)
        axes.plot(places, now.at(q), **_CURRENT)
        axes.locator_params(axis="x", integer=True)
        drawing.show_seconds(axes.yaxis)

    slower = sum(after > before for before, after in found)
    return sheet.figure(
        draw,
        f"Interleaved launches, p{q}",
        f"now was slower in {slower} of {len(found)} pairs; {_ranges(now, base, q)}",
        keys=(Key(mark="now", text="now"), Key(mark="base", text=base.name)),
        head=("pair", "first", base.name, "now", "change"),
        rows=tuple(
            (
                str(number + 1),
                {"b": base.name, "n": "now"}.get(order[2 * number : 2 * number + 1], "-"),
                text.seconds(before),
                text.seconds(after),
                text.share(after / before - 1),
            )
            for number, (before, after) in enumerate(found)
        ),
    )


def draw_launches(sheet: Sheet, now: Side, base: Side | None, q: int) -> Figure:
    """Draw a percentile of each launch: those of the sessions of a baseline, if there is one, then the current ones."""
    before = [session[q] for session in base.sessions] if base is not None else []
    by_session = [*before, now.at(q)]
    starts = list(accumulate((len(values) for values in by_session), initial=1))
    names = [*(base.descriptions if base is not None else ()), "now"]

    def draw(axes: Axes) -> None:
        for start, values in zip(starts, by_session, strict=False):
            style = _CURRENT if start == starts[-2] else _BASELINE
            axes.plot(range(start, start + len(values)), values, **style)
        for start in starts[1:-1]:
            axes.axvline(start - 0.5, color=FAINT, linewidth=1, linestyle="dotted")
        axes.locator_params(axis="x", integer=True)
        drawing.show_seconds(axes.yaxis)

    keys = [Key(mark="now", text="now")]
    if base is not None:
        keys.append(Key(mark="base", text=f"{base.name}, {text.several(len(before), 'session')}"))
    return sheet.figure(
        draw,
        f"Launches in the order they were taken, p{q}",
        _ranges(now, base, q),
        keys=tuple(keys),
        head=("session", "launches", "mean", "each"),
        rows=tuple(
            (
                name if name == "now" else f"{number}: {name}",
                str(len(own)),
                text.seconds(stats.geometric_mean(own)),
                " ".join(map(text.seconds, own)),
            )
            for number, (name, own) in enumerate(zip(names, by_session, strict=True), 1)
        ),
    )


def _ranges(now: Side, base: Side | None, q: int) -> str:
    sides = [now] if base is None else [now, base]
    return "; ".join(f"{side.name}: {text.span(side.at(q), text.seconds)}" for side in sides)


def rank_table(outcome: Outcome) -> Table:
    """Return each rank's own step times, CPU time and wait for RPC, of both sides if they are known."""
    assert outcome.measurement is not None
    samples = outcome.measurement.samples
    own = _percentiles(samples.rank_seconds)
    columns = {f"p{q}": [of_rank[q] for of_rank in own] for q in (10, 50, 90, 95)}
    columns |= {"CPU p50": _medians(samples.cpu_seconds), "blocked in RPC, p50": _medians(samples.blocked_seconds)}
    other = outcome.baseline_side.measurement if outcome.baseline_side is not None else None
    if other is not None and len(other.samples.rank_seconds[0]) == len(own):
        columns["baseline side p50"] = [of_rank[50] for of_rank in _percentiles(other.samples.rank_seconds)]
        columns["baseline side CPU p50"] = _medians(other.samples.cpu_seconds)
    columns = {title: values for title, values in columns.items() if values}
    return Table(
        title="Trainers' own steps" if outcome.plan.rpc else "Ranks' own steps",
        head=("", *columns),
        rows=tuple(
            (outcome.plan.name(rank), *(text.seconds(values[rank]) for values in columns.values()))
            for rank in range(len(own))
        ),
    )


def _percentiles(durations: LaunchRankSteps) -> list[dict[int, float]]:
    """Return each rank's percentiles over launches."""
    by_rank = [
        launch_quantiles((launch[rank] for launch in durations), (10, 50, 90, 95)) for rank in range(len(durations[0]))
    ]
    return [{q: stats.geometric_mean(values) for q, values in found.items()} for found in by_rank]


def _medians(durations: LaunchRankSteps | None) -> list[float]:
    """Return each rank's median over all steps of all launches; a step may have taken no time."""
    if durations is None:
        return []
    return [
        stats.quantile([step for launch in durations for step in launch[rank]], 50) for rank in range(len(durations[0]))
    ]


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


def find_shifts(outcome: Outcome) -> list[Shift]:
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
