"""How the pytests of several nodes find each other, by torchrun's variables and store, and connect:
both ends prove that they know the secret of the run.

The proof is the one of `multiprocessing.connection`: an HMAC of a random challenge, in both
directions.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from pytest_ddpperf.launch.server_client import inherited
from pytest_ddpperf.records.errors import NodesError
from pytest_ddpperf.remote.node import keep_watch
from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.channels import Lines, Message, readable

VARIABLE = "DDPPERF_SECRET"

_WRONG = "its proof is wrong: is DDPPERF_SECRET the same on all nodes?"
_UNKNOWN = "it is not a pytest with this plugin"
_PROOF_SECONDS = 10  # for each message of a proof
_MOST_UNTRUSTED = 64  # at once; more wait in the kernel's queue
_TICK_SECONDS = 0.5
_SOON_SECONDS = 0.02  # while a proof is awaited
_NODE = struct.Struct("!I")


def _verify(connected: socket.socket, secret: bytes) -> int:
    """Return which node has connected and proved that it knows the secret; raises NodesError."""
    # In seconds and microseconds; a timeout of Python's would make the descriptor non-blocking.
    connected.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _PROOF_SECONDS, 0)
    )
    try:
        with Connection(os.dup(connected.fileno())) as channel:
            deliver_challenge(channel, secret)
            answer_challenge(channel, secret)
            node: int = _NODE.unpack(channel.recv_bytes(_NODE.size))[0]
    except BlockingIOError:
        raise NodesError(f"it gave no proof within {_PROOF_SECONDS:g} s") from None
    except AuthenticationError:
        raise NodesError(_WRONG) from None
    except (EOFError, ConnectionError):
        raise NodesError("it disconnected without a proof") from None
    except (OSError, AssertionError, struct.error):
        # a length or a message that no proof has
        raise NodesError(_UNKNOWN) from None
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
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
    `dropped` gets a line that says why.
    """
    came: dict[int, Lines] = {}
    untrusted: dict[Future[int], tuple[socket.socket, str]] = {}

    def drop(connected: socket.socket, who: str, why: object) -> None:
        connected.close()
        dropped(f"a connection from {who} was dropped: {why}")

    with ThreadPoolExecutor(_MOST_UNTRUSTED) as verifying:
        try:
            while len(came) < len(nodes) and time.monotonic() < until:
                if len(untrusted) == _MOST_UNTRUSTED:
                    time.sleep(_SOON_SECONDS)
                elif readable([door], _SOON_SECONDS if untrusted else _TICK_SECONDS):
                    connected, (who, *_) = door.accept()
                    untrusted[verifying.submit(_verify, connected, secret)] = (
                        connected,
                        str(who),
                    )
                for proof in [proof for proof in untrusted if proof.done()]:
                    connected, who = untrusted.pop(proof)
                    if (error := proof.exception()) is not None:
                        drop(connected, who, error)
                    elif (node := proof.result()) not in nodes or node in came:
                        drop(connected, who, f"it says that it is node {node}")
                    else:
                        keep_watch(connected)
                        came[node] = Lines(connected)
        finally:
            for connected, _ in untrusted.values():
                with suppress(OSError):  # it has gone
                    connected.shutdown(socket.SHUT_RDWR)  # which ends its thread
    for connected, _ in untrusted.values():
        connected.close()
    return came


