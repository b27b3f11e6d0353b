"""What nodes say to each other before there is a connection: by torchrun's own store, which a process in `rank` asks,
for it takes torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile

from pytest_ddpperf.launch.request import inherited
from pytest_ddpperf.nodes.role import Role
from pytest_ddpperf.records.errors import NodesError
from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.channels import Lines, Message, readable

_END_SECONDS = 5.0
_LONGER_SECONDS = 60.0  # than it was asked for: to import torch, and to say so
_SHOWN = 4000  # characters of what it wrote


class _Asking:
    """A process that does so, from the beginning to `close`."""

    def __init__(self, role: Role, told: Message | None, seconds: float) -> None:
        self._seconds = seconds
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                boot.command(sys.executable, "pytest_ddpperf.rank.store", theirs.fileno()),
                env=inherited(os.environ),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )
        self._lines = Lines(ours)
        self._lines.send(
            {
                "sys_path": boot.search_path(),
                "parent": os.getpid(),
                "address": role.address,
                "port": role.port,
                "hosts": told is not None and not role.hosted,
                "key": f"ddpperf/{role.run}",
                "tell": told,
                "seconds": seconds,
            }
        )

    def answer(self) -> Message:
        """Raises NodesError."""
        messages = None
        if readable([self._lines.socket], self._seconds + _LONGER_SECONDS):
            messages = self._lines.receive()
        if not messages:
            self._log.seek(0)
            written = self._log.read().decode(errors="replace")[-_SHOWN:].rstrip()
            raise NodesError(f"torchrun's store did not answer\n{written}".rstrip())
        if messages[0]["event"] == "failed":
            raise NodesError(f"torchrun's store: {messages[0]['text']}")
        return messages[0]

    def close(self) -> None:
        self._lines.socket.close()  # it ends at the end of its stream
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class Notice:
    """Lets the store say to the others where the first node listens; it does so in the background, until `close`."""

    def __init__(self, role: Role, found: Message) -> None:
        self._asking: _Asking | None = _Asking(role, found, _LONGER_SECONDS)
        self._said = False

    def __enter__(self) -> Notice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Wait until it is said; raises NodesError."""
        if self._asking is not None and not self._said:
            self._asking.answer()
            self._said = True

    def close(self) -> None:
        """Nobody needs to be told any more."""
        if self._asking is not None:
            self._asking.close()
            self._asking = None


def found(role: Role, seconds: float) -> Message:
    """Where the first node listens, once that is said; raises NodesError."""
    asking = _Asking(role, None, seconds)
    try:
        message: Message = asking.answer()["found"]
        return message
    finally:
        asking.close()
