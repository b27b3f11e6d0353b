"""`ddpperf diff`: one run held against another."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pytest_ddpperf.cli import console
from pytest_ddpperf.report import reading, text


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("diff", help="hold one run against another", allow_abbrev=False)
    parser.add_argument("base", type=Path, metavar="BASE", help="a report of pytest --ddp-json")
    parser.add_argument("now", type=Path, nargs="+", metavar="NOW", help="one or several that belong together")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    base, now = reading.read([arguments.base]), reading.read(arguments.now)
    there = {reading.identity(outcome) for outcome in base.outcomes}
    both = [outcome for outcome in now.outcomes if reading.identity(outcome) in there]
    console.say(map(text.name, both))
    return console.OK if both else console.NOTHING_IN_COMMON
