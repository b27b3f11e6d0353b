"""One other node, as the first one sees it: the connection, and its pytest."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from pytest_ddpperf.launch.remote_ranks import Offset, offset
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import BaseSideError, NodesError
from pytest_ddpperf.records.messages import Event, EventKind, Order, OrderKind, Sources
from pytest_ddpperf.records.samples import Scalar
from pytest_ddpperf.remote.node_launch import Member
from pytest_ddpperf.remote.process import START_SECONDS, Line, Tests
from pytest_ddpperf.remote.worktree import differing_files
from pytest_ddpperf.wire.channels import Lines, readable

# A node that is asked answers at once, whatever its tests do, unless it is stopped, hangs or is cut off.
_ASK_SECONDS = 3.0
_GONE_SECONDS = 12.0
_TICK_SECONDS = 0.5
# For the kernel to say that the other end of an idle connection is not there: idle, between probes, how many. (With
# TCP_USER_TIMEOUT probes would be of no account, and an end that is busy and does not read would be taken for gone.)
_IDLE, _BETWEEN, _PROBES = 4, 2, 3
# Bounds of a clock's offset come from the luckiest of so many.
EXCHANGES = 200
CLOCK = struct.Struct("!q")


def keep_watch(connected: socket.socket) -> None:
    """Let the kernel notice within about ten seconds that the other end has gone without a word; and send at once."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("KEEPIDLE", _IDLE), ("KEEPINTVL", _BETWEEN), ("KEEPCNT", _PROBES)):
        if hasattr(socket, f"TCP_{name}"):  # Linux
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)


def spun(connected: socket.socket, size: int) -> bytes:
    """So many bytes of a socket that does not block. Who sleeps until they come takes several times as long to see
    them. Raises OSError."""
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


class Connection:
    """The connection to the process that torchrun started on another node (`remote.node_worker`), which passes on what
    is sent to the pytests there and what they report."""

    def __init__(self, name: str, lines: Lines) -> None:
        self.name, self.lines = name, lines
        lines.socket.settimeout(_GONE_SECONDS)
        self._heard = self._asked = self._watched = time.monotonic()
        self._sides: dict[str, NodeLine] = {}
        self._own: list[Event] = []  # of that process itself

    def line(self, side: str) -> NodeLine:
        """Return the line to its pytest of a version."""
        return self._sides.setdefault(side, NodeLine(self, side))

    def send(self, order: Order) -> None:
        """Raises BaseSideError."""
        left = memoryview(json.dumps(codec.encode_message(order)).encode() + b"\n")
        try:
            while left:  # each piece has its time, for all of them may take longer
                left = left[self.lines.socket.send(left) :]
        except OSError:
            self.lost()

    def answer(self, kind: EventKind) -> Event:
        """Return the next event of this kind of that process itself; raises BaseSideError."""
        until = time.monotonic() + _GONE_SECONDS
        while not (found := [event for event in self._own if event.kind is kind]):
            if not self.arrives(until):
                self.end(f"said nothing for {_GONE_SECONDS:g} s")
            self.take_in()
        self._own.remove(found[0])
        return found[0]

    def arrives(self, until: float) -> bool:
        """Whether something is there to be taken in by then, its end included; raises BaseSideError if it is gone."""
        while (left := until - time.monotonic()) > 0:
            if readable([self.lines.socket], min(left, _TICK_SECONDS)):
                return True
            self.watch()
        return False

    def watch(self) -> None:
        """Ask for a sign of life where none came for a while; raises BaseSideError."""
        now = time.monotonic()
        if now - self._watched > _ASK_SECONDS:  # nobody looked: nothing was asked, either
            self._heard = now
        self._watched = now
        if now - self._heard > _GONE_SECONDS:
            self.end(f"said nothing for {now - self._heard:.0f} s")
        if now - max(self._heard, self._asked) > _ASK_SECONDS:
            self._asked = now
            self.send(Order(OrderKind.CHECK_ALIVE))

    def take_in(self) -> None:
        """Take in all that has arrived; waits if nothing has. Raises BaseSideError."""
        arrived = self.lines.receive()
        if arrived is None:
            self.lost()
        self._heard = time.monotonic()
        for event in (codec.decode(Event, message) for message in arrived):
            if event.side:
                self.line(event.side).add(event)
            elif event.kind is not EventKind.ALIVE:
                self._own.append(event)

    def offset(self) -> Offset:
        """Measure the offset of that node's clock; raises BaseSideError."""
        self.send(Order(OrderKind.SEND_CLOCK))
        self.answer(EventKind.CLOCK_READY)
        connected = self.lines.socket
        try:
            connected.setblocking(False)
            found = offset([_exchange(connected) for _ in range(EXCHANGES)])
            connected.settimeout(_GONE_SECONDS)
            return found
        except OSError:
            self.lost()
        except BaseException:  # Ctrl-C: what that node says next is the time
            with suppress(BaseSideError):
                self.end("was left while it sent its time")
            raise

    def lost(self) -> NoReturn:
        self.end("is gone: its connection ended")

    def end(self, problem: str) -> NoReturn:
        """Close the connection, with all lines; raises BaseSideError."""
        self.lines.socket.close()
        for line in self._sides.values():
            line.dead = line.dead or f"{self.name} {problem}"
        raise BaseSideError(f"{self.name} {problem}")


