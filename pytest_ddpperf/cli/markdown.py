"""`ddpperf markdown`: one run, or several that belong together, for the summary of a CI job or a pull request."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pytest_ddpperf.cli import console
from pytest_ddpperf.report import json_report, markdown, side_by_side, terminal
from pytest_ddpperf.report.summary import count


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "markdown",
        help="tell runs as Markdown",
        description="Tell what pytest --ddp-json wrote as Markdown, the worst first, in at most 60,000 characters. "
        "Several reports, the shards of a CI job say, become one; of what several of them measured on one kind of "
        "machine the run that ended last counts.",
        allow_abbrev=False,
    )
    parser.add_argument("reports", type=Path, nargs="+", metavar="JSON", help="a report of pytest --ddp-json")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="PATH",
        help="the file to write; the one that GITHUB_STEP_SUMMARY names is appended to",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    report = json_report.read(arguments.reports)
    whole = report.run
    content = markdown.report(
        report.outcomes,
        count(report.outcomes, whole),
        problem=whole.problem,
        messages=[*side_by_side.bases(report), *whole.messages, *report.told, *terminal.remarks(report.outcomes)],
        run=whole,
        only_before=report.only_before,
    )
    console.write(arguments.output, content, append=markdown.appends(arguments.output))
    return console.OK
