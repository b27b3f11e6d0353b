"""`ddpperf history`: the steps in what runs added to a history, and what becomes of them."""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_ddpperf.cli import asked, console
from pytest_ddpperf.records import Limit, Status, codec
from pytest_ddpperf.records.errors import HistoryError

if TYPE_CHECKING:
    from pytest_ddpperf.cli.matching import Matches
    from pytest_ddpperf.history.judging import Found, Judged
    from pytest_ddpperf.history.tracks import Track

_DESCRIPTION = """\
Finds the steps in each series of a history, to which pytest --ddp-history and ddpperf history add add: where a test
became slower or faster for good, beside the noise of its launches and the drift of its machine.

`ddpperf history DIR` is short for `ddpperf history show DIR`.
"""
_USUAL = Path("history")
_FAIL_ON = ("regressed", "improved", "suspected")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "history",
        help="find when tests became slower or faster",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_show, _add_add, _add_accept, _add_confirm):
        add(verbs)
    plain = parser.parse_known_args

    def parse_known_args(arguments: Sequence[str], namespace: Any = None) -> Any:
        """A folder, or an option of `show`, in the place of a command: argparse has no word for a usual one."""
        named = bool(arguments) and (arguments[0] in verbs.choices or arguments[0] in ("-h", "--help"))
        return plain(list(arguments) if named else ["show", *arguments], namespace)

    parser.parse_known_args = parse_known_args


def _add_show(verbs: Any) -> None:
    parser = verbs.add_parser("show", help="find the steps", allow_abbrev=False)
    _add_folder(parser)
    _add_threshold(parser)
    parser.add_argument(
        "--fail-on",
        type=asked.read_as(_fail_on),
        default=frozenset({"regressed"}),
        metavar="LIST",
        help=f"exactly these end with status 1: {', '.join(_FAIL_ON)} (default: regressed)",
    )
    asked.add_k(parser, "series")
    parser.add_argument("--format", choices=("text", "json", "csv"), default="text", help="(default: text)")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write a page with a figure of each series, too")
    parser.set_defaults(run=show)


def _add_add(verbs: Any) -> None:
    parser = verbs.add_parser("add", help="add runs that were reported as JSON", allow_abbrev=False)
    parser.add_argument("reports", type=Path, nargs="+", metavar="JSON", help="reports of pytest --ddp-json")
    parser.add_argument("--to", type=Path, default=_USUAL, metavar="DIR", help="the history (default: history)")
    parser.set_defaults(run=add)


def _add_accept(verbs: Any) -> None:
    parser = verbs.add_parser(
        "accept",
        help="say that a step is meant to stay",
        description="Adds a file for review for each series of the test that has a step at that commit, or for those "
        "alone that became slower: the step is meant to stay, and fails nothing any more.",
        allow_abbrev=False,
    )
    parser.add_argument("commit", metavar="COMMIT", help="that the step is at, as history shows it")
    _add_test(parser)
    parser.add_argument("-m", "--message", type=asked.read_as(_reason), required=True, metavar="WHY")
    _add_shown(parser)
    parser.set_defaults(run=accept)


def _add_confirm(verbs: Any) -> None:
    parser = verbs.add_parser(
        "confirm",
        help="measure the commits around a step side by side",
        description="Checks out the commit that a step is at into a worktree, and measures the test there with the "
        "commit before it beside it, in turns (pytest --ddp-against). Call it where pytest is called, on a machine "
        "of the kind that the step was seen on. Ends with 1 where the test is slower, with 0 where it is not, with 5 "
        "where neither can be said.",
        allow_abbrev=False,
    )
    _add_test(parser)
    parser.add_argument("--at", default="", metavar="COMMIT", help="of several steps, the one at this commit")
    _add_shown(parser)
    parser.add_argument(
        "--option",
        type=asked.read_as(shlex.split),
        action="extend",
        default=[],
        metavar="OPTIONS",
        help='more options for pytest: "--ddp-launches 10"; may be repeated, a single word needs the =',
    )
    parser.set_defaults(run=confirm)


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, nargs="?", default=_USUAL, metavar="DIR", help="(default: history)")


