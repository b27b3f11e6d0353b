"""A node that takes part: what it does for the first one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import BaseSideError, DdpPerfError
from pytest_ddpperf.records.messages import Event, EventKind, Order, OrderKind
from pytest_ddpperf.remote.node import BASE, CLOCK, CURRENT, EXCHANGES, spun
from pytest_ddpperf.remote.process import RemotePytest
from pytest_ddpperf.remote.version import BaseSide
from pytest_ddpperf.wire.channels import Lines, readable

_TICK_SECONDS = 1.0

Start = Callable[[Sequence[str], Sequence[str]], RemotePytest]
MakeBase = Callable[[Sequence[str], str], BaseSide]


class _Gone(Exception):
    """The leader is."""


class NodeWorker:
    """Of one run, until the pytest that leads says that it is over, or is gone."""

    def __init__(self, leader: Lines, start: Start, make_base: MakeBase) -> None:
        """`start` starts this node's pytest, with further arguments, and what both versions have from the working tree,
        from its top. `make_base` returns the other version, by the same files and its commit as the first node has it,
        "" where no other one is asked for."""
        self._leader, self._start, self._make_base = leader, start, make_base
        self._pytests: dict[str, RemotePytest] = {}  # by side
        self._base: BaseSide | None = None
        self._thread = ThreadPoolExecutor(1)
        self._prepared: Future[BaseSide] | None = None

    def run(self) -> int | None:
        """The status to exit with; None if the leader is gone."""
        try:
            while True:
                sides = dict(self._pytests)
                ready = readable([self._leader.socket, *(one.socket for one in sides.values())], _TICK_SECONDS)
                if self._leader.socket in ready:
                    for order in self._orders():
                        if order.kind is OrderKind.EXIT:
                            self._close()
                            return order.status
                        self._obey(order)
                for side, remote_pytest in sides.items():
                    self._relay(side, remote_pytest, arrived=remote_pytest.socket in ready)
                self._look_for_base()
        except _Gone:
            return None
        finally:
            for remote_pytest in self._pytests.values():
                remote_pytest.kill()  # and its ranks with it
            self._thread.shutdown()
            if self._base is not None:
                self._base.close()

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
        """Let the pytests tear their fixtures down."""
        for remote_pytest in self._pytests.values():
            remote_pytest.socket.close()
        for remote_pytest in self._pytests.values():
            remote_pytest.close()
        self._pytests.clear()

    def _obey(self, order: Order) -> None:
        if order.kind is OrderKind.CHECK_ALIVE:
            self._send(Event(EventKind.ALIVE))
        elif order.kind is OrderKind.SEND_CLOCK:
            self._send_clock()
        elif order.kind is OrderKind.START_CURRENT:
            try:
                self._pytests[CURRENT] = self._start(order.arguments, order.kept)
            except (OSError, DdpPerfError) as error:
                self._died(CURRENT, error)
        elif order.kind is OrderKind.START_BASE:
            # In the background: this process answers at once.
            self._prepared = self._thread.submit(self._prepare_base, order.kept, order.commit)
        elif order.side in self._pytests:
            try:
                if order.kind is OrderKind.GIVE_UP:
                    self._pytests[order.side].give_up(order.seconds)
                else:
                    self._pytests[order.side].send(order)
            except BaseSideError as error:
                self._died(order.side, error)

    def _prepare_base(self, kept: Sequence[str], commit: str) -> BaseSide:
        self._base = side = self._make_base(kept, commit)
        side.prepare()
        return side

    def _look_for_base(self) -> None:
        """Start its pytest once its tree is there."""
        if self._prepared is None or not self._prepared.done():
            return
        prepared, self._prepared = self._prepared, None
        try:
            self._pytests[BASE] = prepared.result().spawn()
        except DdpPerfError as error:
            self._died(BASE, error)

    def _relay(self, side: str, remote_pytest: RemotePytest, *, arrived: bool) -> None:
        """Pass on the events of a pytest of this node, and its end."""
        try:
            remote_pytest.refuse_stopped()
            for event in remote_pytest.arrived() if arrived else ():
                self._send(replace(event, side=side))
        except BaseSideError as error:
            self._died(side, error)

    def _died(self, side: str, error: Exception) -> None:
        self._pytests.pop(side, None)
        self._send(Event(EventKind.DIED, side=side, text=str(error)))

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
