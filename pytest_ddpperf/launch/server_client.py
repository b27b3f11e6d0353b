"""pytest's handle on its rank server: start it, restart it when it must be, ask for ranks."""

import errno
import os
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, NoReturn

from pytest_ddpperf.launch.template import (
    Template,
    Templates,
    read_at_import,
    with_hash_seed,
)
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import (
    DdpPerfError,
    ServerError,
    where_limited,
)
from pytest_ddpperf.records.messages import (
    Message,
    ServerAnswer,
    ServerFailed,
    ServerReady,
    StartServer,
    StopServer,
)
from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.channels import Lines, readable
from pytest_ddpperf.wire.source_trees import Trees


def limits() -> str:
    """Return the end of a message: where to look if `ulimit` limits memory or files; "" if it does
    not."""
    for limited in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
        if resource.getrlimit(limited)[0] != resource.RLIM_INFINITY:
            return "; see the limits of ulimit -v and -f"
    return ""


@contextmanager
def writing_temporary_files() -> Iterator[None]:
    """Raise DdpPerfError if files cannot be written. It says so if the temporary folder, or the
    quota of this user there, is full."""
    try:
        yield
    except OSError as error:
        problem = f"{error}{limits()}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = f"no space in {tempfile.gettempdir()}; set TMPDIR to a folder that has some"
        raise DdpPerfError(problem) from None


# For importing torch and the preloaded modules, from a cold network disk too. No launch has begun,
# so it is not of the time that --ddp-timeout gives one.
_START_SECONDS = 300.0
# For a server to end, and its template to report it, after it closed its connection or was stopped.
_END_SECONDS = 5.0


@dataclass
class RankServer:
    """One server process at a time. Not for threads: its template is started from the main one,
    with which it dies."""

    _templates: Templates
    _trees: Trees | None = None  # where to import from
    _folder: str = ""  # removed by the server if pytest is killed
    # that it was forked from, if this pytest started that
    _template: Template | None = None
    _lines: Lines | None = None
    _log: IO[bytes] | None = None
    _made_for: tuple[object, ...] = ()
    pid: int = 0

    def ensure(
        self, variables: Mapping[str, str], preload: Sequence[str]
    ) -> None:
        """Start a server that has imported its modules under these variables, unless there is one.

        Importing torch takes seconds, once; variables that libraries read at import need a new
        template. Raises ServerError, and DdpPerfError if there is no space.
        """
        wanted = (read_at_import(variables), tuple(preload))
        # Without its template it is about to end.
        is_alive = self._lines is not None and (
            self._template is None or self._template.is_alive
        )
        if is_alive and wanted == self._made_for and not self._has_ended(0):
            return
        self.stop()
        with writing_temporary_files():
            self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `stop`
            connection, self._template = self._templates.fork_server(variables)
        self._lines = Lines(connection)
        start = StartServer(
            sys_path=boot.search_path(),
            environ=with_hash_seed(variables),
            cwd=os.getcwd(),
            preload=tuple(preload),
            trees=codec.encode(self._trees),
            folder=self._folder,
        )
        self.send(start, self._log.fileno())
        # a long traceback comes in parts
        while not (answers := self.receive(_START_SECONDS)):
            pass
        match answers[0]:
            case ServerReady(pid):
                self.pid, self._made_for = pid, wanted
            case ServerFailed(traceback):
                self.stop()
                raise ServerError(f"did not start{limits()}", traceback)

    @property
    def socket(self) -> socket.socket:
        return self._connected().socket

    def send(self, request: Message, descriptor: int | None = None) -> None:
        """Send a request, with a file descriptor if it needs one; raises ServerError if the server
        is gone."""
        try:
            self._connected().send(request, descriptor)
        except OSError:
            self._raise_dead()

    def receive(self, timeout: float | None = None) -> list[ServerAnswer]:
        """Return what has arrived, or wait for it; raises ServerError if the server is gone or does
        not answer."""
        lines = self._connected()
        lines.socket.settimeout(timeout)
        received = lines.receive(ServerAnswer)
        lines.socket.settimeout(None)
        if received is None:
            self._raise_dead()
        return received

    def stop(self) -> None:
        """End the server and, with it, whatever it still runs."""
        # first: one that is only half ended, or half started, is not to be used
        self._made_for = ()
        if self._lines is not None:
            with suppress(OSError):
                self._lines.send(StopServer())
                self._lines.socket.shutdown(socket.SHUT_WR)
            # one that has not started yet hears nothing
            if self.pid and not self._has_ended(_END_SECONDS):
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)  # its ranks die with it
            self._lines.socket.close()
            self._lines = None
        self.pid = 0
        if self._log is not None:
            self._log.close()
            self._log = None

    def _has_ended(self, seconds: float) -> bool:
        """Whether the connection ends within so many seconds; drops what arrives."""
        channel, until = self._connected().socket, time.monotonic() + seconds
        with suppress(ConnectionError):
            while readable([channel], max(0.0, until - time.monotonic())):
                if not channel.recv(1 << 16):
                    return True
            return False
        return True

    def _connected(self) -> Lines:
        # ensure() comes first, and it has not ended since
        if self._lines is None:
            raise ServerError("is not running", "")
        return self._lines

    def _raise_dead(self) -> NoReturn:
        assert self._log is not None
        problem = "died" if self._has_ended(_END_SECONDS) else "does not answer"
        self._log.seek(0)
        output = self._log.read().decode(errors="replace")
        if self._template is not None:
            output += self._template.output()
            for news in self._template.news(_END_SECONDS):
                # it is 0 until the server is ready
                if self.pid in (0, news.pid):
                    problem += f" (status {news.status})"
        self.stop()
        problem += where_limited(output)
        raise ServerError(problem, output[-10_000:])
