"""A run as one HTML file: offline, without script, each figure with its numbers as a table.

`html` is a pure function of records. `shell` and `canvas` know nothing of runs: other pages are made of them, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_ddpperf.records import Outcome, Run
from pytest_ddpperf.report.page.shell import check

__all__ = ["check", "html"]


def html(outcomes: Sequence[Outcome], runs: Sequence[Run], *, problem: str = "", told: Sequence[str] = ()) -> str:
    """A page of the measurements of some runs, the worst first. `problem` is what made a run end otherwise than its
    measurements say, `told` what else is about all of them. Raises MissingExtraError."""
    check("a page")
    from pytest_ddpperf.report import worst
    from pytest_ddpperf.report.counts import count, last_line
    from pytest_ddpperf.report.page import canvas, content, parts, shell

    counts = count(outcomes, sum(run.skipped for run in runs), sum(run.never_measured for run in runs))
    with canvas.style():
        sheet = parts.Sheet()
        cards = [content.card(outcome, sheet, number) for number, outcome in enumerate(worst.first(outcomes), 1)]
    return shell.rendered(
        "run.html",
        title=last_line(counts),
        counts=counts,
        cards=cards,
        runs=[content.told_of(run) for run in runs],
        problem=problem,
        told=told,
    )
