"""The worker's half of a remote pytest: it measures when the leader asks, and judges nothing."""

from __future__ import annotations

import base64
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pytest_ddpperf import __version__
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.launch.failed_ranks import text_with_output
from pytest_ddpperf.launch.launcher import unpickle
from pytest_ddpperf.launch.remote_ranks import Part
from pytest_ddpperf.measuring import measurement
from pytest_ddpperf.measuring.baseline_side import Stored
from pytest_ddpperf.measuring.launches import CurrentSide, Job, Launches
from pytest_ddpperf.measuring.measurement import Measured
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import BaseSideError, DdpPerfError
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import LaunchSamples, Scalar, Status, Verdict
from pytest_ddpperf.wire import payload
from pytest_ddpperf.wire.channels import Lines, Message, Phase, readable
from pytest_ddpperf.wire.source_trees import Trees

# Often enough to be seen alive, rarely enough to leave the cores to the ranks.
_RELAY_SECONDS = 0.5
OVER = "the leader has ended the test"


class LeaderConnection:
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
        """Launch as often as the leader asks; raises BaseSideError when it has ended the test."""
        if not job.gate:  # nothing is compared, so nothing is asked
            return replace(measurement.carry_out(job, launcher, store, self.relay), fails=False)
        self.refuse_after_end()
        self.trees.refuse_strays()
        launches = CurrentSide(job, launcher, self.relay)
        self.say(
            "ready",
            label=job.test.label,
            plan=codec.encode(job.plan),
            batch_size=job.batch_size,
            facts=codec.encode(job.facts),
        )
        while (order := self.order())["op"] in ("like", "launch", "pause"):
            if order["op"] == "like":
                job = replace(job, plan=codec.decode(Plan, order["plan"]))
                launches = CurrentSide(job, launcher, self.relay)
                continue
            launches.steps = order["steps"]
            try:
                if order["op"] == "launch":
                    launches.take(len(launches.taken) + 1)
                elif not self._pause(launches):
                    continue
            except DdpPerfError as error:
                self.say("failed", text=text_with_output(error))
                if order["op"] == "pause":  # who leads may want to see it alone
                    continue
                self.over = True
                raise
            self.say("launched", samples=codec.encode(replace(launches.taken[-1], output=())))
        if order["op"] != "done" or not launches.taken:
            self.over = True
            raise BaseSideError(OVER)
        return _measured(job, launches, Verdict(status=Status.NOT_GATED, reason="base-side"), store)

    def refuse_after_end(self) -> None:
        """Raise BaseSideError if the leader has ended the test, and a plugin reruns it."""
        if self.over:
            raise BaseSideError(OVER)

    def _pause(self, launches: CurrentSide) -> bool:
        """Pause a launch until it is to deliver or to be dropped; return whether it was added to `launches`."""
        with launches.pause(len(launches.taken) + 1, launches.steps) as launch:
            self.say("paused", steps=launch.steps, step_seconds=launch.step_seconds)
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


class _Relay(Observer):
    """Lets the pytest that leads watch."""

    def __init__(self, leader: LeaderConnection) -> None:
        self._serving = leader
        self._reported = 0.0

    def waiting(self, resource: Path) -> None:
        self._serving.say("waiting", resource=str(resource))

    def progress(self, phase: Phase, step: int, steps: int, marks_ns: Sequence[int]) -> None:
        if time.monotonic() - self._reported < _RELAY_SECONDS:
            return
        self._reported = time.monotonic()
        self._serving.say("progress", phase=int(phase), step=step, steps=steps)


def measurement_of(plan: Plan, label: str) -> Message:
    """What a test asks for: all nodes of a launch have to ask for the same."""
    return {"what": "a measurement", "label": label, "plan": codec.encode(plan)}


def call_of(plan: Plan, function: Callable[..., Any]) -> Message:
    """The same of a call."""
    return {"what": "a call", "label": payload.name_of(function), "plan": codec.encode(plan)}


