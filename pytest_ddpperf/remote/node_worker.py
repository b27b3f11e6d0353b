"""The process that torchrun started on another node: it runs the pytest of its node for the first
one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_ddpperf.records.errors import BaseSideError, DdpPerfError
from pytest_ddpperf.records.messages import (
    Alive,
    CheckAlive,
    ClockReady,
    Died,
    Event,
    Exit,
    GiveUp,
    Order,
    RunPytest,
    SendClock,
    ServeVersion,
)
from pytest_ddpperf.remote.clocks import send_clock
from pytest_ddpperf.remote.process import RemotePytest
from pytest_ddpperf.wire.channels import Lines, readable


class _Gone(Exception):
    """The leader is."""


@dataclass
class NodeWorker:
    """Serves the first node in one run, until the pytest that leads says that it is over, or is
    gone."""

    _leader: Lines
    # starts this node's pytest, with further arguments
    _start: Callable[[Sequence[str]], RemotePytest]
    # begins to serve with another one
    _serve_version: Callable[[ServeVersion], None] | None = None
    _pytest: RemotePytest | None = None

    def run(self) -> int | None:
        """The status to exit with; None if the leader is gone."""
        try:
            while True:
                started = self._pytest
                sockets = [self._leader.socket]
                if started is not None:
                    sockets.append(started.socket)
                ready = readable(sockets)
                if self._leader.socket in ready:
                    orders = self._leader.receive(Order)
                    if orders is None:
                        return None
                    for order in orders:
                        if isinstance(order, Exit):
                            if self._pytest is not None:
                                # it tears its fixtures down
                                self._pytest.close()
                            return order.status
                        self._obey(order)
                if started is not None and started.socket in ready:
                    self._relay(started)
        except _Gone:
            return None
        finally:
            if self._pytest is not None:
                self._pytest.kill()  # and its ranks with it

    def _send(self, event: Event) -> None:
        try:
            self._leader.send(event)
        except OSError:
            raise _Gone from None

    def _obey(self, order: Order) -> None:
        match order:
            case CheckAlive():
                self._send(Alive())
            case SendClock():
                self._send(ClockReady())
                try:
                    send_clock(self._leader.socket)
                except OSError:
                    raise _Gone from None
            case RunPytest(arguments):
                self.start(arguments)
            case ServeVersion() if self._serve_version is not None:
                self._serve_version(order)
            case _ if self._pytest is not None:
                try:
                    if isinstance(order, GiveUp):
                        self._pytest.give_up(order.seconds)
                    self._pytest.send(order)
                except BaseSideError as error:
                    self._died(error)

    def start(self, arguments: Sequence[str]) -> None:
        """Start the pytest of this node; the leader hears if that fails."""
        try:
            self._pytest = self._start(arguments)
        except (OSError, DdpPerfError) as error:
            self._died(error)

    def _relay(self, remote_pytest: RemotePytest) -> None:
        """Pass on the events of this node's pytest, and its end."""
        try:
            for event in remote_pytest.arrived():
                self._send(event)
        except BaseSideError as error:
            self._died(error)

    def _died(self, error: Exception) -> None:
        self._pytest = None
        self._send(Died(str(error)))
