"""How the pytests of several nodes connect: both ends prove that they know the secret of the run.

The proof is the one of `multiprocessing.connection`: an HMAC of a random challenge, in both
directions.
"""

import os
import socket
import struct
import time
from collections.abc import Callable, Collection
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Connection,
    answer_challenge,
    deliver_challenge,
)

from pytest_ddpperf.records.errors import NodesError
from pytest_ddpperf.wire.channels import Lines, readable

VARIABLE = "DDPPERF_SECRET"

_WRONG = "its proof is wrong: is DDPPERF_SECRET the same on all nodes?"
_UNKNOWN = "it is not a pytest with this plugin"
_PROOF_SECONDS = 5  # for each message of a proof
_TICK_SECONDS = 0.5
_NODE = struct.Struct("!I")


def _verify(connected: socket.socket, secret: bytes) -> int:
    """Return which node has connected and proved that it knows the secret; raises NodesError."""
    # Whatever socket.setdefaulttimeout says: a timeout of Python's makes the descriptor
    # non-blocking. The kernel's own is in seconds and microseconds.
    connected.setblocking(True)
    connected.setsockopt(
        socket.SOL_SOCKET,
        socket.SO_RCVTIMEO,
        struct.pack("ll", _PROOF_SECONDS, 0),
    )
    try:
        with Connection(os.dup(connected.fileno())) as channel:
            deliver_challenge(channel, secret)
            answer_challenge(channel, secret)
            node: int = _NODE.unpack(channel.recv_bytes(_NODE.size))[0]
    except BlockingIOError:
        raise NodesError(
            f"it gave no proof within {_PROOF_SECONDS:g} s"
        ) from None
    except AuthenticationError:
        raise NodesError(_WRONG) from None
    except (EOFError, ConnectionError):
        raise NodesError("it disconnected without a proof") from None
    except (OSError, AssertionError, struct.error):
        # a length or a message that no proof has
        raise NodesError(_UNKNOWN) from None
    connected.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0)
    )
    return node


def admit(
    door: socket.socket,
    secret: bytes,
    nodes: Collection[int],
    until: float,
    dropped: Callable[[str], None],
) -> dict[int, Lines]:
    """Return the connections of `nodes`, by node, once all have proved that they know the secret.

    At the time `until` those that have are returned. Every other connection is closed, and
    `dropped` gets a line that says why. One after the other: whoever proves nothing delays the
    others by `_PROOF_SECONDS`.
    """
    came: dict[int, Lines] = {}
    while len(came) < len(nodes) and time.monotonic() < until:
        if not readable([door], _TICK_SECONDS):
            continue
        connected, (who, *_) = door.accept()
        try:
            node = _verify(connected, secret)
            if node not in nodes or node in came:
                raise NodesError(f"it says that it is node {node}")
        except NodesError as error:
            connected.close()
            dropped(f"a connection from {who} was dropped: {error}")
            continue
        keep_watch(connected)
        came[node] = Lines(connected)
    return came


def connect_to_leader(
    address: str, port: int, secret: bytes, node: int, seconds: float = 0.0
) -> Lines:
    """Return a connection to the pytest that leads, which may take so long; raises NodesError and
    OSError."""
    connected = socket.create_connection(
        (address, port), max(_PROOF_SECONDS, seconds)
    )
    try:
        _prove(connected, secret, node)
    except BaseException:
        connected.close()
        raise
    return Lines(connected)


def _prove(connected: socket.socket, secret: bytes, node: int) -> None:
    """Prove to the leader that this node knows the secret, and let it prove the same; raises
    NodesError."""
    keep_watch(connected)
    # the leader may answer only when all of its tests are over
    connected.settimeout(None)
    try:
        with Connection(os.dup(connected.fileno())) as channel:
            answer_challenge(channel, secret)
            deliver_challenge(channel, secret)
            channel.send_bytes(_NODE.pack(node))
    except AuthenticationError:
        raise NodesError(_WRONG) from None
    except AssertionError:  # no challenge
        raise NodesError(_UNKNOWN) from None
    except (EOFError, ConnectionError):
        raise NodesError("it closed the connection") from None


# For the kernel to say that the other end of an idle connection is not there: idle, between probes,
# how many. (With TCP_USER_TIMEOUT probes would be of no account, and an end that is busy and does
# not read would be taken for gone.)
_KEEP_ALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


def keep_watch(connected: socket.socket) -> None:
    """Let the kernel notice within about ten seconds that the other end has gone without a word;
    and send at once."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # Linux
            connected.setsockopt(
                socket.IPPROTO_TCP, getattr(socket, name), value
            )
