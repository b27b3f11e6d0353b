"""The pytest that leads, as it sees another node."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from pytest_ddpperf.launch.observer import Nobody
from pytest_ddpperf.led import Sources, Tests
from pytest_ddpperf.led.sources import differing
from pytest_ddpperf.nodes.line import NodeLine
from pytest_ddpperf.records import Plan, RankError, Scalar, codec
from pytest_ddpperf.records.errors import BaseSideError, NodesError
from pytest_ddpperf.wire.channels import Lines, Message

# Beyond what a test may take there: whoever hangs says so before we say it of the whole node.
_SILENCE_SECONDS = 10.0
_NAMED = 5  # files


class Node:
    """One that follows."""

    def __init__(self, number: int, lines: Lines, timeout_seconds: float) -> None:
        """Raises BaseSideError."""
        self.number, self._timeout = number, timeout_seconds
        self.line = NodeLine(f"node {number}", lines)
        hello = self.line.receive(Nobody(), _SILENCE_SECONDS)
        self.host: str = hello["host"]
        self.order: str = hello["order"]  # the place of its locks among those of all hosts
        self.versions: Mapping[str, str] = hello["versions"]
        self.line = NodeLine(str(self), lines)
        self.tests = Tests(self.line, timeout_seconds + _SILENCE_SECONDS)
        self.facts: Mapping[str, Scalar] = {}

    def __str__(self) -> str:
        return f"node {self.number} ({self.host})"

    def check(self, versions: Mapping[str, str]) -> None:
        """Raises NodesError if it runs with other versions of what has to be the same."""
        for name, here in versions.items():
            if (there := self.versions.get(name)) != here:
                raise NodesError(f"{self} has {name} {there}, the first node {here}")

    def start(self, arguments: Sequence[str]) -> None:
        """Let its pytest collect; raises BaseSideError."""
        self.line.send({"op": "start", "arguments": list(arguments)})

    def collected(self, here: Sources, seconds: float) -> None:
        """Wait until it has; raises BaseSideError, and NodesError if it runs other code."""
        until = time.monotonic() + seconds
        self.tests.hello(seconds)
        message = self.tests.collect(max(0.0, until - time.monotonic()))
        there = codec.decode(Sources, message["sources"])
        both = here.files.keys() & there.files.keys()
        if others := differing(*({file: side.files[file] for file in both} for side in (here, there))):
            more = ", ..." if len(others) > _NAMED else ""
            raise NodesError(f"{self} has other files than the first node: {', '.join(others[:_NAMED])}{more}")
        self.facts = self.tests.started()

    def begin(self, nodeid: str) -> None:
        """Let it run a test up to what that asks for; raises BaseSideError."""
        with self.tests.last_words():
            self.tests.enter(nodeid)

    def asks(self, asked: Message) -> None:
        """Wait for what its test asks for; raises BaseSideError if that is something else than what is `asked` here."""
        with self.tests.last_words():
            told = self.tests.hear(Nobody(), "the test ended there without asking for what it asks for here")
        if difference := _difference(asked, told):
            self.tests.leave()
            raise BaseSideError(difference)

    def lost(self, plan: Plan, problem: str) -> RankError:
        """The error of a launch of which it can tell no more."""
        first = plan.part(self.number)[0]
        return RankError(rank=first, when=time.monotonic(), phase="the launch", summary=problem)


def _difference(here: Message, there: Message) -> str:
    """What a test asks for there and not here, in words; "" where both ask for the same."""
    for name in ("what", "label"):
        if there.get(name) != here[name]:
            return f"the test asks for {_in_words(there)} there, and for {_in_words(here)} on the first node"
    plans = there.get("plan", {}), here["plan"]
    for name, value in here["plan"].items():
        if plans[0].get(name) != value:
            return f"the test asks for {name} {plans[0].get(name)!r} there, and for {value!r} on the first node"
    return ""


def _in_words(asked: Message) -> str:
    return f"{asked.get('what')} named {asked['label']!r}" if asked.get("label") else str(asked.get("what"))
