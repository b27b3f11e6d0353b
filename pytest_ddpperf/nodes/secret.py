"""What both ends of a connection between nodes prove: that they know the secret of the run.

The one challenges with a number used once, the other answers with HMAC-SHA256 of it under the secret and challenges in
turn. Each end's proof names its side, so that none can be sent back as one's own. What follows is not encrypted: it
keeps strangers out, and is for a network that can be trusted.
"""

from __future__ import annotations

import hmac
import json
import secrets
from typing import Any, TypeGuard

from pytest_ddpperf.records.errors import NodesError
from pytest_ddpperf.wire.channels import Message

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
