"""A node that takes part: what it does for the first one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pytest_ddpperf.records.errors import BaseSideError, DdpPerfError
from pytest_ddpperf.remote.node import BASE, CLOCK, CURRENT, spun
from pytest_ddpperf.remote.process import RemotePytest
from pytest_ddpperf.remote.version import BaseSide
from pytest_ddpperf.wire.channels import Lines, Message, readable

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
        self._led: dict[str, RemotePytest] = {}  # by side
        self._base: BaseSide | None = None
        self._thread = ThreadPoolExecutor(1)
        self._prepared: Future[BaseSide] | None = None

    def run(self) -> int | None:
        """The status to exit with; None if the leader is gone."""
        try:
            while True:
                sides = dict(self._led)
                ready = readable(
                    [self._leader.socket, *(remote_pytest.socket for remote_pytest in sides.values())], _TICK_SECONDS
                )
                if self._leader.socket in ready:
                    for message in self._orders():
                        if message["op"] == "exit":
                            self._close()
                            return int(message["status"])
                        self._obey(message)
                for side, remote_pytest in sides.items():
                    self._relay(side, remote_pytest, said=remote_pytest.socket in ready)
                self._look_for_base()
        except _Gone:
            return None
        finally:
            for remote_pytest in self._led.values():
                remote_pytest.kill()  # and its ranks with it
            self._thread.shutdown()
            if self._base is not None:
                self._base.close()

    def _orders(self) -> list[Message]:
        messages = self._leader.receive()
        if messages is None:
            raise _Gone
        return messages

    def _say(self, event: str, **fields: Any) -> None:
        try:
            self._leader.send({"event": event, **fields})
        except OSError:
            raise _Gone from None

    def _close(self) -> None:
        """Let the pytests tear their fixtures down."""
        for remote_pytest in self._led.values():
            remote_pytest.socket.close()
        for remote_pytest in self._led.values():
            remote_pytest.close()
        self._led.clear()

    def _obey(self, message: Message) -> None:
        operation = message["op"]
        if operation == "ping":
            self._say("alive")
        elif operation == "clock":
            self._tell_time(message["exchanges"])
        elif operation == "start":
            try:
                self._led[CURRENT] = self._start(message["arguments"], message["kept"])
            except (OSError, DdpPerfError) as error:
                self._died(CURRENT, error)
        elif operation == "start-base":
            # In the background: this process answers at once.
            self._prepared = self._thread.submit(self._prepare_base, message["kept"], message["commit"])
        elif message["side"] in self._led:
            side = message.pop("side")
            try:
                if operation == "give-up":
                    self._led[side].give_up(message["seconds"])
                else:
                    self._led[side].send(message)
            except BaseSideError as error:
                self._died(side, error)

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
            self._led[BASE] = prepared.result().spawn()
        except DdpPerfError as error:
            self._died(BASE, error)

    def _relay(self, side: str, remote_pytest: RemotePytest, *, said: bool) -> None:
        """What this node's pytest said, and its end."""
        try:
            remote_pytest.refuse_stopped()
            for message in remote_pytest.arrived() if said else ():
                self._say(**message, side=side)
        except BaseSideError as error:
            self._died(side, error)

    def _died(self, side: str, error: Exception) -> None:
        self._led.pop(side, None)
        self._say("died", side=side, text=str(error))

    def _tell_time(self, exchanges: int) -> None:
        """Nothing else may happen in between: each answer takes as long as it is late."""
        self._say("clock")
        leader = self._leader.socket
        try:
            leader.setblocking(False)
            for _ in range(exchanges):
                spun(leader, 1)
                leader.send(CLOCK.pack(time.monotonic_ns()))
            leader.setblocking(True)
        except OSError:
            raise _Gone from None
