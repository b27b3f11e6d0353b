"""`ddpperf html`: a page of one run, or of several that belong together."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pytest_ddpperf.cli import console


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "html",
        help="draw runs as one HTML file",
        description="Draw what pytest --ddp-json wrote as one HTML file with figures, which needs no network. Several "
        "reports, the shards of a CI job say, become one page; of what several of them measured on one kind of machine "
        "the run that ended last counts. It needs matplotlib and Jinja2: pip install 'pytest-ddpperf[report]'.",
        allow_abbrev=False,
    )
    parser.add_argument("reports", type=Path, nargs="+", metavar="JSON", help="a report of pytest --ddp-json")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PATH", help="the file to write")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pytest_ddpperf.report import json_report, page

    page.check("ddpperf html")
    report = json_report.read(arguments.reports)
    content = page.run_page(report)
    console.write(arguments.output, content)
    return console.OK
