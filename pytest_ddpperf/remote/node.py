"""One other node, as the first one sees it: the connection, and its pytest. And what that node does
for the first."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import NoReturn

from pytest_ddpperf import text
from pytest_ddpperf.launch import Observer
from pytest_ddpperf.launch.remote_ranks import Offset, offset
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import BaseSideError, DdpPerfError, NodesError
from pytest_ddpperf.records.messages import Event, EventKind, Order, OrderKind, Sources
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import RankError, Scalar
from pytest_ddpperf.remote.process import START_SECONDS, Line, RemotePytest, Tests
from pytest_ddpperf.remote.worktree import differing_files
from pytest_ddpperf.wire.channels import Lines, readable

# A node that is asked answers at once, whatever its tests do, unless it is stopped, hangs or is cut
# off.
_ASK_SECONDS = 3.0
_GONE_SECONDS = 12.0
_TICK_SECONDS = 0.5
# For the kernel to say that the other end of an idle connection is not there: idle, between probes,
# how many. (With TCP_USER_TIMEOUT probes would be of no account, and an end that is busy and does
# not read would be taken for gone.)
_IDLE, _BETWEEN, _PROBES = 4, 2, 3
# Bounds of a clock's offset come from the luckiest of so many.
EXCHANGES = 200
CLOCK = struct.Struct("!q")


def keep_watch(connected: socket.socket) -> None:
    """Let the kernel notice within about ten seconds that the other end has gone without a word;
    and send at once."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("KEEPIDLE", _IDLE),
        ("KEEPINTVL", _BETWEEN),
        ("KEEPCNT", _PROBES),
    ):
        if hasattr(socket, f"TCP_{name}"):  # Linux
            connected.setsockopt(
                socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value
            )


def spun(connected: socket.socket, size: int) -> bytes:
    """So many bytes of a socket that does not block. Who sleeps until they come takes several times
    as long to see them. Raises OSError."""
    reported, until = b"", time.monotonic() + _GONE_SECONDS
    while len(reported) < size:
        try:
            part = connected.recv(size - len(reported))
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError from None
            continue
        if not part:
            raise ConnectionError
        reported += part
    return reported


def _exchange(connected: socket.socket) -> tuple[int, int, int]:
    before = time.monotonic_ns()
    connected.send(b"?")
    reported = spun(connected, CLOCK.size)
    after = time.monotonic_ns()
    return before, int(CLOCK.unpack(reported)[0]), after


# events that `NodeLine.answer` waits for
_OF_NODE = (EventKind.NODE_JOINED, EventKind.CLOCK_READY)


