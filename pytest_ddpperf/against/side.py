"""pytest's handle on the other version's pytest: the seam *run launch k of test X there*.

Both halves speak `wire.Lines`, JSON only; the other half is `serving` and `base`.

Told                                    Answered
                                        {"event": "hello", "version": v} as soon as the plugin is imported there
{"op": "start", ...}                    {"event": "collected", "tests": [...], "errors": {file: text}, "sources": {...}}
{"op": "test", "nodeid": id}            {"event": "ready", "label": l, "plan": {...}, "batch_size": n, "facts": {...}}
                                        when the test asks for a measurement, or, before that or any time later,
                                        {"event": "ended", "text": why, or ""}
{"op": "launch"}                        {"event": "launched", "samples": {...}} or {"event": "failed", "text": why}
{"op": "done"}                          (the measurement is over: the test goes on)
{"op": "leave"}                         (the test is over here: at its next measurement it ends there, too)

While something is launched there, {"event": "progress", "phase": p, "step": k} and {"event": "waiting", "resource": r}
come in between. The end of the stream ends everything.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_ddpperf import __version__, codec
from pytest_ddpperf.against.arguments import of_base_side
from pytest_ddpperf.against.checkout import SHOWN, Checkout, describe_end
from pytest_ddpperf.against.proof import Sources, nothing_differs
from pytest_ddpperf.errors import AgainstError, BaseSideError
from pytest_ddpperf.launch import Nobody, Observer
from pytest_ddpperf.options import Settings
from pytest_ddpperf.records import LaunchSamples, Plan, Scalar
from pytest_ddpperf.trees import Trees
from pytest_ddpperf.wire import Lines, Message, Phase

_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:] or sys.path; from pytest_ddpperf.base import main; main(int(sys.argv[1]))"
)
# For importing pytest and all test modules, from a cold network disk too.
_START_SECONDS = 300.0
# Beyond what a launch may take: whoever hangs there says so before we say it of the whole side.
_SILENCE_SECONDS = 10.0
_STACKS_SECONDS = 1.0
_END_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """How this pytest was called."""

    arguments: tuple[str, ...]  # all of them: of the ini file, of the environment, of the command line
    tests: tuple[str, ...]  # those that name tests
    folder: Path  # where it was called
    rootdir: Path
    kept: tuple[str, ...]  # files and folders of tests, absolute, links resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A measurement that a test asks for on the other side."""

    plan: Plan
    batch_size: int | None
    facts: Mapping[str, Scalar]


