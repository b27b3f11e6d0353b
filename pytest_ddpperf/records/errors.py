"""Exceptions with fields: each names the file, rank or option at fault and the next step to take.

None is a pytest exception: the plugin turns them into what pytest's users expect.
"""

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pytest_ddpperf.records.samples import Outputs, RankError


def short_repr(value: object) -> str:
    """Return the repr of a user's value on one line, at most 200 characters of it: that of a tensor
    has many."""
    line = " ".join(repr(value).split())
    return line if len(line) <= 200 else f"{line:.197}..."


def where_limited(said: str) -> str:
    """Return the end of a message: where to look if what was `said` may be that no further process
    or thread could be started; "" if it is something else."""
    if not re.search(f"{os.strerror(errno.EAGAIN)}|start new thread", said):
        return ""
    return (
        "; if no process or thread could be started, see the limits of ulimit -u and -v, and a"
        " container's on processes"
    )


class DdpPerfError(Exception):
    """The base of all errors of this package. Their fields are given by position: so they are their
    `args`, and every error survives pickling."""


@dataclass(eq=False)
class OptionError(DdpPerfError):
    """A setting of the user's that cannot be: `where` is the option, ini key or marker argument."""

    where: str
    value: object
    allowed: str

    def __str__(self) -> str:
        return f"{self.where}: {short_repr(self.value)}: {self.allowed}"


class MarkerError(OptionError):
    """A setting that cannot be, and that a test's marker has a part in: it is that test's alone."""


class Unavailable(Exception):
    """A marker asks for something that this machine lacks: the test is skipped."""


@dataclass(eq=False)
class BaselineError(DdpPerfError):
    """A baseline that cannot be read or written; names the file and what to do."""

    path: Path
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"baseline {self.path}: {self.problem}\n{self.remedy}"


@dataclass(eq=False)
class FileError(DdpPerfError):
    """A report, or a file of a history, that cannot be read or written: names it and, if there is
    one, the field."""

    path: Path
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class MissingExtraError(DdpPerfError):
    """What was asked for needs packages that are not installed."""


@dataclass(eq=False)
class ServerError(DdpPerfError):
    """The rank server did not start or died; carries what it wrote."""

    problem: str
    output: str

    def __str__(self) -> str:
        return f"the rank server {self.problem}\n{self.output}".rstrip()


class GitError(DdpPerfError):
    """git refused, or is not there; its own words."""


# The beginning of what is said where two versions are the same, before anything is measured.
NOTHING_DIFFERS = "nothing differs from"


@dataclass(eq=False)
class AgainstError(DdpPerfError):
    """The version to compare with cannot be had: `option` is the one that asked for it."""

    option: str
    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return "\n".join(
            filter(None, (f"{self.option}: {self.problem}", self.remedy))
        )


class NodesError(DdpPerfError):
    """Something about the nodes of a run that cannot be, in words."""


class BaseSideError(DdpPerfError):
    """A side of a comparison, or another node, could not do what was asked; in its own words."""


class EndedEarly(DdpPerfError):
    """A program that ended before all its steps were timed, and what helps if all ranks ended
    then."""

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(problem)
        self.advice = advice


_TRACEBACKS = 3  # of other ranks than the first cause, at most


@dataclass(eq=False)
class LaunchError(DdpPerfError):
    """A launch in which at least one rank did not deliver: the first cause, then the others."""

    cause: RankError
    others: tuple[RankError, ...]
    output: Outputs

    def __str__(self) -> str:
        place = f" in {self.cause.phase}" if self.cause.phase else ""
        lines = [f"{self.cause.who} failed{place}: {self.cause.summary}"]
        if self.cause.traceback:
            lines += ["", self.cause.traceback.rstrip()]
        if self.others:
            who = (
                "other ranks"
                if self.cause.who.startswith("rank ")
                else "the others"
            )
            lines += ["", f"{who}:"]
        shown = 0  # tracebacks
        for other in self.others:
            same = (
                other.summary == self.cause.summary
                and other.traceback == self.cause.traceback
            )
            summary = "the same" if same else other.summary
            lines.append(f"  {other.who} in {other.phase}: {summary}")
            # where a rank was when its peer went away explains nothing
            if same or other.lost_connection or not other.traceback:
                continue
            shown += 1
            if shown <= _TRACEBACKS:
                lines += [
                    f"    {line}"
                    for line in other.traceback.rstrip().splitlines()
                ]
        if shown > _TRACEBACKS:
            lines.append(
                f"  ({shown - _TRACEBACKS} more tracebacks are left out)"
            )
        return "\n".join(lines)
