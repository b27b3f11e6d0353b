"""The figures of a measurement: what is drawn, what it says, and its numbers as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_ddpperf.records import LaunchRankSteps, Outcome, Samples
from pytest_ddpperf.report import text
from pytest_ddpperf.report.page import canvas
from pytest_ddpperf.report.page.canvas import BASE, FAINT, GROUND, INK, LIMIT, NOW
from pytest_ddpperf.report.page.parts import Figure, Key, Sheet
from pytest_ddpperf.report.page.sides import PERCENTILES, Shift, Side, launch_quantiles
from pytest_ddpperf.verdict import stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Marks differ in shape as in colour: what is at hand is a filled circle, what it is held against a hollow square.
_NOW: Mapping[str, Any] = {"color": NOW, "marker": "o", "markersize": 5.5, "linestyle": "none"}
_BASE: Mapping[str, Any] = {
    "color": BASE, "marker": "s", "markersize": 5.5, "linestyle": "none", "markerfacecolor": GROUND
}  # fmt: skip
_OPEN = {**_NOW, "markerfacecolor": GROUND}
_CPU: Mapping[str, Any] = {"color": INK, "marker": "x", "markersize": 5, "linestyle": "none"}
_DASHED, _DOTTED = (0, (4, 2)), (0, (2, 3))
_MARKED, _IN_TABLE = (10, 25, 50, 75, 90), (5, 10, 25, 50, 75, 90, 95)  # of a distribution
# Bounds may be so wide that nothing else could be seen beside them: what is drawn ends at so many times the largest
# change or limit, in an arrowhead, but not before half of them are whole. The table has all whole.
_MOST = 3.0
_MANY, _SMALL = 60, 3.0  # launches whose marks would cover each other, and points across one then


def shifts(sheet: Sheet, found: Sequence[Shift], name: str) -> Figure:
    """By how much each percentile changed, with its bounds and its limit."""
    shares = [shift.limit_share for shift in found if shift.limit_share is not None]
    usual = median(max(-shift.change.low, shift.change.high) for shift in found)
    most = max(_MOST * max(abs(value) for value in (*(shift.change.estimate for shift in found), *shares)), usual)
    ends = [(max(shift.change.low, -most), min(shift.change.high, most)) for shift in found]

    def draw(axes: Axes) -> None:
        places = range(len(found))
        canvas.along(axes, places, [shift.metric for shift in found], ends=(-0.6, len(found) - 0.4))
        canvas.upwards(axes, [0.0, *shares, *(value for pair in ends for value in pair)], canvas.shares)
        axes.axhline(0, color=INK, linewidth=0.8)
        lines = [(at, low, at, high) for at, (low, high) in enumerate(ends)]
        canvas.segments(axes, lines, color=NOW, linewidth=2.5)
        for marker, cut in (
            ("^", {at: most for at, shift in enumerate(found) if shift.change.high > most}),
            ("v", {at: -most for at, shift in enumerate(found) if shift.change.low < -most}),
        ):
            axes.plot(list(cut), list(cut.values()), color=NOW, marker=marker, markersize=6, linestyle="none")
        for style, asked in ((_NOW, True), (_OPEN, False)):
            own = {at: s.change.estimate for at, s in enumerate(found) if (s.limit is not None) is asked}
            axes.plot(list(own), list(own.values()), **style)
        limits = [
            (at - 0.35, shift.limit_share, at + 0.35, shift.limit_share)
            for at, shift in enumerate(found)
            if shift.limit_share is not None
        ]
        canvas.segments(axes, limits, color=LIMIT, linewidth=2, linestyle=_DASHED)

    gated = [shift for shift in found if shift.limit is not None]
    told = "; ".join(f"{shift.metric} {text.interval(shift.change)}, limit {shift.limit}" for shift in gated)
    keys = [Key(mark="now", text="change and its bounds"), Key(mark="limit", text="limit")]
    if len(gated) < len(found):
        keys.insert(1, Key(mark="open", text="without a limit"))
    return sheet.figure(
        draw,
        f"Change against {name}",
        told,
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
    """Step times of both sides: each percentile over launches, and from the least launch to the most."""
    sides = [side for side in (now, base) if side is not None]

    def draw(axes: Axes) -> None:
        ends = [value for side in sides for q in (PERCENTILES[0], PERCENTILES[-1]) for value in side.at(q)]
        pad = (max(ends) - min(ends)) * 0.04 or max(ends) * 0.05
        canvas.across(axes, min(ends) - pad, max(ends) + pad, canvas.durations)
        canvas.beside(axes, _MARKED, [f"p{q}" for q in _MARKED], ends=(0, 100))
        for side in reversed(sides):
            colour, style = (NOW, "-") if side is now else (BASE, _DASHED)
            least, most = ([end(side.at(q)) for q in PERCENTILES] for end in (min, max))
            axes.fill_betweenx(PERCENTILES, least, most, color=colour, alpha=0.15, linewidth=0)
            middle = [side.middle(q) for q in PERCENTILES]
            axes.plot(middle, PERCENTILES, color=colour, linewidth=2, linestyle=style)

    return sheet.figure(
        draw,
        "Step times",
        "; ".join(
            f"{side.name}: p50 {text.seconds(side.middle(50))}, p95 {text.seconds(side.middle(95))}" for side in sides
        ),
        keys=tuple(Key(mark=f"{_mark(side, now)}-line", text=side.name) for side in sides)
        + (Key(mark="band", text="least to most launch"),),
        head=("", *(f"p{q}" for q in _IN_TABLE)),
        rows=tuple((side.name, *(text.seconds(side.middle(q)) for q in _IN_TABLE)) for side in sides),
    )


def in_turns(sheet: Sheet, outcome: Outcome, now: Side, base: Side, q: int) -> Figure:
    """A percentile of each launch of both sides, joined in pairs, in the order in which they were taken."""
    assert outcome.baseline_side is not None
    pairs = list(zip(base.at(q), now.at(q), strict=True))
    places = _places(outcome.baseline_side.order, len(pairs), at_once=bool(outcome.baseline_side.stretches))

    def draw(axes: Axes) -> None:
        middles = [sum(pair) / 2 for pair in places]
        labels = [str(number) for number in range(1, len(pairs) + 1)]
        last = max(max(pair) for pair in places)
        canvas.along(axes, middles, labels, ends=(-0.6, last + 0.6))
        canvas.upwards(axes, [value for pair in pairs for value in pair], canvas.durations)
        joined = [(a, before, b, after) for (a, b), (before, after) in zip(places, pairs, strict=True)]
        canvas.segments(axes, joined, color=FAINT, linewidth=2)
        for side, style in enumerate((_BASE, _NOW)):
            axes.plot([place[side] for place in places], [pair[side] for pair in pairs], **style)

    slower = sum(after > before for before, after in pairs)
    return sheet.figure(
        draw,
        f"Launches in turns, p{q}",
        f"now was slower in {slower} of {len(pairs)} pairs; {_spans(now, base, q)}",
        keys=(Key(mark="now", text="now"), Key(mark="base", text=base.name)),
        head=("pair", "first", base.name, "now", "change"),
        rows=tuple(
            (
                str(number + 1),
                _first(outcome.baseline_side.order[2 * number :], base.name),
                text.seconds(before),
                text.seconds(after),
                text.share(after / before - 1),
            )
            for number, (before, after) in enumerate(pairs)
        ),
    )


def _places(order: str, pairs: int, *, at_once: bool) -> list[tuple[float, float]]:
    """Where each pair's launches stand: that of the baseline, that of now."""
    taken = {side: [place for place, letter in enumerate(order) if letter == side] for side in "bn"}
    if at_once or any(len(own) != pairs for own in taken.values()):
        return [(pair, pair) for pair in range(pairs)]
    return list(zip(taken["b"], taken["n"], strict=True))


