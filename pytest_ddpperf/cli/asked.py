"""Options that several subcommands have: the plugin's without its prefix, read as it reads them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar

from pytest_ddpperf.options import parse
from pytest_ddpperf.options.table import FAIL_ON_NAMES
from pytest_ddpperf.report.json_report import StoredReport

T = TypeVar("T")
Matches = Callable[[str], bool]


def add_threshold(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threshold",
        type=read_as(parse.limits),
        metavar="LIST",
        help="how much worse a metric may get, as p10:5%%,p50:2ms; the tests' own limits if nothing is said",
    )


def add_fail_on(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fail-on",
        type=read_as(parse.fail_on),
        metavar="LIST",
        help=f"exactly these verdicts end with status 1: {', '.join(FAIL_ON_NAMES)} (default: regressed)",
    )


def add_k(parser: argparse.ArgumentParser, what: str = "measurements") -> None:
    parser.add_argument(
        "-k",
        type=_name_filter,
        dest="matches",
        metavar="NAME",
        help=f"only {what} with NAME in their name, in any case; * and ? as in a shell",
    )


def _name_filter(pattern: str) -> Matches:
    glob = f"*{pattern.lower()}*"
    return lambda name: pattern.lower() in name.lower() or fnmatchcase(name.lower(), glob)


def matching(report: StoredReport, matches: Matches | None) -> StoredReport:
    """The measurements whose node id, or the name of whose call, fits."""
    if matches is None:
        return report
    fits = (entry for entry in report.entries if matches(f"{entry.outcome.nodeid} {entry.outcome.test.label}"))
    return replace(report, entries=tuple(fits))


def read_as(parser: Callable[[str], T]) -> Callable[[str], T]:
    """With what is wrong as argparse tells it, and the place it is at."""

    def read(value: str) -> T:
        try:
            return parser(value)
        except ValueError as error:
            item = getattr(error, "item", value)
            raise argparse.ArgumentTypeError(f"{item!r}: {error}") from None

    return read
