"""`ddpperf history`: find change points, add runs, accept change points."""

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pytest_ddpperf import git, text
from pytest_ddpperf.cli import console
from pytest_ddpperf.history import entries
from pytest_ddpperf.history.change_points import MIN_POINTS
from pytest_ddpperf.history.series import (
    ChangeStatus,
    HistoryAnalysis,
    HistoryChange,
    Series,
    analyze,
    build_series,
    make_acceptance,
)
from pytest_ddpperf.options import parse
from pytest_ddpperf.records.errors import FileError, GitError
from pytest_ddpperf.records.plan import Limit, Limits
from pytest_ddpperf.report import figures, history_report, json_report

_DESCRIPTION = """\
Finds the commits at which tests became slower or faster for good, in a history to which
pytest --ddp-history and ddpperf history add add runs.

`ddpperf history DIR` is short for `ddpperf history show DIR`.
"""
_DEFAULT_FOLDER = Path("history")


# What may follow `ddpperf history`; else it is `show`.
COMMANDS = [[word] for word in "show add accept -h --help".split()]


def add_parser(subparsers: Any) -> None:
    """Add the command and its subcommands."""
    parser = subparsers.add_parser(
        "history",
        help="find when tests became slower or faster",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )
    _add_show(commands)
    _add_add(commands)
    _add_accept(commands)


def _add_show(commands: Any) -> None:
    parser = commands.add_parser("show", help="find change points")
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=_DEFAULT_FOLDER,
        metavar="DIR",
        help="default: history",
    )
    _add_threshold(parser)
    console.add_k(parser, "series")
    console.add_path(
        parser, "--html", "also write a page with a figure of each series"
    )
    parser.set_defaults(run=show)


def _add_add(commands: Any) -> None:
    parser = commands.add_parser(
        "add", help="add runs that were reported as JSON"
    )
    console.add_reports(parser)
    console.add_path(
        parser,
        "--to",
        "default: history",
        metavar="DIR",
        default=_DEFAULT_FOLDER,
    )
    parser.set_defaults(run=add)


def _add_accept(commands: Any) -> None:
    parser = commands.add_parser(
        "accept",
        help="accept a change point that is meant to stay",
        description=(
            "Adds a file for review for each change point of the test at that commit which is"
            " REGRESSED; if there is none, for each that is IMPROVED."
        ),
    )
    parser.add_argument(
        "commit",
        metavar="COMMIT",
        help="the commit of the change point; may be shortened",
    )
    parser.add_argument(
        "test",
        metavar="TEST",
        help="its name as history shows it, or a part of it",
    )
    parser.add_argument(
        "-m",
        "--message",
        required=True,
        metavar="WHY",
        help="why it is meant to stay",
    )
    parser.add_argument(
        "--in", type=Path, default=_DEFAULT_FOLDER, dest="folder", metavar="DIR"
    )
    _add_threshold(parser)
    parser.set_defaults(run=accept)


def _add_threshold(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threshold",
        type=console.read_as(_limits),
        metavar="LIST",
        help=(
            "the metrics, p10, p50, p90 or your own figures, and the change that is allowed, as"
            " p10:3%%,tps:3%% (default: p10:0%%, and 0%% for each figure of your own)"
        ),
    )


def _limits(words: str) -> Limits:
    limits = parse.limits(words)
    for limit in limits:
        is_own = limit.kind.own_figure == limit.metric
        if limit.metric not in entries.METRICS and not is_own:
            raise ValueError(
                f"a history has {', '.join(entries.METRICS)}, not {limit.metric}"
            )
    return limits


def show(arguments: argparse.Namespace) -> int:
    """List the change points; the exit status is 1 if a test became slower."""
    if arguments.html is not None:
        figures.check("--html")
    analysis = _analyze(arguments)
    which = "no series"
    if arguments.matches is not None:
        which = "no series that -k chooses"
        analysis = _chosen(analysis, arguments.matches)
    if arguments.html is not None:
        console.write(arguments.html, history_report.history_html(analysis))
    bisected = entries.read_changes(arguments.folder, entries.BisectedChange)
    hint = partial(_which_commit, arguments.folder, bisected)
    lines = history_report.history_lines(analysis, hint)
    console.say(text.wrap_for_terminal(lines))
    if not (analysis.changes or analysis.unchanged):
        console.complain(
            f"{arguments.folder}: nothing to judge: {which} has {MIN_POINTS} runs with"
            f" {', '.join(analysis.metrics)}"
        )
        return console.NOTHING_IN_COMMON
    for change in analysis.changes:
        if change.status is ChangeStatus.REGRESSED:
            return console.NAMED_VERDICT
    return console.OK