def _first(order: str, name: str) -> str:
    return {"b": name, "n": "now"}.get(order[:1], "-")


def in_a_row(sheet: Sheet, now: Side, base: Side | None, q: int) -> Figure:
    """A percentile of each launch: those of the sessions of a baseline, if there is one, then those of now."""
    before = base.sessions if base is not None else ()
    launches = [*(session[q] for session in before), now.at(q)]
    starts = list(accumulate((len(values) for values in launches), initial=0))
    told = [*(base.told if base is not None else ()), "now"]

    def draw(axes: Axes) -> None:
        labels = [*(str(number) for number in range(1, len(launches))), "now"]
        edge = 0.4 + starts[-1] * 0.015
        canvas.along(axes, [(a + b - 1) / 2 for a, b in pairwise(starts)], labels, ends=(-edge, starts[-1] - 1 + edge))
        values = [value for own in launches for value in own]
        size = _NOW["markersize"] if len(values) <= _MANY else _SMALL
        canvas.upwards(axes, values, canvas.durations)
        for start in starts[1:-1]:
            axes.axvline(start - 0.5, color=FAINT, linewidth=1, linestyle=_DOTTED)
        for (start, stop), style in (((0, starts[-2]), _BASE), (starts[-2:], _NOW)):
            if stop > start:
                axes.plot(range(start, stop), values[start:stop], **{**style, "markersize": size})

    keys = [Key(mark="now", text="now")]
    if base is not None:
        keys.append(Key(mark="base", text=f"{base.name}, {text.several(len(before), 'session')}"))
    return sheet.figure(
        draw,
        f"Launches in the order they were taken, p{q}",
        _spans(now, base, q),
        keys=tuple(keys),
        head=("session", "launches", "mean", "each"),
        rows=tuple(
            (
                who if who == "now" else f"{number}: {who}",
                str(len(own)),
                text.seconds(stats.geometric_mean(own)),
                " ".join(map(text.seconds, own)),
            )
            for number, (who, own) in enumerate(zip(told, launches, strict=True), 1)
        ),
    )


