"""A pytest that takes part in launches that another one leads: of another node or, of another version, of this."""

from __future__ import annotations

import time
from collections.abc import Callable

from pytest_ddpperf.launch import Nobody
from pytest_ddpperf.launch.clock import Offset
from pytest_ddpperf.led import Line, Tests
from pytest_ddpperf.records import Plan, RankError
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.wire.channels import Message


class Member:
    """One of a side's."""

    def __init__(
        self, node: int, name: str, order: str, line: Line, tests: Tests, offset: Callable[[], Offset] | None = None
    ) -> None:
        """`order`: of its host's locks among those of all hosts. `offset`: of its clock; None where it is ours."""
        self.node, self.name, self.order, self.line, self.tests = node, name, order, line, tests
        self._offset = offset

    def __str__(self) -> str:
        return self.name

    def offset(self) -> Offset:
        """Of its clock now; raises BaseSideError."""
        if self._offset is not None:
            return self._offset()
        return Offset(at_ns=time.monotonic_ns(), ns=0.0, half_width_ns=0.0)

    def give_up(self, problem: str) -> None:
        """Nothing will be asked of it any more: what it says yet would be taken for an answer. Raises BaseSideError."""
        self.line.end(problem)

    def begin(self, nodeid: str) -> None:
        """Let it run a test up to what that asks for; raises BaseSideError."""
        with self.tests.last_words():
            self.tests.enter(nodeid)

    def asks(self, asked: Message | None) -> Message:
        """What its test asks for; raises BaseSideError if that is something else than what is `asked` on the first
        node, None if that is not known."""
        with self.tests.last_words():
            told = self.tests.hear(Nobody(), "the test ended there without asking for what it asks for here")
        if asked is not None and (difference := _difference(asked, told)):
            raise BaseSideError(difference)
        return told

    def lost(self, plan: Plan, problem: str) -> RankError:
        """The error of a launch of which it can tell no more."""
        first = plan.part(self.node)[0]
        return RankError(rank=first, when=time.monotonic(), phase="the launch", summary=problem)


def _difference(here: Message, there: Message) -> str:
    """What a test asks for there and not here, in words; "" where both ask for the same."""
    for name in ("what", "label"):
        if there.get(name) != here[name]:
            return f"the test asks for {in_words(there)} there, and for {in_words(here)} on the first node"
    if there.get("number") != here["number"]:
        which = f"what it asks for as number {there.get('number')} there is number {here['number']} on the first node"
        return f"{which}: does something run the test again there?"
    plan = there.get("plan", {})
    for name, value in here["plan"].items():
        if plan.get(name) != value:
            return f"the test asks for {name} {plan.get(name)!r} there, and for {value!r} on the first node"
    return ""


def in_words(asked: Message) -> str:
    """What a test asks for: "a call (f)"."""
    return f"{asked.get('what')} ({asked['label']})" if asked.get("label") else str(asked.get("what"))
