"""Launches whose ranks are on several nodes: which ranks are here, and the clocks of the others."""

import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from pytest_ddpperf.launch.output import Observer
from pytest_ddpperf.records.messages import Address, ShareProgress, Started
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.record import record
from pytest_ddpperf.records.samples import Digests, Facts, RankError, RankOutput


@record
class Part:
    """The part of a launch that this process starts."""

    processes: tuple[int, ...]  # of the plan
    node: int = 0
    # address and port where the parts meet; None where there is one part
    store: Address | None = None
    interface: str = ""  # over which this node reaches the others


class Nodes(Protocol):
    """The other nodes, for launches that this one leads."""

    address: str  # by which they reach this one
    interface: str

    def facts(self, nodes: int) -> Facts:
        """Of so many nodes, this one included, and of the network between them."""

    def parts(self, plan: Plan, store: Address) -> "RemoteRanks":
        """Those of a launch whose processes meet at `store`."""

    def alone(
        self,
        plan: Plan,
        here: AbstractContextManager[Sequence[Path]],
        observer: Observer,
    ) -> AbstractContextManager[None]:
        """As `here`, which yields what it locks on this node: nothing else is timed on any node's
        cores or devices meanwhile. Raises BaseSideError."""


class RemoteRanks:
    """The ranks of a launch that other nodes start. What goes wrong there is in `errors`; nothing
    here raises.

    This one is for launches that one node starts alone: there are none."""

    errors: Sequence[RankError] = ()  # `when` by the clock of this node
    results: Mapping[int, bytes] = {}  # by process
    output: Sequence[RankOutput] = ()
    notes: Sequence[str] = ()
    # by node, how far the ranks of a program were when it was asked
    progress: Mapping[int, ShareProgress] = {}
    # by process, the collectives of a launch that was given up
    started: Mapping[int, Started] = {}
    # by the name of their node, the digests of the files that they opened
    files: Mapping[str, Digests] = {}

    def __init__(self, *channels: socket.socket) -> None:
        self._channels = channels

    def channels(self) -> Sequence[socket.socket]:
        """Return where something may arrive."""
        return self._channels

    def settled(self) -> bool:
        """Say whether every other node has delivered all that it was to deliver, or has failed."""
        return True

    def clocks_ahead_ns(self) -> Mapping[int, float]:
        """Return, by process, by how much its clock is ahead of this node's, after `release`."""
        return {}

    def name(self, process: int) -> str:
        """Return the name of a process in errors; "" for the plan's."""
        return ""

    def begin(self) -> None:
        """Let the other nodes start their ranks."""

    def set_window(self, begin: int, steps: int) -> None:
        """Say where the window of a program begins, 0 until that is known: `progress` follows."""

    def ask_progress(self, some_delivered: bool) -> Iterable[ShareProgress]:
        """Ask how far the ranks of a program are; `some_delivered`, of this node."""
        return ()

    def receive(self) -> None:
        """Take in what has arrived, without waiting."""

    def release(self) -> None:
        """Let the processes end: everybody has delivered."""

    def stop(self, when: float, late: str = "") -> None:
        """End the processes where they are: the launch was given up at that time, by this node's
        clock. `late` is said of those that hang at its deadline."""

    def await_end(self) -> None:
        """Wait until all ranks have ended, after `release` or `stop`."""
