"""Lets a remote pytest collect, and run tests up to their measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pytest_ddpperf import __version__
from pytest_ddpperf.launch import Observer
from pytest_ddpperf.records import Scalar, codec
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.remote.checkout import Sources
from pytest_ddpperf.remote.process import Line
from pytest_ddpperf.wire.channels import Message

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
            raise BaseSideError(message["text"], message.get("needs_room", False))
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