def _chosen(
    analysis: HistoryAnalysis, matches: Callable[[str], bool]
) -> HistoryAnalysis:
    """Return what an analysis of all series says of those whose names fit."""

    def is_chosen(series: Series) -> bool:
        return matches(f"{series.test} {series.environment}")

    return replace(
        analysis,
        series=list(filter(is_chosen, analysis.series)),
        changes=[each for each in analysis.changes if is_chosen(each.series)],
        unchanged=[each for each in analysis.unchanged if is_chosen(each[0])],
    )


_PLACE = ("world_size", "backend")


def _which_commit(
    folder: Path,
    bisected: Sequence[entries.BisectedChange],
    change: HistoryChange,
) -> Iterator[str]:
    """Yield which of several commits made a test slower, or the command that finds it."""
    good = change.before.commit
    bad = change.after.commit
    test = replace(change.series.test, label="")
    is_found = False
    for each in bisected:
        if (each.test, each.good, each.bad) == (test, good, bad):
            is_found = True
            yield f"slower at {each.commit[:12]}: {text.shortened(each.subject)}"
    if is_found or change.status is not ChangeStatus.REGRESSED:
        return
    with suppress(GitError):  # the history may be of another repository
        if len(git.first_parents(Path.cwd(), good, bad)) > 1:
            command = ["ddpperf", "bisect", f"{test.module}.py::{test.name}"]
            command += ["--good", good[:12], "--bad", bad[:12]]
            command += ["--history", str(folder)]
            known = change.series.measurements[-1].key
            place = [
                f"--ddp-{name.replace('_', '-')}={known[name]}"
                for name in _PLACE
                if name in known
            ]
            if place:
                command += ["--", *place]
            yield f"which commit: {shlex.join(command)}"


def _analyze(arguments: argparse.Namespace) -> HistoryAnalysis:
    series = build_series(entries.read_entries(arguments.folder))
    accepted = entries.read_changes(arguments.folder, entries.AcceptedChange)
    limits = arguments.threshold
    if limits is None:
        names = {"p10": None}
        for one in series:
            for measurement in one.measurements:
                names.update(dict.fromkeys(measurement.figures))
        limits = [Limit(metric=name, value=0.0, unit="%") for name in names]
    return analyze(series, limits, accepted)


def add(arguments: argparse.Namespace) -> int:
    """Add the runs of reports to a history."""
    for path in arguments.reports:
        report = json_report.read([path])
        why = entries.why_unfit(report.runs[0])
        if report.bases:
            why = "it compares two runs: add the report of the run itself"
        if why:
            raise FileError(path, f"cannot be added: {why}")
        entry = entries.make_entry(report.outcomes, report.runs[0])
        if entry.measurements:
            line = f"{path} -> {entries.add_entry(arguments.to, entry)}"
        else:
            line = f"{path}: no measurement of this commit alone can be added (see docs/history.md)"
        # a later report may be refused
        console.say([line])
    return console.OK


def accept(arguments: argparse.Namespace) -> int:
    """Accept the change points of a test at a commit."""
    if not arguments.commit or not arguments.message.strip():
        raise console.UsageError("COMMIT and WHY must not be empty")
    changes = _changes_at(_analyze(arguments), arguments.test, arguments.commit)
    slower = [
        change for change in changes if change.status is ChangeStatus.REGRESSED
    ]
    chosen = slower or [
        change for change in changes if change.status is ChangeStatus.IMPROVED
    ]
    if not chosen:
        reasons = ", ".join(sorted({change.status.value for change in changes}))
        raise console.UsageError(
            f"{arguments.commit}: nothing to accept: the change point there is {reasons}"
        )
    lines = []
    for change in chosen:
        path = entries.add_change(
            arguments.folder, make_acceptance(change, arguments.message)
        )
        size = text.interval(text.changed_as(change.kind, change.change))
        lines.append(
            f"{change.metric} {size} in {change.series.environment}: accepted in {path}: commit it"
        )
    console.say(lines)
    return console.OK


def _changes_at(
    analysis: HistoryAnalysis, test: str, commit: str
) -> list[HistoryChange]:
    """Return the change points of one test at one commit; raises UsageError unless both name
    one."""
    of_commit = [
        change
        for change in analysis.changes
        if change.after.commit.startswith(commit)
    ]
    found = [each for each in of_commit if test == str(each.series.test)]
    if not found:
        found = [each for each in of_commit if test in str(each.series.test)]
    if len(set(map(_named, found))) != 1:
        problem = "several change points" if found else "no change point"
        places = sorted(set(map(_named, found or analysis.changes)))
        raise console.UsageError(
            f"{problem} of {test} at {commit}: {text.some(places) or 'there is none'}"
        )
    return found


def _named(change: HistoryChange) -> str:
    return f"{change.series.test} at {change.after.commit[:12]}"
