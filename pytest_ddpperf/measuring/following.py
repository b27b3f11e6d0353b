"""The other half of `nodes`, in the pytest of another node: takes part in launches when it is told to.

Told                                    Answered
{"op": "alone"}                         {"event": "alone", "resources": [...]} when nothing else is timed on these, this
                                        node's cores or devices
{"op": "shared"}                        (others may again)
{"op": "part", ...}                     see `launch.part`; or {"event": "failed", "text": why}
{"op": "done", "samples": [...],        (the measurement is over, and this is what its launches brought and, where they
 "verdict": {...}, "fails": b}          were held against something, what came of that)
{"op": "done", "results": [...]}        (the same of a call, by rank)
{"op": "done", "error": text}           (of either: that it failed)

A "ready" here says what the test asks for, so that it can be seen whether all nodes ask for the same.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from pytest_ddpperf import baseline as store_room
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.launch import Launcher, Nobody
from pytest_ddpperf.launch.elsewhere import Part
from pytest_ddpperf.launch.failure import text_with_output
from pytest_ddpperf.launch.launcher import unpickle
from pytest_ddpperf.measuring import benchmark
from pytest_ddpperf.measuring.benchmark import Job, Measured
from pytest_ddpperf.measuring.launches import Launches
from pytest_ddpperf.measuring.serving import OVER, Serving
from pytest_ddpperf.records import LaunchSamples, Plan, Scalar, Status, Verdict, codec
from pytest_ddpperf.records.errors import BaseSideError, DdpPerfError
from pytest_ddpperf.wire import payload
from pytest_ddpperf.wire.channels import Message
from pytest_ddpperf.wire.trees import Trees


def measurement_of(plan: Plan, label: str) -> Message:
    """What a test asks for: all nodes of a launch have to ask for the same."""
    return {"what": "a measurement", "label": label, "plan": codec.encode(plan)}


def call_of(plan: Plan, function: Callable[..., Any]) -> Message:
    """The same of a call."""
    return {"what": "a call", "label": payload.name_of(function), "plan": codec.encode(plan)}


class Following(Serving):
    """The connection to the node that leads."""

    def __init__(self, descriptor: int, start: Message) -> None:
        """`start` has also this `node`, of how many `nodes`, and the `interface` to the others."""
        super().__init__(descriptor, start)
        self.node: int = start["node"]
        self.nodes: int = start["nodes"]
        self._interface: str = start["interface"]

    @property
    def sources_of(self) -> Trees:
        """The code at hand with its tests: they have to be the same on all nodes."""
        return self.trees if self.trees.base != self.trees.hand else replace(self.trees, kept=())

    def carry_out(self, job: Job, launcher: Launcher, store: Store) -> Measured:
        """Take part as often as told; raises BaseSideError when the test is over where it is led."""
        if job.plan.nodes == 1:  # the first node does it by itself
            return super().carry_out(job if self.node == 0 else replace(job, gate=False), launcher, store)

        def take(plan: Plan, part: Part) -> None:
            launcher.take_part(plan, part, job.setup, job.others, Nobody(), self)

        measured = {"batch_size": job.batch_size, "facts": codec.encode(job.facts), "gate": job.gate}
        asked = measurement_of(job.plan, job.test.label)
        told = self._take_part(launcher, job.plan, {**asked, **measured, "launches": job.launches}, take)
        launches = Launches(job.plan, _never)
        if not told["samples"]:
            self.over = True
            raise BaseSideError(OVER)
        for data in told["samples"]:
            launches.add(codec.decode(LaunchSamples, data))
        environment = store_room.environment({**launches.facts, **job.facts}, job.plan, batch_size=job.batch_size)
        found = benchmark.measured(job, launches, environment, _verdict(told))
        return replace(found, outcome=replace(found.outcome, fails=told.get("fails", False)))

    def call(self, plan: Plan, function: Callable[..., Any], args: Sequence[Any], launcher: Launcher) -> list[Any]:
        """The same of a call: the results by rank."""

        def take(plan: Plan, part: Part) -> None:
            launcher.take_part_in_call(plan, part, function, args, Nobody(), self)

        told = self._take_part(launcher, plan, call_of(plan, function), take)
        return unpickle([base64.b64decode(data) for data in told["results"]])

    def started(self, facts: Mapping[str, Scalar]) -> None:
        self.say("started", facts=codec.encode(facts))

    def begin_test(self) -> None:
        super().begin_test()
        self._asked = 0

    def _take_part(self, launcher: Launcher, plan: Plan, asked: Message, take: Callable[[Plan, Part], None]) -> Message:
        """Take part in the launches of what the test asks for; what is said at its end."""
        self.refuse_after_end()
        self.trees.refuse_strays()
        launcher.ready_for(plan)  # which may take seconds, and no launch has begun
        self._asked += 1  # a plugin may run the test again here, and not where it is led
        self.say("ready", **asked, number=self._asked)
        processes = plan.part(self.node)
        with ExitStack() as alone:
            while (order := self.order())["op"] not in ("done", "leave"):
                try:
                    if order["op"] == "alone":
                        held = alone.enter_context(launcher.alone_here(plan, len(processes), self.relay))
                        self.say("alone", resources=list(map(str, held)))
                    elif order["op"] == "shared":
                        alone.close()
                    elif order["op"] == "part":
                        part = Part(
                            processes=processes,
                            node=self.node,
                            store=(order["store"][0], order["store"][1]),
                            interface=self._interface,
                        )
                        take(codec.decode(Plan, order["plan"]), part)
                except DdpPerfError as error:
                    self.say("failed", text=text_with_output(error))
        if order["op"] == "leave":
            self.over = True
            raise BaseSideError(OVER)
        if "error" in order:  # as where it is led: the test may expect it
            raise BaseSideError(order["error"])
        return order


def _verdict(told: Message) -> Verdict:
    """The first node's: a test may go on by it. What that one is to save is not gated, and nobody else's to save."""
    found = codec.decode(Verdict, told["verdict"]) if "verdict" in told else None
    gated = found is not None and found.status is not Status.NOT_GATED
    return found if found is not None and gated else Verdict(status=Status.NOT_GATED, reason="follows")


def _never(launch: int, launches: int, steps: int | None) -> LaunchSamples:
    raise AssertionError("launches are taken where they are led")
