"""A remote pytest as a process of this machine, the connection to it, and the tests that it runs
for the leader."""

import os
import re
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pytest_ddpperf.launch import Observer, describe_end
from pytest_ddpperf.launch.stacks import await_stacks
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.records.messages import (
    Collected,
    ConftestFailed,
    Event,
    Hello,
    LaunchFailed,
    LeaveTest,
    Order,
    Progress,
    RunTest,
    ServerStarted,
    StartPytest,
    TestEnded,
    WaitingForLock,
)
from pytest_ddpperf.records.samples import Facts
from pytest_ddpperf.version import __version__
from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.channels import Lines, Phase, readable

_E = TypeVar("_E")


class Line(ABC):
    """A connection to a remote pytest."""

    def __init__(self, name: str, lines: Lines) -> None:
        """`name` is for messages."""
        self.name, self._lines = name, lines
        self.dead = ""  # why nothing can be asked of it any more
        self._pending: list[Event] = []

    @property
    def socket(self) -> socket.socket:
        return self._lines.socket

    def arrived(self) -> list[Event]:
        """Return what has arrived by now, progress included; raises BaseSideError."""
        if not self._pending and readable([self.socket], 0):
            self._take_in()
        arrived, self._pending = self._pending, []
        return arrived

    @abstractmethod
    def send(self, order: Order) -> None:
        """Raises BaseSideError."""

    def receive(
        self, observer: Observer, patience: float, kind: Any = object
    ) -> Any:
        """Return the next event that is not about progress; raises BaseSideError if it is not of
        this `kind`, and if the process died, or reported nothing for `patience` seconds."""
        until = time.monotonic() + patience
        while True:
            while self._pending:
                until = time.monotonic() + patience
                event = self._pending.pop(0)
                match event:
                    case Progress(phase, step, steps):
                        observer.progress(Phase(phase), step, steps, ())
                    case WaitingForLock(resource):
                        observer.waiting(Path(resource))
                    case _ if isinstance(event, kind):
                        return event
                    case _:
                        raise BaseSideError(
                            f"{self.name} reported {type(event).__name__}"
                        )
            if not self._arrives(max(0.0, until - time.monotonic())):
                self.give_up(patience)
            self._take_in()

    def _arrives(self, patience: float) -> bool:
        """Whether there is something to take in within so many seconds, its end included."""
        return bool(readable([self.socket], patience))

    @abstractmethod
    def _take_in(self) -> None:
        """Take in all that has arrived; waits if nothing has. Raises BaseSideError."""

    def end(self, problem: str) -> NoReturn:
        """Close the connection: nothing more is received. Raises BaseSideError."""
        self.socket.close()
        self.dead = f"{self.name} {problem}"
        raise BaseSideError(self.dead)

    @abstractmethod
    def give_up(self, patience: float) -> NoReturn:
        """End the remote pytest, which did not answer for so many seconds; raises BaseSideError
        with its stacks."""


# For a process that closed its connection to end, and for one that was asked to end to tear its
# fixtures down.
_END_SECONDS = 30.0
# For a process that has run no test, and that may hear nothing because it still imports.
_IDLE_END_SECONDS = 2.0
_SHOWN = 4000  # characters of what it wrote
# of a stack, which has dozens of them
_PYTEST_FRAME = re.compile(r'  File ".*/(_pytest|pluggy)/')


class RemotePytest(Line):
    """A remote pytest in a process of this machine, which ends with `close`."""

    def __init__(
        self,
        name: str,
        python: str,
        environ: Mapping[str, str],
        folder: Path,
        descriptors: Sequence[int] = (),
    ) -> None:
        """`name` is for messages. What is sent first has its sys.path: see `wire.boot`. Raises
        OSError."""
        self._end_seconds = _IDLE_END_SECONDS
        self._child = boot.Child(
            python,
            "pytest_ddpperf.plugin.remote_worker",
            environ,
            folder,
            descriptors,
        )
        super().__init__(name, self._child.lines)

    def send(self, order: Order | StartPytest) -> None:
        if not isinstance(order, StartPytest):
            self._end_seconds = _END_SECONDS
        try:
            self._lines.send(order)
        except OSError:
            self._die(f"died: {self._exit()}")

    def _take_in(self) -> None:
        try:
            arrived = self._lines.receive(Event)
        except codec.CodecError as error:  # of another build of the plugin
            self._die(f"sent what is no message here: {error}")
        if arrived is None:
            self._die(f"died: {self._exit()}")
        self._pending += arrived

    def give_up(self, patience: float) -> NoReturn:
        process, log = self._child.process, self._child.log.fileno()
        await_stacks(
            lambda: process.send_signal(signal.SIGQUIT),
            lambda: [os.fstat(log).st_size],
        )
        self._die(f"did not answer for {patience:.3g} s")

    def _die(self, problem: str) -> NoReturn:
        lines = self._child.output().splitlines()
        output = "\n".join(
            line for line in lines if not _PYTEST_FRAME.match(line)
        ).rstrip()[-_SHOWN:]
        self.kill()
        self.dead = f"pytest of {self.name} {problem}\n{output}".rstrip()
        raise BaseSideError(self.dead)

    def _exit(self) -> str:
        try:
            return describe_end(self._child.process.wait(_END_SECONDS))
        except subprocess.TimeoutExpired:
            return "it closed its connection"

    def kill(self) -> None:
        """End it at once; its rank server ends with their connection, and its ranks with that."""
        self._child.kill()

    def close(self) -> None:
        """At the end of the stream it ends by itself, or soon after is ended."""
        self._child.close(self._end_seconds)


