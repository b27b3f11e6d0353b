"""The page of a history: its series, those with the worst change points first, with figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from pytest_ddpperf.history.change_points import MIN_POINTS
from pytest_ddpperf.history.series import ChangeStatus, HistoryAnalysis, HistoryChange, Series
from pytest_ddpperf.report import history, text
from pytest_ddpperf.report.page import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Each figure takes a tenth of a second and 10 kB.
_MAX_FIGURES = 200
_LAST_RUNS = 10  # in the table of numbers, next to those around change points
_MANY_RUNS = 100  # more are drawn as a line: their marks would cover each other
_COLOURS = {ChangeStatus.REGRESSED: drawing.BAD, ChangeStatus.IMPROVED: drawing.GOOD}


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesCard:
    """A series with its change points and figures."""

    anchor: str
    kind: str  # of the worst change point, in the style sheet
    status: str
    name: str
    sentence: str
    opened: bool
    changes: tuple[str, ...]
    figures: tuple[drawing.Figure, ...]


def history_html(analysis: HistoryAnalysis) -> str:
    """Return the page of a history. Raises MissingExtraError."""
    drawing.check("a page")
    by_series: dict[int, list[HistoryChange]] = {}
    for change in analysis.changes:
        by_series.setdefault(id(change.series), []).append(change)
    ranks = {key: rank for rank, key in enumerate(by_series)}
    ordered = sorted(analysis.series, key=lambda series: ranks.get(id(series), len(ranks)))
    drawn = ordered[: _MAX_FIGURES // len(analysis.metrics)]
    with drawing.style():
        sheet = drawing.Sheet()
        cards = [
            _card(sheet, f"s{number}", series, by_series.get(id(series), []), analysis.metrics)
            for number, series in enumerate(drawn, 1)
        ]
    notes = []
    if analysis.short == len(analysis.series):
        notes.append(f"Nothing was judged: no series has {MIN_POINTS} runs.")
    if len(drawn) < len(ordered):
        notes.append(f"{len(ordered) - len(drawn):,} further series are not shown.")
    title = f"ddpperf history: {history.summary_line(analysis)}"
    return drawing.rendered("history.html", title=title, notes=notes, cards=cards)


def _card(
    sheet: drawing.Sheet, anchor: str, series: Series, changes: Sequence[HistoryChange], metrics: Sequence[str]
) -> SeriesCard:
    status = changes[0].status.value if changes else "no change point"
    facts = (series.environment, series.distinction, text.several(len(series.runs), "run"))
    return SeriesCard(
        anchor=anchor,
        kind=status.lower().replace(" ", "-"),
        status=status,
        name=text.shortened(str(series.test)),
        sentence=", ".join(text.shortened(fact) for fact in facts if fact),
        opened=status == ChangeStatus.REGRESSED.value,
        changes=tuple(f"{change.status.value}: {'; '.join(history.change_lines(change))}" for change in changes),
        figures=tuple(
            _figure(sheet, series, metric, [change for change in changes if change.metric == metric])
            for metric in metrics
        ),
    )


def _figure(sheet: drawing.Sheet, series: Series, metric: str, changes: Sequence[HistoryChange]) -> drawing.Figure:
    """Draw one metric of a series. Runs are at equal distances, whatever the time between them."""
    launches = [run.measurement.launch_seconds[metric] for run in series.runs]
    logs = [estimate.value for estimate in series.estimates(metric)]
    seconds = [math.exp(each) for each in logs]
    dates = [run.entry.committed[:10] for run in series.runs]
    are_many = len(dates) > _MANY_RUNS
    stretches = list(pairwise([0, *sorted(change.index for change in changes), len(logs)]))

    def draw(axes: Axes) -> None:
        every = -(-len(dates) // 4)
        axes.set_xticks(range(0, len(dates), every), dates[::every])
        drawing.show_seconds(axes.yaxis)
        if are_many:
            axes.plot(range(len(dates)), seconds, color=drawing.CURRENT, linewidth=0.8)
        else:
            fastest, slowest = [min(each) for each in launches], [max(each) for each in launches]
            axes.vlines(range(len(dates)), fastest, slowest, drawing.CURRENT, linewidth=0.8, alpha=0.4)
            axes.plot(range(len(dates)), seconds, color=drawing.CURRENT, marker="o", markersize=4.5, linestyle="none")
        for start, end in stretches:
            level = math.exp(fmean(logs[start:end]))
            axes.plot([start - 0.5, end - 0.5], [level, level], color=drawing.INK, linewidth=1.6)
        for change in changes:
            axes.axvline(change.index - 0.5, color=_COLOURS.get(change.status, drawing.INK), linewidth=1)

    return sheet.figure(
        draw,
        f"{metric} of each run",
        f"{text.several(len(dates), 'run')}; the last took {text.seconds(seconds[-1])}",
        keys=(
            drawing.Key(mark="now", text="runs" if are_many else "a run; bar: its fastest to its slowest launch"),
            drawing.Key(mark="level", text="mean between change points"),
        ),
        head=("commit", "date", "change point", metric),
        rows=tuple(_number_rows(series, seconds, changes)),
    )


def _number_rows(
    series: Series, seconds: Sequence[float], changes: Sequence[HistoryChange]
) -> Iterator[tuple[str, ...]]:
    """Yield the runs around change points and the last ones."""
    status = {change.index: change.status.value for change in changes}
    shown = {index - offset for index in status for offset in (0, 1)}
    shown |= set(range(max(0, len(seconds) - _LAST_RUNS), len(seconds)))
    for index in sorted(shown):
        entry = series.runs[index].entry
        yield entry.commit[:12], entry.committed[:10], status.get(index, ""), text.seconds(seconds[index])
