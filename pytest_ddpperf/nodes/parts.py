"""A launch's parts on other nodes, as `launch.elsewhere` has them."""

from __future__ import annotations

import base64
import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from pytest_ddpperf.launch.clock import Clock, Offset
from pytest_ddpperf.nodes.member import Member
from pytest_ddpperf.records import Plan, RankError, RankOutput, codec
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.wire.channels import Message, readable

# For a node to end its processes, and to say where they were, after it was told to: longer than `launch.run` gives the
# rank server there.
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


class Parts:
    """All but the part of the node that leads. Nothing here raises: what goes wrong is an error of a rank."""

    def __init__(self, plan: Plan, store: tuple[str, int], members: Sequence[Member], names: Mapping[int, str]) -> None:
        """`names` are those of all processes in errors."""
        self._plan, self._store, self._members, self._names = plan, store, members, names
        self._parts: list[_Part] = []
        self._told = False  # that it is over, or given up
        self._given_up = math.inf  # when
        self.errors: list[RankError] = []
        self.results: dict[int, bytes] = {}
        self.output: list[RankOutput] = []
        self.notes: list[str] = []

    @property
    def channels(self) -> Sequence[socket.socket]:
        return [part.member.line.socket for part in self._parts if not (part.over or part.member.line.dead)]

    @property
    def settled(self) -> bool:
        return all(part.settled or part.over for part in self._parts)

    @property
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
            self.output += [codec.decode(RankOutput, told) for told in message["output"]]
            self.notes += message["notes"]
        elif event in ("failed", "ended"):
            if event == "ended":
                part.member.tests.ended(message, "the test ended there during a launch")
            self._end(part, message["text"] or "the test ended there during a launch")

    def _failed(self, part: _Part, told: Sequence[Message], when: float = math.inf) -> None:
        for fields in told:
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
        has delivered: nobody knows how its clock went."""
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
        self._tell({"op": "release"})

    def stop(self, when: float, *, at_deadline: bool) -> None:
        if not self._told:
            self._given_up = when
        self._tell({"op": "stop", "at_deadline": at_deadline})

    def _tell(self, order: Message) -> None:
        if self._told:
            return
        self._told = True
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
            readable(self.channels, _TICK_SECONDS)
            self.hear()
        self._tell_times()
        if self.errors:
            self.errors += [error for part in self._parts for error in part.idle]
            for part in self._parts:
                part.idle = []
