"""A run as Markdown, for the summary of a CI job or a comment on a pull request: yields text,
writes nothing.

Whatever a user named stands in a code span or in a fence: there neither Markdown nor HTML is read,
and no platform looks for mentions or references.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from pytest_ddpperf import text
from pytest_ddpperf.records.outcome import Outcome, Outcomes, RunInfo
from pytest_ddpperf.records.samples import Status
from pytest_ddpperf.report import (
    diff_report,
    guard,
    sentences,
    summary,
    terminal,
)
from pytest_ddpperf.report.json_report import StoredReport

# A bot finds the comment that it should replace by this marker.
MARKER = "<!-- pytest-ddpperf -->"

# GitHub refuses comments of more than 65,536 characters. The other bounds together stay below this
# one, but for long names with characters that HTML spells out.
_LONGEST = 60_000
_MOST_ROWS = 50
_MOST_GONE = 10  # measurements of the baseline run that this run lacks
_MOST_DETAILS = 10
_MOST_REMARKS = 20
_LONGEST_REMARK = 250  # characters
_LONGEST_DETAILS = 1_700
_LONGEST_SECTION = 2_500
_MOST_SECTIONS = 2


def report(stored: StoredReport) -> str:
    """Return the counts, then a row for each measurement that needs attention, the worst first,
    with their details, then the others, then the messages. Longer lists end with "and N more"."""
    for details in (_MOST_DETAILS, _MOST_DETAILS // 2, 0):
        content = _report(stored, details)
        if len(content) <= _LONGEST:
            break
    return content


def _report(stored: StoredReport, most_details: int) -> str:
    whole, ordered = stored.run, summary.worst_first(stored.outcomes)
    concerning = summary.concerning(ordered)
    quiet = ordered[len(concerning) :]
    rows = list(map(_row, concerning))
    gone = [
        f"| {diff_report.ONLY_BEFORE} | {_code(f'{each.name} on {each.ranks}')} | |"
        for each in stored.only_before
    ]
    room = max(0, _MOST_ROWS - len(rows))
    detailed = [
        each
        for each in concerning
        if each.verdict
        and (each.fails or each.verdict.status is Status.INCONCLUSIVE)
    ]
    sections = [*whole.sections.items()]
    remarks = [
        *(
            line
            for line in (*_about(whole), *diff_report.run_messages(stored))
            if line
        ),
        *sentences.problems([*concerning, *quiet[:room]], reasons=False),
    ]
    title = summary.last_line(ordered, whole, only_before=len(gone))
    left_out = max(0, len(rows) - _MOST_ROWS) + max(0, len(gone) - _MOST_GONE)
    parts = [
        f"{MARKER}\n## {_heading(title)}",
        _code(whole.problem) if whole.problem else "",
        _list([*guard.lines(whole)]),
        _table([*rows[:_MOST_ROWS], *gone[:_MOST_GONE]], concerning),
        *map(_details, detailed[:most_details]),
        _quiet(quiet, room, open_=not concerning) if quiet else "",
        *(_section(*section) for section in sections[:_MOST_SECTIONS]),
        _more(len(sections) - _MOST_SECTIONS, "section"),
        _list(remarks),
        _more(left_out, "row"),
    ]
    return _joined(parts) + "\n"


def _heading(line: str) -> str:
    """Return a line as it is, unless it names a version or an option in which Markdown may read
    something."""
    is_plain = re.fullmatch(r"[\w ',.;:=()/+-]+", line, re.ASCII)
    return line if is_plain and len(line) <= _LONGEST_REMARK else _code(line)


def _joined(parts: Sequence[str]) -> str:
    return "\n\n".join(filter(None, parts))


def _section(title: str, lines: Sequence[str]) -> str:
    name = f"<code>{escape(text.shortened(title))}</code>"
    return _folded(name, _fenced("\n".join(lines), _LONGEST_SECTION))


def _quiet(outcomes: Outcomes, most: int, *, open_: bool) -> str:
    """Return a folded section of at most `most` measurements that need no attention."""
    statuses = Counter(outcome.shown_status for outcome in outcomes)
    summary = ", ".join(
        f"{number} {status}" for status, number in statuses.items()
    )
    parts = (
        _table(list(map(_row, outcomes[:most])), outcomes),
        _more(len(outcomes) - most, "row"),
    )
    return _folded(summary, _joined(parts), open_=open_)


def _list(lines: Sequence[str]) -> str:
    shown = [f"- {_code(line)}" for line in lines[:_MOST_REMARKS]]
    return "\n".join(
        filter(None, (*shown, _more(len(lines) - _MOST_REMARKS, "remark")))
    )


def _more(number: int, what: str) -> str:
    if number <= 0:
        return ""
    return f"And {text.several(number, f'more {what}')}: see the JSON report."


def _about(run: RunInfo) -> Iterator[str]:
    """Yield the commit and the machine of a run."""
    if run.commit:
        yield f"commit {text.commit(run.commit)}"
    yield from terminal.about(run.facts)


def appends(path: Path) -> bool:
    """Return whether `path` is the summary of a GitHub step, to which all commands of the step
    append."""
    summary = os.environ.get("GITHUB_STEP_SUMMARY", "")
    return summary != "" and os.path.realpath(summary) == os.path.realpath(path)


def _table(rows: Sequence[str], outcomes: Outcomes) -> str:
    """Return a table of three columns: a phone shows no more."""
    if not rows:
        return ""
    column = sentences.column(outcomes)
    return "\n".join([f"| result | test | {column} |", "|---|---|--:|", *rows])


def _row(outcome: Outcome) -> str:
    status = outcome.shown_status
    said = sentences.headline(outcome).removeprefix(status).lstrip(": ")
    said = said or terminal.change(outcome)
    result = status
    if summary.concern(outcome) is summary.Concern.FAILS:
        result = f"**{status}**"
    sides = ""
    if outcome.measurement:
        sides = " -> ".join(filter(None, terminal.both_sides(outcome)))
    test = _code(f"{text.name(outcome)} on {text.ranks(outcome.plan)}")
    return f"| {result} {_code(said) if said else ''} | {test} | {sides} |"


def _details(outcome: Outcome) -> str:
    """Return the text of a failure."""
    title = f"{outcome.shown_status}: <code>{escape(text.name(outcome))}</code>"
    return _folded(title, _fenced(sentences.gate_failure(outcome)))


def _folded(summary: str, inner: str, *, open_: bool = False) -> str:
    """Return a folded section. `summary` is HTML; `inner` is Markdown, which begins after an empty
    line."""
    opened = " open" if open_ else ""
    return f"<details{opened}><summary>{summary}</summary>\n\n{inner}\n\n</details>"


def _fenced(inner: str, most: int = _LONGEST_DETAILS) -> str:
    body = text.printable(inner)
    if len(body) > most:  # the beginning and the end say most
        half = most // 2
        body = f"{body[:half]}\n...\n{body[-half:]}"
    longest = max(map(len, re.findall("`+", body)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{body}\n{fence}"


def _code(line: str) -> str:
    """Return a user's text as a code span that may stand in a table. Backticks and pipes would end
    the one or the other, and readers of Markdown differ in how they are quoted."""
    shown = (
        text.printable(line.replace("\n", " "))
        .replace("`", r"\x60")
        .replace("|", r"\x7c")
    )
    return f"`{text.shortened(shown, _LONGEST_REMARK)}`"
