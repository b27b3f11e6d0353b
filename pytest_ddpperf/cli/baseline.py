"""`ddpperf baseline`: list what is stored."""

from __future__ import annotations

import argparse
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pytest_ddpperf.baseline import Store
from pytest_ddpperf.cli import console
from pytest_ddpperf.records import Baseline
from pytest_ddpperf.records.errors import BaselineError
from pytest_ddpperf.report import terminal, text


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("baseline", help="list stored baselines", allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listed = commands.add_parser("list", help="list what is stored, by environment", allow_abbrev=False)
    listed.add_argument(
        "--baseline-dir",
        type=Path,
        default=Path("baselines"),
        metavar="DIR",
        help="the folder of baselines (default: baselines)",
    )
    listed.add_argument("--environment", metavar="NAME", help="only this environment, a folder's name or a glob")
    listed.add_argument("--older-than", type=_days, metavar="DAYS", help="only those not saved in the last DAYS days")
    console.add_k(listed, "tests")
    listed.set_defaults(run=_list)


def _days(value: str) -> timedelta:
    try:
        days = float(value)
    except ValueError:
        days = -1.0
    if not 0 <= days < 1e6:  # nan is neither
        raise argparse.ArgumentTypeError(f"{value!r}: a number of days, from 0")
    return timedelta(days=days)


def _list(arguments: argparse.Namespace) -> int:
    """List the baselines; one that cannot be read is named, and ends the command with status 4."""
    store, status = Store(arguments.baseline_dir), console.OK
    chosen: dict[str, list[Baseline]] = {}
    environments: dict[str, None] = {}
    for path in store.files():
        name = path.relative_to(store.root).parts[0]
        environments[name] = None
        if arguments.environment is not None and not fnmatchcase(name, arguments.environment):
            continue
        try:
            baseline = store.read_file(path)
        except BaselineError as error:
            console.complain(f"error: {error}")
            status = console.USAGE_ERROR
            continue
        if _is_wanted(baseline, arguments):
            chosen.setdefault(name, []).append(baseline)
    if arguments.environment is not None and not any(fnmatchcase(name, arguments.environment) for name in environments):
        there = ", ".join(environments) or "none"
        raise console.UsageError(f"--environment {arguments.environment}: not found; there are {there}")
    for name, baselines in chosen.items():
        console.say((*terminal.baseline_table(name, baselines), ""))
    count = sum(map(len, chosen.values()))
    console.say([f"{text.several(count, 'baseline')} in {text.several(len(chosen), 'environment')}"])
    return status


def _is_wanted(baseline: Baseline, arguments: argparse.Namespace) -> bool:
    test = baseline.test
    if arguments.matches is not None and not arguments.matches(f"{test.module}::{test.name} {test.label}"):
        return False
    if arguments.older_than is None:
        return True
    try:
        created = datetime.fromisoformat(baseline.sessions[-1].created)
    except ValueError:
        return True  # its age is unknown
    if created.tzinfo is None:
        created = created.replace(tzinfo=timezone.utc)
    oldest: timedelta = arguments.older_than
    return datetime.now(timezone.utc) - created > oldest
