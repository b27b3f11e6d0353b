"""pytest's handle on the other version's pytest: the seam *run launch k of test X there*.

Both halves speak `wire.Lines`, JSON only; the other half is `serving` and `base`.

Told                                    Answered
{"sys_path": [...], ...}                {"event": "hello", "version": v} as soon as the plugin is imported there, then
                                        {"event": "collected", "tests": [...], "errors": {file: text}, "sources": {...}}
{"op": "test", "nodeid": id}            {"event": "ready", "label": l, "plan": {...}, "batch_size": n, "facts": {...}}
                                        when the test asks for a measurement, or, before that or any time later,
                                        {"event": "ended", "text": why, or ""}
{"op": "like", "plan": {...}}           (launches of the measurement are to be so)
{"op": "launch", "steps": n or null}    {"event": "launched", "samples": {...}} or, and then the test ends there,
                                        {"event": "failed", "text": why}
{"op": "hold", "steps": n or null}      {"event": "held", "steps": n, "step_seconds": s, "fills": why, or ""} when a
                                        launch has warmed up and rests; or, here and for the following,
                                        {"event": "failed", "text": why}: the launch has ended, the test goes on
{"op": "stretch", "steps": n}           {"event": "rested"}
{"op": "deliver"}                       {"event": "launched", "samples": {...}}
{"op": "drop"}                          {"event": "dropped"}
{"op": "done"}                          (the measurement is over: the test goes on)
{"op": "leave"}                         (the test is over here: at its next measurement it ends there, too)

While something is launched there, {"event": "progress", "phase": p, "step": k, "steps": n} and {"event": "waiting",
"resource": r} come in between. The end of the stream ends everything.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pytest_ddpperf import __version__
from pytest_ddpperf.against.checkout import Checkout
from pytest_ddpperf.against.held import HeldThere
from pytest_ddpperf.against.invocation import Invocation
from pytest_ddpperf.against.led import Led
from pytest_ddpperf.against.proof import Sources, nothing_differs
from pytest_ddpperf.launch import Nobody, Observer
from pytest_ddpperf.launch.held import until_left
from pytest_ddpperf.options import Settings
from pytest_ddpperf.records import LaunchSamples, Plan, Scalar, codec
from pytest_ddpperf.records.errors import AgainstError, BaseSideError
from pytest_ddpperf.wire.channels import Message
from pytest_ddpperf.wire.trees import Trees

# For importing pytest and all test modules, from a cold network disk too.
_START_SECONDS = 300.0
# Beyond what a launch may take: whoever hangs there says so before we say it of the whole side.
_SILENCE_SECONDS = 10.0
_CACHE = ".pytest_cache"  # of that side's pytest
# How pytest says that a conftest at the root of what is collected cannot be imported.
_CONFTEST = "while loading conftest"


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
        self._checkout = Checkout(settings, invocation.rootdir, invocation.kept, offline=bool(invocation.only))
        self.version, self.trees = self._checkout.version, self._checkout.at_hand
        self._closing = ExitStack()
        self._until = math.inf  # when it has to have collected, by the monotonic clock

    def start(self, seconds: float | None = None) -> None:
        """Check the version out and let its pytest collect, in the background; raises AgainstError. `seconds`: that
        there are for both, and for what `collect` waits for."""
        self._may_take(seconds)
        self._closing.callback(self._checkout.remove)
        self._there = self._checkout.check_out(self._invocation.environ, self._until)
        self._lead()

    def again(self, only: str, seconds: float) -> None:
        """`start` and `collect`, for the tests of another file, in the same tree."""
        self._may_take(seconds)
        self._led.close()
        self._invocation = replace(self._invocation, only=only)
        self._lead()
        self.collect(None)

    def _may_take(self, seconds: float | None) -> None:
        self._until = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def _to_start(self) -> float:
        return max(0.0, min(_START_SECONDS, self._until - time.monotonic()))

    def _lead(self) -> None:
        """A pytest of its own, that has nothing to do yet."""
        self._tests: frozenset[str] = frozenset()
        self._errors: Mapping[str, str] = {}  # of collection, by file
        self._started = False  # whether it has a rank server
        self._test = ""  # that it is in
        self._ended: dict[str, str] = {}  # tests of which no further measurement will come, and why
        trees = self._there
        self._led = self._spawn(trees)
        self._closing.callback(self._led.close)
        arguments = self._invocation.arguments_in(trees)
        folder = self._checkout.folder
        cache = ["-o", f"cache_dir={folder / _CACHE}"] if self._invocation.caches else []
        start = {
            "sys_path": None if self.version.python else [*(self._invocation.sys_path or sys.path)],
            "trees": codec.encode(trees),
            "arguments": [*arguments, *self.version.option, "-o", "addopts=", *cache],
            "argv": sys.argv,
            "folder": str(folder),
            "parent": os.getpid(),
        }
        try:
            self._led.send(start)
            self._hello()
        except BaseSideError as error:
            if self.version.python:
                remedy = f"pytest-ddpperf {__version__} must be installed for that interpreter"
                raise AgainstError("--ddp-against-python", str(error), remedy) from None
            raise AgainstError(self._settings.beside, str(error)) from None

    @property
    def environ(self) -> dict[str, str]:
        """This process's variables, with those that are to be otherwise."""
        return self._checkout.environ(self._invocation.environ or os.environ)

    def _spawn(self, trees: Trees) -> Led:
        python = sys.executable
        if self._settings.against_python is not None:
            python = os.path.abspath(shutil.which(self._settings.against_python) or "")
        environ = self.environ
        environ.pop("PYTEST_ADDOPTS", None)  # they are among the arguments
        if "PYTHONPATH" in environ:
            folders = environ["PYTHONPATH"].split(os.pathsep)
            environ["PYTHONPATH"] = os.pathsep.join(trees.followed(f) if f else f for f in folders)
        try:
            return Led(str(self.version), python, environ, self._invocation.folder_in(trees))
        except OSError as error:
            raise AgainstError(self._settings.beside, f"{python} cannot be started: {error}") from None

    def _hello(self) -> None:
        message = self._led.receive(Nobody(), self._to_start)
        if message["version"] != __version__:
            raise BaseSideError(f"there is pytest-ddpperf {message['version']}, here {__version__}")

    def collect(self, here: Sources | None) -> None:
        """Wait until the other side has collected; raises AgainstError where nothing differs from `here`, unless that
        is not asked."""
        try:
            message = self._led.receive(Nobody(), self._to_start)
        except BaseSideError as error:
            if _CONFTEST in str(error):
                return  # which every test will be told: it lacks the code
            raise AgainstError(self._settings.beside, str(error)) from None
        self._tests, self._errors = frozenset(message["tests"]), message["errors"]
        there = codec.decode(Sources, message["sources"])
        if self.version.ref == "self" or here is None:
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

    def why_missing(self, nodeid: str) -> str:
        """Why it has no such test; "" if it has."""
        return "" if nodeid in self._tests else self._led.dead or self._why_missing(nodeid)

    def only_there(self, nodeids: Collection[str]) -> list[str]:
        """Tests that only the other side has, of the files that were collected here; none where tests were named, for
        there whole files are collected."""
        if any("::" in test for test in self._invocation.tests):
            return []
        files = {nodeid.partition("::")[0] for nodeid in nodeids}
        return sorted(test for test in self._tests.difference(nodeids) if test.partition("::")[0] in files)

    # --- one test

    def begin(self, nodeid: str, label: str, plan: Plan) -> Ready:
        """Let a test run there up to its measurement of this name, which has the `plan` here; raises BaseSideError."""
        with self._last_words():
            return self._begin(nodeid, label, plan)

    def _begin(self, nodeid: str, label: str, here: Plan) -> Ready:
        if not self._started and not self._led.dead:
            self._led.receive(Nobody(), _START_SECONDS)  # its ranks' server
            self._started = True
        if self._led.dead:
            raise BaseSideError(self._led.dead)
        if nodeid in self._ended:
            raise BaseSideError(self._ended[nodeid])
        if nodeid not in self._tests:
            raise BaseSideError(self._why_missing(nodeid))
        if self._test != nodeid:
            self.leave()
            self._led.send({"op": "test", "nodeid": nodeid})
            self._test = nodeid
        ended = f"the test ended there without measuring {label or 'anything'}"
        message = self._of_test(Nobody(), ended)
        while self._invocation.only and message["label"] != label:  # here nobody doubted that one
            self._led.send({"op": "launch", "steps": 1})
            if self._of_test(Nobody(), ended)["event"] == "launched":
                self._led.send({"op": "done"})
            message = self._of_test(Nobody(), ended)
        if message["label"] != label:
            self._led.send({"op": "leave"})  # it would wait for ever
            raise BaseSideError(f"there the test measured {message['label']!r} where it measures {label!r} here")
        plan = codec.decode(Plan, message["plan"])
        if self._invocation.only:  # what its test asks for may have changed since, and is not the code
            plan = plan.measured_as(here)
            self._led.send({"op": "like", "plan": codec.encode(plan)})
        return Ready(plan=plan, batch_size=message["batch_size"], facts=message["facts"])

    def _why_missing(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0])
        places = (place.as_posix() for place in (file, *file.parents))  # a conftest's error is its folder's
        errors = [self._errors[place] for place in places if place in self._errors]
        return errors[0] if errors else f"there is no such test: {nodeid}"

    def _of_test(self, observer: Observer, otherwise: str) -> Message:
        """The next message of the test that it is in; raises BaseSideError, with `otherwise` or its own words, if that
        ended."""
        message = self._led.receive(observer, self._patience)
        if message["event"] == "ended":
            self._ended[self._test] = message["text"] or otherwise
            self._test = ""
            raise BaseSideError(message["text"] or otherwise)
        return message

    def measure(self, observer: Observer, steps: int | None) -> LaunchSamples:
        """One launch of the measurement that `begin` led to, with a window of so many `steps`; None leaves that to the
        launch. Raises BaseSideError."""
        return codec.decode(LaunchSamples, self._ask(observer, {"op": "launch", "steps": steps})["samples"])

    @contextmanager
    def hold(self, observer: Observer, steps: int | None) -> Iterator[HeldThere]:
        """As `measure`, a launch that has warmed up and rests; over, clean-up included, when the context is left."""
        said = self._ask(observer, {"op": "hold", "steps": steps})
        with until_left(HeldThere(said, partial(self._ask, observer))) as held:
            yield held

    def _ask(self, observer: Observer, order: Message) -> Message:
        """What comes of an order to a launch; raises BaseSideError."""
        if self.gone:
            raise BaseSideError(self._led.dead or next(reversed(self._ended.values())))
        with self._last_words():
            self._led.send(order)
            message = self._of_test(observer, "the test ended there during a launch")
        if message["event"] == "failed":
            raise BaseSideError(message["text"])
        return message

    @property
    def dead(self) -> bool:
        """Whether its process has ended."""
        return bool(self._led.dead)

    @property
    def gone(self) -> bool:
        """Whether it is in no test any more, of which something could be asked."""
        return bool(self._led.dead) or not self._test

    def done(self) -> None:
        """The measurement is over."""
        with suppress(BaseSideError):  # the next test will be told
            self._led.send({"op": "done"})

    def leave(self) -> None:
        """The test is over here. Returns when it is over there."""
        self._ended.clear()
        if not self._test or self._led.dead:
            return
        self._test = ""
        with suppress(BaseSideError):
            self._led.send({"op": "leave"})
            while self._led.receive(Nobody(), self._patience)["event"] != "ended":
                pass

    @property
    def _patience(self) -> float:
        return self._settings.timeout_seconds + _SILENCE_SECONDS

    @contextmanager
    def _last_words(self) -> Iterator[None]:
        """What it wrote before it died is told to one test; to others that it did."""
        try:
            yield
        finally:
            self._led.dead = self._led.dead.partition("\n")[0]

    def close(self) -> None:
        """End the process, and remove the worktree."""
        self._closing.close()
