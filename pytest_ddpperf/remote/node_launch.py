"""A launch over several nodes: who takes part, and what came of each part."""

from __future__ import annotations

import base64
import json
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_ddpperf.launch import Observer
from pytest_ddpperf.launch.remote_ranks import Clock, Offset, RemoteRanks
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import RankError, RankOutput, Scalar
from pytest_ddpperf.remote.process import Line, Tests
from pytest_ddpperf.wire.channels import Message, readable


class Member:
    """One of a side's."""

    def __init__(
        self, node: int, name: str, order: str, line: Line, tests: Tests, offset: Callable[[], Offset] | None = None
    ) -> None:
        """`order`: of its host's locks among those of all hosts. `offset`: of its clock; None where it is ours."""
        self.node, self.name, self.order, self.line, self.tests = node, name, order, line, tests
        self._offset = offset

    def __str__(self) -> str:
        return self.name

    def offset(self) -> Offset:
        """Of its clock now; raises BaseSideError."""
        if self._offset is not None:
            return self._offset()
        return Offset(at_ns=time.monotonic_ns(), ns=0.0, half_width_ns=0.0)

    def give_up(self, problem: str) -> None:
        """Nothing will be asked of it any more: what it says yet would be taken for an answer. Raises BaseSideError."""
        self.line.end(problem)

    def begin(self, nodeid: str) -> None:
        """Let it run a test up to what that asks for; raises BaseSideError."""
        with self.tests.last_words():
            self.tests.enter(nodeid)

    def asks(self, asked: Message | None) -> Message:
        """What its test asks for; raises BaseSideError if that is something else than what is `asked` on the first
        node, None if that is not known."""
        with self.tests.last_words():
            reported = self.tests.hear(Observer(), "the test ended there without asking for what it asks for here")
        if asked is not None and (difference := _difference(asked, reported)):
            raise BaseSideError(difference)
        return reported

    def lost(self, plan: Plan, problem: str) -> RankError:
        """The error of a launch of which it can tell no more."""
        first = plan.part(self.node)[0]
        return RankError(rank=first, when=time.monotonic(), phase="the launch", summary=problem)


def _difference(here: Message, there: Message) -> str:
    """What a test asks for there and not here, in words; "" where both ask for the same."""
    for name in ("what", "label"):
        if there.get(name) != here[name]:
            return f"the test asks for {in_words(there)} there, and for {in_words(here)} on the first node"
    if there.get("number") != here["number"]:
        which = f"what it asks for as number {there.get('number')} there is number {here['number']} on the first node"
        return f"{which}: does something run the test again there?"
    plan = there.get("plan", {})
    for name, value in json.loads(json.dumps(here["plan"])).items():  # as the other one came
        if (other := plan.get(name)) != value:
            return f"the test asks for {name} {other!r} there, and for {value!r} on the first node"
    return ""


def in_words(asked: Message) -> str:
    """What a test asks for: "a call (f)"."""
    return f"{asked.get('what')} ({asked['label']})" if asked.get("label") else str(asked.get("what"))


# For a node to end its processes and to send their stacks after the leader asked for it: longer than `launch.run`
# gives the rank server there.
_END_SECONDS = 45.0
_TICK_SECONDS = 0.1


@dataclass
class _Part:
    """What came of one node's."""

    member: Member
    before: Offset
    after: Offset | None = None
    settled: bool = False
    over: bool = False
    failed: dict[int, RankError] = field(default_factory=dict)
    idle: list[RankError] = field(default_factory=list)


