"""A launch over several nodes: who takes part, and what came of each part."""

import math
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_ddpperf.launch import Observer
from pytest_ddpperf.launch.remote_ranks import RemoteRanks
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.records.messages import (
    AcquireLocks,
    Address,
    AskProgress,
    Event,
    LaunchFailed,
    LocksAcquired,
    Order,
    RankFailed,
    ReleaseLocks,
    ReleaseRanks,
    SetWindow,
    ShareEnded,
    ShareProgress,
    ShareSettled,
    Started,
    StopRanks,
    TakeShare,
    TestEnded,
)
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import Digests, RankError, RankOutput
from pytest_ddpperf.remote.node import Node
from pytest_ddpperf.wire.channels import readable

# For a node to end its processes and to send their stacks after the leader asked for it: longer
# than `launch.run` gives the rank server there.
_END_SECONDS = 45.0
_TICK_SECONDS = 0.1
# For a node to say how far its ranks are: longer than it waits for their answers.
_ANSWER_SECONDS = 5.0


@dataclass
class _Part:
    """What came of one node's."""

    member: Node
    ahead_ns: float | None = None  # its clock
    settled: bool = False
    over: bool = False


class Parts(RemoteRanks):
    """All but the part of the node that leads. Nothing here raises: what goes wrong is an error of
    a rank."""

    def __init__(
        self,
        plan: Plan,
        store: Address,
        members: Sequence[Node],
        names: Mapping[int, str],
    ) -> None:
        """`names` are those of all processes in errors."""
        self._plan, self._store, self._names = plan, store, names
        self._parts = [_Part(member) for member in members]
        self._reported = False  # that it is over, or given up
        self._given_up = math.inf  # when
        self.errors: list[RankError] = []
        # of ranks that waited for others; they come last
        self._waiting: list[RankError] = []
        self.results: dict[int, bytes] = {}
        self.output: list[RankOutput] = []
        self.notes: list[str] = []
        self.files: dict[str, Digests] = {}
        self.progress: dict[int, ShareProgress] = {}
        self.started: dict[int, Started] = {}
        self._window = SetWindow(0, 0)  # the last one that was sent

    @property
    def _under_way(self) -> list[_Part]:
        return [part for part in self._parts if not part.over]

    def channels(self) -> Sequence[socket.socket]:
        return [
            part.member.line.socket
            for part in self._under_way
            if not part.member.line.dead
        ]

    def settled(self) -> bool:
        return all(part.settled or part.over for part in self._parts)

    def clocks_ahead_ns(self) -> Mapping[int, float]:
        return {
            process: part.ahead_ns
            for part in self._parts
            if part.ahead_ns is not None
            for process in self._plan.part(part.member.number)
        }

    def begin(self) -> None:
        self._send(TakeShare(self._plan, self._store))

    def set_window(self, begin: int, steps: int) -> None:
        window = SetWindow(begin, steps)
        if window != self._window:
            self._window = window
            self.progress.clear()  # answers to an earlier question
            self._send(window)

    def ask_progress(self, some_delivered: bool) -> Iterable[ShareProgress]:
        self.progress.clear()
        self._send(AskProgress(some_delivered))
        until = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < until:
            if len(self.progress) >= len(self._under_way):
                break
            readable(self.channels(), _TICK_SECONDS)
            self.receive()
        return self.progress.values()

    def _send(self, order: Order) -> None:
        for part in self._under_way:
            with self._watched(part):
                part.member.line.send(order)

    def receive(self) -> None:
        for part in self._under_way:
            with self._watched(part):
                for event in part.member.line.arrived():
                    self._take(part, event)

    def _take(self, part: _Part, event: Event) -> None:
        match event:
            case RankFailed(error):
                self._failed([error])
            case ShareProgress():
                self.progress[part.member.number] = event
            case ShareSettled(results):
                part.settled = True
                self.results |= results
            case ShareEnded():
                self._share_ended(part, event)
            case LaunchFailed(why):
                self._end(part, why)
            case TestEnded():
                why = part.member.tests.ended(
                    event, "the test ended there during a launch"
                )
                self._end(part, why)

    def _share_ended(self, part: _Part, event: ShareEnded) -> None:
        part.over = True
        self.results |= event.results
        # What had not failed before was given up when all were: who was at fault, its place says,
        # and not its time.
        self._failed(event.errors, self._given_up)
        self._waiting += event.waiting
        self.output += event.output
        self.notes += event.notes
        self.started |= event.started
        self.files[str(part.member)] = event.files

    def _failed(
        self, errors: Sequence[RankError], when: float = math.inf
    ) -> None:
        """Add errors, in the order in which they arrive here; `when` is the latest time."""
        when = min(when, time.monotonic())
        known = {error.rank for error in self.errors}
        for error in errors:
            if error.rank not in known:
                self.errors.append(replace(error, when=when))

    def name(self, process: int) -> str:
        return self._names[process]

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
        """Let the processes end, once the clocks are compared. A node that cannot be asked any more
        is an error though it has delivered: its clock is unknown."""
        for part in self._parts:
            with self._watched(part):
                part.ahead_ns = part.member.line.clock_ahead_ns()
        self._end_ranks(ReleaseRanks())

    def stop(self, when: float, late: str = "") -> None:
        if not self._reported:
            self._given_up = when
        self._end_ranks(StopRanks(late))

    def _end_ranks(self, order: ReleaseRanks | StopRanks) -> None:
        if not self._reported:
            self._reported = True
            self._send(order)

    def await_end(self) -> None:
        until = time.monotonic() + _END_SECONDS
        while self._under_way:
            if time.monotonic() > until:
                for part in self._under_way:
                    # a late event would be taken for an answer
                    with self._watched(part):
                        part.member.line.end(
                            f"did not end its ranks within {_END_SECONDS:g} s"
                        )
                break
            readable(self.channels(), _TICK_SECONDS)
            self.receive()
        if self.errors:
            self.errors += self._waiting
            self._waiting = []


