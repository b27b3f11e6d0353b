"""One other node, as the first one sees it: the connection, and its pytest."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import NoReturn, TypeVar

from pytest_ddpperf import text
from pytest_ddpperf.launch import Observer
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import BaseSideError, NodesError
from pytest_ddpperf.records.messages import (
    Alive,
    CheckAlive,
    ClockReady,
    Died,
    Event,
    Exit,
    GiveUp,
    NodeJoined,
    Order,
    Ready,
    ReadyToCall,
    RunPytest,
    SendClock,
    Sources,
)
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import Facts, RankError
from pytest_ddpperf.remote.clocks import compare_clocks
from pytest_ddpperf.remote.process import START_SECONDS, Line, Tests
from pytest_ddpperf.wire.channels import Lines, readable

# A node that is asked answers at once, whatever its tests do, unless it is stopped, hangs or is cut
# off.
_ASK_SECONDS = 3.0
_GONE_SECONDS = 12.0
_TICK_SECONDS = 0.5
_OfNode = TypeVar("_OfNode", NodeJoined, ClockReady)


class NodeLine(Line):
    """The line to another node: to the process that torchrun started there (`NodeWorker`), which
    passes on what is sent to the pytest there and what that reports."""

    def __init__(self, name: str, lines: Lines) -> None:
        super().__init__(name, lines)
        lines.socket.settimeout(_GONE_SECONDS)
        now = time.monotonic()
        self._heard = now
        self._asked = now
        self._watched = now
        self._own: list[NodeJoined | ClockReady] = []  # of that process itself

    def send(self, order: Order) -> None:
        self._refuse_dead()
        self._send(order)

    def _send(self, order: Order) -> None:
        left = memoryview(codec.to_json(order) + b"\n")
        try:
            # each piece has its time, for all of them may take longer
            while left:
                left = left[self.socket.send(left) :]
        except OSError:
            self._lost()

    def answer(self, kind: type[_OfNode]) -> _OfNode:
        """Return the next event of this kind, of that process itself; raises BaseSideError."""
        until = time.monotonic() + _GONE_SECONDS
        while True:
            for event in self._own:
                if isinstance(event, kind):
                    self._own.remove(event)
                    return event
            # no CheckAlive: the clocks may be compared, byte by byte
            left = max(0.0, until - time.monotonic())
            if not readable([self.socket], left):
                self.end(f"said nothing for {_GONE_SECONDS:g} s")
            self._receive()

    def arrived(self) -> list[Event]:
        if not self._pending:
            self._refuse_dead()
            self._watch()
        return super().arrived()

    def check(self) -> None:
        """Raise BaseSideError if the node is gone."""
        self._watch()
        if readable([self.socket], 0):
            self._receive()
        self._refuse_dead()

    def _arrives(self, patience: float) -> bool:
        """As `Line` has it; raises BaseSideError if it is gone."""
        if self.dead:
            return True
        until = time.monotonic() + patience
        while (left := until - time.monotonic()) > 0:
            if readable([self.socket], min(left, _TICK_SECONDS)):
                return True
            self._watch()
        return False

    def _watch(self) -> None:
        """Ask for a sign of life where none came for a while; raises BaseSideError."""
        now = time.monotonic()
        # nobody looked: nothing was asked, either
        if now - self._watched > _ASK_SECONDS:
            self._heard = now
        self._watched = now
        if now - self._heard > _GONE_SECONDS:
            self.end(f"said nothing for {now - self._heard:.0f} s")
        if now - max(self._heard, self._asked) > _ASK_SECONDS:
            self._asked = now
            self._send(CheckAlive())

    def _take_in(self) -> None:
        if not self.dead:
            self._receive()
        if not self._pending:
            self._refuse_dead()

    def _receive(self) -> None:
        try:
            arrived: list[Event] | None = self._lines.receive(Event)
        except codec.CodecError as error:  # of another build of the plugin
            self.end(f"sent what is no message here: {error}")
        if arrived is None:
            self._lost()
        self._heard = time.monotonic()
        for event in arrived:
            match event:
                case Died(why):
                    self.dead = why
                case NodeJoined() | ClockReady():
                    self._own.append(event)
                case Alive():
                    pass
                case _:
                    self._pending.append(event)

    def _refuse_dead(self) -> None:
        if self.dead:
            raise BaseSideError(self.dead)

    def clock_ahead_ns(self) -> float:
        """Compare that node's clock with ours; raises BaseSideError."""
        self.send(SendClock())
        self.answer(ClockReady)
        try:
            found = compare_clocks(self.socket)
            self.socket.settimeout(_GONE_SECONDS)
            return found
        except OSError:
            self._lost()
        except BaseException:  # Ctrl-C: what that node says next is the time
            with suppress(BaseSideError):
                self.end("was left while it sent its time")
            raise

    def _lost(self) -> NoReturn:
        self.end("is gone: its connection ended")

    def give_up(self, patience: float) -> NoReturn:
        self.send(GiveUp(patience))
        until = time.monotonic() + _GONE_SECONDS
        while self._arrives(until - time.monotonic()):
            self._take_in()  # raises, once it says how its pytest ended
            self._pending.clear()
        self.end(f"did not answer for {patience:.3g} s")

    def close(self, status: int) -> None:
        """Let that node exit with this status, and close the connection."""
        with suppress(BaseSideError):
            self._send(Exit(status))
        self.socket.close()


