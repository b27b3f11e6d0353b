"""The figure of a series of runs: what is drawn of it, what it says, and its numbers as a table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pytest_ddpperf.history.curves import Curve
from pytest_ddpperf.history.judging import Found
from pytest_ddpperf.history.tracks import Mark
from pytest_ddpperf.records import Status
from pytest_ddpperf.report import text
from pytest_ddpperf.report.page import canvas
from pytest_ddpperf.report.page.canvas import BAD, GOOD, INK, NOW, OPEN
from pytest_ddpperf.report.page.parts import Figure, Key, Sheet
from pytest_ddpperf.verdict import stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# As the style sheet has them: a verdict has a shape, not a colour alone.
_SHAPES = {
    Status.REGRESSED: ("\N{BLACK UP-POINTING TRIANGLE}", BAD),
    Status.IMPROVED: ("\N{BLACK DOWN-POINTING TRIANGLE}", GOOD),
    Status.INCONCLUSIVE: ("?", OPEN),
    Status.PASS: ("\N{CHECK MARK}", GOOD),
}
# So many bars can be told apart on a phone: of more runs some that follow one another share one.
_COLUMNS = 96
_MANY, _SIZE, _SMALL = 40, 4.5, 2.6  # runs whose marks would cover each other, and points across one before and then
# A run further than so many interquartile ranges from those beside it would leave no room for them: it is drawn as an
# arrowhead at the edge. About five standard deviations.
_FAR = 4.0
_LAST = 10  # runs that the table has beside those around steps
_LANE = 0.16  # of the height, above what is drawn: for the marks of steps


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Runs between two steps, or between two changes of facts that must match."""

    curve: Curve
    first: int  # in the figure
    start: int  # in its series
    end: int

    def place(self, run: int) -> int:
        """In the figure, of one in the series."""
        return self.first - self.start + run


