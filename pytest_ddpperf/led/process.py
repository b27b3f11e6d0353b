"""The process of a pytest that is led from here, and the connection to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

from pytest_ddpperf.launch import describe_end
from pytest_ddpperf.launch.failure import await_stacks
from pytest_ddpperf.led.line import Line
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.channels import Lines

# For a process that closed its connection to end, and for one that was told to leave to tear its fixtures down.
_END_SECONDS = 30.0
_SHOWN = 4000  # characters of what it wrote


class Led(Line):
    """A process that is led from here, and ends with `close`."""

    def __init__(self, name: str, python: str, environ: Mapping[str, str], folder: Path) -> None:
        """`name` is for messages. What is sent first has its sys.path: see `wire.boot`. Raises OSError."""
        with ExitStack() as failing:
            ours, theirs = socket.socketpair()
            failing.callback(ours.close)
            super().__init__(name, Lines(ours))
            self._log = failing.enter_context(tempfile.TemporaryFile())
            with theirs:
                self._process = subprocess.Popen(
                    boot.command(python, "pytest_ddpperf.plugin.base", theirs.fileno()),
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
        output = self._log.read().decode(errors="replace").rstrip()[-_SHOWN:]
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