# Beyond what a test may take there: whoever hangs says so before we say it of the whole node.
_SILENCE_SECONDS = 10.0
# facts that have to be the same on all nodes
_MACHINE = ("device_type", "device_count", "torch")


class Node:
    """Another node, which runs what the first one orders."""

    def __init__(
        self, number: int, lines: Lines, timeout_seconds: float
    ) -> None:
        """Raises BaseSideError."""
        self.number = number
        self.line = NodeLine(f"node {number}", lines)
        joined = self.line.answer(NodeJoined)
        self.host, self._versions = joined.host, joined.versions
        # of its host's locks among those of all hosts
        self.order = joined.lock_order
        self.line.name = f"node {number} ({self.host})"
        # Until it launches, what a test does there is the user's, whatever a launch may take: a
        # fixture loads data.
        self.tests = Tests(
            self.line, max(START_SECONDS, timeout_seconds) + _SILENCE_SECONDS
        )

    def __str__(self) -> str:
        return self.line.name

    def check(self, versions: Mapping[str, str]) -> None:
        """Raises NodesError if it runs with other versions of what has to be the same."""
        for name, here in versions.items():
            if (there := self._versions.get(name)) != here:
                raise NodesError(
                    f"{self} has {name} {there}, the first node {here}"
                )

    def start(self, arguments: Sequence[str]) -> None:
        """Let its pytest collect, with further `arguments`; raises BaseSideError."""
        self.line.send(RunPytest(tuple(arguments)))

    def collected(self, here: Sources, facts: Facts, seconds: float) -> None:
        """Wait until it has; raises BaseSideError, and NodesError if it runs other code than is
        `here`, or has other devices than the `facts` of this node tell."""
        until = time.monotonic() + seconds
        tests = self.tests
        tests.hello(seconds)
        collected = tests.collect(max(0.0, until - time.monotonic()))
        if problem := _unlike(here, collected.sources):
            raise NodesError(f"{self} {problem}")
        for name, has in tests.started().items():
            if name in _MACHINE and has != facts.get(name):
                raise NodesError(
                    f"{self} has {name.replace('_', ' ')} {has}, the first node {facts.get(name)}"
                )

    def begin(self, nodeid: str) -> None:
        """Let it run a test up to what that asks for; raises BaseSideError."""
        with self.tests.output_shown_once():
            self.tests.enter(nodeid)

    def await_ready(self, first: Ready) -> None:
        """Wait until its test asks for something; raises BaseSideError if that is not what the
        first node's asks."""
        ended = "the test ended there without asking for what it asks for here"
        with self.tests.output_shown_once():
            ready = self.tests.receive(Ready, Observer(), ended)
        if difference := _difference(first, ready):
            raise BaseSideError(difference)

    def lost(self, plan: Plan, problem: str) -> RankError:
        """Return the error of a launch of which it reports nothing more."""
        return RankError(
            rank=plan.part(self.number)[0],
            when=time.monotonic(),
            phase="the launch",
            summary=problem,
        )


def _unlike(here: Sources, there: Sources) -> str:
    """What another node runs that the first does not, in words; "" where both run the same."""
    if there.python != here.python:
        return f"has Python {there.python}, the first node {here.python}"
    both = here.files.keys() & there.files.keys()
    if here.files and not both:
        return "imported none of the first node's files: do both have the same git repository?"
    others = [
        file for file in sorted(both) if here.files[file] != there.files[file]
    ]
    return (
        f"has other files than the first node: {text.some(others)}"
        if others
        else ""
    )


def _difference(here: Ready, there: Ready) -> str:
    """Say what a test asks for there and not here; "" if both ask for the same."""
    if _in_words(there) != _in_words(here):
        return (
            f"the test asks for {_in_words(there)} there, and for {_in_words(here)} on the first"
            " node"
        )
    if there.number != here.number:
        return (
            f"what it asks for as number {there.number} there is number {here.number} on the first"
            " node: does something run the test again there?"
        )
    plan = asdict(there.plan)
    for name, value in asdict(here.plan).items():
        if plan[name] != value:
            return (
                f"the test asks for {name} {plan[name]!r} there, and for {value!r} on the first"
                " node"
            )
    return ""


def _in_words(ready: Ready) -> str:
    """Say what a test asks for: "a call (f)"."""
    kind = "a call" if isinstance(ready, ReadyToCall) else "a measurement"
    return f"{kind} ({ready.label})" if ready.label else kind