class Parts(RemoteRanks):
    """All but the part of the node that leads. Nothing here raises: what goes wrong is an error of a rank."""

    def __init__(self, plan: Plan, store: tuple[str, int], members: Sequence[Member], names: Mapping[int, str]) -> None:
        """`names` are those of all processes in errors."""
        self._plan, self._store, self._members, self._names = plan, store, members, names
        self._parts: list[_Part] = []
        self._reported = False  # that it is over, or given up
        self._given_up = math.inf  # when
        self.errors: list[RankError] = []
        self.results: dict[int, bytes] = {}
        self.output: list[RankOutput] = []
        self.notes: list[str] = []

    def channels(self) -> Sequence[socket.socket]:
        return [part.member.line.socket for part in self._parts if not (part.over or part.member.line.dead)]

    def settled(self) -> bool:
        return all(part.settled or part.over for part in self._parts)

    def clocks(self) -> Mapping[int, Clock]:
        return {
            process: Clock(first=part.before, last=part.after or part.before)
            for part in self._parts
            for process in self._plan.part(part.member.node)
        }

    def begin(self) -> None:
        order = {"op": "part", "plan": codec.encode(self._plan), "store": list(self._store)}
        for member in self._members:
            part = _Part(member, Offset(at_ns=0, ns=0, half_width_ns=math.inf))
            self._parts.append(part)
            with self._watched(part):
                part.before = member.offset()
        for part in self._parts:
            with self._watched(part):
                if not part.over:
                    part.member.line.send(order)

    def hear(self) -> None:
        for part in self._parts:
            if part.over:
                continue
            with self._watched(part):
                for message in part.member.line.arrived():
                    self._take(part, message)

    def _take(self, part: _Part, message: Message) -> None:
        event = message["event"]
        if event == "failed-rank":
            self._failed(part, [message["error"]])
        elif event == "settled":
            part.settled = True
            self._take_results(message)
        elif event == "over":
            part.over = True
            self._take_results(message)
            # What had not failed before was given up when all were: who was at fault, its place says, and not its time.
            self._failed(part, message["errors"], self._given_up)
            part.idle = [self._error(part, fields) for fields in message["idle"]]
            self.output += [codec.decode(RankOutput, reported) for reported in message["output"]]
            self.notes += message["notes"]
        elif event in ("failed", "ended"):
            if event == "ended":
                part.member.tests.ended(message, "the test ended there during a launch")
            self._end(part, message["text"] or "the test ended there during a launch")

    def _failed(self, part: _Part, reported: Sequence[Message], when: float = math.inf) -> None:
        for fields in reported:
            error = self._error(part, fields)
            error = replace(error, when=min(error.when, when))
            if error.rank not in part.failed:
                part.failed[error.rank] = error
                self.errors.append(error)

    def _error(self, part: _Part, fields: Message) -> RankError:
        """`when` by this node's clock, so that errors of all nodes are in order."""
        error = RankError(**fields)
        when = error.when if math.isinf(error.when) else error.when - part.before.ns / 1e9
        return replace(error, when=when)

    def name(self, process: int) -> str:
        return self._names[process]

    def _take_results(self, message: Message) -> None:
        self.results |= {int(rank): base64.b64decode(data) for rank, data in message["results"].items()}

    def _tell_times(self) -> None:
        """The offsets after the window, where all is well. A node that cannot be asked any more is an error though it
        has delivered: its clock is unknown."""
        for part in self._parts if not self.errors else ():
            if part.after is None:
                try:
                    part.after = part.member.offset()
                except BaseSideError as error:
                    part.over = True
                    self.errors.append(part.member.lost(self._plan, str(error)))

    @contextmanager
    def _watched(self, part: _Part) -> Iterator[None]:
        """What goes wrong with a node's line ends its part."""
        try:
            yield
        except BaseSideError as error:
            self._end(part, str(error))

    def _end(self, part: _Part, problem: str) -> None:
        if not part.over:
            part.over = True
            self.errors.append(part.member.lost(self._plan, problem))

    def release(self) -> None:
        self._tell_times()
        self._send_to_all({"op": "release"})

    def stop(self, when: float, *, at_deadline: bool) -> None:
        if not self._reported:
            self._given_up = when
        self._send_to_all({"op": "stop", "at_deadline": at_deadline})

    def _send_to_all(self, order: Message) -> None:
        if self._reported:
            return
        self._reported = True
        for part in self._parts:
            with self._watched(part):
                if not part.over:
                    part.member.line.send(order)

    def await_end(self) -> None:
        until = time.monotonic() + _END_SECONDS
        while not all(part.over for part in self._parts):
            if time.monotonic() > until:
                for part in self._parts:
                    if not part.over:
                        with self._watched(part):
                            part.member.give_up(f"did not end its ranks within {_END_SECONDS:g} s")
                break
            readable(self.channels(), _TICK_SECONDS)
            self.hear()
        self._tell_times()
        if self.errors:
            self.errors += [error for part in self._parts for error in part.idle]
            for part in self._parts:
                part.idle = []


_FOR_EVER = 1e6  # seconds: while others have the node, as on one's own