class NodeLine(Line):
    """The line to another node: to the process that torchrun started there (`NodeWorker`), which
    passes on what is sent to the pytest there and what that reports."""

    def __init__(self, name: str, lines: Lines) -> None:
        super().__init__(name, lines)
        lines.socket.settimeout(_GONE_SECONDS)
        self._heard = self._asked = self._watched = time.monotonic()
        self._own: list[Event] = []  # of that process itself

    def send(self, order: Order) -> None:
        self._refuse_dead()
        self._send(order)

    def _send(self, order: Order) -> None:
        left = memoryview(json.dumps(codec.encode_message(order)).encode() + b"\n")
        try:
            while left:  # each piece has its time, for all of them may take longer
                left = left[self._lines.socket.send(left) :]
        except OSError:
            self._lost()

    def answer(self, kind: EventKind) -> Event:
        """Return the next event of this kind, which is one of `_OF_NODE`; raises BaseSideError."""
        until = time.monotonic() + _GONE_SECONDS
        while not (found := [event for event in self._own if event.kind is kind]):
            if not self._arrives_by(until):
                self.end(f"said nothing for {_GONE_SECONDS:g} s")
            self._receive()
        self._own.remove(found[0])
        return found[0]

    def arrived(self) -> list[Event]:
        if not self._pending:
            self._refuse_dead()
            self._watch()
        return super().arrived()

    def _arrives(self, patience: float) -> bool:
        return bool(self.dead) or self._arrives_by(time.monotonic() + patience)

    def _arrives_by(self, until: float) -> bool:
        """Whether something is there to be taken in by then, its end included; raises BaseSideError
        if it is gone."""
        while (left := until - time.monotonic()) > 0:
            if readable([self._lines.socket], min(left, _TICK_SECONDS)):
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
            self._send(Order(OrderKind.CHECK_ALIVE))

    def _take_in(self) -> None:
        if not self.dead:
            self._receive()
        if not self._pending:
            self._refuse_dead()

    def _receive(self) -> None:
        arrived = self._lines.receive()
        if arrived is None:
            self._lost()
        self._heard = time.monotonic()
        for event in (codec.decode(Event, message) for message in arrived):
            if event.kind is EventKind.DIED:
                self.dead = event.text
            elif event.kind is not EventKind.ALIVE:
                (self._own if event.kind in _OF_NODE else self._pending).append(event)

    def _refuse_dead(self) -> None:
        if self.dead:
            raise BaseSideError(self.dead)

    def offset(self) -> Offset:
        """Measure the offset of that node's clock; raises BaseSideError."""
        self.send(Order(OrderKind.SEND_CLOCK))
        self.answer(EventKind.CLOCK_READY)
        connected = self._lines.socket
        try:
            connected.setblocking(False)
            found = offset([_exchange(connected) for _ in range(EXCHANGES)])
            connected.settimeout(_GONE_SECONDS)
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
        self.send(Order(OrderKind.GIVE_UP, seconds=patience))
        until = time.monotonic() + _GONE_SECONDS
        while self._arrives(until - time.monotonic()):
            self._take_in()  # raises, once it says how its pytest ended
            self._pending.clear()
        self.end(f"did not answer for {patience:.3g} s")

    def close(self, status: int) -> None:
        """Let that node exit with this status, and close the connection."""
        with suppress(BaseSideError):
            self._send(Order(OrderKind.EXIT, status=status))
        self._lines.socket.close()


# Beyond what a test may take there: whoever hangs says so before we say it of the whole node.
_SILENCE_SECONDS = 10.0
# facts that have to be the same on all nodes
_MACHINE = ("device_type", "device_count")


class Node:
    """One that follows."""

    def __init__(self, number: int, lines: Lines, timeout_seconds: float) -> None:
        """Raises BaseSideError."""
        self.number = number
        self.line = NodeLine(f"node {number}", lines)
        joined = self.line.answer(EventKind.NODE_JOINED)
        self.host, self._versions = joined.host, joined.versions
        self.order = joined.lock_order  # of its host's locks among those of all hosts
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
                raise NodesError(f"{self} has {name} {there}, the first node {here}")

    def start(self, arguments: Sequence[str]) -> None:
        """Let its pytest collect, with further `arguments`; raises BaseSideError."""
        self.line.send(Order(OrderKind.START_PYTEST, arguments=tuple(arguments)))

    def collected(
        self, here: Sources, facts: Mapping[str, Scalar], seconds: float
    ) -> None:
        """Wait until it has; raises BaseSideError, and NodesError if it runs other code than is
        `here`, or has other devices than the `facts` of this node tell."""
        until = time.monotonic() + seconds
        tests = self.tests
        tests.hello(seconds)
        tests.collect(max(0.0, until - time.monotonic()))
        if tests.sources is not None and (problem := _unlike(here, tests.sources)):
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

    def await_ready(self, first: Event) -> None:
        """Wait until its test asks for something; raises BaseSideError if that is not what the
        first node's asks."""
        with self.tests.output_shown_once():
            ready = self.tests.receive(
                Observer(),
                "the test ended there without asking for what it asks for here",
            )
        if difference := _difference(first, ready):
            raise BaseSideError(difference)

    def lost(self, plan: Plan, problem: str) -> RankError:
        """Return the error of a launch of which it reports nothing more."""
        first = plan.part(self.number)[0]
        return RankError(
            rank=first, when=time.monotonic(), phase="the launch", summary=problem
        )


def _unlike(here: Sources, there: Sources) -> str:
    """What another node runs that the first does not, in words; "" where both run the same."""
    if there.python != here.python:
        return f"has Python {there.python}, the first node {here.python}"
    both = here.files.keys() & there.files.keys()
    if here.files and not both:
        return "imported none of the first node's files: do both have the same git repository?"
    others = differing_files(
        *({file: side.files[file] for file in both} for side in (here, there))
    )
    return f"has other files than the first node: {text.some(others)}" if others else ""