def _add_threshold(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threshold",
        type=asked.read_as(_limits),
        default=(Limit(metric="p10", value=0.0, unit="%"),),
        metavar="LIST",
        help="the metrics, p10, p50 or p90, and how much a step in them may come to, as p10:3%%,p50:3%% "
        "(default: p10:0%%, every step of p10 that is evidence)",
    )


def _add_shown(parser: argparse.ArgumentParser) -> None:
    """What decides which steps `show` tells: how many series and metrics there are is part of the evidence."""
    parser.add_argument("--in", type=Path, default=_USUAL, dest="folder", metavar="DIR", help="(default: history)")
    _add_threshold(parser)
    asked.add_k(parser, "series")


def _add_test(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("test", metavar="TEST", help="its name as history shows it, or a part of it")


def _limits(words: str) -> tuple[Limit, ...]:
    from pytest_ddpperf.history.entry import METRICS
    from pytest_ddpperf.options import parse

    limits = parse.limits(words)
    for limit in limits:
        if limit.metric not in METRICS:
            raise ValueError(f"a history keeps {', '.join(METRICS)}, not {limit.metric}")
    return limits


def _reason(words: str) -> str:
    if not words.strip():
        raise ValueError("say why the step is meant to stay")
    return words


def _fail_on(words: str) -> frozenset[str]:
    names = frozenset(word.strip() for word in words.split(","))
    if unknown := sorted(names - set(_FAIL_ON)):
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(_FAIL_ON)}")
    return names


def show(arguments: argparse.Namespace) -> int:
    from pytest_ddpperf.history.steps import FEWEST_POINTS
    from pytest_ddpperf.report import page, steps

    if arguments.html is not None:
        page.check("--html")
    judged = _judged(arguments.folder, arguments.threshold, arguments.matches)
    if not judged.tracks:
        console.complain(f"{arguments.folder}: nothing to judge")
        return console.NOTHING_IN_COMMON
    if arguments.html is not None:
        console.write(arguments.html, page.history_html(judged))
    if arguments.format == "json":
        console.say(codec.dumps(steps.data(judged)).split("\n")[:-1])
    elif arguments.format == "csv":
        console.say(steps.table(judged).split("\n")[:-1])
    else:
        console.say(steps.lines(judged))
    if judged.short == len(judged.tracks):
        console.complain(f"{arguments.folder}: nothing to judge: no series has {FEWEST_POINTS} runs")
        return console.NOTHING_IN_COMMON
    fails = any(_name(found) in arguments.fail_on for found in judged.found)
    return console.NAMED_VERDICT if fails else console.OK


def _name(found: Found) -> str:
    """By which --fail-on names it; "" for what is accepted, undone, the machine's or within its limit."""
    if found.status is Status.INCONCLUSIVE:
        return "suspected"
    return "" if found.status is Status.PASS else found.status.value.lower()


def _judged(root: Path, limits: Sequence[Limit], matches: Matches | None) -> Judged:
    from pytest_ddpperf.history import accepted, judging

    return judging.judge(_tracks(root, matches), limits, accepted.read(root), _progress)


def _tracks(root: Path, matches: Matches | None) -> list[Track]:
    from pytest_ddpperf.history import folder, tracks

    gc.disable()  # a hundred thousand small records, of which none is garbage: a third of the time
    try:
        found = tracks.tracks(folder.read(root))
    finally:
        gc.freeze()  # nor shall any collection from now on look at them
        gc.enable()
    return [each for each in found if matches is None or matches(f"{each.test} {each.environment}")]


