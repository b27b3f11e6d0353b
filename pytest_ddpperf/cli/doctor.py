"""`ddpperf doctor`: a checklist of what decides how steady measurements on this machine are."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_ddpperf import __version__
from pytest_ddpperf.cli import console

if TYPE_CHECKING:
    from pytest_ddpperf.doctor.checks import Check

_SCHEMA = 1
_WIDTH = 100


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check what makes measurements on this machine less steady",
        description="Check cores, clocks, load, memory and GPUs, and print advice where something can be better. It "
        "takes seconds and starts no ranks. The exit status is 0, whatever is found.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the checks as JSON, too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pytest_ddpperf.doctor.checks import run_checks
    from pytest_ddpperf.records import codec

    checks = run_checks()
    console.say(_lines(checks))
    if arguments.json is not None:
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        data = {"schema": _SCHEMA, "created": created, "version": __version__, "checks": list(map(asdict, checks))}
        console.write(arguments.json, codec.dumps(data))
    return console.OK


def _lines(checks: Sequence[Check]) -> Iterator[str]:
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark = "!" if check.advice else " "
        yield from _wrapped(f"{mark} {check.name.ljust(width)}  ", check.fact)
        if check.advice:
            yield from _wrapped(" " * (width + 4), f"-> {check.advice}")
    advice = sum(bool(check.advice) for check in checks)
    yield ""
    yield f"{advice} of {len(checks)} checks have advice" if advice else "nothing to change was found"
    yield "smallest change that can be detected here: pytest TESTS --ddp-against self"


def _wrapped(lead: str, line: str) -> Iterator[str]:
    yield from textwrap.wrap(
        line, _WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False
    )
