"""Nodes without any: roles, proofs, the door, clocks, interfaces, a follower and its leader over a
socket pair."""

from __future__ import annotations

import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf import __version__
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.plugin import leader_connection as following
from pytest_ddpperf.plugin import remote_worker as base_module
from pytest_ddpperf.plugin import running
from pytest_ddpperf.plugin.leader_connection import OVER as OVER_TEXT
from pytest_ddpperf.records.errors import BaseSideError, NodesError
from pytest_ddpperf.records.guard import Judged
from pytest_ddpperf.records.messages import (
    AcquireLocks,
    AskProgress,
    CheckAlive,
    ClockReady,
    Collected,
    Died,
    EndCall,
    Event,
    Exit,
    Hello,
    LaunchFailed,
    LeaveTest,
    LocksAcquired,
    Message,
    NodeJoined,
    Order,
    RaiseError,
    RankFailed,
    ReadyToCall,
    ReadyToMeasure,
    ReleaseLocks,
    ReleaseRanks,
    RunTest,
    ServerStarted,
    ServeVersion,
    SetWindow,
    ShareEnded,
    ShareProgress,
    ShareSettled,
    Sources,
    StopRanks,
    StretchDone,
    TakeShare,
    TestEnded,
    WaitingForLock,
)
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import RankError, Status, Verdict
from pytest_ddpperf.remote import interfaces, rendezvous
from pytest_ddpperf.remote import node as line
from pytest_ddpperf.remote import node_launch as parts_module
from pytest_ddpperf.remote.clocks import closest, compare_clocks, send_clock
from pytest_ddpperf.remote.node import Node
from pytest_ddpperf.remote.node_launch import Parts, alone
from pytest_ddpperf.remote.nodes import OtherNodes
from pytest_ddpperf.remote.torchrun import (
    Role,
    TorchrunStore,
    join_step,
    role,
)
from pytest_ddpperf.remote.version import remote_arguments
from pytest_ddpperf.wire.boot import listen
from pytest_ddpperf.wire.channels import Lines
from pytest_ddpperf.wire.source_trees import Trees

# --- roles

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}


def test_a_role_is_torchruns() -> None:
    found = role(TORCHRUN)
    assert found == Role(
        node=1,
        nodes=2,
        local_rank=0,
        address="head",
        port=29500,
        hosted=True,
        run="7",
    )
    assert (found.leads, found.follows) == (False, True)
    assert replace(found, node=0).leads
    assert not replace(found, local_rank=3).follows
    assert not replace(found, node=0, local_rank=3).leads


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "1", "WORLD_SIZE": "2"},
        {**TORCHRUN, "GROUP_WORLD_SIZE": "1"},
    ],
)
def test_one_node_has_no_roles(environ: dict[str, str]) -> None:
    assert role(environ) is None


def test_restarts_are_refused() -> None:
    with pytest.raises(NodesError, match="--max-restarts"):
        role({**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "3"})


@pytest.mark.parametrize("wrong", [{"GROUP_RANK": "x"}, {"MASTER_PORT": ""}])
def test_variables_that_are_not_whole_are_told(wrong: dict[str, str]) -> None:
    with pytest.raises(NodesError, match="torchrun's variables"):
        role({**TORCHRUN, **wrong})


STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}


def test_a_task_of_srun_has_the_role_that_torchrun_would_give_it() -> None:
    environ = dict(STEP)
    join_step(environ)
    assert role(environ) == replace(role(TORCHRUN), hosted=False)


def test_a_step_that_starts_torchrun_is_torchruns() -> None:
    environ = {**STEP, **TORCHRUN, "SLURM_NODEID": "0"}
    join_step(environ)
    assert role(environ) == role(TORCHRUN)


@pytest.mark.parametrize(
    ("changed", "seen"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, "8 pytests on 2 nodes"),
        ({"SLURM_STEP_NUM_NODES": "1"}, "2 pytests on 1 node"),
        ({"MASTER_ADDR": None}, "2 pytests on 2 nodes"),
        ({"MASTER_PORT": None}, "2 pytests on 2 nodes"),
    ],
)
def test_a_step_whose_tasks_cannot_meet_says_how_to_start_it(
    changed: dict[str, str | None], seen: str
) -> None:
    environ = {
        name: value
        for name, value in {**STEP, **changed}.items()
        if value is not None
    }
    with pytest.raises(NodesError) as caught:
        join_step(environ)
    said = str(caught.value)
    assert said.startswith(f"srun started {seen}: start one on each")
    assert "MASTER_ADDR" in said
    assert "MASTER_PORT" in said


