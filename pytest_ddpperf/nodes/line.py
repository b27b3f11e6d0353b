"""The connection between the pytest that leads and another node."""

from __future__ import annotations

import socket
import struct
import time
from typing import NoReturn

from pytest_ddpperf.launch.clock import Offset, offset
from pytest_ddpperf.led import Line
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.wire.channels import Lines, Message, readable

# A node that is asked answers at once, whatever its tests do, unless it is stopped, hangs or is cut off.
_ASK_SECONDS = 3.0
_GONE_SECONDS = 12.0
_TICK_SECONDS = 0.5
# For the kernel to say that the other end is not there: idle, between probes, how many; and for what was sent.
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
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int((_IDLE + _BETWEEN * _PROBES) * 1000))


class NodeLine(Line):
    """To the pytest of another node, by way of the process that torchrun started there: see `nodes.follower`."""

    def __init__(self, name: str, lines: Lines) -> None:
        super().__init__(name, lines)
        lines.socket.settimeout(_GONE_SECONDS)
        self._heard = self._asked = self._watched = time.monotonic()

    @property
    def socket(self) -> socket.socket:
        return self._lines.socket

    def arrived(self) -> list[Message]:
        """What has arrived by now, without waiting; raises BaseSideError."""
        self._watch()
        if not self._pending and readable([self.socket], 0):
            self._take_in()
        arrived, self._pending = self._pending, []
        return arrived

    def _arrives(self, patience: float) -> bool:
        until = time.monotonic() + patience
        while (left := until - time.monotonic()) > 0:
            if readable([self.socket], min(left, _TICK_SECONDS)):
                return True
            self._watch()
        return False

    def _watch(self) -> None:
        """Ask for a sign of life where none came for a while."""
        now = time.monotonic()
        if now - self._watched > _ASK_SECONDS:  # nobody looked: nothing was asked, either
            self._heard = now
        self._watched = now
        if now - self._heard > _GONE_SECONDS:
            self._end(f"said nothing for {now - self._heard:.0f} s")
        if now - max(self._heard, self._asked) > _ASK_SECONDS:
            self._asked = now
            self.send({"op": "ping"})

    def _take_in(self) -> None:
        super()._take_in()
        self._heard = time.monotonic()
        self._pending = [message for message in self._pending if message["event"] != "alive"]
        for message in self._pending:
            if message["event"] == "died":
                self.dead = message["text"]
                raise BaseSideError(self.dead)

    def _lost(self) -> NoReturn:
        self._end("is gone: its connection ended")

    def _silent(self, patience: float) -> NoReturn:
        self.send({"op": "give-up", "seconds": patience})
        while self._arrives(_GONE_SECONDS):
            self._take_in()  # raises, once it says how its pytest ended
        self._end(f"did not answer for {patience:.3g} s")

    def _end(self, problem: str) -> NoReturn:
        self.dead = f"{self._name} {problem}"
        self.socket.close()
        raise BaseSideError(self.dead)

    def offset(self) -> Offset:
        """Of that node's clock; raises BaseSideError."""
        self.send({"op": "clock", "exchanges": EXCHANGES})
        try:
            while not any(message["event"] == "clock" for message in self._pending):
                if not self._arrives(_GONE_SECONDS):
                    self._end("did not tell the time")
                self._take_in()
            self._pending = [message for message in self._pending if message["event"] != "clock"]
            return offset([self._exchange() for _ in range(EXCHANGES)])
        except OSError:
            self._lost()

    def _exchange(self) -> tuple[int, int, int]:
        before = time.monotonic_ns()
        self.socket.send(b"?")
        told = self.socket.recv(CLOCK.size, socket.MSG_WAITALL)
        after = time.monotonic_ns()
        if len(told) < CLOCK.size:
            raise ConnectionError
        return before, int(CLOCK.unpack(told)[0]), after

    def close(self) -> None:
        self.socket.close()
