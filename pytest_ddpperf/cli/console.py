"""How a subcommand ends and what it prints, and the options that several have."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TextIO, TypeVar

from pytest_ddpperf import files, text
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.report.json_report import StoredReport
from pytest_ddpperf.wire import boot

# Never 2, argparse's own for usage: make turns any failure into 2.
OK = 0
NAMED_VERDICT = 1  # there is one that --fail-on names
INTERNAL_ERROR = 3  # ours
USAGE_ERROR = 4  # or a file that cannot be read or written, which is named
NOTHING_IN_COMMON = 5


class UsageError(DdpPerfError):
    """An invalid command, or a file that cannot be written."""


def end_with_us() -> Callable[[], None]:
    """Return what a child calls before it runs pytest: so that it ends in order when this process
    is killed."""
    parent = os.getpid()

    def prepare() -> None:
        # A shell's background jobs ignore SIGINT.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        boot.die_with_parent(parent, signal.SIGINT)

    return prepare


def say(lines: Iterable[str]) -> None:
    """Print lines, whatever they hold."""
    _print(lines, sys.stdout)


def complain(words: str) -> None:
    """Say on standard error what stands in the way."""
    warn([f"ddpperf: {words}"])


def warn(lines: Iterable[str]) -> None:
    """Print lines on standard error, whatever they hold."""
    _print(lines, sys.stderr)


def progress(words: str) -> None:
    """Say how far a command is. On a terminal each call replaces the line of the last one, and a
    call without words clears it."""
    stream = sys.stderr
    if stream and stream.isatty():
        end = "" if words else "\r"
        print(f"\r{words:<70}", end=end, file=stream, flush=True)
    elif words:
        warn([words])


def _print(lines: Iterable[str], stream: TextIO | None) -> None:
    """Who reads them may have seen enough (`| head`), or have closed the stream: that ends nothing
    else."""
    if stream is None:
        return
    reported = "".join(f"{text.printable(line)}\n" for line in lines)
    encoding = stream.encoding or "utf-8"
    encodable = reported.encode(encoding, "backslashreplace").decode(encoding)
    try:
        print(encodable, end="", file=stream, flush=True)
    except OSError as error:
        # so that Python can flush it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError) and stream is sys.stdout:
            raise UsageError(
                f"standard output: cannot be written: {error.strerror}"
            ) from error


def write(path: Path, content: str, *, append: bool = False) -> None:
    """Write a file, or raise UsageError."""
    try:
        files.write(path, content, append=append)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error.strerror}"
        ) from error


T = TypeVar("T")
Matches = Callable[[str], bool]


def add_path(
    parser: argparse.ArgumentParser,
    name: str,
    what: str,
    *,
    metavar: str = "PATH",
    default: Path | None = None,
) -> None:
    """Add an option that takes a path."""
    parser.add_argument(
        name, type=Path, metavar=metavar, default=default, help=what
    )


def add_baseline_dir(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the option for the folder of baselines."""
    default = Path("baselines")
    parser.add_argument(
        *names,
        type=Path,
        default=default,
        metavar="DIR",
        help=f"the folder of baselines (default: {default})",
    )


def add_reports(parser: argparse.ArgumentParser) -> None:
    """Add the argument for reports."""
    parser.add_argument(
        "reports",
        type=Path,
        nargs="+",
        metavar="JSON",
        help="a report of pytest --ddp-json",
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
    part = pattern.lower()

    def is_chosen(name: str) -> bool:
        name = name.lower()
        return part in name or fnmatchcase(name, f"*{part}*")

    return is_chosen


def matching(report: StoredReport, matches: Matches | None) -> StoredReport:
    """The measurements whose node id, or the name of whose call, fits."""
    if matches is None:
        return report
    return replace(
        report,
        entries=tuple(
            entry
            for entry in report.entries
            if matches(f"{entry.outcome.nodeid} {entry.outcome.test.label}")
        ),
    )


def read_as(parser: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap a parser so that argparse reports what is wrong, and where."""

    def read(value: str) -> T:
        try:
            return parser(value)
        except ValueError as error:
            item = getattr(error, "item", value)
            raise argparse.ArgumentTypeError(f"{item!r}: {error}") from None

    return read
