"""How a subcommand ends and how it speaks: exit statuses, errors, lines for a terminal, files that it writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from pytest_ddpperf import files
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.report import text

# Never 2, argparse's own for usage: make turns any failure into 2.
OK = 0
NAMED_VERDICT = 1  # there is one that --fail-on names
INTERNAL_ERROR = 3  # ours
USAGE_ERROR = 4  # or a file that cannot be read or written, which is named
NOTHING_IN_COMMON = 5


class UsageError(DdpPerfError):
    """The command cannot be as it was given: what is wrong with it, in words."""


class FileError(DdpPerfError):
    """A file that cannot be written."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


def say(lines: Iterable[str]) -> None:
    """Print lines, whatever they hold."""
    _print(lines, sys.stdout)


def complain(words: str) -> None:
    """Say on standard error what stands in the way."""
    warn([f"ddpperf: {words}"])


def warn(lines: Iterable[str]) -> None:
    """Print lines on standard error, whatever they hold."""
    _print(lines, sys.stderr)


def _print(lines: Iterable[str], stream: TextIO | None) -> None:
    """Who reads them may have seen enough (`| head`), or have closed the stream: that ends nothing else."""
    if stream is None:
        return
    reported = "".join(f"{text.printable(line)}\n" for line in lines)
    encoding = stream.encoding or "utf-8"
    try:
        print(reported.encode(encoding, "backslashreplace").decode(encoding), end="", file=stream, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # so that Python can flush it at exit
        if not isinstance(error, BrokenPipeError) and stream is sys.stdout:
            raise FileError(Path("standard output"), f"cannot be written: {error.strerror}") from error


def write(path: Path, content: str, *, append: bool = False) -> None:
    """As `files.write`, but that it raises FileError."""
    try:
        files.write(path, content, append=append)
    except OSError as error:
        raise FileError(path, f"cannot be written: {error.strerror}") from error