def connect_to_leader(
    address: str, port: int, secret: bytes, node: int, seconds: float = 0.0
) -> Lines:
    """Return a connection to the pytest that leads, which may take so long; raises NodesError and
    OSError."""
    connected = socket.create_connection((address, port), max(_PROOF_SECONDS, seconds))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Of one pytest among those of several nodes."""

    node: int
    nodes: int
    local_rank: int
    address: str  # MASTER_ADDR
    port: int  # MASTER_PORT, of torchrun's own store
    hosted: bool  # whether torchrun holds that store; else the first process is to
    run: str  # the id of torchrun's run

    @property
    def leads(self) -> bool:
        """Whether this pytest decides, judges and reports."""
        return self.node == 0 and self.local_rank == 0

    @property
    def follows(self) -> bool:
        """Whether it launches the ranks of its node for the leader."""
        return self.node > 0 and self.local_rank == 0


def role(environ: Mapping[str, str]) -> Role | None:
    """None where torchrun started none, or those of one node. Raises NodesError for what we cannot
    work with."""
    if (
        "TORCHELASTIC_RUN_ID" not in environ
        or environ.get("GROUP_WORLD_SIZE", "1") == "1"
    ):
        return None
    try:
        found = Role(
            node=int(environ["GROUP_RANK"]),
            nodes=int(environ["GROUP_WORLD_SIZE"]),
            local_rank=int(environ["LOCAL_RANK"]),
            address=environ["MASTER_ADDR"],
            port=int(environ["MASTER_PORT"]),
            hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True",
            run=environ["TORCHELASTIC_RUN_ID"],
        )
    except (KeyError, ValueError) as error:
        raise NodesError(
            f"torchrun's variables are incomplete: {type(error).__name__}: {error}"
        ) from None
    if environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise NodesError("torchrun --max-restarts is not supported: use 0")
    return found


_GET_ADDRESS = 0x8915  # SIOCGIFADDR, Linux
_IPV6 = Path("/proc/net/if_inet6")
_CLASS = Path("/sys/class/net")


def interface_of(address: str) -> str:
    """Its name; "" where the system does not tell."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        for line in boot.contents(_IPV6).splitlines():
            found, *_, name = line.split()
            if ipaddress.ip_address(bytes.fromhex(found)) == wanted:
                return name
        return ""
    for name, address_of_it in _ipv4():
        if address_of_it == wanted:
            return name
    # An address of an alias, or of a network that is an interface's as a whole: 127.0.1.1 is lo's.
    return "lo" if wanted.is_loopback else ""


def _ipv4() -> list[tuple[str, ipaddress.IPv4Address]]:
    found = []
    with (
        suppress(ImportError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking,
    ):
        import fcntl

        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                reported = fcntl.ioctl(
                    asking.fileno(),
                    _GET_ADDRESS,
                    struct.pack("256s", name.encode()[:15]),
                )
                found.append((name, ipaddress.IPv4Address(reported[20:24])))
    return found


def link_of(name: str) -> str:
    """What kind of link an interface is, and its rate, if the system says so: "ethernet 25000
    Mb/s"."""
    folder = _CLASS / name
    kind = {"1": "ethernet", "32": "infiniband", "772": "loopback"}.get(
        boot.contents(folder / "type"), ""
    )
    rate = boot.contents(folder / "speed")  # "" of a link that is down, or virtual
    return f"{kind} {rate} Mb/s".strip() if rate.isdigit() and rate != "0" else kind


_END_SECONDS = 5.0
_LONGER_SECONDS = 60.0  # than it was asked for: to import torch, and to say so
_SHOWN = 4000  # characters of what it wrote


class TorchrunStore:
    """torchrun's store, asked by a process of its own, which imports torch; `close` ends it.

    With `reported`, where the first node listens, the process says that to the others until it
    ends; without, it waits for it.
    """

    def __init__(
        self, role: Role, seconds: float, reported: Message | None = None
    ) -> None:
        self._seconds, self._answer = seconds, Message()
        self._child = boot.Child(
            sys.executable, "pytest_ddpperf.rank.group", inherited(os.environ)
        )
        start = {
            "sys_path": boot.search_path(),
            "parent": os.getpid(),
            "address": role.address,
            "port": role.port,
            "hosts": reported is not None and not role.hosted,
            "key": f"ddpperf/{role.run}",
            "tell": reported,
            "seconds": seconds,
        }
        self._child.lines.send(start)

    def answer(self) -> Message:
        """Wait until it is said, or return what was said; raises NodesError."""
        if not self._answer:
            messages = None
            if readable([self._child.lines.socket], self._seconds + _LONGER_SECONDS):
                messages = self._child.lines.receive()
            if not messages:
                written = self._child.output()[-_SHOWN:].rstrip()
                raise NodesError(f"torchrun's store did not answer\n{written}".rstrip())
            if "error" in messages[0]:
                raise NodesError(f"torchrun's store: {messages[0]['error']}")
            self._answer = messages[0]
        return self._answer

    def close(self) -> None:
        """End the process: no node waits any more."""
        self._child.close(_END_SECONDS)
