"""Another node, as the pytest sees it that leads."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from pytest_ddpperf.led import Sources, Tests
from pytest_ddpperf.led.sources import differing
from pytest_ddpperf.led.tests import START_SECONDS
from pytest_ddpperf.nodes.line import Connection
from pytest_ddpperf.nodes.member import Member
from pytest_ddpperf.records import Scalar
from pytest_ddpperf.records.errors import NodesError
from pytest_ddpperf.wire.channels import Lines

# Beyond what a test may take there: whoever hangs says so before we say it of the whole node.
_SILENCE_SECONDS = 10.0
_NAMED = 5  # files
_MACHINE = ("device_type", "device_count")  # facts that have to be the same on all nodes

HAND, BASE = "hand", "base"  # the code at hand, and the version that is measured beside it


class Node:
    """One that follows."""

    def __init__(self, number: int, lines: Lines, timeout_seconds: float) -> None:
        """Raises BaseSideError."""
        self.number, self._timeout = number, timeout_seconds
        self.connection = Connection(f"node {number}", lines)
        hello = self.connection.answer("hello")
        self.host: str = hello["host"]
        self._order: str = hello["order"]
        self.versions: Mapping[str, str] = hello["versions"]
        self.connection.name = str(self)
        self.hand = self._member(HAND)

    def __str__(self) -> str:
        return f"node {self.number} ({self.host})"

    def _member(self, side: str) -> Member:
        line = self.connection.line(side)
        # Until it launches, what a test does there is the user's, whatever a launch may take: a fixture loads data.
        tests = Tests(line, max(START_SECONDS, self._timeout) + _SILENCE_SECONDS)
        return Member(self.number, str(self), self._order, line, tests, self.connection.offset)

    def check(self, versions: Mapping[str, str]) -> None:
        """Raises NodesError if it runs with other versions of what has to be the same."""
        for name, here in versions.items():
            if (there := self.versions.get(name)) != here:
                raise NodesError(f"{self} has {name} {there}, the first node {here}")

    def start(self, arguments: Sequence[str], kept: Sequence[str]) -> None:
        """Let its pytest collect, with further `arguments`; `kept` as `Trees` has them, from the top. Raises
        BaseSideError."""
        self.connection.send({"op": "start", "arguments": list(arguments), "kept": list(kept)})

    def start_base(self, kept: Sequence[str], commit: str) -> Member:
        """Let the pytest of the version that is measured beside it collect, of this `commit` if that is another one's;
        raises BaseSideError."""
        self.connection.send({"op": "start-base", "kept": list(kept), "commit": commit})
        return self._member(BASE)

    def collected(self, here: Sources, facts: Mapping[str, Scalar], seconds: float) -> None:
        """Wait until it has; raises BaseSideError, and NodesError if it runs other code than is `here`, or has other
        devices than the `facts` of this node tell."""
        until = time.monotonic() + seconds
        tests = self.hand.tests
        tests.hello(seconds)
        tests.collect(max(0.0, until - time.monotonic()))
        if tests.sources is not None and (problem := unlike(here, tests.sources)):
            raise NodesError(f"{self} {problem}")
        for name, has in tests.started().items():
            if name in _MACHINE and has != facts.get(name):
                raise NodesError(f"{self} has {name.replace('_', ' ')} {has}, the first node {facts.get(name)}")


def unlike(here: Sources, there: Sources) -> str:
    """What another node runs that the first does not, in words; "" where both run the same."""
    if there.python != here.python:
        return f"has Python {there.python}, the first node {here.python}"
    both = here.files.keys() & there.files.keys()
    if here.files and not both:
        return "imported none of the first node's files: does git tell the same of both?"
    others = differing(*({file: side.files[file] for file in both} for side in (here, there)))
    more = ", ..." if len(others) > _NAMED else ""
    return f"has other files than the first node: {', '.join(others[:_NAMED])}{more}" if others else ""