class NodeLine(Line):
    """The line to the pytest of one version on another node."""

    def __init__(self, connection: Connection, side: str) -> None:
        super().__init__(connection.name, connection.lines)
        self._connection, self._side = connection, side

    def add(self, event: Event) -> None:
        """Take an event that came for this line."""
        if event.kind is EventKind.DIED:
            self.dead = event.text
        else:
            self._pending.append(event)

    def send(self, order: Order) -> None:
        self._refuse_dead()
        self._connection.send(replace(order, side=self._side))

    def arrived(self) -> list[Event]:
        if not self._pending:
            self._refuse_dead()
            self._connection.watch()
        return super().arrived()

    def end(self, problem: str) -> NoReturn:
        self._connection.end(problem)

    def _arrives(self, patience: float) -> bool:
        known = self._pending or self.dead  # from what came for another line
        return bool(known) or self._connection.arrives(time.monotonic() + patience)

    def _take_in(self) -> None:
        if not (self._pending or self.dead):
            self._connection.take_in()
        if not self._pending:
            self._refuse_dead()

    def _refuse_dead(self) -> None:
        if self.dead:
            raise BaseSideError(self.dead)

    def give_up(self, patience: float) -> NoReturn:
        self.send(Order(OrderKind.GIVE_UP, seconds=patience))
        until = time.monotonic() + _GONE_SECONDS
        while self._arrives(until - time.monotonic()):
            self._take_in()  # raises, once it says how its pytest ended
            self._pending.clear()
        self._connection.end(f"did not answer for {patience:.3g} s")


# Beyond what a test may take there: whoever hangs says so before we say it of the whole node.
_SILENCE_SECONDS = 10.0
_NAMED = 5  # files
_MACHINE = ("device_type", "device_count")  # facts that have to be the same on all nodes

CURRENT, BASE = "current", "base"  # the current code, and the version that it is compared with


class Node:
    """One that follows."""

    def __init__(self, number: int, lines: Lines, timeout_seconds: float) -> None:
        """Raises BaseSideError."""
        self.number, self._timeout = number, timeout_seconds
        self.connection = Connection(f"node {number}", lines)
        joined = self.connection.answer(EventKind.NODE_JOINED)
        self.host, self._order, self.versions = joined.host, joined.lock_order, joined.versions
        self.connection.name = str(self)
        self.current = self._member(CURRENT)

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
        self.connection.send(Order(OrderKind.START_CURRENT, arguments=tuple(arguments), kept=tuple(kept)))

    def start_base(self, kept: Sequence[str], commit: str) -> Member:
        """Let the pytest of the other version collect, of this `commit` if that is another one's;
        raises BaseSideError."""
        self.connection.send(Order(OrderKind.START_BASE, kept=tuple(kept), commit=commit))
        return self._member(BASE)

    def collected(self, here: Sources, facts: Mapping[str, Scalar], seconds: float) -> None:
        """Wait until it has; raises BaseSideError, and NodesError if it runs other code than is `here`, or has other
        devices than the `facts` of this node tell."""
        until = time.monotonic() + seconds
        tests = self.current.tests
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
        return "imported none of the first node's files: do both have the same git repository?"
    others = differing_files(*({file: side.files[file] for file in both} for side in (here, there)))
    more = ", ..." if len(others) > _NAMED else ""
    return f"has other files than the first node: {', '.join(others[:_NAMED])}{more}" if others else ""
