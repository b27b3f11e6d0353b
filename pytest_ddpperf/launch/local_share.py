"""The share of a launch that this node starts for the leader: it judges nothing, and ends when the leader says so."""

from __future__ import annotations

import base64
import socket
from dataclasses import asdict
from typing import Any, Protocol

from pytest_ddpperf.launch.remote_ranks import NoRemoteRanks
from pytest_ddpperf.launch.run import TICK_SECONDS, Launch
from pytest_ddpperf.records import codec
from pytest_ddpperf.wire.channels import Message


class Leader(Protocol):
    """The line to who leads."""

    @property
    def socket(self) -> socket.socket: ...

    def order_by_now(self) -> Message | None:
        """The next order if there is one."""

    def say(self, event: str, **fields: Any) -> None: ...


class _Channel(NoRemoteRanks):
    """Lets a launch look up when the leader says something."""

    def __init__(self, leader: Leader) -> None:
        self.channels = (leader.socket,)


class LocalShareLaunch(Launch):
    """As a Launch, without a deadline: that is the leader's.

    Told                                    Answered
    {"op": "part", "plan": {...},           {"event": "failed-rank", "error": {...}} for each that fails, and
     "store": [address, port]}              {"event": "settled", "results": {...}} when all have come to their ends
    {"op": "release"}, when everybody has   {"event": "over", "errors": [...], "idle": [...], "output": [...],
    {"op": "stop", "at_deadline": b}        "notes": [...], "results": {...}} when all processes have ended
    """

    def serve(self, leader: Leader) -> None:
        """All of it; raises ServerError."""
        self._remote = _Channel(leader)
        self.begin()
        failed: set[int] = set()
        settled = False
        while (order := leader.order_by_now()) is None:
            self._wait(TICK_SECONDS)
            for rank in self._ranks:
                if rank.error is not None and rank.number not in failed:
                    failed.add(rank.number)
                    leader.say("failed-rank", error=asdict(rank.error))
            if not settled and all(rank.done for rank in self._ranks):
                settled = True
                leader.say("settled", results=self._results())
        if order["op"] == "release":
            self._release()
        else:
            self._give_up(lambda rank: rank.settled, at_deadline=order.get("at_deadline", False))
        self._end()
        errors = [rank.error for rank in self._ranks if rank.error is not None]
        known = {error.rank for error in errors}
        idle = [error for error in self._diagnosis.failures(self._ranks) if error.rank not in known]
        leader.say(
            "over",
            errors=[asdict(error) for error in errors],
            idle=[asdict(error) for error in idle],
            output=codec.encode(self._output()),
            notes=list(self._notes),
            results={} if settled else self._results(),
        )

    def _results(self) -> dict[str, str]:
        """Those that there are, by process."""
        there = ((rank.number, rank.result) for rank in self._timed if rank.result is not None)
        return {str(number): base64.b64encode(result).decode() for number, result in there}
