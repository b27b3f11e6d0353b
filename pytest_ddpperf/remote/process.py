"""A remote pytest as a process of this machine, and the connection to it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

from pytest_ddpperf.launch import Observer, describe_end
from pytest_ddpperf.launch.failure import await_stacks
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.channels import Lines, Message, Phase, readable


class Line(ABC):
    """A connection to a remote pytest. The subclass says how it ends, and what is known then."""

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


# For a process that closed its connection to end, and for one that was asked to end to tear its fixtures down.
_END_SECONDS = 30.0
_SHOWN = 4000  # characters of what it wrote
_PYTEST_FRAME = re.compile(r'  File ".*/(_pytest|pluggy)/')  # of a stack, which has dozens of them


class RemotePytest(Line):
    """A remote pytest in a process of this machine, which ends with `close`."""

    def __init__(self, name: str, python: str, environ: Mapping[str, str], folder: Path) -> None:
        """`name` is for messages. What is sent first has its sys.path: see `wire.boot`. Raises OSError."""
        with ExitStack() as failing:
            ours, theirs = socket.socketpair()
            failing.callback(ours.close)
            super().__init__(name, Lines(ours))
            self._log = failing.enter_context(tempfile.TemporaryFile())
            with theirs:
                self._process = subprocess.Popen(
                    boot.command(python, "pytest_ddpperf.plugin.worker", theirs.fileno()),
                    env=dict(environ),
                    cwd=folder,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    start_new_session=True,  # Ctrl-C is this pytest's to handle
                )
            failing.pop_all()

    def refuse_stopped(self) -> None:
        """Raises BaseSideError if somebody stopped the process: it will not answer."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13: its silence will say so
            return
        with suppress(ChildProcessError):  # it has ended, and its connection will say so
            if os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None:
                self._die("was stopped by a signal")

    def _lost(self) -> NoReturn:
        self._die(f"died: {self._exit()}")

    def _silent(self, patience: float) -> NoReturn:
        self.give_up(patience)

    def give_up(self, patience: float) -> NoReturn:
        """End it, for it did not answer for so many seconds; raises BaseSideError with its stacks."""
        await_stacks(lambda: self._process.send_signal(signal.SIGQUIT), lambda: [os.fstat(self._log.fileno()).st_size])
        self._die(f"did not answer for {patience:.3g} s")

    def _die(self, problem: str) -> NoReturn:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        output = "\n".join(line for line in lines if not _PYTEST_FRAME.match(line)).rstrip()[-_SHOWN:]
        self.kill()
        self.dead = f"pytest of {self._name} {problem}\n{output}".rstrip()
        raise BaseSideError(self.dead)

    def _exit(self) -> str:
        try:
            return describe_end(self._process.wait(_END_SECONDS))
        except subprocess.TimeoutExpired:
            return "it closed its connection"

    def kill(self) -> None:
        """End it at once."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # its rank server dies with it, and its ranks with that
        self._process.wait()

    def close(self) -> None:
        """At the end of the stream it ends by itself, or soon after is ended."""
        self._lines.socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self.kill()
        self._log.close()
