"""`ddpperf markdown`: one run, or several that belong together, for the summary of a CI job or a pull request."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pytest_ddpperf.cli import console
from pytest_ddpperf.report import json_report, markdown


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "markdown",
        help="write runs as Markdown",
        description="Write what pytest --ddp-json wrote as Markdown: the worst 50 measurements first. "
        "Several reports, the shards of a CI job say, become one; of what several of them measured on one kind of "
        "machine, the run that ended last counts.",
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
    content = markdown.run_report(report)
    console.write(arguments.output, content, append=markdown.appends(arguments.output))
    return console.OK