# --- parts of a plan


def test_processes_are_dealt_over_nodes_in_order_and_those_that_serve_are_on_the_first() -> (
    None
):
    plan = Plan(
        world_size=4,
        nodes=2,
        backend="gloo",
        device="cpu",
        parameter_servers=2,
        master=True,
    )
    assert [plan.part(node) for node in range(2)] == [(0, 1, 4, 5, 6), (2, 3)]
    assert [plan.node_of(process) for process in range(plan.processes)] == [
        0,
        0,
        1,
        1,
        0,
        0,
        0,
    ]


# --- clocks


def test_each_exchange_bounds_the_difference_and_all_of_them_closest() -> None:
    ahead = 1_000_000
    found = closest(
        [(0, 8 + ahead, 10), (20, 22 + ahead, 40), (50, 55 + ahead, 60)]
    )
    assert found == ahead


def test_clocks_are_compared_over_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as background:
        sending = background.submit(send_clock, theirs)
        found = compare_clocks(ours)
        sending.result(SOON_SECONDS)
    assert abs(found) < 1e9, "it is one clock"


# --- who is let in

KEY = b"a secret"
SOON_SECONDS = 60.0  # for what needs no time but a busy machine's


class Door:
    """A leader that lets nodes in, in the background."""

    def __init__(self, closing: ExitStack) -> None:
        self.socket = closing.enter_context(listen("127.0.0.1"))
        self.port: int = self.socket.getsockname()[1]
        self.dropped: list[str] = []
        self.came: dict[int, Lines] = {}
        self._closing = closing

    def admit(self, nodes: Sequence[int]) -> None:
        def run() -> None:
            self.came = rendezvous.admit(
                self.socket,
                KEY,
                nodes,
                time.monotonic() + SOON_SECONDS,
                self.dropped.append,
            )

        self._thread = threading.Thread(target=run)
        self._thread.start()
        self._closing.callback(self.end)

    def end(self) -> None:
        self._thread.join()
        for lines in self.came.values():
            lines.socket.close()

    def untrusted(self) -> socket.socket:
        return self._closing.enter_context(
            socket.create_connection(("127.0.0.1", self.port), SOON_SECONDS)
        )


@pytest.fixture
def at_the_door() -> Iterator[Door]:
    with ExitStack() as closing:
        yield Door(closing)


def ended(connected: socket.socket) -> bool:
    try:
        return connected.recv(1) == b""
    except ConnectionError:
        return True


def test_who_knows_the_secret_comes_in(at_the_door: Door) -> None:
    at_the_door.admit([1, 2])
    for node in (2, 1):
        with rendezvous.connect_to_leader(
            "127.0.0.1", at_the_door.port, KEY, node
        ).socket:
            pass
    at_the_door.end()
    assert at_the_door.came.keys() == {1, 2}
    assert at_the_door.dropped == []


def test_a_default_timeout_that_a_conftest_sets_locks_no_node_out(
    at_the_door: Door,
) -> None:
    connected = at_the_door.untrusted()
    socket.setdefaulttimeout(30.0)
    try:
        at_the_door.admit([1])
        assert connected.recv(1, socket.MSG_PEEK)  # the challenge
        time.sleep(0.2)  # the door waits for a proof by now
        rendezvous._prove(connected, KEY, 1)
        at_the_door.end()
    finally:
        socket.setdefaulttimeout(None)
    assert at_the_door.dropped == []
    assert at_the_door.came.keys() == {1}


def test_a_wrong_secret_is_told_at_both_ends(at_the_door: Door) -> None:
    at_the_door.admit([1])
    with pytest.raises(
        NodesError, match="is DDPPERF_SECRET the same on all nodes"
    ):
        rendezvous.connect_to_leader(
            "127.0.0.1", at_the_door.port, b"another", 1
        )
    rendezvous.connect_to_leader(
        "127.0.0.1", at_the_door.port, KEY, 1
    ).socket.close()
    at_the_door.end()
    (reported,) = at_the_door.dropped
    assert reported.startswith(
        "a connection from 127.0.0.1 was dropped: its proof is wrong"
    )


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


