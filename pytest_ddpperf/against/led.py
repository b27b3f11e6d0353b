"""The process of the other version's pytest, and the connection to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from pytest_ddpperf.against.checkout import SHOWN, describe_end
from pytest_ddpperf.launch import Observer, stacks
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.channels import Lines, Message, Phase, readable

# For a process that closed its connection to end, and for one that was told to leave to tear its fixtures down.
_END_SECONDS = 30.0


class Led:
    """A process that is led from here, and ends with `close`."""

    def __init__(self, name: str, python: str, environ: Mapping[str, str], folder: Path) -> None:
        """`name` is for messages. What is sent first has its sys.path: see `wire.boot`. Raises OSError."""
        self._name = name
        self.dead = ""  # why nothing can be asked of it any more
        self._pending: list[Message] = []
        with ExitStack() as failing:
            ours, theirs = socket.socketpair()
            failing.callback(ours.close)
            self._lines = Lines(ours)
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

    def send(self, message: Message) -> None:
        """Raises BaseSideError."""
        try:
            self._lines.send(message)
        except OSError:
            self._die(f"died: {self._exit()}")

    def receive(self, observer: Observer, patience: float) -> Message:
        """The next message that is not about progress; raises BaseSideError if the process died, or said nothing for
        `patience` seconds."""
        while True:
            while self._pending:
                message = self._pending.pop(0)
                if message["event"] == "progress":
                    observer.progress(Phase(message["phase"]), message["step"], message["steps"], ())
                elif message["event"] == "waiting":
                    observer.waiting(Path(message["resource"]))
                else:
                    return message
            ready = readable([self._lines.socket], patience)
            try:
                arrived = self._lines.receive() if ready else []
            except OSError:
                arrived = None
            if arrived is None:
                self._die(f"died: {self._exit()}")
            elif not ready:
                stacks.ask(
                    lambda: self._process.send_signal(signal.SIGQUIT), lambda: [os.fstat(self._log.fileno()).st_size]
                )
                self._die(f"did not answer for {patience:.3g} s")
            else:
                self._pending += arrived

    def _die(self, problem: str) -> None:
        self._log.seek(0)
        output = self._log.read().decode(errors="replace").rstrip()[-SHOWN:]
        self.dead = f"pytest of {self._name} {problem}\n{output}".rstrip()
        self._kill()
        raise BaseSideError(self.dead)

    def _exit(self) -> str:
        try:
            return describe_end(self._process.wait(_END_SECONDS))
        except subprocess.TimeoutExpired:
            return "it closed its connection"

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # its rank server dies with it, and its ranks with that
        self._process.wait()

    def close(self) -> None:
        """At the end of the stream it ends by itself, or soon after is ended."""
        self._lines.socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._kill()
        self._log.close()
