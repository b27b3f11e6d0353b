"""The pytests of one version that take part in launches, on whatever nodes: as `launch.elsewhere.Nodes` has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from pytest_ddpperf.launch import Nobody, Observer
from pytest_ddpperf.launch.elsewhere import Elsewhere
from pytest_ddpperf.nodes.member import Member
from pytest_ddpperf.nodes.parts import Parts
from pytest_ddpperf.records import Plan, Scalar
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.wire.channels import Message

_FOR_EVER = 1e6  # seconds: while others have the node, as on one's own


class Side:
    """Of the members that take part beside what this process starts by itself, if anything."""

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
        told: list[Message] = []
        try:
            for member in taking_part:
                with _named(member):
                    member.begin(nodeid)
            for member in taking_part:
                with _named(member):
                    told.append(member.asks(asked if asked is not None or not told else told[0]))
        except BaseSideError:
            self.leave()  # else some would wait for what comes of it
            raise
        return told

    def tell(self, message: Message, nodes: int) -> None:
        """Raises BaseSideError, once all have been told that are there."""
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
        ending = [member for member in self.members if member.tests.let_go()]  # all at once
        told = [(member, member.tests.await_end()) for member in ending]
        return [f"{member}: {apart}" for member, apart in told if apart]

    def parts(self, plan: Plan, store: tuple[str, int]) -> Elsewhere:
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
        with ExitStack() as late, ExitStack() as held:
            for order, node in sorted(places):
                whose = places[order, node]
                if isinstance(whose, Member):
                    resources = held.enter_context(self._alone_on(whose, _There(whose, observer, taken), late))
                else:
                    resources = list(map(str, held.enter_context(whose)))
                taken |= {(_boot(order), resource): f"node {node}" for resource in resources}
            yield

    @contextmanager
    def _alone_on(self, member: Member, there: _There, late: ExitStack) -> Iterator[list[str]]:
        member.line.send({"op": "alone"})
        try:
            resources = _when_alone(member, there)
        except _SameMachine:
            late.callback(_let_go, member, there)
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


def _let_go(member: Member, there: _There) -> None:
    """What it waited for is free by now: it says so, and is to leave it to others."""
    there.taken.clear()
    with suppress(BaseSideError):
        _when_alone(member, there)
        member.line.send({"op": "shared"})


class _SameMachine(BaseSideError):
    """A node waits for what another node of the same launch has: for ever."""


class _There(Nobody):
    """Tells what a member waits for."""

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
    """What goes wrong there is told with its name."""
    try:
        yield
    except BaseSideError as error:
        told = str(error)
        raise BaseSideError(told if told.startswith(str(member)) else f"{member}: {told}") from None