class Side:
    """The members that take part in addition to what this process starts itself, if anything."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        address: str,
        interface: str,
        hosts: Sequence[str],
        order: str,
        facts: Mapping[str, Scalar],
    ) -> None:
        """`hosts` are by node; `order` of this one's locks among those of all."""
        self.members, self.address, self.interface, self._hosts = list(members), address, interface, hosts
        self._order, self.facts = order, facts

    def taking_part(self, nodes: int) -> list[Member]:
        return [member for member in self.members if member.node < nodes]

    def begin(self, nodeid: str, asked: Message | None, nodes: int) -> list[Message]:
        """Let the test run on so many nodes up to what it asks for there: what that is. Raises BaseSideError if it is
        not the same everywhere: as what is `asked` here or, where that is not known, on the first. The test is over
        everywhere then."""
        taking_part = self.taking_part(nodes)
        reported: list[Message] = []
        try:
            for member in taking_part:
                with _named(member):
                    member.begin(nodeid)
            for member in taking_part:
                with _named(member):
                    reported.append(member.asks(asked if asked is not None or not reported else reported[0]))
        except BaseSideError:
            self.leave()  # else some would wait for what comes of it
            raise
        return reported

    def tell(self, message: Message, nodes: int) -> None:
        """Send a message to all; raises BaseSideError, once it was sent to all that are there."""
        gone = None
        for member in self.taking_part(nodes):
            try:
                with _named(member):
                    member.line.send(message)
            except BaseSideError as error:
                gone = gone or error
        if gone is not None:
            raise gone

    def leave(self) -> list[str]:
        """The test is over here. Returns when it is over everywhere: what failed there outside of its call."""
        ending = [member for member in self.members if member.tests.request_end()]  # all at once
        reported = [(member, member.tests.await_end()) for member in ending]
        return [f"{member}: {apart}" for member, apart in reported if apart]

    def parts(self, plan: Plan, store: tuple[str, int]) -> RemoteRanks:
        names = {
            process: f"{plan.name(process)} (node {node}, {self._hosts[node]})"
            for node in range(plan.nodes)
            for process in plan.part(node)
        }
        return Parts(plan, store, self.taking_part(plan.nodes), names)

    @contextmanager
    def alone(
        self, plan: Plan, here: AbstractContextManager[Sequence[Path]] | None, observer: Observer
    ) -> Iterator[None]:
        places: dict[tuple[str, int], Member | AbstractContextManager[Sequence[Path]]] = {
            (member.order, member.node): member for member in self.taking_part(plan.nodes)
        }
        if here is not None:
            places[self._order, 0] = here
        taken: dict[tuple[str, str], str] = {}  # by host and resource, who has it
        with ExitStack() as late, ExitStack() as paused:
            for order, node in sorted(places):
                whose = places[order, node]
                if isinstance(whose, Member):
                    resources = paused.enter_context(
                        self._alone_on(whose, _RemoteObserver(whose, observer, taken), late)
                    )
                else:
                    resources = list(map(str, paused.enter_context(whose)))
                taken |= {(_boot(order), resource): f"node {node}" for resource in resources}
            yield

    @contextmanager
    def _alone_on(self, member: Member, there: _RemoteObserver, late: ExitStack) -> Iterator[list[str]]:
        member.line.send({"op": "alone"})
        try:
            resources = _when_alone(member, there)
        except _SameMachine:
            late.callback(_request_end, member, there)
            raise
        try:
            yield resources
        finally:
            with suppress(BaseSideError):
                member.line.send({"op": "shared"})


def _when_alone(member: Member, observer: Observer) -> list[str]:
    """Wait until it is: on what. Raises BaseSideError."""
    said = member.line.receive(observer, _FOR_EVER)
    if said["event"] == "ended":
        member.tests.ended(said, "the test ended there before it measured")
    if said["event"] != "alone":
        raise BaseSideError(f"{member}: {said.get('text', said)}")
    return list(said["resources"])


def _request_end(member: Member, there: _RemoteObserver) -> None:
    """What it waited for is free by now: it says so, and is to leave it to others."""
    there.taken.clear()
    with suppress(BaseSideError):
        _when_alone(member, there)
        member.line.send({"op": "shared"})


class _SameMachine(BaseSideError):
    """A node waits for what another node of the same launch has: for ever."""


class _RemoteObserver(Observer):
    """Reports what a member waits for."""

    def __init__(self, member: Member, observer: Observer, taken: Mapping[tuple[str, str], str]) -> None:
        """`taken`: by host and resource, which node has it."""
        self._member, self._observer, self.taken = member, observer, dict(taken)

    def waiting(self, resource: object) -> None:
        path = Path(str(resource))
        if by := self.taken.get((_boot(self._member.order), str(path))):
            problem = f"{self._member} is on the same machine and the same cores or devices as {by}"
            raise _SameMachine(f"{problem}: give each node its own (taskset, CUDA_VISIBLE_DEVICES)")
        # Of another node by a name that is no file here: who has it there, this machine does not know.
        self._observer.waiting(Path(f"{path.name or 'all'} of {self._member}") if self._member.node else path)


def _boot(order: str) -> str:
    """The host behind its name: that of a container is its own."""
    return order.rpartition(" ")[2]


@contextmanager
def _named(member: Member) -> Iterator[None]:
    """Put the member's name into errors."""
    try:
        yield
    except BaseSideError as error:
        reported = str(error)
        raise BaseSideError(reported if reported.startswith(str(member)) else f"{member}: {reported}") from None