def _progress(done: int, of: int) -> None:
    """On a terminal, where there is so much to judge that one would wonder."""
    if sys.stderr is not None and sys.stderr.isatty() and of > 50 and (done % 10 == 0 or done + 1 == of):
        end = "\r\x1b[K" if done + 1 == of else ""
        print(f"\rjudged {done + 1} of {of} series", end=end, file=sys.stderr, flush=True)


def add(arguments: argparse.Namespace) -> int:
    from pytest_ddpperf.history import entry, folder
    from pytest_ddpperf.report import reading

    told = []
    for path in arguments.reports:
        report = reading.read([path])
        why = "it was held against another run: add the report of the run itself" if report.bases else ""
        if why := why or entry.unfit(report.runs[0]):
            raise HistoryError(path, f"has no place in a history: {why}")
        added = [folder.add(arguments.to, each) for each in entry.entries(report.outcomes, report.runs[0])]
        told += [f"{path} -> {each}" for each in added] or [f"{path}: nothing was measured of its commit alone"]
    console.say(told)
    return console.OK


def _steps_of(arguments: argparse.Namespace, commit: str) -> list[Found]:
    """The steps of the test that a command names, at a commit if there is one, as `show` tells them; raises UsageError
    where there is none, or the commit may be several."""
    judged = _judged(arguments.folder, arguments.threshold, arguments.matches)
    names = sorted({str(track.test) for track in judged.tracks})
    chosen = [arguments.test] if arguments.test in names else [name for name in names if arguments.test in name]
    if len(chosen) != 1:
        several = f"several tests are called that: {', '.join(chosen)}" if chosen else "the history has no such test"
        raise console.UsageError(f"{arguments.test}: {several}")
    of_test = [found for found in judged.found if str(found.track.test) == chosen[0]]
    fitting = [found for found in of_test if found.after.run.commit.startswith(commit)]
    if not fitting:
        places = ", ".join(sorted({found.after.run.commit[:12] for found in of_test}))
        raise console.UsageError(
            f"{chosen[0]} has no step{f' at {commit}' * bool(commit)}{f': there are steps at {places}' * bool(places)}"
        )
    commits = sorted({found.after.run.commit for found in fitting})
    if commit and len(commits) > 1:
        places = ", ".join(each[: max(12, len(commit) + 1)] for each in commits)
        raise console.UsageError(f"{commit}: {chosen[0]} has steps at several such commits: {places}")
    return fitting


def _place(found: Found) -> int:
    """Among what may be meant: slower by evidence, slower to be feared, then the same for faster."""
    return 2 * (found.change.estimate <= 0) + (found.status is Status.INCONCLUSIVE)


def accept(arguments: argparse.Namespace) -> int:
    from pytest_ddpperf.history import accepted, judging
    from pytest_ddpperf.report import text

    if not arguments.commit:
        raise console.UsageError("COMMIT: name the one that the step is at")
    steps = _steps_of(arguments, arguments.commit)
    failing = [found for found in steps if found.status is not Status.PASS]
    if not failing:
        reasons = ", ".join(sorted({found.reason.replace("-", " ") for found in steps}))
        raise console.UsageError(f"{arguments.commit}: the step there fails nothing as it is: {reasons}")
    first = min(map(_place, failing))  # who accepts what is slower does not mean what is faster in another series
    told = []
    for found in failing:
        if _place(found) == first:
            path = accepted.write(arguments.folder, judging.acceptance(found, arguments.message))
            step = f"{found.metric} {text.interval(found.change)} in {found.track.environment}"
            told.append(f"{step}: accepted in {path}: commit it")
    console.say(told)
    return console.OK


def confirm(arguments: argparse.Namespace) -> int:
    from pytest_ddpperf.cli import confirming

    steps = _steps_of(arguments, arguments.at)
    slower = [found for found in steps if found.status is not Status.PASS and found.change.estimate > 0]
    latest = max(slower or steps, key=lambda found: (found.after.run.committed, abs(found.change.estimate)))
    return confirming.confirm(latest, arguments.option)
