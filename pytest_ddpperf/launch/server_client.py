"""pytest's handle on its rank server: start it, restart it when it must be, ask for ranks."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict

from pytest_ddpperf.launch.request import read_at_import
from pytest_ddpperf.records import messages
from pytest_ddpperf.records.errors import DdpPerfError, ServerError
from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.channels import Lines
from pytest_ddpperf.wire.source_trees import Trees


@contextmanager
def writing_temporary_files() -> Iterator[None]:
    """Raise DdpPerfError if the temporary folder, or the quota of this user there, is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DdpPerfError(f"no space in {tempfile.gettempdir()}; set TMPDIR to a folder that has some") from None


# For importing torch and the preloaded modules, from a cold network disk too. No launch has begun, so it is not of
# the time that --ddp-timeout gives one.
_START_SECONDS = 300.0
# For a server to end after it closed its connection or was stopped.
_END_SECONDS = 5.0


class RankServer:
    """One server process at a time. Not for threads: start it from the main one, for it dies with its thread."""

    def __init__(self, trees: Trees | None = None, folder: str = "") -> None:
        """`trees`: where to import from, if there are two. `folder`: removed by the server if pytest is killed."""
        self._trees, self._folder = trees, folder
        self._child: boot.Child | None = None
        self._made_for: tuple[object, ...] = ()

    def ensure(self, variables: Mapping[str, str], preload: Sequence[str]) -> None:
        """Start a server that has imported its modules under these variables, unless there is one.

        Importing torch takes seconds, once; variables that libraries read at import need a new server. Raises
        ServerError, and DdpPerfError if there is no space.
        """
        wanted = (read_at_import(variables), tuple(preload))
        if self._child is not None and self._child.process.poll() is None and wanted == self._made_for:
            return
        self.stop()
        with writing_temporary_files():
            self._child = boot.Child(sys.executable, "pytest_ddpperf.rank.fork_server", variables)
        self._child.lines.socket.settimeout(_START_SECONDS)
        start = messages.StartServer(
            sys_path=boot.search_path(),
            parent=os.getpid(),
            preload=list(preload),
            trees=asdict(self._trees) if self._trees is not None else None,
            folder=self._folder,
        )
        self.send(start)
        answers: list[messages.ServerAnswer] = []
        while not answers:  # a long traceback comes in parts
            answers = self.receive(_START_SECONDS)
        if isinstance(answers[0], messages.ServerFailed):
            self.stop()
            raise ServerError("did not start", answers[0].traceback)
        self._made_for = wanted

    @property
    def socket(self) -> socket.socket:
        return self._connected().socket

    def send(self, request: messages.ServerRequest, descriptor: int | None = None) -> None:
        """Send a request, with a file descriptor if it needs one; raises ServerError if the server is gone."""
        try:
            self._connected().send(messages.encode(request), descriptor)
        except OSError:
            self._raise_dead()

    def receive(self, timeout: float | None = None) -> list[messages.ServerAnswer]:
        """Return what has arrived, or wait for it; raises ServerError if the server is gone or does not answer."""
        lines = self._connected()
        lines.socket.settimeout(timeout)
        received = lines.receive()
        lines.socket.settimeout(None)
        if received is None:
            self._raise_dead()
        return [messages.decode(fields) for fields in received or ()]

    def stop(self) -> None:
        """End the server and, with it, whatever it still runs."""
        self._made_for = ()  # first: one that is only half ended, or half started, is not to be used
        if self._child is None:
            return
        with suppress(OSError):
            self._child.lines.send(messages.encode(messages.Request.STOP_SERVER))
        self._child.close(_END_SECONDS)  # its ranks die with it
        self._child = None

    def _connected(self) -> Lines:
        if self._child is None:  # ensure() comes first, and it has not ended since
            raise ServerError("is not running", "")
        return self._child.lines

    def _raise_dead(self) -> None:
        assert self._child is not None
        try:
            problem = f"died (status {self._child.process.wait(_END_SECONDS)})"
        except subprocess.TimeoutExpired:
            problem = "does not answer"
        output = self._child.output()[-10_000:]
        self.stop()
        raise ServerError(problem, output)
