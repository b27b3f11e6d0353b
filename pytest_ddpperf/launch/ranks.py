"""One rank of a launch on this node, as pytest sees it over its channel."""

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pytest_ddpperf.records import codec
from pytest_ddpperf.records.messages import Resting
from pytest_ddpperf.records.samples import RankError
from pytest_ddpperf.wire.channels import Kind, send_word, take_frames


@dataclass(eq=False)
class Peer:
    number: int
    channel: socket.socket  # does not block
    pid: int = 0  # until it has started
    result: bytes | None = None
    resting: Resting | None = None  # what it said when it came to rest
    error: RankError | None = None
    done: bool = False  # its clean-up is over
    exited: bool = False
    silent: bool = False  # its channel has ended
    _arrived: bytearray = field(default_factory=bytearray)

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
            self._arrived += data
            for kind, content in take_frames(self._arrived):
                self._take(kind, content)

    def _take(self, kind: Kind, content: bytes) -> None:
        match kind:
            case Kind.RESULT:
                self.result = content
            case Kind.DONE:
                self.done = True
            case Kind.RESTING:
                self.resting = codec.from_json(Resting, content)
            case Kind.ERROR:
                # what comes after it is of its end
                self.error = self.error or codec.from_json(RankError, content)


def wake(ranks: Sequence[Peer], number: int = 0) -> None:
    """Send the word that these ranks wait for."""
    for rank in ranks:
        rank.resting = None
        # A rank that is gone: after its delivery that is fine, at rest the rank server reports it.
        with suppress(OSError):
            send_word(rank.channel, number)
