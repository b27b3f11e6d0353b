"""The change points of a history as lines of text, and its page: the series with the worst change
points first."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pytest_ddpperf import text
from pytest_ddpperf.history.change_points import MIN_POINTS
from pytest_ddpperf.history.series import (
    ChangeStatus,
    HistoryAnalysis,
    HistoryChange,
    Series,
)
from pytest_ddpperf.report import figures
from pytest_ddpperf.report.page import rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    ChangeStatus.REGRESSED: figures.BAD,
    ChangeStatus.IMPROVED: figures.GOOD,
}


_MOST_UNCHANGED = 50  # lines, as many as other reports have rows


# Regressions without an improvement: if both were as likely, so many would be seen in 0.4 % of
# histories.
_MANY = 8


def history_lines(
    analysis: HistoryAnalysis,
    hint: Callable[[HistoryChange], Iterable[str]] = lambda _: (),
) -> Iterator[str]:
    """Yield the change points, each with its `hint`, what could be found in the other series, and
    the summary."""
    for change in analysis.changes:
        yield f"{change.status.value}  {_name(change.series)}"
        for line in (*change_lines(change), *hint(change)):
            yield f"  {line}"
        yield ""
    for series, metric, smallest in analysis.unchanged[:_MOST_UNCHANGED]:
        yield f"{_name(series)}  {unchanged_line(series, metric, smallest)}"
    if (more := len(analysis.unchanged) - _MOST_UNCHANGED) > 0:
        yield f"and {more} more without a change point: -k NAME shows them"
    yield summary_line(analysis)
    counts = Counter(change.status for change in analysis.changes)
    regressed = counts[ChangeStatus.REGRESSED]
    better = counts[ChangeStatus.IMPROVED] + counts[ChangeStatus.UNDONE]
    if regressed >= _MANY and not better:
        yield (
            f"{regressed} regressions, 0 improvements: this is likely noise;"
            " check that all runs are of one kind of machine, and --threshold"
        )


def _name(series: Series) -> str:
    return f"{text.shortened(str(series.test))}  {text.shortened(series.environment)}"


def unchanged_line(series: Series, metric: str, smallest: float) -> str:
    """Return the smallest detectable change of a series without a change point."""
    change = text.resolved(series.kind(metric), smallest)
    return f"{metric}: no change point; a change under {text.amount(change)} could not be seen"


def change_lines(change: HistoryChange) -> Iterator[str]:
    """Yield the size and the commits of a change point, and what else changed there."""
    before, after = (text.figure(change.kind, each) for each in change.seconds)
    interval = text.interval(text.changed_as(change.kind, change.change))
    earlier, later = change.before, change.after
    yield (
        f"{change.metric} {interval}, {before} -> {after}; "
        f"at {later.commit[:12]} of {later.committed[:10]}, after {earlier.commit[:12]}; "
        f"{text.several(change.runs_since, 'run')} since"
    )
    if change.series.distinction:
        yield f"series with {text.shortened(change.series.distinction)}"
    if earlier.commit == later.commit:
        yield "both runs are of the same commit: the machine may have changed"
    if change.why:
        yield f"accepted: {text.shortened(change.why)}"
    if saved := change.why_saved:
        yield f"its baseline was saved: {text.shortened(saved)}"
    if found := change.phase():
        yield f"mostly {text.phase(found[0])}: {text.seconds(found[1], signed=True)}"
    if differences := ", ".join(map(text.shortened, change.differences())):
        yield f"also changed: {differences}"


def summary_line(analysis: HistoryAnalysis) -> str:
    """Return the numbers of change points, series, runs and commits."""
    counts = Counter(change.status for change in analysis.changes)
    found = ", ".join(
        f"{counts[status]} {status.value.lower()}"
        for status in ChangeStatus
        if counts[status]
    )
    runs = {id(run): run for series in analysis.series for run in series.runs}
    commits = len({run.commit for run in runs.values()})
    short = f"; too short: {analysis.short} series" if analysis.short else ""
    return (
        f"{found or 'no change point'} in {len(analysis.series)} series of"
        f" {text.several(len(runs), 'run')} at {text.several(commits, 'commit')}"
        f" ({', '.join(analysis.metrics)}){short}"
    )


def history_html(analysis: HistoryAnalysis) -> str:
    """Return the page of a history. Call `figures.check` first: it needs matplotlib."""
    # The series with the worst change comes first.
    ordered = {change.series.key: change.series for change in analysis.changes}
    ordered |= {series.key: series for series in analysis.series}
    with figures.style():
        cards = [
            _card(f"s{number}", series, analysis)
            for number, series in enumerate(ordered.values(), 1)
        ]
    note = ""
    if not (analysis.changes or analysis.unchanged):
        metrics = ", ".join(analysis.metrics)
        note = f"Nothing was judged: no series has {MIN_POINTS} runs with {metrics}."
    return rendered(
        "history.html",
        title=f"ddpperf history: {summary_line(analysis)}",
        note=note,
        cards=cards,
    )


def _card(
    anchor: str, series: Series, analysis: HistoryAnalysis
) -> dict[str, Any]:
    """Return what the template shows of a series."""
    key = series.key
    changes = [each for each in analysis.changes if each.series.key == key]
    # the worst
    status = changes[0].status.value if changes else "no change point"
    facts = (
        series.environment,
        series.distinction,
        text.several(len(series.runs), "run"),
    )
    lines = [
        f"{change.status.value}: {'; '.join(change_lines(change))}"
        for change in changes
    ]
    for each, metric, smallest in analysis.unchanged:
        if each.key == key:
            lines.append(unchanged_line(each, metric, smallest))
    drawn = []
    for metric in analysis.metrics:
        of_metric = [change for change in changes if change.metric == metric]
        part = series.having(metric)
        if part.runs:
            drawn.append(_figure(part, metric, of_metric))
    return {
        "anchor": anchor,
        "kind": status.lower().replace(" ", "-"),  # in the style sheet
        "status": status,
        "name": text.shortened(str(series.test)),
        "sentence": ", ".join(text.shortened(fact) for fact in facts if fact),
        "opened": status == ChangeStatus.REGRESSED.value,
        "changes": lines,
        "figures": drawn,
    }


def _figure(
    series: Series, metric: str, changes: Sequence[HistoryChange]
) -> dict[str, str]:
    """Draw one metric of a series. Runs are at equal distances, whatever the time between them."""
    logs = series.observe(metric).values
    kind = series.kind(metric)
    values = [kind.shown(math.exp(each), None) for each in logs]
    dates = [run.committed[:10] for run in series.runs]

    def draw(axes: "Axes") -> None:
        every = -(-len(dates) // 4)
        axes.set_xticks(range(0, len(dates), every), dates[::every])
        if not kind.own_figure:
            figures.show_seconds(axes.yaxis)
        axes.plot(
            range(len(dates)), values, ".", color=figures.CURRENT, label="run"
        )
        label = "mean between change points"
        ends = [0, *sorted(change.index for change in changes), len(logs)]
        for start, end in pairwise(ends):
            level = kind.shown(math.exp(fmean(logs[start:end])), None)
            axes.plot(
                [start - 0.5, end - 0.5],
                [level, level],
                color=figures.INK,
                linewidth=1.6,
                label=label,
            )
            label = ""  # one entry of the legend is enough
        for change in changes:
            axes.axvline(
                change.index - 0.5,
                color=_COLOURS.get(change.status, figures.INK),
                linewidth=1,
            )

    last = text.figure(kind, math.exp(logs[-1]))
    described = f"{text.several(len(dates), 'run')}; the last has {last}"
    return figures.figure(f"{metric} of each run", described, draw)