def over_time(sheet: Sheet, curves: Sequence[Curve], changed: Sequence[int]) -> Figure:
    """One metric of series that followed one another; at the places `changed` something of the environment did."""
    stretches = list(_stretches(curves))
    marks = [mark for curve in curves for mark in curve.track.marks]
    found = [(place, each) for place, each in _found(curves)]
    starts = [stretch.first for stretch in stretches if stretch.start == 0][1:]
    a_column = -(-len(marks) // _COLUMNS)
    low, high = ends = _ends(stretches, bars=a_column == 1)
    cut = [sorted(cut) for cut in _beyond(stretches, ends, a_column)]

    def draw(axes: Axes) -> None:
        _along(axes, marks)
        span = high - low or high * 0.1
        canvas.upwards(axes, [low - 0.04 * span, high + _LANE * span * bool(found)], canvas.durations)
        for start in starts:
            axes.axvline(start - 0.5, color=INK, linewidth=1, linestyle=(0, (2, 2)))
        for place, each in found:
            axes.axvline(place - 0.5, color=_SHAPES[each.status][1], linewidth=1, alpha=0.7)
        if a_column > 1:
            _columns(axes, stretches, ends, a_column)
        else:
            _runs(axes, stretches, ends)
        for marker, edge, places in zip("v^", ends, cut, strict=True):
            axes.plot(places, [edge] * len(places), color=NOW, marker=marker, markersize=5, linestyle="none")
        levels = list(_levels(stretches, a_column))
        axes.plot([x for x, _ in levels], [y for _, y in levels], color=INK, linewidth=1.6)
        canvas.below(axes, sorted({place - place % a_column for place in changed}))
        worst = sorted(found, key=lambda pair: list(_SHAPES).index(pair[1].status))
        canvas.above(axes, [(place - 0.5, *_SHAPES[each.status], _commit(each.after)) for place, each in worst])

    metric = curves[0].metric
    return sheet.figure(
        draw,
        f"{metric} of each run",
        _told(curves, a_column),
        keys=tuple(_keys(curves, a_column, split=bool(starts), changed=bool(changed), beyond=any(cut))),
        head=("commit", "of", "there", metric, "95 %", "level"),
        rows=tuple(_rows(curves)),
    )


def _stretches(curves: Sequence[Curve]) -> Iterator[_Stretch]:
    before = 0
    for curve in curves:
        for start, end in pairwise([0, *curve.breaks, len(curve.seconds)]):
            yield _Stretch(curve, before + start, start, end)
        before += len(curve.seconds)


def _found(curves: Sequence[Curve]) -> Iterator[tuple[int, Found]]:
    before = 0
    for curve in curves:
        yield from ((before + found.place, found) for found in curve.found)
        before += len(curve.seconds)


def _ends(stretches: Sequence[_Stretch], *, bars: bool) -> tuple[float, float]:
    """From the least to the most seconds that are drawn, with the bars of single runs."""
    ends: list[float] = []
    for stretch in stretches:
        values = stretch.curve.seconds[stretch.start : stretch.end]
        shown = [*values, *(end for pair in stretch.curve.bounds[stretch.start : stretch.end] for end in pair if bars)]
        lower, middle, upper = (stats.quantile(sorted(values), q) for q in (25, 50, 75))
        reach = _FAR * max(upper - lower, 0.01 * middle)
        # What was suspected to be a step, and looks like an outlier, is to be seen.
        ends += [values[each.place - stretch.start] for each in stretch.curve.found if each.place == stretch.end - 1]
        ends += [max(min(shown), lower - reach), min(max(shown), upper + reach)]
    return min(ends), max(ends)


def _along(axes: Axes, marks: Sequence[Mark]) -> None:
    """Days of commits: few, for they are long."""
    number = min(4, len(marks))
    places = [int((part + 0.5) * len(marks) / number) for part in range(number)]
    canvas.along(axes, places, [marks[at].run.committed[:10] for at in places], ends=(-0.6, len(marks) - 0.4))


def _runs(axes: Axes, stretches: Sequence[_Stretch], ends: tuple[float, float]) -> None:
    """Each run as a mark with its own error."""
    shown = [(each.place(run), each.curve.seconds[run]) for each in stretches for run in range(each.start, each.end)]
    bars = [
        (each.place(run), *each.curve.bounds[run])
        for each in stretches
        if each.curve.bounds
        for run in range(each.start, each.end)
    ]
    _bars(axes, bars, ends, linewidth=0.8, alpha=0.6)
    within = [(x, y) for x, y in shown if ends[0] <= y <= ends[1]]
    style: dict[str, Any] = {"color": NOW, "marker": "o", "linestyle": "none"}
    size = _SIZE if len(shown) <= _MANY else _SMALL
    axes.plot([x for x, _ in within], [y for _, y in within], markersize=size, **style)


def _columns(axes: Axes, stretches: Sequence[_Stretch], ends: tuple[float, float], size: int) -> None:
    """Several runs as one bar: from the least to the most, and the middle half."""
    parts = [(place, sorted(values)) for place, values in _parts(stretches, size)]
    _bars(axes, [(place, values[0], values[-1]) for place, values in parts], ends, linewidth=0.7, alpha=0.8)
    middle = [(place, stats.quantile(values, 25), stats.quantile(values, 75)) for place, values in parts]
    _bars(axes, middle, ends, linewidth=2.2)


def _bars(axes: Axes, bars: Sequence[tuple[float, float, float]], ends: tuple[float, float], **style: Any) -> None:
    low, high = ends
    shown = [(x, max(least, low), x, min(most, high)) for x, least, most in bars if least <= high and most >= low]
    canvas.segments(axes, shown, color=NOW, **style)


def _beyond(stretches: Sequence[_Stretch], ends: tuple[float, float], size: int) -> tuple[set[float], set[float]]:
    """The places of bars below what is drawn, and above."""
    parts = list(_parts(stretches, size))
    low, high = ends
    below, above = ({x for x, own in parts if min(own) < low}, {x for x, own in parts if max(own) > high})
    return below, above


def _parts(stretches: Sequence[_Stretch], size: int) -> Iterator[tuple[float, Sequence[float]]]:
    """Runs that follow one another and share a bar, which never reaches across a step, and its place."""
    for stretch in stretches:
        for start in range(stretch.start, stretch.end, size):
            end = min(start + size, stretch.end)
            yield (stretch.place(start) + stretch.place(end - 1)) / 2, stretch.curve.seconds[start:end]


def _levels(stretches: Sequence[_Stretch], size: int) -> Iterator[tuple[float, float]]:
    """A line a stretch, to its ends and half way to the next."""
    for stretch in stretches:
        levels = stretch.curve.levels
        if not levels:
            continue
        shown = sorted({*range(stretch.start, stretch.end, size), stretch.end - 1})
        yield stretch.place(stretch.start) - 0.5, levels[stretch.start]
        yield from ((stretch.place(run), levels[run]) for run in shown)
        yield stretch.place(stretch.end) - 0.5, levels[stretch.end - 1]
        yield stretch.place(stretch.end), float("nan")


def _commit(mark: Mark) -> str:
    """To be drawn: nothing but what is a commit's name, whatever the file holds."""
    return mark.run.commit[:7] if re.fullmatch("[0-9a-f]{7,64}", mark.run.commit) else ""


def _told(curves: Sequence[Curve], a_column: int) -> str:
    last = curves[-1]
    marks = [mark for curve in curves for mark in curve.track.marks]
    days = [mark.run.committed[:10] for mark in (marks[0], marks[-1])]
    told = [f"{text.several(len(marks), 'run')} of commits of {' to '.join(dict.fromkeys(days))}"]
    told.append(f"the last took {text.seconds(last.seconds[-1])}")
    if last.levels:
        told[-1] += f", where the level is {text.seconds(last.levels[-1])}"
    told += [
        f"{found.status} {text.interval(found.change)} at {text.shortened(found.after.run.commit[:12])}"
        for _, found in _found(curves)
    ]
    if a_column > 1:
        told.append(f"up to {a_column} runs share a bar")
    return "; ".join(told)


def _keys(curves: Sequence[Curve], a_column: int, *, split: bool, changed: bool, beyond: bool) -> Iterator[Key]:
    told = any(curve.levels for curve in curves)
    if a_column > 1:
        yield Key(mark="bar", text=f"least to most of up to {a_column} runs, thick: the middle half")
    else:
        yield Key(mark="now", text="a run")
        if told:
            yield Key(mark="bar", text="its 95 % interval")
    if told:
        yield Key(mark="level", text="level")
    for status in _SHAPES:
        if any(found.status is status for curve in curves for found in curve.found):
            name = "suspected step" if status is Status.INCONCLUSIVE else f"step, {status}"
            yield Key(mark=f"shape {status.lower()}", text=name)
    if beyond:
        yield Key(mark="shape beyond", text="beyond the figure")
    if changed:
        yield Key(mark="shape changed", text="environment changed")
    if split:
        yield Key(mark="split", text="a series of its own from here")


def _rows(curves: Sequence[Curve]) -> Iterator[tuple[str, ...]]:
    """The runs around steps and where a series begins, and the last ones."""
    shown = [(curve, at, told) for curve in curves for at, told in _shown(curve, curves)]
    # In one unit, and with a digit more than elsewhere: runs differ by little.
    written = iter(canvas.durations([float(f"{value:.4g}") for curve, at, _ in shown for value in _seconds(curve, at)]))
    for curve, at, told in shown:
        run = curve.track.marks[at].run
        own, *level = [next(written) for _ in _seconds(curve, at)]
        error = f"± {text.amount((curve.bounds[at][1] / curve.bounds[at][0]) ** 0.5 - 1)}" if curve.bounds else "-"
        yield text.shortened(run.commit[:12]), run.committed[:10], told, own, error, *(level or "-")


def _seconds(curve: Curve, at: int) -> tuple[float, ...]:
    """Of a run, and the level there if it is known."""
    return (curve.seconds[at], *curve.levels[at : at + 1])


def _shown(curve: Curve, curves: Sequence[Curve]) -> Iterator[tuple[int, str]]:
    """Places of a series, and what is told of each."""
    number = len(curve.seconds)
    told: dict[int, list[str]] = {}
    if len(curves) > 1:
        told[0] = [text.shortened(curve.track.told)]
    for found in curve.found:
        told.setdefault(found.place, []).append(str(found.status))
    last = range(max(0, number - _LAST), number) if curve is curves[-1] else [number - 1]
    for at in sorted({*told, *(max(place - 1, 0) for place in told), *last}):
        yield at, "; ".join(told.get(at, ()))
