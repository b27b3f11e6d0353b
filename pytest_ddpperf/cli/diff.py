"""`ddpperf diff`: compare one run with another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_ddpperf.cli import asked, console
from pytest_ddpperf.cli.comparing import Terms, compare
from pytest_ddpperf.records import Outcome, codec
from pytest_ddpperf.report import json_report, markdown, page, pytorch, side_by_side
from pytest_ddpperf.report.json_report import StoredReport
from pytest_ddpperf.report.summary import count

_DESCRIPTION = """\
Compares reports of pytest --ddp-json with another, test by test, with the plugin's judge: BASE counts as a stored
baseline of one session. Several NOW are one report, as the shards of a CI job are. Two files of PyTorch's own DDP
benchmark are shown side by side in its form, without verdicts.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "diff", help="compare one run with another", description=_DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("base", type=Path, metavar="BASE", help="the earlier report")
    parser.add_argument("now", type=Path, nargs="+", metavar="NOW", help="the later one")
    asked.add_threshold(parser)
    asked.add_fail_on(parser)
    asked.add_k(parser)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write NOW with its verdicts, as --ddp-json does")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write it for a pull request, as --ddp-markdown")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write it as a page, as --ddp-html does")
    parser.add_argument(
        "--form",
        choices=("ours", "pytorch"),
        default="ours",
        help="pytorch: the side-by-side form of PyTorch's DDP benchmark (default: ours)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    contents = [(path, json_report.load(path)) for path in (arguments.base, *arguments.now)]
    theirs = [path for path, content in contents if pytorch.is_theirs(content)]
    if len(theirs) == len(contents):
        return _theirs(arguments, contents)
    if theirs:
        raise console.UsageError(f"{theirs[0]} is of PyTorch's benchmark, and cannot be compared with one of ddpperf")
    base, *several = (json_report.report_of(path, content) for path, content in contents)
    base = asked.matching(base, arguments.matches)
    now = asked.matching(json_report.merged(several), arguments.matches)
    terms = Terms(
        limits=arguments.threshold,
        fail_on=arguments.fail_on or frozenset({"regressed"}),
    )
    if arguments.html is not None:
        page.check("--html")
    compared = compare(base, now, terms)
    _write(arguments, base, compared)
    if arguments.form == "pytorch":
        console.say(pytorch.side_by_side(*pytorch.ours(base, now)))
        console.say(side_by_side.summary_lines(base, compared))
    else:
        console.say(side_by_side.lines(base, compared))
    return _status(compared.outcomes)


def _write(arguments: argparse.Namespace, base: StoredReport, now: StoredReport) -> None:
    """The files that were asked for."""
    messages = [*side_by_side.about(base, now), *side_by_side.remarks(base, now)]
    if arguments.json is not None:
        console.write(arguments.json, codec.dumps(_data(base, now)))
    if arguments.markdown is not None:
        content = markdown.report(
            now.outcomes, count(now.outcomes, *now.runs), messages=messages, only_before=now.only_before
        )
        console.write(arguments.markdown, content, append=markdown.appends(arguments.markdown))
    if arguments.html is not None:
        console.write(arguments.html, page.html(now.outcomes, now.runs, messages=messages, only_before=now.only_before))


def _status(outcomes: Sequence[Outcome]) -> int:
    if any(outcome.fails for outcome in outcomes):
        return console.NAMED_VERDICT
    if not any(outcome.verdict is not None and outcome.verdict.status.compared for outcome in outcomes):
        return _nothing()
    return console.OK


def _nothing() -> int:
    console.complain("nothing was compared")
    return console.NOTHING_IN_COMMON


def _theirs(arguments: argparse.Namespace, contents: Sequence[tuple[Path, dict[str, Any]]]) -> int:
    """Show files of PyTorch's benchmark. They hold one launch each, so there is no verdict."""
    for option in ("threshold", "fail_on", "json", "markdown", "html"):
        if getattr(arguments, option) is not None:
            name = "--" + option.replace("_", "-")
            raise console.UsageError(f"{name}: files of PyTorch's benchmark hold one launch, so there is no verdict")
    if len(contents) > 2:
        raise console.UsageError("files of PyTorch's benchmark are compared by two")
    base, now = (pytorch.matching(pytorch.theirs(*each), arguments.matches) for each in contents)
    console.say(pytorch.side_by_side(base, now))
    return console.OK if pytorch.in_common(base, now) else _nothing()


def _data(base: StoredReport, now: StoredReport) -> dict[str, Any]:
    """Return NOW as a report, with the baseline run."""
    before = {name: getattr(base.run, name) for name in ("created", "version", "commit", "committed")}
    return {
        **json_report.report(now.outcomes, replace(now.run, messages=tuple(side_by_side.remarks(base, now)))),
        "base": {"run_id": base.run.id, **before},
        "only_in_base": codec.encode(now.only_before),
    }
