"""Nodes without any: roles, proofs, the door, clocks, interfaces, a follower and its leader over a socket pair."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_ddpperf.launch.clock import Clock, Offset, offset
from pytest_ddpperf.nodes import door, interface, secret
from pytest_ddpperf.nodes import role as role_module
from pytest_ddpperf.nodes.role import Role, role
from pytest_ddpperf.records import Plan
from pytest_ddpperf.records.errors import NodesError
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
    strangers = [at_the_door.stranger() for _ in range(6)]
    assert strangers
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