class NodeLeaderConnection(LeaderConnection):
    """The connection to the node that leads."""

    def __init__(self, descriptor: int, start: Message) -> None:
        """`start` has also this `node`, of how many `nodes`, and the `interface` to the others."""
        super().__init__(descriptor, start)
        self.node: int = start["node"]
        self.nodes: int = start["nodes"]
        self._interface: str = start["interface"]

    @property
    def sources_of(self) -> Trees:
        """The current code with its tests, which have to be the same on all nodes."""
        return self.trees if self.trees.base != self.trees.current else replace(self.trees, kept=())

    def carry_out(self, job: Job, launcher: Launcher, store: Store) -> Measured:
        """Take part as often as the leader asks; raises BaseSideError when it has ended the test."""
        if job.plan.nodes == 1:  # the first node does it by itself
            return super().carry_out(job if self.node == 0 else replace(job, gate=False), launcher, store)

        setup, *others = job.setups
        task = partial(payload.dumps, "measure", setup, others)
        measured = {"batch_size": job.batch_size, "facts": codec.encode(job.facts), "gate": job.gate}
        asked = measurement_of(job.plan, job.test.label)
        reported = self._take_part(launcher, job.plan, {**asked, **measured, "launches": job.launches}, task)
        launches = Launches(job.plan, _never)
        if not reported["samples"]:
            self.over = True
            raise BaseSideError(OVER)
        for data in reported["samples"]:
            launches.add(codec.decode(LaunchSamples, data))
        return _measured(job, launches, _verdict(reported), store, fails=reported.get("fails", False))

    def call(self, plan: Plan, function: Callable[..., Any], args: Sequence[Any], launcher: Launcher) -> list[Any]:
        """Take part in a call as often as the leader asks; return the results by rank."""
        task = partial(payload.dumps, "call", function, args)
        reported = self._take_part(launcher, plan, call_of(plan, function), task)
        return unpickle([base64.b64decode(data) for data in reported["results"]])

    def started(self, facts: Mapping[str, Scalar]) -> None:
        self.say("started", facts=codec.encode(facts))

    def begin_test(self) -> None:
        super().begin_test()
        self._asked = 0

    def _take_part(self, launcher: Launcher, plan: Plan, asked: Message, task: Callable[[], bytes]) -> Message:
        """Take part in the launches of what the test asks for; what is said at its end."""
        self.refuse_after_end()
        self.trees.refuse_strays()
        launcher.ready_for(plan)  # which may take seconds, and no launch has begun
        self._asked += 1  # a plugin may run the test again here, and not at the leader
        self.say("ready", **asked, number=self._asked)
        processes = plan.part(self.node)
        with ExitStack() as alone:
            while (order := self.order())["op"] not in ("done", "leave"):
                try:
                    if order["op"] == "alone":
                        paused = alone.enter_context(launcher.alone_here(plan, len(processes), self.relay))
                        self.say("alone", resources=list(map(str, paused)))
                    elif order["op"] == "shared":
                        alone.close()
                    elif order["op"] == "part":
                        part = Part(
                            processes=processes,
                            node=self.node,
                            store=(order["store"][0], order["store"][1]),
                            interface=self._interface,
                        )
                        launcher.take_part(codec.decode(Plan, order["plan"]), part, task(), self)
                except DdpPerfError as error:
                    self.say("failed", text=text_with_output(error))
        if order["op"] == "leave":
            self.over = True
            raise BaseSideError(OVER)
        if "error" in order:  # as at the leader: the test may expect it
            raise BaseSideError(order["error"])
        return order


def _measured(job: Job, launches: Launches, verdict: Verdict, store: Store, *, fails: bool = False) -> Measured:
    """Return what this pytest's test gets; its leader decides whether it fails."""
    return Measured(
        job=job,
        verdict=verdict,
        fails=fails,
        environment=job.environment(launches),
        current=launches,
        side=Stored(store, job.test),
    )


def _verdict(reported: Message) -> Verdict:
    """The first node's: a test may go on by it. What that one is to save is not gated, and nobody else's to save."""
    found = codec.decode(Verdict, reported["verdict"]) if "verdict" in reported else None
    gated = found is not None and found.status is not Status.NOT_GATED
    return found if found is not None and gated else Verdict(status=Status.NOT_GATED, reason="follows")


def _never(launch: int, launches: int, steps: int | None) -> LaunchSamples:
    raise AssertionError("the leader takes launches")
