"""A run, or a history, as one HTML file: offline, without script, each figure with its numbers as a table.

`html` and `history.history_html` are pure functions. `shell` and `drawing` serve both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_ddpperf.records import Outcome, RunInfo
from pytest_ddpperf.report.page.drawing import check

if TYPE_CHECKING:
    from pytest_ddpperf.report.json_report import Gone, StoredReport

__all__ = ["check", "html", "run_page"]


def html(
    outcomes: Sequence[Outcome],
    runs: Sequence[RunInfo],
    *,
    problem: str = "",
    messages: Sequence[str] = (),
    only_before: Sequence[Gone] = (),
) -> str:
    """Return a page of the measurements of some runs, the worst first. `problem` says why a run is invalid, `messages`
    are lines about it. `only_before` are measurements of the baseline run that this run lacks. Raises
    MissingExtraError."""
    check("a page")
    from pytest_ddpperf.report import summary
    from pytest_ddpperf.report.page import content, drawing
    from pytest_ddpperf.report.summary import count, last_line

    counts = count(outcomes, *runs)
    with drawing.style():
        sheet = drawing.Sheet()
        cards = [
            content.card(outcome, sheet, number) for number, outcome in enumerate(summary.worst_first(outcomes), 1)
        ]
    return drawing.rendered(
        "run.html",
        title=last_line(counts, len(only_before)),
        counts=counts,
        cards=cards,
        only_before=only_before,
        runs=[content.run_card(run) for run in runs],
        problem=problem,
        messages=messages,
    )


def run_page(stored: StoredReport) -> str:
    """Return the page of one report, or of several shards. Raises MissingExtraError."""
    from pytest_ddpperf.report import side_by_side, terminal

    whole = stored.run
    return html(
        stored.outcomes,
        stored.runs,
        problem=whole.problem,
        messages=[*side_by_side.bases(stored), *whole.messages, *stored.messages, *terminal.remarks(stored.outcomes)],
        only_before=stored.only_before,
    )