_FOR_EVER = 1e6  # seconds: while others have the node, as on one's own


@contextmanager
def alone(
    members: Sequence[Node],
    order: str,
    here: AbstractContextManager[Sequence[Path]],
    observer: Observer,
) -> Iterator[None]:
    """Hold the locks of this node, by `here`, and of all others, in the order of their hosts;
    `order` is this one's."""
    places: dict[Address, Node | AbstractContextManager[Iterable[object]]] = {
        (member.order, member.number): member for member in members
    }
    places[order, 0] = here
    taken: dict[tuple[str, str], str] = {}  # by host and resource, who has it
    with ExitStack() as late, ExitStack() as paused:
        for host, number in sorted(places):
            whose = places[host, number]
            if isinstance(whose, Node):
                there = _RemoteObserver(whose, observer, {**taken})
                whose = _alone_on(whose, there, late)
            for resource in paused.enter_context(whose):
                taken[_boot(host), str(resource)] = f"node {number}"
        yield


@contextmanager
def _alone_on(
    member: Node, there: "_RemoteObserver", late: ExitStack
) -> Iterator[Sequence[str]]:
    member.line.send(AcquireLocks())
    try:
        resources = _await_locks(member, there)
    except _SameMachine:
        late.callback(_request_end, member, there)
        raise
    try:
        yield resources
    finally:
        with suppress(BaseSideError):
            member.line.send(ReleaseLocks())


def _await_locks(member: Node, observer: Observer) -> Sequence[str]:
    """Wait until it holds the locks; return of which resources. Raises BaseSideError."""
    event = member.line.receive(observer, _FOR_EVER)
    match event:
        case LocksAcquired(resources):
            return resources
        case TestEnded():
            why = member.tests.ended(
                event, "the test ended there before it measured"
            )
        case LaunchFailed(why):
            pass
        case _:
            why = f"it reported {type(event).__name__}"
    raise BaseSideError(f"{member}: {why}")


def _request_end(member: Node, there: "_RemoteObserver") -> None:
    """Let it release the locks that it waited for, which are free by now."""
    there.taken.clear()
    with suppress(BaseSideError):
        _await_locks(member, there)
        member.line.send(ReleaseLocks())


class _SameMachine(BaseSideError):
    """A node waits for what another node of the same launch has: for ever."""


@dataclass
class _RemoteObserver(Observer):
    """Reports what a member waits for."""

    _member: Node
    _observer: Observer
    taken: dict[tuple[str, str], str]  # by host and resource, which node has it

    def waiting(self, resource: object) -> None:
        path = Path(str(resource))
        if by := self.taken.get((_boot(self._member.order), str(path))):
            raise _SameMachine(
                f"{self._member} is on the same machine and the same cores or devices as {by}:"
                " give each node its own (taskset, CUDA_VISIBLE_DEVICES)"
            )
        # Of another node by a name that is no file here: who has it there, this machine does not
        # know.
        self._observer.waiting(Path(str(self._member), path.name or "all"))


def _boot(order: str) -> str:
    """The host behind its name: that of a container is its own."""
    return order.rpartition(" ")[2]