class BaseSide:
    """The other version: a process of its own, from `start` to `close`, which leaves nothing. One test at a time."""

    def __init__(self, settings: Settings, invocation: Invocation) -> None:
        """Raises AgainstError."""
        self._settings, self._invocation = settings, invocation
        self._checkout = Checkout(settings, invocation.rootdir, invocation.kept)
        self.version, self.trees = self._checkout.version, self._checkout.at_hand
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: list[Message] = []
        self._tests: frozenset[str] = frozenset()
        self._errors: Mapping[str, str] = {}  # of collection, by file
        self._dead = ""  # why nothing can be asked of it any more
        self._test = ""  # that it is in
        self._ended: dict[str, str] = {}  # tests of which no further measurement will come, and why

    def start(self) -> None:
        """Check the version out and let its pytest collect, in the background; raises AgainstError."""
        trees = self._checkout.check_out()
        self._spawn(trees)
        arguments = of_base_side(self._invocation.arguments, self._invocation.tests)
        self._cache = tempfile.TemporaryDirectory(prefix="ddpperf-")  # pytest's of that side
        fixed = ["-o", "addopts=", "-o", f"cache_dir={self._cache.name}"]
        message = {
            "op": "start",
            "trees": codec.encode(trees),
            "arguments": [*arguments, *self.version.option, *fixed],
            "argv": sys.argv,
            "parent": os.getpid(),
        }
        try:
            self._hello()
            self._send(message)
        except BaseSideError as error:
            if self.version.python:
                remedy = f"pytest-ddpperf {__version__} must be installed for that interpreter"
                raise AgainstError("--ddp-against-python", str(error), remedy) from None
            raise AgainstError(self._settings.beside, str(error)) from None

    def _spawn(self, trees: Trees) -> None:
        python, path = sys.executable, sys.path
        if self._settings.against_python is not None:
            python, path = os.path.abspath(shutil.which(self._settings.against_python) or ""), []
        environ = {**os.environ, **self._checkout.assignments}
        environ.pop("PYTEST_ADDOPTS", None)  # they are among the arguments
        if "PYTHONPATH" in environ:
            folders = environ["PYTHONPATH"].split(os.pathsep)
            environ["PYTHONPATH"] = os.pathsep.join(trees.home(os.path.realpath(f)) if f else f for f in folders)
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._process = subprocess.Popen(
            [python, "-c", _BOOT, str(theirs.fileno()), *path],
            env=environ,
            cwd=self._invocation.folder,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is this pytest's to handle
        )
        theirs.close()
        self._lines = Lines(ours)

    def _hello(self) -> None:
        message = self._receive(Nobody(), _START_SECONDS)
        if message["version"] != __version__:
            raise BaseSideError(f"there is pytest-ddpperf {message['version']}, here {__version__}")

    def collect(self, here: Sources) -> None:
        """Wait until the other side has collected; raises AgainstError where nothing differs from `here`."""
        try:
            message = self._receive(Nobody(), _START_SECONDS)
        except BaseSideError:
            return  # which every test will be told
        self._tests, self._errors = frozenset(message["tests"]), message["errors"]
        there = codec.decode(Sources, message["sources"])
        if self.version.ref == "self":
            return
        differ = self._checkout.assignments, self.version.option, self._checkout.changed()
        if nothing_differs(here, there, *differ):
            raise AgainstError(self._settings.beside, *self._the_same(here))

    def _the_same(self, here: Sources) -> tuple[str, str]:
        files = sorted(here.files)
        named = f" ({', '.join(files[:5])}{', ...' if len(files) > 5 else ''})" if files else ""
        top = f"{self._checkout.top}{os.sep}"
        kept = [path.removeprefix(top) for path in self.trees.kept if path.startswith(top) and os.path.isdir(path)]
        tests = f"; tests are the same on both sides, with all in {', '.join(kept)}" if kept else ""
        return (
            f"nothing differs between {self.version} and the code at hand: the same interpreter, the same environment, "
            f"and the same in all files that Python imports, {len(files)} of them so far{named}{tests}",
            "--ddp-against self measures how far the same code differs from itself",
        )

    def only_there(self, nodeids: Collection[str]) -> list[str]:
        """Tests that only the other side has; none where tests were named here, for there whole files are collected."""
        named = any("::" in test for test in self._invocation.tests)
        return [] if named else sorted(self._tests.difference(nodeids))

    # --- one test

    def begin(self, nodeid: str, label: str) -> Ready:
        """Let a test run there up to its measurement of this name; raises BaseSideError."""
        if self._dead:
            raise BaseSideError(self._dead)
        if nodeid in self._ended:
            raise BaseSideError(self._ended[nodeid])
        if nodeid not in self._tests:
            raise BaseSideError(self._why_missing(nodeid))
        if self._test != nodeid:
            self.leave()
            self._send({"op": "test", "nodeid": nodeid})
            self._test = nodeid
        message = self._receive(Nobody())
        if message["event"] == "ended":
            self._test = ""
            self._ended[nodeid] = message["text"] or f"the test ended there without measuring {label or 'anything'}"
            raise BaseSideError(self._ended[nodeid])
        if message["label"] != label:
            raise BaseSideError(f"there the test measured {message['label']!r} where it measures {label!r} here")
        return Ready(plan=codec.decode(Plan, message["plan"]), batch_size=message["batch_size"], facts=message["facts"])

    def _why_missing(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return self._errors.get(file) or f"there is no such test: {nodeid}"

    def measure(self, observer: Observer) -> LaunchSamples:
        """One launch of the measurement that `begin` led to; raises BaseSideError."""
        self._send({"op": "launch"})
        message = self._receive(observer)
        if message["event"] != "launched":
            raise BaseSideError(message["text"])
        return codec.decode(LaunchSamples, message["samples"])

    def done(self) -> None:
        """The measurement is over."""
        with suppress(BaseSideError):  # the next test will be told
            self._send({"op": "done"})

    def leave(self) -> None:
        """The test is over here. Returns when it is over there."""
        self._ended.clear()
        if not self._test or self._dead:
            return
        self._test = ""
        with suppress(BaseSideError):
            self._send({"op": "leave"})
            while self._receive(Nobody())["event"] != "ended":
                pass

    # --- its life

    def _send(self, message: Message) -> None:
        try:
            self._lines.send(message)
        except OSError:
            self._die(f"died: {self._exit()}")

    def _receive(self, observer: Observer, seconds: float | None = None) -> Message:
        """The next message that is not about progress; raises BaseSideError if the other side died, or said nothing
        for as long as a launch may take and a little longer."""
        patience = seconds or self._settings.timeout_seconds + _SILENCE_SECONDS
        while True:
            while self._pending:
                message = self._pending.pop(0)
                if message["event"] == "progress":
                    observer.progress(Phase(message["phase"]), message["step"], ())
                elif message["event"] == "waiting":
                    observer.waiting(Path(message["resource"]))
                else:
                    return message
            ready, _, _ = select.select([self._lines.socket], [], [], patience)
            try:
                arrived = self._lines.receive() if ready else []
            except OSError:
                arrived = None
            if arrived is None:
                self._die(f"died: {self._exit()}")
            elif not ready:
                self._dump_stacks()
                self._die(f"did not answer for {patience:g} s")
            else:
                self._pending += arrived

    def _die(self, problem: str) -> None:
        self._log.seek(0)
        output = self._log.read().decode(errors="replace").rstrip()[-SHOWN:]
        self._dead = f"pytest of {self.version} {problem}"
        self._kill()
        raise BaseSideError(f"{self._dead}\n{output}".rstrip())  # once; later tests are told the first line

    def _exit(self) -> str:
        assert self._process is not None
        try:
            return describe_end(self._process.wait(_END_SECONDS))
        except subprocess.TimeoutExpired:
            return "it closed its connection"

    def _dump_stacks(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        time.sleep(_STACKS_SECONDS)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()  # its rank server dies with it, and its ranks with that
            self._process.wait()

    def close(self) -> None:
        """End the process, and remove the worktree."""
        try:
            if self._process is not None:
                self._lines.socket.close()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_SECONDS)
                self._kill()
                self._log.close()
                self._process = None
        finally:
            self._checkout.remove()
