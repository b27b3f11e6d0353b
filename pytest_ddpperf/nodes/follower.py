"""The process that torchrun started on another node: it starts that node's pytest when it is told to, carries what is
said between it and the pytest that leads, and ends with the status of that one.

By itself it answers at once, whatever its pytest does. It is told, beside what is for its pytest (see `led.tests`):

{"op": "start", "arguments": [...]}     (a pytest that is led: what it says follows)
{"op": "ping"}                          {"event": "alive"}
{"op": "clock", "exchanges": n}         {"event": "clock"}, then so many times the time, 8 bytes, for a byte
{"op": "give-up", "seconds": s}         {"event": "died", "text": why} with its stacks; the same whenever it dies
{"op": "exit", "status": s}             (all is over)
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from pytest_ddpperf.led import Led
from pytest_ddpperf.nodes.line import CLOCK
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.wire.channels import Lines, Message, readable

_TICK_SECONDS = 1.0

Start = Callable[[Sequence[str]], Led]


class Follower:
    """Of one run, until the pytest that leads says that it is over, or is gone."""

    def __init__(self, leader: Lines, start: Start) -> None:
        """`start` starts this node's pytest, with further arguments."""
        self._leader, self._start = leader, start
        self._led: Led | None = None

    def run(self) -> int | None:
        """The status to exit with; None if the leader is gone."""
        try:
            while True:
                led = self._led
                ready = readable([self._leader.socket, *([led.socket] if led is not None else [])], _TICK_SECONDS)
                if self._leader.socket in ready:
                    messages = self._leader.receive()
                    if messages is None:
                        return None
                    for message in messages:
                        if message["op"] == "exit":
                            return int(message["status"])
                        self._obey(message)
                if led is not None:
                    self._relay(led, said=led.socket in ready)
        except OSError:
            return None
        finally:
            if self._led is not None:
                self._led.kill()  # and its ranks with it

    def _obey(self, message: Message) -> None:
        operation = message["op"]
        if operation == "ping":
            self._leader.send({"event": "alive"})
        elif operation == "clock":
            self._tell_time(message["exchanges"])
        elif operation == "start":
            self._led = self._start(message["arguments"])
        elif self._led is not None:
            try:
                if operation == "give-up":
                    self._led.give_up(message["seconds"])
                else:
                    self._led.send(message)
            except BaseSideError as error:
                self._died(error)

    def _relay(self, led: Led, *, said: bool) -> None:
        """What this node's pytest said, and its end."""
        try:
            led.refuse_stopped()
            for message in led.heard() if said else ():
                self._leader.send(message)
        except BaseSideError as error:
            self._died(error)

    def _died(self, error: BaseSideError) -> None:
        self._led = None
        self._leader.send({"event": "died", "text": str(error)})

    def _tell_time(self, exchanges: int) -> None:
        """Nothing else may happen in between: each answer takes as long as it is late."""
        self._leader.send({"event": "clock"})
        leader = self._leader.socket
        for _ in range(exchanges):
            if not leader.recv(1, socket.MSG_WAITALL):
                raise ConnectionError
            leader.send(CLOCK.pack(time.monotonic_ns()))
