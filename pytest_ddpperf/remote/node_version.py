"""Another version on all nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pytest_ddpperf.git import commit_named
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.launch.failed_ranks import text_with_output
from pytest_ddpperf.options.settings import Settings
from pytest_ddpperf.records.errors import AgainstError, BaseSideError, DdpPerfError, GitError
from pytest_ddpperf.records.messages import Event, Order, OrderKind, Sources
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import LaunchSamples
from pytest_ddpperf.remote.arguments import Invocation
from pytest_ddpperf.remote.node import unlike
from pytest_ddpperf.remote.node_launch import Member, in_words
from pytest_ddpperf.remote.nodes import OtherNodes, host_order
from pytest_ddpperf.remote.process import START_SECONDS
from pytest_ddpperf.remote.version import BaseSide
from pytest_ddpperf.wire.source_trees import Trees


def from_top(trees: Trees) -> list[str]:
    """What it keeps, for another node's tree; what is outside of the tree is that node's own."""
    return [within for path in trees.kept if (within := trees.within(path)) is not None]


def refuse_lacking(top: Path, ref: str, commit: str) -> None:
    """Raises AgainstError if this node's clone lacks the commit that a ref names on the first node."""
    try:
        commit_named(top, commit)
    except GitError:
        problem = f"{top} lacks {commit}, which {ref} is on the first node"
        raise AgainstError("--ddp-against", problem, f"git fetch origin {commit} brings it") from None


class BaseOfNodes(BaseSide):
    """The other version in the view of the leader, which leads launches over several nodes.

    All shares of such a launch are started by that version's pytests, this node's too.
    """

    def __init__(
        self, settings: Settings, invocation: Invocation, other_nodes: OtherNodes, launcher: Callable[[], Launcher]
    ) -> None:
        """Raises AgainstError."""
        super().__init__(settings, invocation)
        self._other_nodes, self._launcher = other_nodes, launcher
        self._measured: list[LaunchSamples] = []  # of the measurement under way
        self._plan: Plan | None = None  # of a measurement over several nodes
        self.more = {"node": 0, "nodes": other_nodes.role.nodes, "interface": other_nodes.interface}

    def start(self, seconds: float | None = None) -> None:
        # Of one name each clone may have another commit.
        commit = self.version.commit if self.version.ref not in ("", "self") else ""
        try:
            self._others = [node.start_base(from_top(self.trees), commit) for node in self._other_nodes.nodes]
        except BaseSideError as error:
            raise AgainstError(self.option, str(error)) from None
        super().start(seconds)

    def collect(self, here: Sources | None) -> None:
        first = Member(0, f"node 0 ({self._other_nodes.hosts[0]})", host_order(), self.remote_pytest, self.tests)
        self._side = self._other_nodes.side([first, *self._others])
        super().collect(here)
        if self.tests.sources is None:
            return  # which every test will report: it lacks the code, on all nodes
        for member in self._others:
            try:
                member.tests.hello(START_SECONDS)
                member.tests.collect(START_SECONDS)
            except BaseSideError as error:
                said = str(error).removeprefix(f"{self.option}: ")
                raise AgainstError(self.option, f"{member}: {said}") from None
            if member.tests.sources is not None and (problem := unlike(self.tests.sources, member.tests.sources)):
                raise AgainstError(self.option, f"{self.version}: {member} {problem}")

    def begin(self, nodeid: str, label: str, plan: Plan) -> Event:
        self._measured, self._plan = [], None
        if plan.nodes == 1:
            return super().begin(nodeid, label, plan)
        if plan.rpc:
            raise BaseSideError(
                "an RPC launch over several nodes cannot be compared with another version: use stored baselines"
            )
        try:
            return self._begin_on_all(nodeid, label, plan.nodes)
        except BaseSideError:
            self._side.leave()  # it would wait for ever
            raise

    def _begin_on_all(self, nodeid: str, label: str, nodes: int) -> Event:
        ready = self._side.begin(nodeid, None, nodes)
        if not ready.gate:
            first = f"the test asks for {in_words(ready)} first"
            raise BaseSideError(f"{first}, which is not supported over several nodes")
        if ready.label != label:
            raise BaseSideError(f"there the test measured {ready.label!r} where it measures {label!r} here")
        self._plan = ready.plan
        return ready

    def measure(self, observer: Observer, steps: int | None) -> LaunchSamples:
        if self._plan is None:
            return super().measure(observer, steps)
        plan = self._plan if steps is None else self._plan.exactly(steps)
        try:
            taken = self._launch(plan, observer)
        except DdpPerfError as error:
            raise BaseSideError(text_with_output(error)) from None
        self._measured.append(taken)
        return taken

    def _launch(self, plan: Plan, observer: Observer) -> LaunchSamples:
        return self._launcher().lead(plan, self._side, observer, self.tree, self.environ)

    def end_measurement(self) -> None:
        if self._plan is None:
            super().end_measurement()
            return
        end = Order(OrderKind.END_MEASUREMENT, samples=tuple(self._measured))
        self._side.send_to_all(self._plan.nodes, end)

    def leave(self) -> None:
        self._side.leave()
