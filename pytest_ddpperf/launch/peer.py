"""One rank as pytest sees it: what it sent, and whether more will come."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pytest_ddpperf.records import RankError
from pytest_ddpperf.wire.channels import FrameReader, Kind, send_word


class Peer:
    def __init__(self, number: int, channel: socket.socket) -> None:
        """`channel` does not block."""
        self.number = number
        self.channel = channel
        self.pid = 0
        self.result: bytes | None = None
        self.resting: dict[str, Any] | None = None  # what it said when it came to rest
        self.done = False
        self.silent = False  # its channel has ended
        self.exited = False
        self.error: RankError | None = None
        self._reader = FrameReader()

    @property
    def settled(self) -> bool:
        return self.done or self.error is not None

    def read(self) -> None:
        """Take in all that has arrived."""
        while True:
            try:
                data = self.channel.recv(1 << 20)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self.silent = True
                return
            for kind, content in self._reader.feed(data):
                if kind is Kind.RESULT:
                    self.result = content
                elif kind is Kind.DONE:
                    self.done = True
                elif kind is Kind.RESTING:
                    self.resting = json.loads(content)
                else:
                    self.error = RankError(**json.loads(content))


def wake(ranks: Sequence[Peer], number: int = 0) -> None:
    """The word that a rank awaits."""
    for rank in ranks:
        rank.resting = None
        with suppress(OSError):  # it is gone already: after delivering green, at rest the rank server tells
            send_word(rank.channel, number)
