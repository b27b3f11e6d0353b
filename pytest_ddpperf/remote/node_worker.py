"""A node that takes part: what it does for the first one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import BaseSideError, DdpPerfError
from pytest_ddpperf.records.messages import Event, EventKind, Order, OrderKind
from pytest_ddpperf.remote.node import CLOCK, EXCHANGES, spun
from pytest_ddpperf.remote.process import RemotePytest
from pytest_ddpperf.wire.channels import Lines, readable

_TICK_SECONDS = 1.0


class _Gone(Exception):
    """The leader is."""


class NodeWorker:
    """Of one run, until the pytest that leads says that it is over, or is gone."""

    def __init__(self, leader: Lines, start: Callable[[Sequence[str]], RemotePytest]) -> None:
        """`start` starts this node's pytest, with further arguments."""
        self._leader, self._start = leader, start
        self._pytest: RemotePytest | None = None

    def run(self) -> int | None:
        """The status to exit with; None if the leader is gone."""
        try:
            while True:
                started = self._pytest
                sockets = [self._leader.socket, *([started.socket] if started is not None else ())]
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