def _difference(here: Event, there: Event) -> str:
    """Say what a test asks for there and not here; "" if both ask for the same."""
    if (there.asks_for, there.label) != (here.asks_for, here.label):
        return (
            f"the test asks for {_in_words(there)} there, and for {_in_words(here)} on the first"
            " node"
        )
    if there.number != here.number:
        which = (
            f"what it asks for as number {there.number} there is number {here.number} on the first"
            " node"
        )
        return f"{which}: does something run the test again there?"
    plan = asdict(there.plan)
    for name, value in asdict(here.plan).items():
        if plan[name] != value:
            return (
                f"the test asks for {name} {plan[name]!r} there, and for {value!r} on the first"
                " node"
            )
    return ""


def _in_words(ready: Event) -> str:
    """Say what a test asks for: "a call (f)"."""
    return f"{ready.asks_for} ({ready.label})" if ready.label else ready.asks_for


class _Gone(Exception):
    """The leader is."""


class NodeWorker:
    """Of one run, until the pytest that leads says that it is over, or is gone."""

    def __init__(
        self, leader: Lines, start: Callable[[Sequence[str]], RemotePytest]
    ) -> None:
        """`start` starts this node's pytest, with further arguments."""
        self._leader, self._start = leader, start
        self._pytest: RemotePytest | None = None

    def run(self) -> int | None:
        """The status to exit with; None if the leader is gone."""
        try:
            while True:
                started = self._pytest
                sockets = [
                    self._leader.socket,
                    *([started.socket] if started is not None else ()),
                ]
                ready = readable(sockets, _TICK_SECONDS)
                if self._leader.socket in ready:
                    for order in self._orders():
                        if order.kind is OrderKind.EXIT:
                            self._close()
                            return order.status
                        self._obey(order)
                if started is not None:
                    self._relay(started, arrived=started.socket in ready)
        except _Gone:
            return None
        finally:
            if self._pytest is not None:
                self._pytest.kill()  # and its ranks with it

    def _orders(self) -> list[Order]:
        messages = self._leader.receive()
        if messages is None:
            raise _Gone
        return [codec.decode(Order, message) for message in messages]

    def _send(self, event: Event) -> None:
        try:
            self._leader.send(codec.encode_message(event))
        except OSError:
            raise _Gone from None

    def _close(self) -> None:
        """Let the pytest tear its fixtures down."""
        if self._pytest is not None:
            self._pytest.close()
            self._pytest = None

    def _obey(self, order: Order) -> None:
        if order.kind is OrderKind.CHECK_ALIVE:
            self._send(Event(EventKind.ALIVE))
        elif order.kind is OrderKind.SEND_CLOCK:
            self._send_clock()
        elif order.kind is OrderKind.START_PYTEST:
            try:
                self._pytest = self._start(order.arguments)
            except (OSError, DdpPerfError) as error:
                self._died(error)
        elif self._pytest is not None:
            try:
                if order.kind is OrderKind.GIVE_UP:
                    self._pytest.give_up(order.seconds)
                else:
                    self._pytest.send(order)
            except BaseSideError as error:
                self._died(error)

    def _relay(self, remote_pytest: RemotePytest, *, arrived: bool) -> None:
        """Pass on the events of this node's pytest, and its end."""
        try:
            remote_pytest.refuse_stopped()
            for event in remote_pytest.arrived() if arrived else ():
                self._send(event)
        except BaseSideError as error:
            self._died(error)

    def _died(self, error: Exception) -> None:
        self._pytest = None
        self._send(Event(EventKind.DIED, text=str(error)))

    def _send_clock(self) -> None:
        """Nothing else may happen in between: each answer takes as long as it is late."""
        self._send(Event(EventKind.CLOCK_READY))
        leader = self._leader.socket
        try:
            leader.setblocking(False)
            for _ in range(EXCHANGES):
                spun(leader, 1)
                leader.send(CLOCK.pack(time.monotonic_ns()))
            leader.setblocking(True)
        except OSError:
            raise _Gone from None
