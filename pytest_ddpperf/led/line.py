"""What is said to a pytest that is led, and heard of it, whatever carries it."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NoReturn

from pytest_ddpperf.launch import Observer
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.wire.channels import Lines, Message, Phase, readable


class Line(ABC):
    """A connection to a pytest that is led. Who carries it says how it ends, and what is known then."""

    def __init__(self, name: str, lines: Lines) -> None:
        """`name` is for messages."""
        self._name, self._lines = name, lines
        self.dead = ""  # why nothing can be asked of it any more
        self._pending: list[Message] = []

    @property
    def socket(self) -> socket.socket:
        return self._lines.socket

    def arrived(self) -> list[Message]:
        """What has arrived by now, progress included; raises BaseSideError."""
        if not self._pending and readable([self.socket], 0):
            self._take_in()
        arrived, self._pending = self._pending, []
        return arrived

    def send(self, message: Message) -> None:
        """Raises BaseSideError."""
        try:
            self._lines.send(message)
        except OSError:
            self._lost()

    def receive(self, observer: Observer, patience: float) -> Message:
        """The next message that is not about progress; raises BaseSideError if the process died, or said nothing for
        `patience` seconds."""
        until = time.monotonic() + patience
        while True:
            while self._pending:
                until = time.monotonic() + patience
                message = self._pending.pop(0)
                if message["event"] == "progress":
                    observer.progress(Phase(message["phase"]), message["step"], message["steps"], ())
                elif message["event"] == "waiting":
                    observer.waiting(Path(message["resource"]))
                else:
                    return message
            if not self._arrives(max(0.0, until - time.monotonic())):
                self._silent(patience)
            self._take_in()

    def _arrives(self, patience: float) -> bool:
        """Whether there is something to take in within so many seconds, its end included."""
        return bool(readable([self._lines.socket], patience))

    def _take_in(self) -> None:
        """All that has arrived; waits where nothing has."""
        arrived = self._lines.receive()
        if arrived is None:
            self._lost()
        self._pending += arrived

    def end(self, problem: str) -> NoReturn:
        """Close the connection: nothing of it is heard any more. Raises BaseSideError."""
        self._lines.socket.close()
        self.dead = f"{self._name} {problem}"
        raise BaseSideError(self.dead)

    @abstractmethod
    def _lost(self) -> NoReturn:
        """The connection has ended: raises BaseSideError."""

    @abstractmethod
    def _silent(self, patience: float) -> NoReturn:
        """Nothing was said for so many seconds: raises BaseSideError."""
