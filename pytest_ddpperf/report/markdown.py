"""A run as Markdown, for the summary of a CI job or a comment on a pull request: yields text, writes nothing.

Whatever a user named stands in a code span or in a fence: there neither Markdown nor HTML is read, and no platform
looks for mentions or references.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path

from pytest_ddpperf.records import Outcome, RunInfo, Status
from pytest_ddpperf.report import failure, sentences, terminal, text, worst
from pytest_ddpperf.report.counts import Counts, last_line
from pytest_ddpperf.report.reading import Gone
from pytest_ddpperf.report.sides import ONLY_BEFORE
from pytest_ddpperf.report.worst import Concern

# By it a bot finds the comment again that it is to replace.
MARKER = "<!-- pytest-ddpperf -->"

# GitHub refuses comments of more than 65,536 characters, and whoever posts one may add some.
MOST_CHARACTERS = 60_000

_WORST = 10  # whose details come before the rows of others, where there is no room for all
_LONGEST_LINE = 1_000  # characters; commands and lists of variables are long, and only what is hostile is longer
_LONGEST_DETAILS = 6_000
_CUT_CHARACTERS = 300  # what may have to be said of what was cut

_PERCENTILES = (50, 95)

# What there is to say, in the order in which it stands.
_ROW, _DETAILS, _TOLD, _QUIET_ROW, _QUIET_TOLD = range(5)
_NAMES = {
    _ROW: "rows",
    _DETAILS: "details",
    _TOLD: "remarks",
    _QUIET_ROW: "rows of those that need no look",
    _QUIET_TOLD: "remarks on them",
}


def report(
    outcomes: Sequence[Outcome],
    counts: Counts,
    *,
    problem: str = "",
    told: Sequence[str] = (),
    run: RunInfo | None = None,
    only_before: Sequence[Gone] = (),
    most: int = MOST_CHARACTERS,
) -> str:
    """The counts, what is to be looked at with its details, the worst first, then the rest. `problem`: why the run as a
    whole is none. `told`: lines about it. `run`: that all of it is of. `only_before`: what it was held against and
    does not have. What is left out where there are more than
    `most` characters is the least important, and it is said how much that is."""
    ordered = worst.first(outcomes)
    concerning = [outcome for outcome in ordered if worst.concern(outcome) is not Concern.NONE]
    quiet = ordered[len(concerning) :]
    about = list(_about(run)) if run is not None else []
    head = f"{MARKER}\n## {last_line(counts, len(only_before))}\n" + (f"\n{_code(problem)}\n" if problem else "")
    frame = _assembled(dict.fromkeys(_NAMES, ("-",)), quiet, open_=True)
    room = most - len(head) - len(frame) - _CUT_CHARACTERS
    kept: dict[int, list[str]] = {}
    pieces = list(_by_importance(concerning, quiet, only_before, [line for line in (*about, *told) if line]))
    for place, (kind, piece) in enumerate(pieces):
        room -= len(piece) + len("\n\n")
        if room < 0:
            pieces = pieces[place:]
            break
        kept.setdefault(kind, []).append(piece)
    else:
        pieces = []
    return head + _assembled(kept, quiet, open_=not concerning) + _cut(Counter(kind for kind, _ in pieces), most)


def _about(run: RunInfo) -> Iterator[str]:
    if run.commit:
        yield f"commit {text.commit(run.commit)}"
    if run.facts:
        yield from (line.removeprefix("ddpperf: ") for line in terminal.header(run.facts, verbose=False))


def appends(path: Path) -> bool:
    """Whether it is the summary of a step of GitHub's, to which all that runs there adds its own."""
    summary = os.environ.get("GITHUB_STEP_SUMMARY", "")
    return summary != "" and os.path.realpath(summary) == os.path.realpath(path)


def _by_importance(
    concerning: Sequence[Outcome], quiet: Sequence[Outcome], only_before: Sequence[Gone], told: Sequence[str]
) -> Iterator[tuple[int, str]]:
    """Every piece of the report, with what it is."""
    detailed = [outcome for outcome in concerning if _has_details(outcome)]
    first, others = concerning[:_WORST], concerning[_WORST:]
    yield from ((_ROW, _row(outcome)) for outcome in first)
    yield from ((_DETAILS, _details(outcome)) for outcome in detailed[:_WORST])
    yield from ((_ROW, _row(outcome)) for outcome in others)
    yield from ((_ROW, _gone(gone)) for gone in only_before)
    yield from ((_DETAILS, _details(outcome)) for outcome in detailed[_WORST:])
    yield from ((_TOLD, f"- {_code(line)}") for line in told)
    briefly = chain.from_iterable(sentences.told(outcome) for outcome in concerning if not _has_details(outcome))
    yield from ((_TOLD, f"- {_code(line)}") for line in briefly)
    yield from ((_QUIET_ROW, _row(outcome)) for outcome in quiet)
    yield from ((_QUIET_TOLD, f"- {_code(line)}") for outcome in quiet for line in sentences.told(outcome))


