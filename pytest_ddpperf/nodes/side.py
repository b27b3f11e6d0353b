"""The pytests of one version that take part in launches, on whatever nodes: as `launch.elsewhere.Nodes` has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

from pytest_ddpperf.launch.elsewhere import Elsewhere
from pytest_ddpperf.launch.observer import Observer
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
        """Raises BaseSideError."""
        for member in self.taking_part(nodes):
            with _named(member):
                member.line.send(message)

    def leave(self) -> None:
        """The test is over here. Returns when it is over everywhere."""
        for member in self.members:
            member.tests.leave()

    def parts(self, plan: Plan, store: tuple[str, int]) -> Elsewhere:
        names = {
            process: f"{plan.name(process)} (node {node}, {self._hosts[node]})"
            for node in range(plan.nodes)
            for process in plan.part(node)
        }
        return Parts(plan, store, self.taking_part(plan.nodes), names)

    @contextmanager
    def alone(self, plan: Plan, here: AbstractContextManager[None] | None, observer: Observer) -> Iterator[None]:
        holds: dict[tuple[str, int], AbstractContextManager[None]] = {
            (member.order, member.node): self._alone_on(member, observer) for member in self.taking_part(plan.nodes)
        }
        if here is not None:
            holds[self._order, 0] = here
        with ExitStack() as held:
            for place in sorted(holds):
                held.enter_context(holds[place])
            yield

    @contextmanager
    def _alone_on(self, member: Member, observer: Observer) -> Iterator[None]:
        member.line.send({"op": "alone"})
        said = member.line.receive(observer, _FOR_EVER)
        if said["event"] == "ended":
            member.tests.ended(said, "the test ended there before it measured")
        if said["event"] != "alone":
            raise BaseSideError(f"{member}: {said.get('text', said)}")
        try:
            yield
        finally:
            with suppress(BaseSideError):
                member.line.send({"op": "shared"})


@contextmanager
def _named(member: Member) -> Iterator[None]:
    """What goes wrong there is told with its name."""
    try:
        yield
    except BaseSideError as error:
        told = str(error)
        raise BaseSideError(told if told.startswith(str(member)) else f"{member}: {told}") from None
