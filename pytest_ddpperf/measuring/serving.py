"""The other half of `against.side`, in the version's own pytest: measures when it is told to, and judges nothing.

Knows no pytest; `base` runs the tests around it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_ddpperf import __version__
from pytest_ddpperf import baseline as store_room
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.launch import Launcher
from pytest_ddpperf.launch.failure import text_with_output
from pytest_ddpperf.measuring import benchmark
from pytest_ddpperf.measuring.benchmark import Job, Measured
from pytest_ddpperf.measuring.launches import Launches
from pytest_ddpperf.records import LaunchSamples, Plan, Scalar, Status, Verdict, codec
from pytest_ddpperf.records.errors import BaseSideError, DdpPerfError
from pytest_ddpperf.wire.channels import Lines, Message, Phase, readable
from pytest_ddpperf.wire.trees import Trees

# Often enough to be seen alive, rarely enough to leave the cores to the ranks.
_RELAY_SECONDS = 0.5
OVER = "the test is over where it is led"


class Serving:
    """The connection to the pytest that leads."""

    nodes = 1  # that tests of this pytest may have ranks on

    def __init__(self, descriptor: int, start: Message) -> None:
        """`start` has the fields of the `trees` to import from, and the `folder` that goes with this side."""
        self._lines = Lines(socket.socket(fileno=descriptor))
        self._orders: list[Message] = []
        self.relay = _Relay(self)
        self.over = False  # nothing more will be asked of the test that runs
        self.say("hello", version=__version__)  # first: another one may mean something else by what follows
        self.trees = codec.decode(Trees, start["trees"])
        self.folder: str = start["folder"]

    def started(self, facts: Mapping[str, Scalar]) -> None:
        """Say that there is a rank server; `facts` are what that found here."""
        self.say("started")

    def say(self, event: str, **fields: Any) -> None:
        try:
            self._lines.send({"event": event, **fields})
        except OSError:
            raise KeyboardInterrupt from None

    @property
    def sources_of(self) -> Trees:
        """What it says by digests."""
        return self.trees

    @property
    def socket(self) -> socket.socket:
        return self._lines.socket

    def order_by_now(self) -> Message | None:
        """The next order if there is one; raises as `order`."""
        return self.order() if self._orders or readable([self.socket], 0) else None

    def order(self) -> Message:
        """The next order; raises KeyboardInterrupt when there is nobody left to give one."""
        while not self._orders:
            arrived = self._lines.receive()
            if arrived is None:
                raise KeyboardInterrupt
            self._orders += arrived
        return self._orders.pop(0)

    def begin_test(self) -> None:
        self.over = False

    def carry_out(self, job: Job, launcher: Launcher, store: Store) -> Measured:
        """Launch as often as told; raises BaseSideError when the test is over where it is led."""
        if not job.gate:  # nothing is compared, so nothing is asked
            return self.untold(benchmark.carry_out(job, launcher, store, self.relay))
        self.refuse_after_end()
        self.trees.refuse_strays()
        launches = benchmark.own_launches(job, launcher, self.relay)
        self.say(
            "ready",
            label=job.test.label,
            plan=codec.encode(job.plan),
            batch_size=job.batch_size,
            facts=codec.encode(job.facts),
        )
        while (order := self.order())["op"] in ("like", "launch", "hold"):
            if order["op"] == "like":
                job = replace(job, plan=codec.decode(Plan, order["plan"]))
                launches = benchmark.own_launches(job, launcher, self.relay)
                continue
            launches.steps = order["steps"]
            try:
                if order["op"] == "launch":
                    launches.take(len(launches.taken) + 1)
                elif not self._hold(job, launcher, launches):
                    continue
            except DdpPerfError as error:
                self.say("failed", text=text_with_output(error))
                if order["op"] == "hold":  # who leads may want to see it alone
                    continue
                self.over = True
                raise
            self.say("launched", samples=codec.encode(replace(launches.taken[-1], output=())))
        if order["op"] != "done" or not launches.taken:
            self.over = True
            raise BaseSideError(OVER)
        environment = store_room.environment({**launches.facts, **job.facts}, job.plan, batch_size=job.batch_size)
        verdict = Verdict(status=Status.NOT_GATED, reason="base-side")
        return self.untold(benchmark.measured(job, launches, environment, verdict))

    def refuse_after_end(self) -> None:
        """Raises BaseSideError where the test is over where it is led: a plugin reruns it."""
        if self.over:
            raise BaseSideError(OVER)

    def untold(self, found: Measured) -> Measured:
        """Who leads decides."""
        return replace(found, outcome=replace(found.outcome, fails=False))

    def _hold(self, job: Job, launcher: Launcher, launches: Launches) -> bool:
        """A held launch, until it is to deliver or to be dropped; whether it was added to `launches`."""
        with benchmark.held(job, launcher, self.relay, launches.steps) as launch:
            self.say("held", steps=launch.steps, step_seconds=launch.step_seconds)
            while (order := self.order())["op"] == "stretch":
                launch.stretch(order["steps"])
                self.say("rested")
            if order["op"] == "deliver":
                launches.add(launch.deliver())
                return True
        if order["op"] == "drop":
            self.say("dropped")
        else:
            self._orders.insert(0, order)
        return False


class _Relay:
    """Lets the pytest that leads watch."""

    streams = False

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._told = 0.0

    def begin(self, launch: int, launches: int) -> None:
        pass

    def launched(self, samples: LaunchSamples) -> None:
        pass

    def output(self, name: str, stream: str, line: str) -> None:
        pass

    def waiting(self, resource: Path) -> None:
        self._serving.say("waiting", resource=str(resource))

    def progress(self, phase: Phase, step: int, steps: int, marks_ns: Sequence[int]) -> None:
        if time.monotonic() - self._told < _RELAY_SECONDS:
            return
        self._told = time.monotonic()
        self._serving.say("progress", phase=int(phase), step=step, steps=steps)