def _assembled(kept: Mapping[int, Sequence[str]], quiet: Sequence[Outcome], *, open_: bool) -> str:
    parts = [_table(kept.get(_ROW, ())), "\n\n".join(kept.get(_DETAILS, ()))]
    if quiet:
        statuses = Counter(str(outcome.verdict) for outcome in quiet)
        summary = ", ".join(f"{number} {status}" for status, number in statuses.items())
        inner = (_table(kept.get(_QUIET_ROW, ())), "\n".join(kept.get(_QUIET_TOLD, ())))
        parts.append(_folded(summary, "\n\n".join(filter(None, inner)), open_=open_))
    parts.append("\n".join(kept.get(_TOLD, ())))
    return "".join(f"\n{part}\n" for part in parts if part)


def _cut(left: Mapping[int, int], most: int) -> str:
    """What is not there."""
    if not left:
        return ""
    what = ", ".join(f"{_NAMES[kind]} ({number})" for kind, number in sorted(left.items()))
    return f"\nCut at {most:,} characters. Left out: {what}. The JSON report has all of it.\n"


def _table(rows: Sequence[str]) -> str:
    if not rows:
        return ""
    figures = [title for q in _PERCENTILES for title in terminal.titles(q)]
    titles = ["verdict", "measurement", "ranks", *figures, "change"]
    lines = ["|---", "|---", "|---", *["|--:"] * len(figures), "|---|"]
    return "\n".join([f"| {' | '.join(titles)} |", "".join(lines), *rows])


def _row(outcome: Outcome) -> str:
    name, ranks, *figures, change, verdict = terminal.row(outcome, _PERCENTILES)
    verdict = f"**{verdict}**" if worst.concern(outcome) is Concern.FAILS else verdict
    return f"| {' | '.join([verdict, _code(name), _code(ranks), *figures, change])} |"


def _gone(gone: Gone) -> str:
    blank = ["-"] * (2 * len(_PERCENTILES) + 1)
    return f"| {' | '.join([ONLY_BEFORE, _code(gone.name), _code(gone.ranks), *blank])} |"


def _has_details(outcome: Outcome) -> bool:
    verdict = outcome.verdict
    return worst.concern(outcome) is Concern.FAILS or (verdict is not None and verdict.status is Status.INCONCLUSIVE)


def _details(outcome: Outcome) -> str:
    """What a failure tells, and why nothing could be concluded."""
    verdict = outcome.verdict
    paragraphs = [failure.gate_failure(outcome)] if verdict is not None else [sentences.sentence(outcome)]
    if verdict is not None and verdict.status is Status.INCONCLUSIVE and outcome.stored_verdict is None:
        paragraphs.insert(0, sentences.sentence(outcome))
    name = f"<code>{escape(text.name(outcome))}</code>"
    return _folded(f"{sentences.verdict_of(outcome)}: {name}", _fenced("\n\n".join(paragraphs)))


def _folded(summary: str, inner: str, *, open_: bool = False) -> str:
    """`summary` is HTML, `inner` Markdown, which begins behind a line that is empty."""
    return f"<details{' open' * open_}><summary>{summary}</summary>\n\n{inner}\n\n</details>"


def _fenced(told: str) -> str:
    lines = [text.shortened(line, _LONGEST_LINE) for line in told.split("\n")]
    body = "\n".join(lines)
    if len(body) > _LONGEST_DETAILS:  # how it begins and how it ends tell most
        half = _LONGEST_DETAILS // 2
        body = f"{body[:half]}\n...\n{body[-half:]}"
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", body)), 0)
    return f"{fence}text\n{body}\n{fence}"


def _code(line: str) -> str:
    """Text of a user's as a code span that may stand in a table. Backticks and pipes would end the one or the other,
    and readers of Markdown differ in how they are quoted."""
    shown = text.shortened(line.replace("\n", " "), _LONGEST_LINE)
    return "`" + shown.replace("`", r"\x60").replace("|", r"\x7c") + "`"
