"""The change points of a history as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_ddpperf.history.series import ChangeStatus, HistoryAnalysis, HistoryChange
from pytest_ddpperf.report import text


def history_lines(analysis: HistoryAnalysis, changes: Sequence[HistoryChange]) -> Iterator[str]:
    """Yield the change points that were chosen, then the summary."""
    for change in changes:
        name, environment = text.shortened(str(change.series.test)), text.shortened(change.series.environment)
        yield f"{change.status.value}  {name}  {environment}"
        for line in change_lines(change):
            yield f"  {line}"
        yield ""
    yield summary_line(analysis)


def change_lines(change: HistoryChange) -> Iterator[str]:
    """Yield the size and the commits of a change point, and what else changed there."""
    before, after = map(text.seconds, change.seconds)
    earlier, later = change.before.entry, change.after.entry
    yield (
        f"{change.metric} {text.interval(change.change)}, {before} -> {after}; "
        f"at {later.commit[:12]} of {later.committed[:10]}, after {earlier.commit[:12]}; "
        f"{text.several(change.runs_since, 'run')} since"
    )
    if change.series.distinction:
        yield f"series with {text.shortened(change.series.distinction)}"
    if earlier.commit == later.commit:
        yield "both runs are of the same commit: the machine may have changed"
    if change.why:
        yield f"accepted: {text.shortened(change.why)}"
    if differences := ", ".join(map(text.shortened, change.differences())):
        yield f"also changed: {differences}"


def summary_line(analysis: HistoryAnalysis) -> str:
    """Return the numbers of change points, series, runs and commits."""
    counts = Counter(change.status for change in analysis.changes)
    found = ", ".join(f"{counts[status]} {status.value.lower()}" for status in ChangeStatus if counts[status])
    entries = {id(run.entry): run.entry for series in analysis.series for run in series.runs}
    commits = len({entry.commit for entry in entries.values()})
    short = f"; too short: {analysis.short} series" if analysis.short else ""
    return (
        f"{found or 'no change point'} in {len(analysis.series)} series of {text.several(len(entries), 'run')} "
        f"at {text.several(commits, 'commit')} ({', '.join(analysis.metrics)}){short}"
    )