# For importing pytest and all test modules, from a cold network disk too.
START_SECONDS = 300.0


@dataclass
class Tests:
    """One test at a time, over one line."""

    _line: Line
    # seconds without a word of a test, after which something is wrong with the whole process
    _patience: float
    known: frozenset[str] = frozenset()
    # of collection, by file
    errors: Mapping[str, str] = field(default_factory=dict)
    lacks_conftest: bool = False  # whether it ended because of one
    _started: bool = False  # whether it has a rank server
    _test: str = ""  # that it is in
    # tests of which no further measurement will come, and why
    _ended: dict[str, str] = field(default_factory=dict)

    def hello(self, seconds: float) -> None:
        """Raises BaseSideError if there is another version of the plugin."""
        version = self._line.receive(Observer(), seconds, Hello).version
        if version != __version__:
            raise BaseSideError(
                f"there is pytest-ddpperf {version}, here {__version__}"
            )

    def collect(self, seconds: float) -> Collected:
        """Return what it has collected, once it has; raises BaseSideError."""
        received = self._line.receive(
            Observer(), seconds, Collected | ConftestFailed
        )
        if isinstance(received, ConftestFailed):
            self.lacks_conftest = True
            # raises, with what it wrote before it ended
            received = self._line.receive(Observer(), seconds, Collected)
        collected: Collected = received
        self.known = frozenset(collected.tests)
        self.errors = collected.file_errors
        return collected

    def why_missing(self, nodeid: str) -> str:
        """Why it has no such test; "" if it has."""
        if nodeid in self.known:
            return ""
        if self._line.dead:
            return self._line.dead
        file = Path(nodeid.partition("::")[0])
        # a conftest's error is its folder's
        for place in (file, *file.parents):
            if place.as_posix() in self.errors:
                return self.errors[place.as_posix()]
        return f"there is no such test: {nodeid}"

    def started(self, seconds: float = START_SECONDS) -> Facts:
        """Wait for its rank server; return what that found there, the first time. Raises
        BaseSideError."""
        if self._started or self._line.dead:
            return {}
        self._started = True
        started = self._line.receive(
            Observer(), seconds, ServerStarted | LaunchFailed
        )
        if isinstance(started, LaunchFailed):
            raise BaseSideError(started.why)
        facts: Facts = started.facts
        return facts

    def enter(self, nodeid: str) -> None:
        """Let a test run there, if it is not in it already, up to what it asks for; raises
        BaseSideError."""
        self.started()
        problem = (
            self._line.dead
            or self._ended.get(nodeid)
            or self.why_missing(nodeid)
        )
        if problem:
            raise BaseSideError(problem)
        if self._test != nodeid:
            self.leave()
            self._line.send(RunTest(nodeid))
            self._test = nodeid

    def receive(self, kind: Any, observer: Observer, otherwise: str) -> Any:
        """Return the next event of the test that it is in, of this `kind`; raises BaseSideError,
        with the event's text or `otherwise`, if the test ended."""
        event = self._line.receive(observer, self._patience, kind | TestEnded)
        if isinstance(event, TestEnded):
            raise BaseSideError(self.ended(event, otherwise))
        return event

    def ended(self, event: TestEnded, otherwise: str) -> str:
        """Note that the test that it is in has ended; return why, or `otherwise`."""
        why = event.why or otherwise
        self._ended[self._test] = why
        self._test = ""
        return why

    def ask(self, observer: Observer, order: Order, answer: type[_E]) -> _E:
        """Send an order to a launch and return its answer; raises BaseSideError."""
        # there is no test that could answer
        if self._line.dead or not self._test:
            raise BaseSideError(
                self._line.dead or next(reversed(self._ended.values()))
            )
        with self.output_shown_once():
            self._line.send(order)
            event: _E | LaunchFailed = self.receive(
                answer | LaunchFailed,
                observer,
                "the test ended there during a launch",
            )
        if isinstance(event, LaunchFailed):
            raise BaseSideError(event.why)
        return event

    def leave(self) -> None:
        """End the test there and wait for it."""
        if self.request_end():
            self.await_end()

    def request_end(self) -> bool:
        """Tell it that the test is over here; return whether its end there is to be awaited."""
        self._ended.clear()
        if not self._test or self._line.dead:
            return False
        self._test = ""
        try:
            self._line.send(LeaveTest())
        except BaseSideError:  # the next test will report it
            return False
        return True

    def await_end(self) -> str:
        """Wait until the test has ended (after `request_end`); return what went wrong with the
        process, if anything."""
        try:
            while True:
                event = self._line.receive(Observer(), self._patience)
                if isinstance(event, TestEnded):
                    return event.apart
        except BaseSideError as error:
            return str(error)

    @contextmanager
    def output_shown_once(self) -> Iterator[None]:
        """Show what it wrote before it died in the error of one test; later ones say only that it
        died."""
        try:
            yield
        finally:
            self._line.dead = self._line.dead.partition("\n")[0]
