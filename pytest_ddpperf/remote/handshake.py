"""How the pytests of several nodes connect: the secret that both ends prove, and who may come in."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable, Collection
from typing import Any, TypeGuard

from pytest_ddpperf.records.errors import NodesError
from pytest_ddpperf.remote.node import keep_watch
from pytest_ddpperf.wire.channels import Lines, Message, readable

VARIABLE = "DDPPERF_SECRET"
LONGEST = 4096  # bytes of a line from somebody who has not proved anything yet

_LEADER, _FOLLOWER = "leader", "follower"


def nonce() -> str:
    return secrets.token_hex(32)


def _proof(secret: bytes, side: str, node: int, *nonces: str) -> str:
    return hmac.digest(secret, "\0".join((side, str(node), *nonces)).encode(), "sha256").hex()


def challenge(ours: str) -> Message:
    """What the leader says first."""
    return {"nonce": ours}


def answer(secret: bytes, node: int, theirs: str, ours: str) -> Message:
    """What a follower says to a challenge."""
    return {"node": node, "nonce": ours, "proof": _proof(secret, _FOLLOWER, node, theirs, ours)}


def verified(secret: bytes, answered: Message, ours: str) -> tuple[int, Message]:
    """The node that answered our challenge, and what the leader says to prove itself; raises NodesError."""
    node, theirs, proof = (answered.get(name) for name in ("node", "nonce", "proof"))
    if type(node) is not int or not (_is_text(theirs) and _is_text(proof)):
        raise NodesError("it gave no proof")
    if not hmac.compare_digest(_proof(secret, _FOLLOWER, node, ours, theirs).encode(), proof.encode()):
        raise NodesError("its proof is wrong: is DDPPERF_SECRET the same on all nodes?")
    return node, {"proof": _proof(secret, _LEADER, node, theirs, ours)}


def is_leader(secret: bytes, node: int, said: Message, theirs: str, ours: str) -> bool:
    """Whether it knows the secret, too."""
    proof = said.get("proof")
    return _is_text(proof) and hmac.compare_digest(_proof(secret, _LEADER, node, ours, theirs).encode(), proof.encode())


def _is_text(value: object) -> TypeGuard[str]:
    """JSON may spell what no encoding has."""
    return isinstance(value, str) and value.isascii()


def parsed(line: bytes) -> dict[str, Any]:
    """A line of somebody who has not proved anything; raises NodesError."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise NodesError("it does not speak as a pytest of ours")
    return message


_PROOF_SECONDS = 10.0  # for one that has come to prove itself
_MOST_UNTRUSTED = 64  # at once, in addition to the nodes
_TICK_SECONDS = 0.5


def _room(nodes: int) -> int:
    """For how many at once: all nodes may come in the same moment."""
    return max(_MOST_UNTRUSTED, nodes) + _MOST_UNTRUSTED


