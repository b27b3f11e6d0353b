"""A remote pytest as a process of this machine, the connection to it, and the tests that it runs for the leader."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from pytest_ddpperf import __version__
from pytest_ddpperf.launch import Observer, describe_end
from pytest_ddpperf.launch.failed_ranks import await_stacks
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.records.samples import Scalar
from pytest_ddpperf.remote.worktree import Sources
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
                    boot.command(python, "pytest_ddpperf.plugin.remote_worker", theirs.fileno()),
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


# For importing pytest and all test modules, from a cold network disk too.
START_SECONDS = 300.0


class Tests:
    """One test at a time, over one line."""

    def __init__(self, line: Line, patience: float) -> None:
        """`patience`: seconds without a word of a test, after which something is wrong with the whole process."""
        self._line, self._patience = line, patience
        self.known: frozenset[str] = frozenset()
        self.sources: Sources | None = None  # what it runs, once it has collected
        self._errors: Mapping[str, str] = {}  # of collection, by file
        self._started = False  # whether it has a rank server
        self._test = ""  # that it is in
        self._ended: dict[str, str] = {}  # tests of which no further measurement will come, and why

    def hello(self, seconds: float) -> None:
        """Raises BaseSideError if there is another version of the plugin."""
        message = self._line.receive(Observer(), seconds)
        if message["version"] != __version__:
            raise BaseSideError(f"there is pytest-ddpperf {message['version']}, here {__version__}")

    def collect(self, seconds: float) -> Message:
        """What it has collected; raises BaseSideError."""
        message = self._line.receive(Observer(), seconds)
        self.known, self._errors = frozenset(message["tests"]), message["errors"]
        self.sources = codec.decode(Sources, message["sources"])
        return message

    def why_missing(self, nodeid: str) -> str:
        """Why it has no such test; "" if it has."""
        if nodeid in self.known:
            return ""
        if self._line.dead:
            return self._line.dead
        file = Path(nodeid.partition("::")[0])
        places = (place.as_posix() for place in (file, *file.parents))  # a conftest's error is its folder's
        errors = [self._errors[place] for place in places if place in self._errors]
        return errors[0] if errors else f"there is no such test: {nodeid}"

    def started(self) -> Mapping[str, Scalar]:
        """Wait for its rank server; what that found there, the first time another node's says it. Raises
        BaseSideError."""
        if self._started or self._line.dead:
            return {}
        self._started = True
        facts: Mapping[str, Scalar] = self._line.receive(Observer(), START_SECONDS).get("facts", {})
        return facts

    def enter(self, nodeid: str) -> None:
        """Let a test run there, if it is not in it already, up to what it asks for; raises BaseSideError."""
        self.started()
        if self._line.dead:
            raise BaseSideError(self._line.dead)
        if nodeid in self._ended:
            raise BaseSideError(self._ended[nodeid])
        if nodeid not in self.known:
            raise BaseSideError(self.why_missing(nodeid))
        if self._test != nodeid:
            self.leave()
            self._line.send({"op": "test", "nodeid": nodeid})
            self._test = nodeid

    def hear(self, observer: Observer, otherwise: str) -> Message:
        """The next message of the test that it is in; raises BaseSideError, with `otherwise` or its own words, if that
        ended."""
        message = self._line.receive(observer, self._patience)
        if message["event"] == "ended":
            self.ended(message, otherwise)
            raise BaseSideError(message["text"] or otherwise)
        return message

    def ended(self, message: Message, otherwise: str) -> None:
        """The test that it is in has ended, as it says or else `otherwise`."""
        self._ended[self._test] = message["text"] or otherwise
        self._test = ""

    def ask(self, observer: Observer, order: Message) -> Message:
        """What comes of an order to a launch; raises BaseSideError."""
        if self.gone:
            raise BaseSideError(self._line.dead or next(reversed(self._ended.values())))
        with self.last_words():
            self._line.send(order)
            message = self.hear(observer, "the test ended there during a launch")
        if message["event"] == "failed":
            raise BaseSideError(message["text"])
        return message

    @property
    def gone(self) -> bool:
        """Whether it is in no test any more, of which something could be asked."""
        return bool(self._line.dead) or not self._test

    def done(self) -> None:
        """The measurement is over."""
        with suppress(BaseSideError):  # the next test will report it
            self._line.send({"op": "done"})

    def leave(self) -> str:
        """The test is over here. Returns when it is over there: what failed there outside of its call, or ""."""
        return self.await_end() if self.request_end() else ""

    def request_end(self) -> bool:
        """Say that the test is over here: whether its end there is to be awaited."""
        self._ended.clear()
        if not self._test or self._line.dead:
            return False
        self._test = ""
        try:
            self._line.send({"op": "leave"})
        except BaseSideError:  # the next test will report it
            return False
        return True

    def await_end(self) -> str:
        """Wait until the test has ended (after `request_end`); return what went wrong with the process, if anything."""
        try:
            while (message := self._line.receive(Observer(), self._patience))["event"] != "ended":
                pass
        except BaseSideError as error:
            return str(error)
        return str(message.get("apart", ""))

    @contextmanager
    def last_words(self) -> Iterator[None]:
        """Show what it wrote before it died to one test, and to others that it did."""
        try:
            yield
        finally:
            self._line.dead = self._line.dead.partition("\n")[0]
