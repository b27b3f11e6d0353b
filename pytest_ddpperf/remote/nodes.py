"""All other nodes, as the first one sees them."""

import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    suppress,
)
from pathlib import Path

from pytest_ddpperf.launch import Observer
from pytest_ddpperf.launch.remote_ranks import RemoteRanks
from pytest_ddpperf.records.errors import (
    BaseSideError,
    DdpPerfError,
    NodesError,
)
from pytest_ddpperf.records.messages import (
    Address,
    NodeJoined,
    Order,
    RaiseError,
    Ready,
    ServeVersion,
    Sources,
    changed,
)
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import Facts
from pytest_ddpperf.remote import rendezvous
from pytest_ddpperf.remote.interfaces import address_of, interface_of, link_of
from pytest_ddpperf.remote.node import Node
from pytest_ddpperf.remote.node_launch import Parts, alone
from pytest_ddpperf.remote.process import START_SECONDS
from pytest_ddpperf.remote.torchrun import Role, TorchrunStore
from pytest_ddpperf.wire.boot import contents, listen
from pytest_ddpperf.wire.channels import Lines

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STORE_SECONDS = 60.0  # for torchrun's store to answer
_MOST_LINES = 10  # about untrusted connections
# for nodes that have not come when all is over, so that they end, too
_LAST_SECONDS = 30.0
# While further connections are awaited: between looks at whether the nodes are still there.
_LOOK_SECONDS = 1.0


def _host_order() -> str:
    """The place of a host's locks among those of all hosts: every leader takes them in this
    order."""
    return f"{socket.gethostname()} {contents(_BOOT_ID)}".strip()


def describe_node(versions: Mapping[str, str]) -> NodeJoined:
    """Return what a node reports when it joins; `versions` are of what has to be the same on all
    nodes."""
    return NodeJoined(socket.gethostname(), _host_order(), versions)


class ConnectedNodes:
    """The other nodes of one run, by the connections to them. Raises NodesError if they cannot be
    used; `close` ends the run on all."""

    def __init__(self, address: str, timeout_seconds: float) -> None:
        """`address`: by which they reach this node."""
        self.address, self.interface = address, interface_of(address)
        self._timeout = timeout_seconds
        self.nodes: list[Node] = []
        self._begun = ""  # the test that all nodes are in
        self._asked = 0  # how often it asked for something
        # what did on other nodes as the test was left there
        self._failed: list[str] = []

    def add(self, connections: Mapping[int, Lines]) -> None:
        """Add nodes that have connected, by number."""
        with _as_nodes_error():
            self.nodes += [
                Node(number, lines, self._timeout)
                for number, lines in sorted(connections.items())
            ]

    @property
    def count(self) -> int:
        """How many nodes the run has, this one included."""
        return 1 + len(self.nodes)

    @property
    def reported(self) -> list[str]:
        """What the end of the run says of them, each line once."""
        return []

    @property
    def hosts(self) -> list[str]:
        """By node."""
        return [socket.gethostname(), *(node.host for node in self.nodes)]

    def facts(self, nodes: int) -> Facts:
        return {
            "hosts": ", ".join(self.hosts[:nodes]),
            "interface": self.interface,
            "network": link_of(self.interface),
            "topology_address": os.environ.get("SLURM_TOPOLOGY_ADDR"),
        }

    def _taking_part(self, nodes: int) -> list[Node]:
        return [node for node in self.nodes if node.number < nodes]

    def parts(self, plan: Plan, store: Address) -> RemoteRanks:
        names = {
            process: f"{plan.name(process)} (node {node}, {self.hosts[node]})"
            for node in range(plan.nodes)
            for process in plan.part(node)
        }
        return Parts(plan, store, self._taking_part(plan.nodes), names)

    def alone(
        self,
        plan: Plan,
        here: AbstractContextManager[Sequence[Path]],
        observer: Observer,
    ) -> AbstractContextManager[None]:
        return alone(
            self._taking_part(plan.nodes), _host_order(), here, observer
        )

    def start(self, arguments: Sequence[str]) -> None:
        """Let their pytests collect, with further `arguments`: these do already."""

    def collected(self, here: Sources, facts: Facts) -> None:
        """Wait until all have collected the same as `here`, on machines with as many devices as the
        `facts` tell."""
        until = time.monotonic() + START_SECONDS
        with _as_nodes_error():
            for node in self.nodes:
                left = max(0.0, until - time.monotonic())
                with _named(node):
                    node.collected(here, facts, left)

    # --- one test

    @contextmanager
    def together(
        self, nodeid: str, ready: Ready, nodes: int
    ) -> Iterator[Callable[[Order], None]]:
        """Let the test run on so many nodes up to what it asks for here; raises BaseSideError if it
        asks for something else there. The function that is yielded sends the order that ends the
        measurement or call. If an error does, the nodes get it, and go on to the end of the test,
        for what is torn down there may need what it did."""
        self._asked = self._asked + 1 if self._begun == nodeid else 1
        self._begun = nodeid
        taking_part = self._taking_part(nodes)
        try:
            for node in taking_part:
                with _named(node):
                    node.begin(nodeid)
            for node in taking_part:
                with _named(node):
                    node.await_ready(changed(ready, number=self._asked))
        except BaseSideError:
            self._end_test()  # else some would wait for what comes of it
            raise

        def end(order: Order) -> None:
            """Send an order to all that are still there; the next test reports those that are
            not."""
            for node in taking_part:
                with suppress(BaseSideError):
                    node.line.send(order)

        try:
            yield end
        except DdpPerfError as error:
            end(RaiseError(str(error)))
            raise

    def leave(self) -> None:
        """End the test everywhere, and wait for it."""
        self._failed += self._end_test()

    def _end_test(self) -> list[str]:
        """End the test everywhere and wait for it; return what failed there outside of its call."""
        self._begun = ""
        # all at once
        ending = [node for node in self.nodes if node.tests.request_end()]
        reported = [(node, node.tests.await_end()) for node in ending]
        return [f"{node}: {apart}" for node, apart in reported if apart]

    def failed(self) -> list[str]:
        """What failed on other nodes outside of the calls of tests that were left, once."""
        failed, self._failed = self._failed, []
        return failed

    # --- the end

    def close(self, status: int) -> None:
        """All is over: every node exits with this status, too."""
        for node in self.nodes:
            node.line.close(status)