def listening(address: str, nodes: int) -> socket.socket:
    """On one interface, at a port that the kernel chooses, for so many nodes; raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_room(nodes))


class UntrustedConnection:
    """Somebody who has come and proved nothing yet. Never waits for him."""

    def __init__(self, connected: socket.socket, who: str) -> None:
        self.socket, self.who = connected, who
        connected.setblocking(False)
        self.until = time.monotonic() + _PROOF_SECONDS
        self.nonce = nonce()
        self._buffer = b""
        _say(connected, challenge(self.nonce))

    def line(self) -> bytes | None:
        """What he said, once it is whole; raises NodesError or OSError."""
        data = self.socket.recv(LONGEST)
        if not data:
            raise NodesError("it left without a proof")
        self._buffer += data
        if b"\n" in self._buffer:
            line, _, rest = self._buffer.partition(b"\n")
            if rest:
                raise NodesError("it does not speak as a pytest of ours")
            return line
        if len(self._buffer) > LONGEST:
            raise NodesError("it does not speak as a pytest of ours")
        return None


def admit(
    door: socket.socket, key: bytes, nodes: Collection[int], until: float, dropped: Callable[[str], None]
) -> dict[int, Lines]:
    """The connections of `nodes`, once all have proved that they know the `key`; by `until`, those that have. Whoever
    else connects is `dropped`, with a line that says why."""
    came: dict[int, Lines] = {}
    untrusted: dict[socket.socket, UntrustedConnection] = {}
    room = _room(len(nodes))

    def drop(connection: UntrustedConnection, why: object) -> None:
        untrusted.pop(connection.socket, None)
        connection.socket.close()
        dropped(f"a connection from {connection.who} was dropped: {why}")

    try:
        while len(came) < len(nodes) and time.monotonic() < until:
            ready = readable([door, *untrusted], _TICK_SECONDS)
            for connection in list(untrusted.values()):
                try:
                    if connection.socket in ready and (line := connection.line()) is not None:
                        node = _let_in(connection, line, key, set(nodes) - came.keys())
                        del untrusted[connection.socket]
                        connection.socket.setblocking(True)
                        keep_watch(connection.socket)
                        came[node] = Lines(connection.socket)
                    elif time.monotonic() > connection.until:
                        drop(connection, f"it gave no proof within {_PROOF_SECONDS:g} s")
                except (NodesError, OSError) as error:
                    drop(connection, error)
            if door in ready:
                try:
                    connected, where = door.accept()
                except OSError as error:
                    dropped(f"a connection was dropped: {error}")
                    continue
                who = str(where[0])
                if len(untrusted) >= room:
                    connected.close()
                    dropped(f"a connection from {who} was dropped: {room} others had given no proof yet")
                    continue
                try:
                    untrusted[connected] = UntrustedConnection(connected, who)
                except OSError as error:
                    connected.close()
                    dropped(f"a connection from {who} was dropped: {error}")
    finally:
        for connection in untrusted.values():
            connection.socket.close()
    return came


def _let_in(untrusted: UntrustedConnection, line: bytes, key: bytes, wanted: Collection[int]) -> int:
    node, proof = verified(key, parsed(line), untrusted.nonce)
    if node not in wanted:
        raise NodesError(f"it says that it is node {node}")
    _say(untrusted.socket, proof)
    return node


def connect_to_leader(address: str, port: int, key: bytes, node: int, seconds: float = 0.0) -> Lines:
    """A connection to the pytest that leads, tried for so many seconds while there is no room for it; raises NodesError
    or OSError."""
    until = time.monotonic() + seconds
    while True:
        try:
            connected, challenge = _challenged(address, port)
            break
        except (_Turned, TimeoutError):
            if time.monotonic() > until:
                raise
            time.sleep(_TICK_SECONDS)
    try:
        connected.settimeout(_PROOF_SECONDS)
        challenged = parsed(challenge).get("nonce")
        if not isinstance(challenged, str):
            raise NodesError("it does not speak as a pytest of ours")
        ours = nonce()
        _say(connected, answer(key, node, challenged, ours))
        if not (said := _line(connected)):
            raise NodesError("it let nobody in: is DDPPERF_SECRET the same on all nodes?")
        if not is_leader(key, node, parsed(said), challenged, ours):
            raise NodesError("its proof is wrong: is DDPPERF_SECRET the same on all nodes?")
    except BaseException:
        connected.close()
        raise
    connected.settimeout(None)
    return Lines(connected)


class _Turned(NodesError):
    """Away at the door, before anything was asked."""


def _challenged(address: str, port: int) -> tuple[socket.socket, bytes]:
    connected = socket.create_connection((address, port), _PROOF_SECONDS)
    try:
        keep_watch(connected)
        connected.settimeout(None)  # it lets others in when it has collected, or when all of its tests are over
        if not (challenge := _line(connected)):
            raise _Turned("it let nobody in: others were at its door")
    except BaseException:
        connected.close()
        raise
    return connected, challenge


def _line(connected: socket.socket) -> bytes:
    """What the other says next, byte for byte: what follows is not for here. Nothing at the end of the stream."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connected.recv(1)
        if not byte:
            return b""
        if len(line) > LONGEST:
            raise NodesError("it does not speak as a pytest of ours")
        line += byte
    return line


def _say(connected: socket.socket, message: Message) -> None:
    connected.sendall(json.dumps(message).encode() + b"\n")
