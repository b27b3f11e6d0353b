"""Launches whose ranks are on several nodes: which ranks are here, and the clocks of the others."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pytest_ddpperf.launch.output import Observer
from pytest_ddpperf.records import Plan, RankError, RankOutput, Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of a launch that this process starts."""

    processes: tuple[int, ...]  # of the plan
    node: int = 0
    store: tuple[str, int] | None = None  # address and port where the parts meet; None where there is one part
    interface: str = ""  # over which this node reaches the others


class Nodes(Protocol):
    """The other nodes, for launches that this one leads."""

    address: str  # by which they reach this one
    interface: str

    @property
    def facts(self) -> Mapping[str, Scalar]:
        """Of the nodes and of the network between them."""

    def parts(self, plan: Plan, store: tuple[str, int]) -> RemoteRanks:
        """Those of a launch whose processes meet at `store`."""

    def alone(
        self, plan: Plan, here: AbstractContextManager[Sequence[Path]] | None, observer: Observer
    ) -> AbstractContextManager[None]:
        """As `here`, which yields what it holds, on this node, if it starts anything itself, nothing else is timed on
        any node's cores or devices meanwhile; raises BaseSideError."""


class RemoteRanks(Protocol):
    """The other parts. What goes wrong there is in `errors`; nothing here raises."""

    @property
    def channels(self) -> Sequence[socket.socket]:
        """Where something may arrive."""

    @property
    def errors(self) -> Sequence[RankError]:
        """Of all of them, `when` by the clock of this node."""

    @property
    def settled(self) -> bool:
        """Whether every part has delivered all that it was to deliver, or has failed."""

    @property
    def results(self) -> Mapping[int, bytes]:
        """By process."""

    @property
    def clocks(self) -> Mapping[int, Clock]:
        """By process, once all is settled."""

    @property
    def output(self) -> Sequence[RankOutput]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    def name(self, process: int) -> str:
        """Of a process in errors; "" for the plan's."""

    def begin(self) -> None:
        """Let all parts be started."""

    def hear(self) -> None:
        """Take in what has arrived, without waiting."""

    def release(self) -> None:
        """Everybody has delivered: the processes may end."""

    def stop(self, when: float, *, at_deadline: bool) -> None:
        """The launch was given up at that time, by this node's clock: the processes end where they are."""

    def await_end(self) -> None:
        """Until all parts have ended, after `release` or `stop`."""


class NoRemoteRanks:
    """Where this process starts all of it."""

    channels: Sequence[socket.socket] = ()
    errors: Sequence[RankError] = ()
    settled = True
    results: Mapping[int, bytes] = {}
    clocks: Mapping[int, Clock] = {}
    output: Sequence[RankOutput] = ()
    notes: Sequence[str] = ()

    def name(self, process: int) -> str:
        return ""

    def begin(self) -> None:
        pass

    def hear(self) -> None:
        pass

    def release(self) -> None:
        pass

    def stop(self, when: float, *, at_deadline: bool) -> None:
        pass

    def await_end(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """By how much another clock is ahead of ours, at one time."""

    at_ns: float  # by our clock
    ns: float
    half_width_ns: float  # the offset is not further from `ns`


def offset(exchanges: Iterable[tuple[int, int, int]]) -> Offset:
    """By exchanges one right after the other, each (ours before, theirs, ours after) in nanoseconds, at least one."""
    before, theirs, after = zip(*exchanges, strict=True)
    low = max(there - end for there, end in zip(theirs, after, strict=True))
    high = min(there - start for start, there in zip(before, theirs, strict=True))
    # Apart by less than they drift during the series, the bounds may even have changed places.
    return Offset(at_ns=(before[0] + after[-1]) / 2, ns=(low + high) / 2, half_width_ns=abs(high - low) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Another clock from one series of exchanges to the next."""

    first: Offset
    last: Offset

    @property
    def half_width_ns(self) -> float:
        return max(self.first.half_width_ns, self.last.half_width_ns)

    def here(self, there_ns: float) -> float:
        """What our clock showed when the other showed `there_ns`, in nanoseconds."""
        first, last = self.first, self.last
        began = first.at_ns + first.ns  # by the other clock
        took = last.at_ns + last.ns - began
        passed = (there_ns - began) / took if took > 0 else 0.0
        return there_ns - (first.ns + (last.ns - first.ns) * passed)
