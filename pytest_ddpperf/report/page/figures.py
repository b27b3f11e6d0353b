"""The three figures of a measurement: its changes, its step times, its launches; and the table of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pytest_ddpperf.records import LaunchRankSteps, Outcome
from pytest_ddpperf.report import text
from pytest_ddpperf.report.page import drawing
from pytest_ddpperf.report.page.drawing import BASELINE, CURRENT, FAINT, INK, LIMIT, Figure, Key, Sheet, Table
from pytest_ddpperf.report.page.sides import PERCENTILES, Shift, Side, launch_quantiles
from pytest_ddpperf.verdict import stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Marks differ in shape and in colour: the current side is a filled circle, the baseline side a hollow square.
_CURRENT: Mapping[str, Any] = {"color": CURRENT, "marker": "o", "linestyle": "none"}
_BASELINE: Mapping[str, Any] = {"color": BASELINE, "marker": "s", "linestyle": "none", "markerfacecolor": "white"}
_IN_TABLE = (5, 10, 25, 50, 75, 90, 95)
# Bounds may be so wide that nothing else could be seen: the axis ends at so many times the largest change or limit.
_MOST = 3.0


def shifts(sheet: Sheet, found: Sequence[Shift], name: str) -> Figure:
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


def distributions(sheet: Sheet, now: Side, base: Side | None) -> Figure:
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


def pairs(sheet: Sheet, order: str, now: Side, base: Side, q: int) -> Figure:
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


def launches(sheet: Sheet, now: Side, base: Side | None, q: int) -> Figure:
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


def ranks(outcome: Outcome) -> Table:
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