class OtherNodes(ConnectedNodes):
    """The other nodes that torchrun started, which connect with this one."""

    def __init__(
        self, role: Role, versions: Mapping[str, str], timeout_seconds: float
    ) -> None:
        """Listen, and publish the address in torchrun's store; `versions` as `describe_node` has
        them."""
        self.role, self._versions = role, versions
        # untrusted connections, in words
        self._dropped: dict[str, None] = {}
        self._closing = ExitStack()
        given = os.environ.get(rendezvous.VARIABLE)
        reported = secrets.token_hex(32) if not given else ""
        self._key = (given or reported).encode()
        try:
            address = address_of(role.address)
            self._door = self._closing.enter_context(listen(address))
        except OSError as error:
            raise NodesError(
                f"MASTER_ADDR {role.address}: it cannot be listened on here: {error}"
            ) from None
        super().__init__(address, timeout_seconds)
        self._store = TorchrunStore(
            role,
            _STORE_SECONDS,
            {
                "address": address,
                "port": self._door.getsockname()[1],
                "secret": reported,
            },
        )
        self._closing.callback(self._store.close)
        self._awaited = False

    @property
    def count(self) -> int:
        return self.role.nodes

    def __str__(self) -> str:
        where = (
            f"{self.interface} ({self.address})"
            if self.interface
            else self.address
        )
        return f"{self.role.nodes} nodes over {where}: {', '.join(self.hosts)}"

    @property
    def reported(self) -> list[str]:
        # who it is of may go on for ever
        return list(self._dropped)[:_MOST_LINES]

    def start(self, arguments: Sequence[str]) -> None:
        """Wait for all nodes, and let their pytests collect: see `Node.start`."""
        self._awaited = True
        seconds = self._patience
        self._admit(seconds)
        self._refuse_missing({node.number for node in self.nodes}, seconds)
        for node in self.nodes:
            node.check(self._versions)
        with _as_nodes_error():
            for node in self.nodes:
                node.start(arguments)

    @property
    def _patience(self) -> float:
        """The seconds that nodes have to come."""
        return max(START_SECONDS, self._timeout)

    def _refuse_missing(self, came: Collection[int], seconds: float) -> None:
        """Raise NodesError unless all nodes came within so many seconds."""
        missing = sorted({*range(1, self.role.nodes)} - {*came})
        if not missing:
            return
        which = ", ".join(map(str, missing))
        who = f"node {which}" if len(missing) == 1 else f"nodes {which}"
        asked = " (--ddp-timeout)" if seconds > START_SECONDS else ""
        problem = f"{who} of {self.role.nodes} did not come within {seconds:.0f} s{asked}"
        raise NodesError("\n".join((problem, *self.reported)))

    def _admit(self, seconds: float) -> None:
        self._store.answer()  # first, for it may import torch meanwhile
        until = time.monotonic() + seconds
        wanted = range(1, self.role.nodes)
        came = rendezvous.admit(
            self._door, self._key, wanted, until, self._dropped.setdefault
        )
        self.add(came)
        if len(came) == len(wanted):
            self._door.close()
            self._store.close()

    @contextmanager
    def serving_version(
        self, order: ServeVersion
    ) -> Iterator[Callable[[float], Mapping[int, Lines]]]:
        """Let each node start a pytest of another version, in the background. The function that is
        yielded waits for the connections of all, at most so many seconds; they are closed at the
        end."""
        with ExitStack() as closing, _as_nodes_error():
            door = closing.enter_context(listen(self.address))
            order = changed(order, port=door.getsockname()[1])
            for node in self.nodes:
                node.line.send(order)

            def connected(seconds: float) -> Mapping[int, Lines]:
                seconds = min(seconds, self._patience)
                came = self._admit_at(door, seconds)
                for lines in came.values():
                    closing.callback(lines.socket.close)
                self._refuse_missing(came, seconds)
                return came

            yield connected

    def _admit_at(
        self, door: socket.socket, seconds: float
    ) -> dict[int, Lines]:
        """Return the further connections that nodes make within so many seconds; raises
        BaseSideError if a node is gone before."""
        until = time.monotonic() + seconds
        came: dict[int, Lines] = {}
        missing = {node.number for node in self.nodes}
        while missing and (now := time.monotonic()) < until:
            came |= rendezvous.admit(
                door,
                self._key,
                missing,
                now + _LOOK_SECONDS,
                self._dropped.setdefault,
            )
            missing -= came.keys()
            for node in self.nodes:
                node.line.check()
        return came

    def close(self, status: int) -> None:
        with self._closing:
            if not self._awaited:
                with suppress(NodesError):
                    self._admit(_LAST_SECONDS)
            super().close(status)


@contextmanager
def _as_nodes_error() -> Iterator[None]:
    try:
        yield
    except BaseSideError as error:
        raise NodesError(str(error)) from None


@contextmanager
def _named(node: Node) -> Iterator[None]:
    """Put the node's name into errors."""
    try:
        yield
    except BaseSideError as error:
        reported = str(error)
        raise BaseSideError(
            reported
            if reported.startswith(str(node))
            else f"{node}: {reported}"
        ) from None
