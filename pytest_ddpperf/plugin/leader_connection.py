"""The worker's half of a remote pytest: it measures when the leader asks, and judges nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pytest_ddpperf.baseline import Store
from pytest_ddpperf.compare import measurement
from pytest_ddpperf.compare.baseline_side import Stored
from pytest_ddpperf.compare.launches import CurrentSide, Job, Launches
from pytest_ddpperf.compare.measurement import Measured
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.launch.failed_ranks import text_with_output
from pytest_ddpperf.launch.launcher import unpickle
from pytest_ddpperf.launch.remote_ranks import Part
from pytest_ddpperf.launch.template import Templates
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import BaseSideError, DdpPerfError
from pytest_ddpperf.records.messages import (
    Event,
    EventKind,
    Order,
    OrderKind,
    StartPytest,
)
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import LaunchSamples, Reason, Status, Verdict
from pytest_ddpperf.wire import payload
from pytest_ddpperf.wire.channels import Lines, Phase, readable
from pytest_ddpperf.wire.source_trees import Trees

# Often enough to be seen alive, rarely enough to leave the cores to the ranks.
_RELAY_SECONDS = 0.5
OVER = "the leader has ended the test"
_LAUNCH_ORDERS = (
    OrderKind.MEASURE_AS,
    OrderKind.LAUNCH,
    OrderKind.PAUSE_LAUNCH,
    OrderKind.SAMPLE_STACKS,
)


class LeaderConnection:
    """The connection to the pytest that leads."""

    nodes = 1  # that tests of this pytest may have ranks on

    def __init__(self, lines: Lines, start: StartPytest) -> None:
        self._lines = lines
        self._orders: list[Order] = []
        self.relay = _Relay(self)
        self.over = False  # nothing more will be asked of the test that runs
        self.trees = codec.decode(Trees, start.trees)
        self.folder = start.folder
        self.rpc = start.rpc
        self.templates = Templates()
        if start.rank_server is not None:
            self.templates.add(start.rank_server, start.variables)

    def send(self, event: Event) -> None:
        """Send an event; raises KeyboardInterrupt if the leader is gone."""
        try:
            self._lines.send(codec.encode_message(event))
        except OSError:
            raise KeyboardInterrupt from None

    @property
    def socket(self) -> socket.socket:
        return self._lines.socket

    def order_by_now(self) -> Order | None:
        """Return the next order if there is one; raises as `order`."""
        return self.order() if self._orders or readable([self.socket], 0) else None

    def order(self) -> Order:
        """Wait for the next order; raises KeyboardInterrupt if the leader is gone."""
        while not self._orders:
            arrived = self._lines.receive()
            if arrived is None:
                raise KeyboardInterrupt
            self._orders += [codec.decode(Order, message) for message in arrived]
        return self._orders.pop(0)

    def begin_test(self) -> None:
        self.over, self._asked = False, 0

    def carry_out(self, job: Job, launcher: Launcher, store: Store) -> Measured:
        """Launch as often as the leader asks; raises BaseSideError when it has ended the test."""
        if not job.gate:  # nothing is compared, so nothing is asked
            return replace(
                measurement.carry_out(job, launcher, store, self.relay), fails=False
            )
        self._check_test()
        launches = CurrentSide(job, launcher, self.relay)
        self.send(ready_job(job))
        while (order := self.order()).kind in _LAUNCH_ORDERS:
            if order.kind is OrderKind.MEASURE_AS:
                job = replace(job, plan=order.plan)
                launches = CurrentSide(job, launcher, self.relay)
                continue
            launches.steps = order.steps
            try:
                if order.kind is OrderKind.SAMPLE_STACKS:
                    launched = launches.launch(order.plan)
                elif order.kind is OrderKind.LAUNCH:
                    launches.take(len(launches.taken) + 1)
                    launched = launches.taken[-1]
                elif self._pause(launches):
                    launched = launches.taken[-1]
                else:
                    continue
            except DdpPerfError as error:
                self.send(Event(EventKind.LAUNCH_FAILED, text=text_with_output(error)))
                # the leader may want to see it alone, or needs it not
                if order.kind is not OrderKind.LAUNCH:
                    continue
                self.over = True
                raise
            self.send(
                Event(EventKind.LAUNCHED, samples=(replace(launched, output=()),))
            )
        if order.kind is not OrderKind.END_MEASUREMENT or not launches.taken:
            self.over = True
            raise BaseSideError(OVER)
        return _measured(
            job,
            launches,
            Verdict(status=Status.NOT_GATED, reason=Reason.BASE_SIDE),
            store,
        )

    def _check_test(self) -> None:
        """Raise BaseSideError if the leader has ended the test, or the test imported the other
        tree."""
        if self.over:
            raise BaseSideError(OVER)
        self.trees.refuse_strays()

    def _pause(self, launches: CurrentSide) -> bool:
        """Pause a launch until it is to deliver or to be dropped; return whether it was added to
        `launches`."""
        with launches.pause(len(launches.taken) + 1, launches.steps) as launch:
            self.send(
                Event(
                    EventKind.PAUSED,
                    steps=launch.steps,
                    step_seconds=launch.step_seconds,
                )
            )
            while (order := self.order()).kind is OrderKind.RUN_STRETCH:
                launch.stretch(order.steps or 0)
                self.send(Event(EventKind.STRETCH_DONE))
            if order.kind is OrderKind.DELIVER:
                launches.add(launch.deliver())
                return True
        if order.kind is OrderKind.DROP:
            self.send(Event(EventKind.DROPPED))
        else:
            self._orders.insert(0, order)
        return False


class _Relay(Observer):
    """Lets the pytest that leads watch."""

    def __init__(self, leader: LeaderConnection) -> None:
        self._leader = leader
        self._reported = 0.0

    def waiting(self, resource: Path) -> None:
        self._leader.send(Event(EventKind.WAITING_FOR_LOCK, resources=(str(resource),)))

    def progress(
        self, phase: Phase, step: int, steps: int, marks_ns: Sequence[int]
    ) -> None:
        if time.monotonic() - self._reported < _RELAY_SECONDS:
            return
        self._reported = time.monotonic()
        self._leader.send(
            Event(EventKind.PROGRESS, phase=int(phase), step=step, steps=steps)
        )


def ready_job(job: Job) -> Event:
    """Return the event that a test asks for a measurement; all nodes of a launch have to ask for
    the same."""
    label, facts = job.test.label, job.facts
    return Event(
        EventKind.READY,
        label=label,
        plan=job.plan,
        batch_size=job.batch_size,
        facts=facts,
        gate=job.gate,
    )


def ready_call(plan: Plan, function: Callable[..., Any]) -> Event:
    """Return the event that a test asks for a call."""
    return Event(
        EventKind.READY, asks_for="a call", label=payload.name_of(function), plan=plan
    )


class NodeLeaderConnection(LeaderConnection):
    """The connection to the node that leads."""

    def __init__(self, lines: Lines, start: StartPytest) -> None:
        super().__init__(lines, start)
        self.node, self.nodes, self._interface = (
            start.node,
            start.nodes,
            start.interface,
        )

    def carry_out(self, job: Job, launcher: Launcher, store: Store) -> Measured:
        """Take part as often as the leader asks; raises BaseSideError when it has ended the
        test."""
        if job.plan.nodes == 1:  # the first node does it by itself
            return super().carry_out(replace(job, gate=False), launcher, store)

        setup, *others = job.setups
        task = partial(payload.dumps, "measure", setup, others)
        end = self._take_part(launcher, ready_job(job), task)
        launches = Launches(job.plan, _never)
        if not end.samples:
            self.over = True
            raise BaseSideError(OVER)
        for samples in end.samples:
            launches.add(samples)
        return _measured(job, launches, _verdict(end.verdict), store, fails=end.fails)

    def call(
        self,
        plan: Plan,
        function: Callable[..., Any],
        args: Sequence[Any],
        launcher: Launcher,
    ) -> list[Any]:
        """Take part in a call as often as the leader asks; return the results by rank."""
        task = partial(payload.dumps, "call", function, args)
        return unpickle(
            self._take_part(launcher, ready_call(plan, function), task).results
        )

    def _take_part(
        self, launcher: Launcher, ready: Event, task: Callable[[], bytes]
    ) -> Order:
        """Take part in the launches of what the test asks for; return the order that ends it."""
        self._check_test()
        # which may take seconds, and no launch has begun
        launcher.ready_for(ready.plan)
        self._asked += 1  # a plugin may run the test again here, and not at the leader
        self.send(replace(ready, number=self._asked))
        processes = ready.plan.part(self.node)
        with ExitStack() as locks:
            while (order := self.order()).kind not in (
                OrderKind.END_MEASUREMENT,
                OrderKind.LEAVE_TEST,
            ):
                try:
                    if order.kind is OrderKind.ACQUIRE_LOCKS:
                        taken = locks.enter_context(
                            launcher.alone_here(ready.plan, len(processes), self.relay)
                        )
                        self.send(
                            Event(
                                EventKind.LOCKS_ACQUIRED,
                                resources=tuple(map(str, taken)),
                            )
                        )
                    elif order.kind is OrderKind.RELEASE_LOCKS:
                        locks.close()
                    elif order.kind is OrderKind.TAKE_SHARE:
                        part = Part(
                            processes=processes,
                            node=self.node,
                            store=order.store,
                            interface=self._interface,
                        )
                        launcher.take_part(order.plan, part, task(), self)
                except DdpPerfError as error:
                    self.send(
                        Event(EventKind.LAUNCH_FAILED, text=text_with_output(error))
                    )
        if order.kind is OrderKind.LEAVE_TEST:
            self.over = True
            raise BaseSideError(OVER)
        if order.error is not None:  # as at the leader: the test may expect it
            raise BaseSideError(order.error)
        return order


def _measured(
    job: Job, launches: Launches, verdict: Verdict, store: Store, *, fails: bool = False
) -> Measured:
    """Return what this pytest's test gets; its leader decides whether it fails."""
    return Measured(
        job=job,
        verdict=verdict,
        fails=fails,
        environment=job.environment(launches),
        current=launches,
        side=Stored(store, job.test),
    )


def _verdict(first: Verdict | None) -> Verdict:
    """Return the verdict of the first node, for a test may go on by it. What the first node saves,
    only it saves."""
    gated = first is not None and first.status is not Status.NOT_GATED
    return (
        first
        if first is not None and gated
        else Verdict(status=Status.NOT_GATED, reason=Reason.FOLLOWS)
    )


def _never(launch: int, launches: int, steps: int | None) -> LaunchSamples:
    raise AssertionError("the leader takes launches")