def _spans(now: Side, base: Side | None, q: int) -> str:
    sides = [now] if base is None else [now, base]
    return "; ".join(f"{side.name}: {text.span(side.at(q), text.seconds)}" for side in sides)


def ranks(sheet: Sheet, outcome: Outcome) -> Figure:
    """Each rank's own step times, CPU time and wait for RPC, of both sides as far as they are known."""
    assert outcome.measurement is not None
    other = outcome.baseline_side.measurement if outcome.baseline_side is not None else None
    now, base = _Ranks.of(outcome.measurement.samples), _Ranks.of(other.samples) if other is not None else None
    if base is not None and len(base.own) != len(now.own):
        base = None
    aside = 0.13 if base is not None else 0.0  # so that both sides are seen
    names = [outcome.plan.name(rank) for rank in range(len(now.own))]

    def draw(axes: Axes) -> None:
        canvas.along(
            axes, range(len(names)), [name.removeprefix("rank ") for name in names], ends=(-0.6, len(names) - 0.4)
        )
        sides = [(now, aside, _NOW, NOW)] + ([(base, -aside, _BASE, BASE)] if base is not None else [])
        shown = [value for side, *_ in sides for own in side.own for value in (own[10], own[90])]
        extra = [value for values in (now.cpu, now.blocked) if values for value in values]
        canvas.upwards(axes, [*shown, *extra], canvas.durations)
        for side, off, style, colour in reversed(sides):
            spans = [(rank + off, own[10], rank + off, own[90]) for rank, own in enumerate(side.own)]
            canvas.segments(axes, spans, color=colour, linewidth=2.5)
            axes.plot([rank + off for rank in range(len(names))], [own[50] for own in side.own], **style)
        for values, marker in ((now.cpu, "x"), (now.blocked, "_")):
            if values:
                axes.plot([rank + aside for rank in range(len(names))], values, **{**_CPU, "marker": marker})

    keys = [Key(mark="now", text="now: p50, p10 to p90")]
    if base is not None:
        keys.append(Key(mark="base", text="the other side"))
    keys += [Key(mark="cross", text="CPU time, p50")] * bool(now.cpu)
    keys += [Key(mark="dash", text="blocked in RPC, p50")] * bool(now.blocked)
    columns: dict[str, list[float]] = {f"p{q}": [own[q] for own in now.own] for q in (10, 50, 90, 95)}
    columns |= {title: values for title, values in (("CPU p50", now.cpu), ("blocked p50", now.blocked)) if values}
    if base is not None:
        columns["other side p50"] = [own[50] for own in base.own]
        columns |= {"other side CPU p50": base.cpu} if base.cpu else {}
    return sheet.figure(
        draw,
        "Trainers' own steps" if outcome.plan.rpc else "Ranks' own steps",
        f"p50 is {text.span([own[50] for own in now.own], text.seconds)}",
        keys=tuple(keys),
        head=("", *columns),
        rows=tuple(
            (name, *(text.seconds(values[rank]) for values in columns.values())) for rank, name in enumerate(names)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """Seconds, a rank each; empty where they were not measured."""

    own: list[dict[int, float]]  # by percentile
    cpu: list[float]
    blocked: list[float]

    @staticmethod
    def of(samples: Samples) -> _Ranks:
        return _Ranks(
            own=[_middles(samples.rank_seconds, rank) for rank in range(len(samples.rank_seconds[0]))],
            cpu=_medians(samples.cpu_seconds),
            blocked=_medians(samples.blocked_seconds),
        )


def _middles(durations: LaunchRankSteps, rank: int) -> dict[int, float]:
    """By percentile, over launches."""
    found = launch_quantiles((launch[rank] for launch in durations), (10, 50, 90, 95))
    return {q: stats.geometric_mean(values) for q, values in found.items()}


def _medians(durations: LaunchRankSteps | None) -> list[float]:
    """Each rank's, over all steps of all launches: there may be steps of nothing."""
    if durations is None:
        return []
    return [
        stats.quantile([step for launch in durations for step in launch[rank]], 50) for rank in range(len(durations[0]))
    ]


def _mark(side: Side, now: Side) -> str:
    return "now" if side is now else "base"
