"""The worker's half of a remote pytest: it measures when the leader asks, and judges nothing."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.compare.job import Job
from pytest_ddpperf.compare.result import Measured
from pytest_ddpperf.compare.rounds import Launches, Round, combine
from pytest_ddpperf.compare.sides import CurrentSide
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.launch.failed_ranks import text_with_output
from pytest_ddpperf.launch.launcher import unpickle
from pytest_ddpperf.launch.remote_ranks import Part
from pytest_ddpperf.launch.template import Templates
from pytest_ddpperf.plugin.process import PytestProcess
from pytest_ddpperf.plugin.role import Call, PytestRole
from pytest_ddpperf.plugin.session import Session
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import (
    BaseSideError,
    DdpPerfError,
    NodesError,
)
from pytest_ddpperf.records.messages import (
    AcquireLocks,
    Deliver,
    Drop,
    Dropped,
    EndCall,
    EndMeasurement,
    Event,
    Launched,
    LaunchFailed,
    LocksAcquired,
    MeasureAs,
    Order,
    Paused,
    PauseLaunch,
    Progress,
    RaiseError,
    Ready,
    ReleaseLocks,
    RunStretch,
    SampleStacks,
    StartPytest,
    StretchDone,
    TakeLaunch,
    TakeShare,
    WaitingForLock,
    changed,
)
from pytest_ddpperf.records.samples import (
    LaunchSamples,
    Reason,
    Status,
    Verdict,
)
from pytest_ddpperf.remote.nodes import ConnectedNodes
from pytest_ddpperf.wire import payload
from pytest_ddpperf.wire.channels import Lines, Phase, readable
from pytest_ddpperf.wire.source_trees import Trees

# Often enough to be seen alive, rarely enough to leave the cores to the ranks.
_RELAY_SECONDS = 0.5
OVER = "the leader has ended the test"


class LeaderConnection(PytestRole):
    """The role of a pytest that another one started for another version: it measures as that one
    asks, over the connection to it."""

    works_for_leader = True

    def __init__(self, lines: Lines, start: StartPytest) -> None:
        self._lines = lines
        self._orders: list[Order] = []
        self.relay: Observer = _Relay(self)
        self.over = False  # nothing more will be asked of the test that runs
        self._asked = 0  # how often the test that runs asked for something
        self.trees: Trees = codec.decode(Trees, start.trees)
        self.folder = start.folder
        self.rpc = start.rpc
        # to the other nodes that this pytest leads, by node
        self.address = start.address
        self.connections: dict[int, Lines] = {}
        for node, descriptor in start.connections.items():
            os.set_inheritable(descriptor, False)
            self.connections[node] = Lines(socket.socket(fileno=descriptor))
        self.templates: Templates = Templates()
        if start.rank_server is not None:
            self.templates.add(start.rank_server, start.variables)

    def prepare(self, run: PytestProcess) -> None:
        if self.connections:
            nodes = ConnectedNodes(self.address, run.settings.timeout_seconds)
            try:
                nodes.add(self.connections)
            except NodesError as error:
                raise pytest.UsageError(str(error)) from None
            self.lead(nodes)

    def send(self, event: Event) -> None:
        """Send an event; raises KeyboardInterrupt if the leader is gone."""
        try:
            self._lines.send(event)
        except OSError:
            raise KeyboardInterrupt from None

    @property
    def socket(self) -> socket.socket:
        return self._lines.socket

    def order_by_now(self) -> Order | None:
        """Return the next order if there is one; raises as `order`."""
        return (
            self.order() if self._orders or readable([self.socket], 0) else None
        )

    def order(self) -> Order:
        """Wait for the next order; raises KeyboardInterrupt if the leader is gone."""
        while not self._orders:
            arrived = self._lines.receive(Order)
            if arrived is None:
                raise KeyboardInterrupt
            self._orders += arrived
        return self._orders.pop(0)

    def begin_test(self) -> None:
        self.over, self._asked = False, 0

    def _carry_out(
        self, job: Job, session: Session, observer: Observer
    ) -> Measured:
        """Launch as often as the leader asks; raises BaseSideError when it has ended the test."""
        launcher = session.launcher
        if not job.gate:  # nothing is compared, so nothing is asked
            measured = session.comparison(job, observer)()
            return replace(measured, fails=False)
        self._check_test()
        launches: Launches = ()
        self.send(job.ready)
        while True:
            order = self.order()
            match order:
                case MeasureAs(plan):
                    job = replace(job, plan=plan)
                case TakeLaunch() | PauseLaunch() | SampleStacks():
                    current = CurrentSide(job, launcher, len(launches))
                    launched = self._launch(current, order)
                    if launched is not None and not isinstance(
                        order, SampleStacks
                    ):
                        launches = (*launches, launched)
                case _:
                    break
        if not isinstance(order, EndMeasurement) or not launches:
            self.over = True
            raise BaseSideError(OVER)
        return _measured(
            job,
            launches,
            Verdict(status=Status.NOT_GATED, reason=Reason.BASE_SIDE),
        )

    def _launch(
        self,
        current: CurrentSide,
        order: TakeLaunch | PauseLaunch | SampleStacks,
    ) -> LaunchSamples | None:
        """Launch once, and report it; raises the errors of a TakeLaunch."""
        launched: LaunchSamples | None
        try:
            match order:
                case TakeLaunch(steps):
                    launched = current.measure(self.relay, steps)
                case PauseLaunch(steps):
                    launched = self._pause(current, steps)
                case SampleStacks(plan):
                    sampling = current._replace(
                        job=replace(current.job, plan=plan)
                    )
                    launched = sampling.measure(self.relay, None)
        except DdpPerfError as error:
            self.send(LaunchFailed(text_with_output(error)))
            # after other orders the leader goes on: it may ask for a launch alone, or do without
            if isinstance(order, TakeLaunch):
                self.over = True
                raise
            return None
        if launched is not None:
            self.send(Launched(replace(launched, output=())))
        return launched

    def _check_test(self) -> None:
        """Raise BaseSideError if the leader has ended the test, or the test imported the other
        tree."""
        if self.over:
            raise BaseSideError(OVER)
        self.trees.refuse_strays()

    def _pause(
        self, current: CurrentSide, steps: int | None
    ) -> LaunchSamples | None:
        """Pause a launch until it is to deliver or to be dropped; return what it delivers."""
        with current.pause(self.relay, steps) as launch:
            self.send(Paused(launch.steps, launch.step_seconds, launch.helpers))
            while isinstance(order := self.order(), RunStretch):
                launch.stretch(order.steps)
                self.send(StretchDone())
            if isinstance(order, Deliver):
                return launch.deliver()
        if isinstance(order, Drop):
            self.send(Dropped())
        else:
            self._orders.insert(0, order)
        return None


@dataclass
class _Relay(Observer):
    """Lets the pytest that leads watch."""

    _leader: LeaderConnection
    _reported: float = 0.0

    def waiting(self, resource: Path) -> None:
        self._leader.send(WaitingForLock(str(resource)))

    def progress(
        self, phase: Phase, step: int, steps: int, marks_ns: Sequence[int]
    ) -> None:
        if time.monotonic() - self._reported < _RELAY_SECONDS:
            return
        self._reported = time.monotonic()
        self._leader.send(Progress(int(phase), step, steps))


class NodeLeaderConnection(LeaderConnection):
    """The role of such a pytest on another node than the leader's."""

    def __init__(self, lines: Lines, start: StartPytest) -> None:
        super().__init__(lines, start)
        self.node, self.nodes = start.node, start.nodes
        self._interface = start.interface

    def _carry_out(
        self, job: Job, session: Session, observer: Observer
    ) -> Measured:
        """Take part as often as the leader asks; raises BaseSideError when it has ended the
        test."""
        if job.plan.nodes == 1:  # the first node does it by itself
            job = replace(job, gate=False)
            return super()._carry_out(job, session, observer)

        setup, *others = job.setups
        task = partial(payload.dumps, "measure", setup, others)
        end = self._take_part(session.launcher, job.ready, task)
        if not isinstance(end, EndMeasurement) or not end.samples:
            self.over = True
            raise BaseSideError(OVER)
        return _measured(
            job, end.samples, _verdict(end.verdict), fails=end.fails
        )

    def _call(
        self, call: Call, launcher: Launcher, observer: Observer
    ) -> list[Any]:
        """Take part in a call as often as the leader asks; return the results by rank."""
        if call.plan.nodes == 1:
            return super()._call(call, launcher, observer)
        task = partial(payload.dumps, "call", call.function, call.args)
        end = self._take_part(launcher, call.ready, task)
        assert isinstance(end, EndCall), "the leader's test asks for the same"
        return unpickle(end.results)

    def _take_part(
        self, launcher: Launcher, ready: Ready, task: Callable[[], bytes]
    ) -> EndMeasurement | EndCall:
        """Take part in the launches of what the test asks for; return the order that ends it.
        Raises BaseSideError if the leader ends the test, or with its error."""
        self._check_test()
        # before any launch begins, because it may take seconds
        launcher.ready_for(ready.plan)
        # a plugin may run the test again here, and not at the leader
        self._asked += 1
        self.send(changed(ready, number=self._asked))
        processes = ready.plan.part(self.node)
        with ExitStack() as locks:
            while True:
                order = self.order()
                try:
                    match order:
                        case AcquireLocks():
                            alone = launcher.alone_here(
                                ready.plan, len(processes), self.relay
                            )
                            taken = locks.enter_context(alone)
                            self.send(LocksAcquired(tuple(map(str, taken))))
                        case ReleaseLocks():
                            locks.close()
                        case TakeShare(plan, store):
                            part = Part(
                                processes=processes,
                                node=self.node,
                                store=store,
                                interface=self._interface,
                            )
                            launcher.take_part(plan, part, task(), self)
                        case _:
                            break
                except DdpPerfError as error:
                    self.send(LaunchFailed(text_with_output(error)))
        match order:
            case EndMeasurement() | EndCall():
                return order
            case RaiseError(why):  # as at the leader: the test may expect it
                raise BaseSideError(why)
        self.over = True
        raise BaseSideError(OVER)


def _measured(
    job: Job, launches: Launches, verdict: Verdict, *, fails: bool = False
) -> Measured:
    """Return what this pytest's test gets; its leader decides whether it fails."""
    return Measured(
        job=job,
        verdict=verdict,
        fails=fails,
        rounds=tuple(map(Round, launches)),
        measurement=combine(launches, job.environment(launches[-1].facts)),
    )


def _verdict(first: Verdict | None) -> Verdict:
    """Return the verdict of the first node, for a test may go on by it. What the first node saves,
    only it saves."""
    if first is None or first.status is Status.NOT_GATED:
        return Verdict(status=Status.NOT_GATED, reason=Reason.FOLLOWS)
    return first