ATTACKS = {
    "HTTP": (b"GET / HTTP/1.1\r\n\r\n", "it is not a pytest with this plugin"),
    "endless": (framed(b"x" * 100_000), "it is not a pytest with this plugin"),
    "silence": (b"", "it gave no proof within 1 s"),
    "a wrong proof": (framed(b"x" * 16), "its proof is wrong"),
    "no proof": (None, "it disconnected without a proof"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_who_proves_nothing_is_dropped_and_does_no_harm(
    at_the_door: Door, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        rendezvous,
        "_PROOF_SECONDS",
        1 if attack == "silence" else int(SOON_SECONDS),
    )
    sends, said = ATTACKS[attack]
    at_the_door.admit([1])
    untrusted = at_the_door.untrusted()
    if sends is None:
        untrusted.close()
    else:
        with suppress(ConnectionError):  # dropped while it went on
            untrusted.sendall(sends)
        while not ended(untrusted):  # after the challenge
            pass
    monkeypatch.setattr(rendezvous, "_PROOF_SECONDS", int(SOON_SECONDS))
    rendezvous.connect_to_leader(
        "127.0.0.1", at_the_door.port, KEY, 1
    ).socket.close()
    at_the_door.end()
    assert at_the_door.came.keys() == {1}
    (dropped,) = at_the_door.dropped
    assert said in dropped


def test_whoever_comes_while_others_prove_nothing_waits(
    at_the_door: Door,
) -> None:
    untrusted = at_the_door.untrusted()
    at_the_door.admit([1])
    assert untrusted.recv(1)  # the challenge: there is room for no other
    with ThreadPoolExecutor(1) as background:
        came = background.submit(
            rendezvous.connect_to_leader, "127.0.0.1", at_the_door.port, KEY, 1
        )
        untrusted.close()
        came.result(SOON_SECONDS).socket.close()
    at_the_door.end()
    assert (at_the_door.came.keys(), len(at_the_door.dropped)) == ({1}, 1)


# --- interfaces


def test_the_interface_of_loopback_is_found() -> None:
    assert interfaces.interface_of("127.0.0.1") == "lo"
    assert interfaces.interface_of("127.0.1.1") == "lo"
    assert interfaces.interface_of("203.0.113.77") == ""
    assert interfaces.link_of("no-such-link") == ""


def test_a_link_is_its_kind_and_its_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "_CLASS", tmp_path)
    for name, kind, speed in (
        ("eth0", "1", "25000"),
        ("ib0", "32", "200000"),
        ("veth", "1", "-1"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(kind + "\n")
        (tmp_path / name / "speed").write_text(speed + "\n")
    reported = [interfaces.link_of(name) for name in ("eth0", "ib0", "veth")]
    assert reported == [
        "ethernet 25000 Mb/s",
        "infiniband 200000 Mb/s",
        "ethernet",
    ]


# --- what has to be the same on all nodes


VERSIONS = {"pytest-ddpperf": __version__, "pytest": "9.2"}


class Follows:
    """The other end of a connection to a node: sends the events that a test asks for."""

    def __init__(self, closing: ExitStack, **joined: Any) -> None:
        ours, theirs = socket.socketpair()
        closing.enter_context(theirs)
        closing.enter_context(ours)
        self._lines = Lines(theirs)
        fields = {
            "host": "b",
            "lock_order": "b",
            "versions": VERSIONS,
            **joined,
        }
        self.send(NodeJoined(**fields))
        self.node = Node(1, Lines(ours), SOON_SECONDS)

    def send(self, event: Event) -> None:
        self._lines.send(event)

    def collects(self, files: dict[str, str], **facts: Any) -> None:
        self.send(Hello(__version__))
        sources = Sources(python="3", prefix="/", files=files)
        self.send(Collected(("test_a.py::test_a",), {}, sources, Judged()))
        self.send(ServerStarted(facts))

    def go(self) -> None:
        self._lines.socket.close()

    def received(self) -> list[Order]:
        return self._lines.receive(Order) or []

    def kinds(self) -> list[type[Message]]:
        return [type(order) for order in self.received()]


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


HERE = Sources(
    python="3",
    prefix="/",
    files={"a.py": "1", "b.py": "2", "only_here.py": "3"},
)


MACHINE = {"device_type": "cpu", "device_count": 0, "torch": "2.13.0"}


@pytest.mark.parametrize(
    ("files", "found", "problem"),
    [
        (
            dict(HERE.files),
            {"device_count": 4},
            r"node 1 \(b\) has device count 4, the first node 0$",
        ),
        (
            dict(HERE.files),
            {"torch": "2.11.0"},
            r"node 1 \(b\) has torch 2.11.0, the first node 2.13.0$",
        ),
        ({"src/a.py": "1"}, {}, "imported none of the first node's files"),
        (
            {"a.py": "1", "b.py": "other", "there.py": "4"},
            {},
            r"node 1 \(b\) has other files than the first node: b.py$",
        ),
        ({"a.py": "1", "there.py": "4"}, {}, ""),
    ],
)
def test_devices_torch_and_the_files_that_both_imported_have_to_be_the_same(
    closing: ExitStack,
    files: dict[str, str],
    found: dict[str, Any],
    problem: str,
) -> None:
    follows = Follows(closing)
    follows.collects(files, **{**MACHINE, **found})
    with pytest.raises(NodesError, match=problem) if problem else nullcontext():
        follows.node.collected(HERE, MACHINE, SOON_SECONDS)
    assert follows.node.tests.known == {"test_a.py::test_a"}


def test_another_version_of_what_has_to_be_the_same_is_refused(
    closing: ExitStack,
) -> None:
    follows = Follows(closing, versions={**VERSIONS, "pytest": "8.0"})
    with pytest.raises(
        NodesError, match=r"node 1 \(b\) has pytest 8.0, the first node 9.2"
    ):
        follows.node.check(VERSIONS)
    Follows(closing).node.check(VERSIONS)


def test_what_a_node_reported_before_its_pytest_died_is_received_first(
    closing: ExitStack,
) -> None:
    follows = Follows(closing)
    follows.send(StretchDone())
    follows.send(Died("it died"))
    line = follows.node.line
    assert line.receive(Observer(), SOON_SECONDS) == StretchDone()
    with pytest.raises(BaseSideError, match="it died"):
        line.receive(Observer(), SOON_SECONDS)
    with pytest.raises(BaseSideError, match="it died"):
        line.send(LeaveTest())
    line.close(3)
    assert follows.received() == [Exit(3)], (
        "for the process that torchrun started is there"
    )


def test_a_test_on_some_nodes_has_the_hosts_of_those(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hosts decide how much baselines may drift."""
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    nodes: Any = object.__new__(OtherNodes)
    nodes.nodes = [SimpleNamespace(host="b"), SimpleNamespace(host="c")]
    nodes.interface = "lo"
    assert nodes.facts(2)["hosts"] == "a, b"
    assert nodes.facts(3)["hosts"] == "a, b, c"


def led(nodes: Sequence[Node]) -> OtherNodes:
    """The other nodes of a run in which all have come."""
    other_nodes = OtherNodes.__new__(OtherNodes)
    other_nodes.nodes = list(nodes)
    other_nodes._begun, other_nodes._asked, other_nodes._failed = "", 0, []
    return other_nodes


def test_other_code_that_ranks_of_a_node_opened_is_an_error_and_other_data_a_note(
    tmp_path: Path,
) -> None:
    for name in ("a.py", "data.bin", "written.log"):
        (tmp_path / name).write_text(name)
    launcher = Launcher.__new__(Launcher)
    launcher.trees = Trees(current=str(tmp_path), base=str(tmp_path), kept=())
    there = launcher.trees.digests(["a.py"])
    there |= {"data.bin": "other", "only_there.bin": "1", "written.log": ""}
    assert list(launcher._compare_nodes({"node 1 (b)": there})) == [
        "node 1 (b) reads other data than the first node: data.bin"
    ]
    there["a.py"] = "other"
    problem = r"node 1 \(b\) has other files than the first node: a.py$"
    with pytest.raises(NodesError, match=problem):
        list(launcher._compare_nodes({"node 1 (b)": there}))


# --- another version


def test_a_version_is_awaited_on_all_nodes_as_long_as_there_is_time(
    closing: ExitStack,
) -> None:
    follows = Follows(closing)
    nodes: Any = object.__new__(OtherNodes)
    nodes.role, nodes.address = SimpleNamespace(nodes=2), "127.0.0.1"
    nodes.nodes, nodes._timeout = [follows.node], SOON_SECONDS
    nodes._key, nodes._dropped = b"key", {}
    order = ServeVersion(commit="1a2b", kept=(), own_tests=True, seconds=0.0)
    problem = "node 1 of 2 did not come within 0 s$"
    with (
        pytest.raises(NodesError, match=problem),
        nodes.serving_version(order) as connected,
    ):
        connected(0.0)
    (received,) = follows.received()
    assert isinstance(received, ServeVersion)
    assert (received.commit, received.own_tests) == ("1a2b", True)
    assert received.port > 0


# --- what comes of a test


def test_the_verdict_is_every_nodes_but_what_is_saved_is_the_first_nodes() -> (
    None
):
    def reported(status: Status, reason: str) -> Verdict:
        return following._verdict(Verdict(status=status, reason=reason))

    assert reported(Status.PASS, "within-limits") == Verdict(
        status=Status.PASS, reason="within-limits"
    )
    assert reported(Status.NO_BASELINE, "missing").status is Status.NO_BASELINE
    follows = Verdict(status=Status.NOT_GATED, reason="follows")
    assert (
        reported(Status.NOT_GATED, "saving")
        == following._verdict(None)
        == follows
    )


RERUNS = (
    "--reruns",
    "--reruns-delay",
    "--only-rerun",
    "--rerun-except",
    "--force-reruns",
    "--max-suite-reruns",
)


@pytest.mark.parametrize("option", RERUNS)
def test_a_pytest_that_is_led_runs_no_test_again_by_itself(option: str) -> None:
    assert (
        remote_arguments([option, "2", "tests"], ["tests"])
        == remote_arguments([f"{option}=2", "tests"], ["tests"])
        == ["tests"]
    )
    assert remote_arguments(["--fail-on-flaky", "tests"], ["tests"]) == [
        "tests"
    ]


@pytest.mark.parametrize("when", ["setup", "call", "teardown"])
@pytest.mark.parametrize("over", [False, True])
def test_what_a_pytest_that_is_led_tells_of_a_test_is_no_failure_there(
    when: str, over: bool
) -> None:
    """Or a plugin would run it again by itself, after some delay."""
    remote_pytest = base_module.WorkerPlugin(
        SimpleNamespace(over=over), own_tests=False
    )  # type: ignore[arg-type]
    report = pytest.TestReport(
        "test_a", ("test_a.py", 1, "test_a"), {}, "failed", OVER_TEXT, when
    )  # type: ignore[arg-type]
    making = remote_pytest.pytest_runtest_makereport(
        SimpleNamespace(path="test_a.py"), None
    )  # type: ignore[arg-type]
    next(making)
    with pytest.raises(StopIteration) as stopped:
        making.send(report)
    assert stopped.value.value.outcome == "skipped"
    assert base_module._why(stopped.value.value) == OVER_TEXT
    assert (remote_pytest._broken, remote_pytest._apart) == (
        when != "call",
        when != "call" and not over,
    )


def test_what_fails_on_another_node_as_its_test_is_left_is_told_and_all_are_left_at_once(
    closing: ExitStack,
) -> None:
    several = [Follows(closing), Follows(closing)]
    for number, follows in enumerate(several, 1):
        follows.node.line.name = f"node {number}"
        follows.node.tests._test = "test_a"
    first, second = several

    def answer() -> None:
        assert second.received() == [LeaveTest()], "before the first has ended"
        second.send(LocksAcquired(()))  # late, and for nobody
        second.send(TestEnded(apart="Error: not removed"))
        first.send(TestEnded("over"))

    thread = threading.Thread(target=answer)
    thread.start()
    other_nodes = led([follows.node for follows in several])
    other_nodes.leave()
    thread.join()
    assert other_nodes.failed() == ["node 2: Error: not removed"]
    other_nodes.leave()
    assert other_nodes.failed() == []


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_test_asked_for_is_told_on_all_nodes_before_it_is_left(
    closing: ExitStack, fails: bool
) -> None:
    """Its body goes on there to its end: what is torn down may need what it did."""
    follows = Follows(closing)
    tests = follows.node.tests
    tests.known, tests._started = frozenset(["test_a"]), True
    other_nodes = led([follows.node])
    plan = Plan(world_size=2, nodes=2, backend="gloo", device="cpu")
    follows.send(ReadyToCall("f", plan, number=1))
    ready = ReadyToCall("f", plan)
    with suppress(NodesError), other_nodes.together("test_a", ready, 2) as end:
        if fails:
            raise NodesError("rank 1 failed")
        end(EndCall((b"one",)))
    follows.send(TestEnded(apart="not removed"))
    other_nodes.leave()
    end_of_call = RaiseError("rank 1 failed") if fails else EndCall((b"one",))
    assert follows.received() == [RunTest("test_a"), end_of_call, LeaveTest()]
    assert other_nodes.failed() == [f"{follows.node}: not removed"]


@pytest.mark.parametrize("here", ["", "fails here"])
def test_what_fails_on_another_node_is_an_error_of_the_tests_teardown(
    monkeypatch: pytest.MonkeyPatch, here: str
) -> None:
    ended: list[bool] = []

    def end_test() -> list[str]:
        ended.append(True)
        return ["node 1: Error: not removed"]

    sections: list[tuple[str, ...]] = []
    run: Any = SimpleNamespace(role=SimpleNamespace(end_test=end_test))
    item: Any = SimpleNamespace(
        nodeid="a", add_report_section=lambda *section: sections.append(section)
    )
    monkeypatch.setattr(running, "is_distributed", lambda item: True)
    ending = running.RunningTests(run).pytest_runtest_teardown(item)
    next(ending)
    if here:
        with pytest.raises(ValueError, match=here):
            ending.throw(ValueError(here))
        assert sections == [
            ("teardown", "of another node", "node 1: Error: not removed")
        ]
    else:
        with pytest.raises(
            pytest.fail.Exception, match="node 1: Error: not removed"
        ):
            ending.send(None)
    assert ended == [True]


# --- who comes


def test_a_node_that_does_not_answer_is_asked_and_then_gone(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "_ASK_SECONDS", 0.2)
    monkeypatch.setattr(line, "_TICK_SECONDS", 0.05)
    monkeypatch.setattr(line, "_GONE_SECONDS", 1.0)
    follows = Follows(closing)
    with pytest.raises(
        BaseSideError, match=r"node 1 \(b\) said nothing for \d s"
    ):
        follows.node.line.receive(Observer(), SOON_SECONDS)
    assert CheckAlive() in follows.received()
    with pytest.raises(BaseSideError, match="said nothing"):
        follows.node.line.send(RunTest("test_a"))


def test_whoever_waits_for_one_answer_asks_nothing_else(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the clocks are compared, each byte is a question about the time."""
    for name, seconds in (("ASK", 0.1), ("TICK", 0.05), ("GONE", 0.5)):
        monkeypatch.setattr(line, f"_{name}_SECONDS", seconds)
    follows = Follows(closing)
    with pytest.raises(BaseSideError, match=r"said nothing for 0.5 s"):
        follows.node.line.answer(ClockReady)
    assert CheckAlive() not in follows.received()


TWO_NODES = Plan(world_size=2, nodes=2, backend="gloo", device="cpu")
CALL = ReadyToCall("f", replace(TWO_NODES, warmup=2), number=2)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (
            ReadyToMeasure("", CALL.plan, number=2),
            "for a measurement there, and for a call (f) on the first",
        ),
        (
            ReadyToCall("g", CALL.plan, number=2),
            "for a call (g) there, and for a call (f) on the first node",
        ),
        (
            ReadyToCall("f", CALL.plan, number=1),
            "as number 1 there is number 2 on the first node: does something run the test again",
        ),
        (
            ReadyToCall("f", replace(TWO_NODES, warmup=5), number=2),
            "for warmup 5 there, and for 2 on the first node",
        ),
    ],
)
def test_what_nodes_ask_for_has_to_be_the_same(
    closing: ExitStack, there: Event, said: str
) -> None:
    follows = Follows(closing)
    follows.send(there)
    with pytest.raises(BaseSideError, match=re.escape(said)):
        follows.node.await_ready(CALL)
    follows.send(CALL)
    follows.node.await_ready(CALL)


def test_an_answer_of_another_kind_is_an_error(closing: ExitStack) -> None:
    follows = Follows(closing)
    follows.send(StretchDone())
    with pytest.raises(
        BaseSideError, match=r"^node 1 \(b\) reported StretchDone$"
    ):
        follows.node.await_ready(CALL)


def test_locks_are_taken_node_by_node_in_the_order_of_their_hosts(
    closing: ExitStack,
) -> None:
    """Whoever leads: two runs that lead from either end of the same nodes cannot wait for each
    other in a ring."""
    follows = Follows(closing, lock_order="host a")
    taken: list[str] = []

    @contextmanager
    def here() -> Iterator[tuple[()]]:
        assert follows.kinds() == [AcquireLocks]
        taken.append("here")
        yield ()

    follows.send(LocksAcquired(()))
    with alone([follows.node], "host z", here(), Observer()):
        assert taken == ["here"], "after the other, whose host comes first"
    assert follows.kinds() == [ReleaseLocks]


def test_a_wait_on_another_node_is_told_with_its_name(
    closing: ExitStack,
) -> None:
    class Watches(Observer):
        def waiting(self, resource: object) -> None:
            reported.append(str(resource))

    reported: list[str] = []
    follows = Follows(closing, lock_order="b boot")
    for resource in ("/sys/devices/system/cpu/cpu3", "/"):
        follows.send(WaitingForLock(resource))
    follows.send(LocksAcquired(("/sys/devices/system/cpu/cpu3",)))
    with alone([follows.node], "a other", nullcontext(()), Watches()):
        assert reported == ["node 1 (b)/cpu3", "node 1 (b)/all"]


def test_a_wait_for_what_this_very_launch_has_is_an_error(
    closing: ExitStack,
) -> None:
    """Two nodes on one machine, perhaps in containers, whose cores are the same."""
    follows = Follows(closing, lock_order="pod-b boot")
    here = nullcontext([Path("/cores/0")])
    follows.send(WaitingForLock("/cores/0"))
    follows.send(LocksAcquired(("/cores/0",)))  # once it is free
    reported = (
        r"^node 1 \(b\) is on the same machine and the same cores or devices as node 0: give each"
        r" node its own"
    )
    with (
        pytest.raises(BaseSideError, match=reported),
        alone([follows.node], "pod-a boot", here, Observer()),
    ):
        pass
    assert follows.kinds() == [AcquireLocks, ReleaseLocks]


# --- parts of a launch


AHEAD_NS = 1000e9


class Parted:
    """A launch of two ranks a node, of which those of node 1 are elsewhere."""

    def __init__(self, closing: ExitStack) -> None:
        self.follows = Follows(closing)
        node = self.follows.node
        node.line.clock_ahead_ns = lambda: AHEAD_NS
        plan = Plan(world_size=4, nodes=2, backend="gloo", device="cpu")
        names = {rank: f"rank {rank} (node {rank // 2})" for rank in range(4)}
        self.parts = Parts(plan, ("127.0.0.1", 1), [node], names)
        self.parts.begin()
        order = TakeShare(plan, ("127.0.0.1", 1))
        assert self.follows.received() == [order]

    def receive(self, until: Callable[[], bool]) -> None:
        end = time.monotonic() + SOON_SECONDS
        while not until():
            assert time.monotonic() < end
            self.parts.receive()


@pytest.fixture
def parted(closing: ExitStack) -> Parted:
    return Parted(closing)


def error(rank: int, when: float) -> RankError:
    return RankError(
        rank=rank,
        when=when,
        phase="setup",
        summary="ValueError: x",
        name=f"rank {rank}",
    )


def test_results_of_other_nodes_arrive_by_rank(parted: Parted) -> None:
    assert not parted.parts.settled()
    parted.follows.send(ShareSettled({2: b"two", 3: b"three"}))
    parted.receive(lambda: parted.parts.settled())
    assert parted.parts.results == {2: b"two", 3: b"three"}
    parted.parts.release()
    assert parted.parts.clocks_ahead_ns() == {2: AHEAD_NS, 3: AHEAD_NS}
    parted.follows.send(ShareEnded(notes=("odd",)))
    parted.parts.await_end()
    assert parted.follows.kinds() == [ReleaseRanks]
    assert (parted.parts.errors, parted.parts.notes) == ([], ["odd"])


def test_an_error_is_in_the_order_in_which_it_arrives_whatever_the_other_clock_says(
    parted: Parted,
) -> None:
    before = time.monotonic()
    parted.follows.send(RankFailed(error(3, before + 1007.0)))
    parted.receive(lambda: bool(parted.parts.errors))
    (found,) = parted.parts.errors
    assert before <= found.when <= time.monotonic()
    assert parted.parts.name(found.rank) == "rank 3 (node 1)"


def test_the_window_of_a_program_is_sent_once_and_again_when_its_begin_is_known(
    parted: Parted,
) -> None:
    for begin in (0, 0, 12, 12):
        parted.parts.set_window(begin, 30)
    assert parted.follows.received() == [SetWindow(0, 30), SetWindow(12, 30)]
    parted.follows.send(ShareProgress({2: 9, 3: 10}))
    parted.receive(lambda: bool(parted.parts.progress))
    assert parted.parts.progress[1].updates == {2: 9, 3: 10}
    parted.parts.set_window(14, 30)
    assert parted.parts.progress == {}, "those were no answer to this"


def test_nodes_say_how_far_a_program_is_or_are_not_waited_for(
    parted: Parted, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ShareProgress({2: 9, 3: 9})
    parted.follows.send(before)
    parted.receive(lambda: bool(parted.parts.progress))
    now = ShareProgress(
        {2: 12, 3: 12}, (3,), {3: {"0": [(7, "all_reduce", 4)]}}
    )
    parted.follows.send(now)
    (answer,) = parted.parts.ask_progress(True)
    assert answer.updates == {2: 12, 3: 12}
    assert (answer.waiting, [*answer.started]) == ((3,), [3])
    assert parted.follows.received() == [AskProgress(True)]
    monkeypatch.setattr(parts_module, "_ANSWER_SECONDS", 0.0)
    assert [*parted.parts.ask_progress(False)] == []


def test_what_is_given_up_was_so_when_all_were(parted: Parted) -> None:
    parted.parts.stop(9.0, "too late")
    parted.follows.send(
        ShareEnded(
            errors=(error(2, 1012.0),),
            waiting=(error(3, math.inf),),
            started={2: {"0": [(7, "all_reduce", 4)]}},
        )
    )
    parted.parts.await_end()
    assert [(found.rank, found.when) for found in parted.parts.errors] == [
        (2, 9.0),
        (3, math.inf),
    ]
    assert parted.follows.received() == [StopRanks("too late")]
    assert [*parted.parts.started] == [2]


def test_a_node_that_goes_after_it_delivered_is_an_error_for_its_clock_is_not_known(
    parted: Parted,
) -> None:
    def gone() -> float:
        raise BaseSideError("node 1 (b) is gone")

    parted.follows.send(ShareSettled({}))
    parted.receive(lambda: parted.parts.settled())
    parted.follows.node.line.clock_ahead_ns = gone
    parted.parts.release()
    assert "is gone" in parted.parts.errors[0].summary


@pytest.mark.parametrize("kind", [LaunchFailed, TestEnded])
def test_a_part_that_cannot_be_is_an_error_of_its_first_rank(
    parted: Parted, kind: type[LaunchFailed | TestEnded]
) -> None:
    parted.follows.send(kind("no space"))
    parted.receive(lambda: bool(parted.parts.errors))
    (found,) = parted.parts.errors
    assert (found.rank, found.summary) == (2, "no space")
    assert parted.parts.settled()


def test_a_node_that_goes_is_an_error_and_not_a_wait(parted: Parted) -> None:
    parted.follows.go()
    parted.receive(lambda: bool(parted.parts.errors))
    assert "node 1 (b) is gone" in parted.parts.errors[0].summary
    parted.parts.stop(1.0)
    parted.parts.await_end()
    assert parted.parts.channels() == []


def test_a_node_that_does_not_end_its_ranks_is_not_waited_for(
    parted: Parted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "_END_SECONDS", 0.2)
    parted.parts.stop(1.0)
    parted.parts.await_end()
    assert "did not end its ranks" in parted.parts.errors[0].summary


# --- a store at which nodes meet


def test_a_store_whose_port_is_taken_is_named_by_its_address(
    closing: ExitStack,
) -> None:
    taken = closing.enter_context(socket.socket())
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    place = Role(
        node=0,
        nodes=2,
        local_rank=0,
        address="127.0.0.1",
        port=port,
        hosted=False,
        run="1",
    )
    store = TorchrunStore(place, 60.0, {"address": "127.0.0.1"})
    closing.callback(store.close)
    said = f"^the store at 127.0.0.1:{port}: .*already in use"
    with pytest.raises(NodesError, match=said):
        store.answer()
