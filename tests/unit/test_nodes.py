"""Nodes without any: roles, proofs, the door, clocks, interfaces, a follower and its leader over a socket pair."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf import __version__
from pytest_ddpperf.launch import Nobody
from pytest_ddpperf.launch.clock import Clock, Offset, offset
from pytest_ddpperf.led import Sources
from pytest_ddpperf.nodes import door, interface, line, secret
from pytest_ddpperf.nodes import parts as parts_module
from pytest_ddpperf.nodes import role as role_module
from pytest_ddpperf.nodes.node import Node
from pytest_ddpperf.nodes.parts import Parts
from pytest_ddpperf.nodes.role import Role, role
from pytest_ddpperf.nodes.side import Side
from pytest_ddpperf.records import Plan
from pytest_ddpperf.records.errors import BaseSideError, NodesError
from pytest_ddpperf.wire.channels import Lines

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


@pytest.fixture(autouse=True)
def _no_torchrun_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_module, "_elastic", lambda: "")


def test_a_role_is_torchruns() -> None:
    found = role(TORCHRUN)
    assert found == Role(node=1, nodes=2, local_rank=0, address="head", port=29500, hosted=True, run="7")
    assert (found.leads, found.follows) == (False, True)
    assert replace(found, node=0).leads
    assert not replace(found, local_rank=3).follows
    assert not replace(found, node=0, local_rank=3).leads


@pytest.mark.parametrize("environ", [{}, {"RANK": "1", "WORLD_SIZE": "2"}, {**TORCHRUN, "GROUP_WORLD_SIZE": "1"}])
def test_one_node_has_no_roles(environ: dict[str, str]) -> None:
    assert role(environ) is None


def test_restarts_are_refused() -> None:
    with pytest.raises(NodesError, match="--max-restarts"):
        role({**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "3"})


@pytest.mark.parametrize("wrong", [{"GROUP_RANK": "x"}, {"MASTER_PORT": ""}])
def test_variables_that_are_not_whole_are_told(wrong: dict[str, str]) -> None:
    with pytest.raises(NodesError, match="torchrun's variables"):
        role({**TORCHRUN, **wrong})


@pytest.mark.parametrize(
    ("words", "changing"),
    [
        (["torchrun", "--nnodes", "1:4", "x.py"], "1:4"),
        (["torchrun", "--nnodes=2:3"], "2:3"),
        (["torchrun", "--nnodes", "2:2"], ""),
        (["torchrun", "--nnodes=2"], ""),
        (["python", "-m", "pytest"], ""),
    ],
)
def test_a_range_of_nodes_is_seen(words: list[str], changing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(Path, "read_text", lambda self: "\0".join(words) + "\0")
    assert role_module._elastic() == changing


# --- parts of a plan


def test_processes_are_dealt_over_nodes_in_order_and_those_that_serve_are_on_the_first() -> None:
    plan = Plan(world_size=4, nodes=2, backend="gloo", device="cpu", parameter_servers=2, master=True)
    assert [plan.part(node) for node in range(2)] == [(0, 1, 4, 5, 6), (2, 3)]
    assert [plan.node_of(process) for process in range(plan.processes)] == [0, 0, 1, 1, 0, 0, 0]


# --- clocks


def test_each_exchange_bounds_the_offset_and_all_of_them_closest() -> None:
    ahead = 1_000_000
    found = offset([(0, 8 + ahead, 10), (20, 22 + ahead, 40), (50, 55 + ahead, 60)])
    assert found == Offset(at_ns=30.0, ns=ahead, half_width_ns=2.0)


def test_between_two_series_an_offset_moves_in_a_straight_line() -> None:
    fast = 1.0 + 40e-6
    first = Offset(at_ns=0.0, ns=1e12, half_width_ns=2000.0)
    last = Offset(at_ns=10e9, ns=1e12 + 10e9 * (fast - 1), half_width_ns=3000.0)
    clock = Clock(first=first, last=last)
    assert clock.half_width_ns == 3000.0
    for here in (-1e9, 0.0, 3e9, 10e9, 11e9):
        assert clock.here(1e12 + here * fast) == pytest.approx(here, abs=0.01)


def test_one_series_is_a_clock_that_does_not_drift() -> None:
    only = Offset(at_ns=5.0, ns=100.0, half_width_ns=1.0)
    assert Clock(first=only, last=only).here(150.0) == 50.0


# --- who is let in

KEY = b"a secret"


def proof(key: bytes, side: str, node: int, *nonces: str) -> str:
    return hmac.new(key, "\0".join((side, str(node), *nonces)).encode(), hashlib.sha256).hexdigest()


class Door:
    """A leader that lets nodes in, in the background."""

    def __init__(self, closing: ExitStack) -> None:
        self.socket = closing.enter_context(door.listening("127.0.0.1"))
        self.port: int = self.socket.getsockname()[1]
        self.dropped: list[str] = []
        self.came: dict[int, Lines] = {}
        self._closing = closing

    def admit(self, nodes: Sequence[int], seconds: float = 10.0) -> None:
        def run() -> None:
            self.came = door.admit(self.socket, KEY, nodes, time.monotonic() + seconds, self.dropped.append)

        self._thread = threading.Thread(target=run)
        self._thread.start()
        self._closing.callback(self.end)

    def end(self) -> None:
        self._thread.join()
        for lines in self.came.values():
            lines.socket.close()

    def stranger(self) -> socket.socket:
        return self._closing.enter_context(socket.create_connection(("127.0.0.1", self.port), 5))


@pytest.fixture
def at_the_door() -> Iterator[Door]:
    with ExitStack() as closing:
        yield Door(closing)


def challenge(connected: socket.socket) -> str:
    with connected.makefile("rb") as lines:
        return str(json.loads(lines.readline())["nonce"])


def ended(connected: socket.socket) -> bool:
    try:
        return connected.recv(1) == b""
    except ConnectionError:
        return True


def test_who_knows_the_secret_comes_in(at_the_door: Door) -> None:
    at_the_door.admit([1, 2])
    for node in (2, 1):
        with door.come_in("127.0.0.1", at_the_door.port, KEY, node).socket:
            pass
    at_the_door.end()
    assert at_the_door.came.keys() == {1, 2}
    assert at_the_door.dropped == []


def test_a_wrong_secret_is_told_at_both_ends(at_the_door: Door) -> None:
    at_the_door.admit([1], seconds=2)
    with pytest.raises(NodesError, match="is DDPPERF_SECRET the same on all nodes"):
        door.come_in("127.0.0.1", at_the_door.port, b"another", 1)
    at_the_door.end()
    assert at_the_door.came == {}
    (told,) = at_the_door.dropped
    assert told.startswith("a connection from 127.0.0.1 was dropped: its proof is wrong")


ATTACKS: dict[str, tuple[Callable[[str], bytes], str]] = {
    "garbage": (lambda nonce: b"GET / HTTP/1.1\r\n\r\n", "does not speak as a pytest of ours"),
    "no JSON object": (lambda nonce: b"[1, 2]\n", "does not speak as a pytest of ours"),
    "deep": (lambda nonce: b"[" * 4000 + b"\n", "does not speak as a pytest of ours"),
    "endless": (lambda nonce: b"x" * 100_000, "does not speak as a pytest of ours"),
    "silence": (lambda nonce: b"", "no proof within"),
    "no proof": (lambda nonce: b'{"node": 1}\n', "gave no proof"),
    "what no encoding has": (
        lambda nonce: b'{"node": 1, "nonce": "\\ud800", "proof": "x"}\n',
        "gave no proof",
    ),
    "the challenge sent back": (
        lambda nonce: json.dumps({"node": 1, "nonce": nonce, "proof": nonce}).encode() + b"\n",
        "its proof is wrong",
    ),
    "another node's proof": (
        lambda nonce: (
            json.dumps({"node": 1, "nonce": "x", "proof": proof(KEY, "follower", 2, nonce, "x")}).encode() + b"\n"
        ),
        "its proof is wrong",
    ),
    "the leader's proof": (
        lambda nonce: (
            json.dumps({"node": 1, "nonce": "x", "proof": proof(KEY, "leader", 1, nonce, "x")}).encode() + b"\n"
        ),
        "its proof is wrong",
    ),
    "a node that there is not": (
        lambda nonce: (
            json.dumps({"node": 9, "nonce": "x", "proof": proof(KEY, "follower", 9, nonce, "x")}).encode() + b"\n"
        ),
        "it says that it is node 9",
    ),
    "more than was asked": (
        lambda nonce: (
            json.dumps({"node": 1, "nonce": "x", "proof": proof(KEY, "follower", 1, nonce, "x")}).encode() + b"\n{}\n"
        ),
        "does not speak as a pytest of ours",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_who_proves_nothing_is_dropped_and_does_no_harm(
    at_the_door: Door, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_PROOF_SECONDS", 1.0)
    sends, said = ATTACKS[attack]
    at_the_door.admit([1])
    stranger = at_the_door.stranger()
    told = sends(challenge(stranger))
    with suppress(ConnectionError):  # dropped while it went on
        stranger.sendall(told)
    assert ended(stranger)
    door.come_in("127.0.0.1", at_the_door.port, KEY, 1).socket.close()
    at_the_door.end()
    assert at_the_door.came.keys() == {1}
    (dropped,) = at_the_door.dropped
    assert said in dropped


def test_strangers_that_say_nothing_keep_nobody_out(at_the_door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_PROOF_SECONDS", 0.5)
    monkeypatch.setattr(door, "_MOST_STRANGERS", 4)
    at_the_door.admit([1])
    for _ in range(6):
        at_the_door.stranger()
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            door.come_in("127.0.0.1", at_the_door.port, KEY, 1).socket.close()
            break
        except (NodesError, OSError):
            time.sleep(0.1)
    at_the_door.end()
    assert at_the_door.came.keys() == {1}
    assert any("4 others had given no proof yet" in told for told in at_the_door.dropped)


def test_one_that_only_says_that_it_leads_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pretend() -> None:
            connected, _ = listening.accept()
            with connected, connected.makefile("rb") as lines:
                connected.sendall(json.dumps(secret.challenge("n")).encode() + b"\n")
                answered = json.loads(lines.readline())
                connected.sendall(json.dumps({"proof": answered["proof"]}).encode() + b"\n")

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(NodesError, match="its proof is wrong"):
            door.come_in("127.0.0.1", listening.getsockname()[1], KEY, 1)
        thread.join()


# --- interfaces


def test_the_interface_of_loopback_is_found() -> None:
    assert interface.interface_of("127.0.0.1") == "lo"
    assert interface.interface_of("127.0.1.1") == "lo"
    assert interface.interface_of("203.0.113.77") == ""
    assert interface.link_of("no-such-link") == ""


def test_a_link_is_its_kind_and_its_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_CLASS", tmp_path)
    for name, kind, speed in (("eth0", "1", "25000"), ("ib0", "32", "200000"), ("veth", "1", "-1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(kind + "\n")
        (tmp_path / name / "speed").write_text(speed + "\n")
    told = [interface.link_of(name) for name in ("eth0", "ib0", "veth")]
    assert told == ["ethernet 25000 Mb/s", "infiniband 200000 Mb/s", "ethernet"]


# --- what has to be the same on all nodes


VERSIONS = {"pytest-ddpperf": __version__, "pytest": "9.2"}


class Follows:
    """The other end of a connection to a node: says what it is told to."""

    def __init__(self, closing: ExitStack, **hello: object) -> None:
        ours, theirs = socket.socketpair()
        closing.enter_context(theirs)
        closing.enter_context(ours)
        self._lines = Lines(theirs)
        self._lines.send({"event": "hello", "host": "b", "order": "b", "versions": VERSIONS, **hello})
        self.node = Node(1, Lines(ours), 5.0)

    def say(self, event: str, side: str = "hand", **fields: object) -> None:
        self._lines.send({"event": event, "side": side, **fields})

    def collects(self, files: dict[str, str], **facts: object) -> None:
        sources = {"python": "3", "prefix": "/", "files": files}
        self.say("hello", version=__version__)
        self.say("collected", tests=["test_a.py::test_a"], errors={}, sources=sources)
        self.say("started", facts=facts)

    def go(self) -> None:
        self._lines.socket.close()

    def heard(self) -> list[dict[str, Any]]:
        return self._lines.receive() or []


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


HERE = Sources(python="3", prefix="/", files={"a.py": "1", "b.py": "2", "only_here.py": "3"})


MACHINE = {"device_type": "cpu", "device_count": 0}


def test_another_number_of_devices_is_refused(closing: ExitStack) -> None:
    follows = Follows(closing)
    follows.collects(dict(HERE.files), device_type="cpu", device_count=4)
    with pytest.raises(NodesError, match=r"node 1 \(b\) has device count 4, the first node 0"):
        follows.node.collected(HERE, MACHINE, 5.0)


def test_a_node_without_any_of_the_files_is_refused(closing: ExitStack) -> None:
    follows = Follows(closing)
    follows.collects({"src/a.py": "1"})
    with pytest.raises(NodesError, match="imported none of the first node's files"):
        follows.node.collected(HERE, MACHINE, 5.0)


def test_another_version_of_what_has_to_be_the_same_is_refused(closing: ExitStack) -> None:
    follows = Follows(closing, versions={**VERSIONS, "pytest": "8.0"})
    with pytest.raises(NodesError, match=r"node 1 \(b\) has pytest 8.0, the first node 9.2"):
        follows.node.check(VERSIONS)
    Follows(closing).node.check(VERSIONS)


def test_files_that_both_imported_have_to_be_the_same(closing: ExitStack) -> None:
    follows = Follows(closing)
    follows.collects({"a.py": "1", "b.py": "other", "only_there.py": "4"})
    with pytest.raises(NodesError, match=r"node 1 \(b\) has other files than the first node: b.py$"):
        follows.node.collected(HERE, MACHINE, 5.0)


def test_the_same_files_are_enough(closing: ExitStack) -> None:
    follows = Follows(closing)
    follows.collects({"a.py": "1", "only_there.py": "4"}, device_type="cpu", device_count=0)
    follows.node.collected(HERE, MACHINE, 5.0)
    assert follows.node.hand.tests.known == {"test_a.py::test_a"}


def test_what_is_said_of_each_version_is_for_its_own_line(closing: ExitStack) -> None:
    follows = Follows(closing)
    base = follows.node.start_base(["tests"])
    follows.say("one", "base")
    follows.say("two", "hand")
    follows.say("died", "base", text="it died")
    assert follows.node.hand.line.receive(Nobody(), 5.0)["event"] == "two"
    assert [message["event"] for message in base.line.arrived()] == ["one"], "before its end"
    with pytest.raises(BaseSideError, match="it died"):
        base.line.receive(Nobody(), 5.0)
    follows.node.hand.line.send({"op": "leave"})
    assert [message["op"] for message in follows.heard()] == ["start-base", "leave"]


def test_a_node_that_does_not_answer_is_asked_and_then_gone(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "_ASK_SECONDS", 0.2)
    monkeypatch.setattr(line, "_TICK_SECONDS", 0.05)
    monkeypatch.setattr(line, "_GONE_SECONDS", 1.0)
    follows = Follows(closing)
    with pytest.raises(BaseSideError, match=r"node 1 \(b\) said nothing for \d s"):
        follows.node.hand.line.receive(Nobody(), 60.0)
    assert {"op": "ping"} in follows.heard()
    with pytest.raises(BaseSideError, match="said nothing"):
        follows.node.hand.line.send({"op": "test"})


ASKED = {"what": "a call", "label": "f", "plan": {"steps": 3, "warmup": 2}, "number": 2}


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({**ASKED, "what": "a measurement", "label": ""}, "for a measurement there, and for a call (f) on the first"),
        ({**ASKED, "label": "g"}, "for a call (g) there, and for a call (f) on the first node"),
        ({**ASKED, "number": 1}, "as number 1 there is number 2 on the first node: does something run the test again"),
        ({**ASKED, "plan": {"steps": 3, "warmup": 5}}, "for warmup 5 there, and for 2 on the first node"),
    ],
)
def test_what_nodes_ask_for_has_to_be_the_same(closing: ExitStack, there: dict[str, Any], said: str) -> None:
    follows = Follows(closing)
    follows.say("ready", **there)
    with pytest.raises(BaseSideError, match=re.escape(said)):
        follows.node.hand.asks(ASKED)
    follows.say("ready", **ASKED)
    assert follows.node.hand.asks(ASKED)["label"] == "f"


def test_locks_are_taken_node_by_node_in_the_order_of_their_hosts(closing: ExitStack) -> None:
    """Whoever leads: two runs that lead from either end of the same nodes cannot wait for each other in a ring."""
    follows = Follows(closing, order="host a")
    side = Side([follows.node.hand], address="127.0.0.1", interface="", hosts=["z", "a"], order="host z", facts={})
    plan = Plan(world_size=2, nodes=2, backend="gloo", device="cpu")
    taken: list[str] = []

    @contextmanager
    def here() -> Iterator[None]:
        assert [message["op"] for message in follows.heard()] == ["alone"]
        taken.append("here")
        yield

    follows.say("alone")
    with side.alone(plan, here(), Nobody()):
        assert taken == ["here"], "after the other, whose host comes first"
    assert [message["op"] for message in follows.heard()] == ["shared"]


# --- parts of a launch


class Parted:
    """A launch of two ranks a node, of which those of node 1 are elsewhere."""

    def __init__(self, closing: ExitStack) -> None:
        self.follows = Follows(closing)
        member = self.follows.node.hand
        member._offset = lambda: Offset(at_ns=0.0, ns=1000e9, half_width_ns=1000.0)  # the clock is ahead by 1,000 s
        plan = Plan(world_size=4, nodes=2, backend="gloo", device="cpu")
        names = {rank: f"rank {rank} (node {rank // 2})" for rank in range(4)}
        self.parts = Parts(plan, ("127.0.0.1", 1), [member], names)
        self.parts.begin()
        (order,) = self.follows.heard()
        assert (order["op"], order["store"], order["side"]) == ("part", ["127.0.0.1", 1], "hand")

    def hear(self, until: Callable[[], bool]) -> None:
        end = time.monotonic() + 5
        while not until():
            assert time.monotonic() < end
            self.parts.hear()


@pytest.fixture
def parted(closing: ExitStack) -> Parted:
    return Parted(closing)


def error(rank: int, when: float) -> dict[str, object]:
    return {"rank": rank, "when": when, "phase": "setup", "summary": "ValueError: x", "name": f"rank {rank}"}


OVER: dict[str, list[Any] | dict[str, str]] = {"errors": [], "idle": [], "output": [], "notes": [], "results": {}}


def test_results_of_other_nodes_arrive_by_rank(parted: Parted) -> None:
    results = {"2": base64.b64encode(b"two").decode(), "3": base64.b64encode(b"three").decode()}
    assert not parted.parts.settled
    parted.follows.say("settled", results=results)
    parted.hear(lambda: parted.parts.settled)
    assert parted.parts.results == {2: b"two", 3: b"three"}
    assert parted.parts.clocks.keys() == {2, 3}
    assert parted.parts.clocks[2].here(1003e9) == pytest.approx(3e9)
    parted.parts.release()
    parted.follows.say("over", **{**OVER, "notes": ["odd"]})
    parted.parts.await_end()
    assert [message["op"] for message in parted.follows.heard()] == ["release"]
    assert (parted.parts.errors, parted.parts.notes) == ([], ["odd"])


def test_an_error_is_in_order_by_the_clock_of_the_node_that_leads(parted: Parted) -> None:
    parted.follows.say("failed-rank", error=error(3, 1007.0))
    parted.hear(lambda: bool(parted.parts.errors))
    (found,) = parted.parts.errors
    assert found.when == pytest.approx(7.0)
    assert parted.parts.name(found.rank) == "rank 3 (node 1)"


def test_what_is_given_up_was_so_when_all_were(parted: Parted) -> None:
    parted.parts.stop(9.0, at_deadline=True)
    parted.follows.say("over", **{**OVER, "errors": [error(2, 1012.0)], "idle": [error(3, math.inf)]})
    parted.parts.await_end()
    assert [(found.rank, found.when) for found in parted.parts.errors] == [(2, 9.0), (3, math.inf)]
    told = parted.follows.heard()
    assert told == [{"op": "stop", "at_deadline": True, "side": "hand"}]


def test_a_node_that_goes_after_it_delivered_is_an_error_for_its_clock_is_not_known(parted: Parted) -> None:
    def gone() -> Offset:
        raise BaseSideError("node 1 (b) is gone")

    parted.follows.say("settled", results={})
    parted.hear(lambda: parted.parts.settled)
    parted.follows.node.hand._offset = gone
    parted.parts.release()
    assert "is gone" in parted.parts.errors[0].summary


def test_clocks_are_asked_after_the_window_though_a_clean_up_hung(parted: Parted) -> None:
    parted.follows.node.hand._offset = lambda: Offset(at_ns=10.0, ns=1001e9, half_width_ns=9.0)
    parted.parts.stop(9.0, at_deadline=True)
    parted.follows.say("over", **OVER)
    parted.parts.await_end()
    assert parted.parts.errors == []
    assert parted.parts.clocks[2].last.ns == 1001e9


@pytest.mark.parametrize("event", ["failed", "ended"])
def test_a_part_that_cannot_be_is_an_error_of_its_first_rank(parted: Parted, event: str) -> None:
    parted.follows.say(event, text="no space")
    parted.hear(lambda: bool(parted.parts.errors))
    (found,) = parted.parts.errors
    assert (found.rank, found.summary) == (2, "no space")
    assert parted.parts.settled


def test_a_node_that_goes_is_an_error_and_not_a_wait(parted: Parted) -> None:
    parted.follows.go()
    parted.hear(lambda: bool(parted.parts.errors))
    assert "node 1 (b) is gone" in parted.parts.errors[0].summary
    parted.parts.stop(1.0, at_deadline=False)
    parted.parts.await_end()
    assert parted.parts.channels == []


def test_a_node_that_does_not_end_its_ranks_is_not_waited_for(parted: Parted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "_END_SECONDS", 0.2)
    parted.parts.stop(1.0, at_deadline=False)
    parted.parts.await_end()
    assert "did not end its ranks" in parted.parts.errors[0].summary
