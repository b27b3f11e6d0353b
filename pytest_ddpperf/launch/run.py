"""One launch, from the request to the last process: the seam *run launch k of this plan, return its
samples*."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pytest_ddpperf.launch import output
from pytest_ddpperf.launch.failed_ranks import Diagnosis, launch_error
from pytest_ddpperf.launch.remote_ranks import Clock, RemoteRanks
from pytest_ddpperf.launch.server_client import (
    LaunchRequest,
    RankServer,
    writing_temporary_files,
)
from pytest_ddpperf.records.errors import ServerError
from pytest_ddpperf.records.messages import (
    Event,
    EventKind,
    Order,
    OrderKind,
    ServerKind,
    ServerMessage,
)
from pytest_ddpperf.records.samples import LaunchCost, RankError, RankOutput
from pytest_ddpperf.wire.boot import contents
from pytest_ddpperf.wire.channels import (
    Board,
    Kind,
    Phase,
    readable,
    send_word,
    take_frames,
)
from pytest_ddpperf.wire.opened import OWN_GROUP, Opened


class Peer:
    def __init__(self, number: int, channel: socket.socket) -> None:
        """`channel` does not block."""
        self.number = number
        self.channel = channel
        self.pid = 0
        self.result: bytes | None = None
        self.resting: dict[str, Any] | None = None  # what it said when it came to rest
        self.done = False
        self.silent = False  # its channel has ended
        self.exited = False
        self.error: RankError | None = None
        self._arrived = bytearray()

    @property
    def settled(self) -> bool:
        return self.done or self.error is not None

    def read(self) -> None:
        """Take in all that has arrived."""
        while True:
            try:
                data = self.channel.recv(1 << 20)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self.silent = True
                return
            self._arrived += data
            for kind, content in take_frames(self._arrived):
                if kind is Kind.RESULT:
                    self.result = content
                elif kind is Kind.DONE:
                    self.done = True
                elif kind is Kind.RESTING:
                    self.resting = json.loads(content)
                else:
                    self.error = RankError(**json.loads(content))


def wake(ranks: Sequence[Peer], number: int = 0) -> None:
    """Send the word that these ranks wait for."""
    for rank in ranks:
        rank.resting = None
        # it is gone: after its delivery that is fine, at rest the rank server reports
        # it
        with suppress(OSError):
            send_word(rank.channel, number)


TICK_SECONDS = 0.1
# After a failure, without another: for the others to say what they saw (they lose their connections
# within milliseconds, one after the other where many share few cores).
_GRACE_SECONDS = 1.0
# After a lost connection: for the rank that closed it to say why; its exception may unwind slowly.
_CAUSE_GRACE_SECONDS = 5.0
# For ranks that were released to end by themselves.
_EXIT_SECONDS = 1.0
# For the server to see the last process end after SIGKILL, which may have much memory to give back;
# one stuck in the kernel is not waited for longer.
_END_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The results of a launch, still in bytes."""

    results: tuple[bytes, ...]  # by rank
    cost: LaunchCost
    output: tuple[RankOutput, ...]
    notes: tuple[str, ...]
    opened: Opened  # by the processes of this node
    clocks: Mapping[int, Clock] = field(default_factory=dict)  # of ranks on other nodes


_L = TypeVar("_L", bound="Launch")


class Launch:
    """The processes of one launch. A context manager: whatever happens, nothing of it is left
    behind."""

    in_stretches = False  # whether the ranks pause between stretches of their window

    def __init__(
        self,
        server: RankServer,
        request: LaunchRequest,
        observer: output.Observer,
        remote: RemoteRanks | None = None,
        store: socket.socket | None = None,
    ) -> None:
        """`remote`: the ranks that other nodes start. `store`: a bound socket where all ranks will
        meet."""
        self._server, self._request, self._observer = server, request, observer
        self._plan, self._part = request.plan, request.part
        self._remote = remote or RemoteRanks()
        self._store = store
        self._names = {
            process: self._plan.name(process) for process in self._part.processes
        }
        self._ranks: list[Peer] = []
        self._notes: list[str] = []
        self.over = self._begun = False
        self._dismissed = False
        self._paused = False  # by signal

    def __enter__(self: _L) -> _L:
        with writing_temporary_files(), ExitStack() as failing:
            self._folder = Path(tempfile.mkdtemp(prefix="ddpperf-"))
            failing.callback(shutil.rmtree, self._folder, ignore_errors=True)
            begun = ServerMessage(ServerKind.BEGIN_LAUNCH, folder=str(self._folder))
            self._server.send(begun)  # from here on it does not outlive us
            self._board = Board(
                self._folder / "board", self._plan.processes, self._plan.room
            )
            failing.callback(self._board.close)
            (self._folder / "payload").write_bytes(self._request.payload)
            fields = self._request.fields(self._folder, in_stretches=self.in_stretches)
            os.mkdir(fields["environ"]["TMPDIR"])
            (self._folder / "request.json").write_text(json.dumps(fields))
            failing.pop_all()
        self._stream = output.Stream(self._folder, self._names, self._observer.output)
        dump = partial(self._server.send, ServerMessage(ServerKind.DUMP_STACKS))
        self._diagnosis = Diagnosis(
            self._folder, self._board, self._plan, dump, self._take_in
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._end()
        except ServerError:
            # it took its ranks along, but what they had started may be stopped
            for rank in filter(
                lambda rank: rank.pid, self._ranks if self.in_stretches else ()
            ):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.pid, signal.SIGCONT)
        finally:
            try:
                # nothing, where it has ended
                self._remote.stop(time.monotonic(), at_deadline=False)
                # what interrupts pytest waits for nobody
                if kind is None or issubclass(kind, Exception):
                    self._remote.await_end()
                for rank in self._ranks:
                    rank.channel.close()
                self._board.close()
            finally:
                shutil.rmtree(self._folder, ignore_errors=True)

    def run(self) -> Delivery:
        """Run the whole launch; raises LaunchError with the first cause, or ServerError."""
        self.begin()
        return self.finish()

    def begin(self) -> None:
        """Start the ranks."""
        self._begun = True
        self._requested = time.monotonic_ns()
        self._deadline = time.monotonic() + self._plan.timeout_seconds
        if self._store is not None:
            self._server.send(
                ServerMessage(ServerKind.HOLD_STORE), self._store.fileno()
            )
        self._remote.begin()
        self._fork()

    def finish(self) -> Delivery:
        """Wait for the ranks' results and for their end; raises LaunchError with the first cause,
        or ServerError."""
        self._collect(lambda rank: rank.settled)
        self._check()
        if self._observer.streams:
            self._stream.pump(last=True)
        self._release()
        self._end()
        self._remote.await_end()
        if self._remote.errors:  # a node that went before its ranks had ended
            raise launch_error(self._remote.errors, self._output())
        results = {
            **{rank.number: rank.result or b"" for rank in self._ranks},
            **self._remote.results,
        }
        return Delivery(
            results=tuple(results[process] for process in range(self._plan.processes)),
            cost=self._cost(time.monotonic_ns()),
            output=self._output(),
            notes=(*self._notes, *self._remote.notes),
            opened=Opened(str(self._folder)),
            clocks=self._remote.clocks(),
        )

    def _output(self) -> tuple[RankOutput, ...]:
        """Return the output of all processes, once they have ended."""
        every = (*output.read(self._folder, self._names), *self._remote.output)
        return tuple(sorted(every, key=lambda one: one.rank))

    def _check(self) -> None:
        """End it and raise LaunchError if a rank failed."""
        if any(rank.error is not None for rank in self._ranks) or self._remote.errors:
            if self._observer.streams:
                self._stream.pump(last=True)
            self._remote.stop(time.monotonic(), at_deadline=False)
            self._end()
            self._remote.await_end()
            failures = [*self._diagnosis.failures(self._ranks), *self._remote.errors]
            named = (
                replace(one, name=self._remote.name(one.rank) or one.name)
                for one in failures
            )
            raise launch_error(named, self._output(), self._diagnosis.differing)

    def _fork(self) -> None:
        for number in self._part.processes:
            ours, theirs = socket.socketpair()
            with theirs:
                self._server.send(
                    ServerMessage(ServerKind.FORK_RANK, rank=number), theirs.fileno()
                )
            ours.setblocking(False)
            self._ranks.append(Peer(number, ours))

    def _collect(self, has_arrived: Callable[[Peer], bool]) -> None:
        """Wait until every rank `has_arrived` or failed, or until it is clear that one will do
        neither."""
        give_up, failed = self._deadline, 0
        while (
            pending := [
                rank for rank in self._ranks if not (has_arrived(rank) or rank.error)
            ]
        ) or not self._remote.settled():
            now = time.monotonic()
            if now >= give_up:
                self._give_up(has_arrived, at_deadline=give_up == self._deadline)
                return
            self._wait(min(TICK_SECONDS, give_up - now))
            self._dismiss_servers()
            own_group = (
                contents(self._folder / OWN_GROUP) if self._plan.boundary else ""
            )
            if own_group:
                self._ranks[0].error = self._diagnosis.error_of_own_group(
                    self._ranks[0], own_group
                )
                self._give_up(has_arrived, at_deadline=False)
                return
            if (
                self._plan.boundary
                and not failed
                and self._diagnosis.wait_in_vain(pending)
            ):
                give_up = self._deadline = now
            errors = [
                *(rank.error for rank in self._ranks if rank.error is not None),
                *self._remote.errors,
            ]
            if len(errors) > failed:
                failed = len(errors)
                grace = (
                    _CAUSE_GRACE_SECONDS
                    if all(e.lost_connection for e in errors)
                    else _GRACE_SECONDS
                )
                give_up = min(self._deadline, time.monotonic() + grace)

    @property
    def _timed(self) -> list[Peer]:
        """The ranks that are timed: in an RPC launch, the trainers."""
        return [rank for rank in self._ranks if rank.number < self._plan.world_size]

    def _dismiss_servers(self) -> None:
        """Let the processes that only serve end when the ranks that they serve have ended."""
        servers = [rank for rank in self._ranks if rank.number >= self._plan.world_size]
        if (
            not self._dismissed
            and servers
            and all(rank.done for rank in self._timed)
            and self._remote.settled()
        ):
            self._dismissed = True
            wake(servers)

    def _wait(self, seconds: float) -> None:
        """Take in whatever arrives, for at most `seconds`, and show it."""
        self._take_in(seconds)
        if self._observer.streams:
            self._stream.pump()
        board = self._board
        for first in self._part.processes[:1]:
            self._observer.progress(
                board.phase(first),
                board.step(first),
                board.steps(first),
                board.marks(first),
            )

    def _take_in(self, seconds: float = 0.0) -> None:
        """Take in what has arrived, or what arrives within `seconds`."""
        channels = {rank.channel: rank for rank in self._ranks if not rank.silent}
        ready = readable(
            [self._server.socket, *self._remote.channels(), *channels], seconds
        )
        for channel in ready:
            if channel in channels:
                channels[channel].read()
        if self._server.socket in ready:
            self._read_server()
        self._remote.receive()

    def _read_server(self) -> None:
        for answer in self._server.receive():
            if answer.kind is ServerKind.RANKS_PAUSED:
                self._paused = True
            for rank in self._ranks:
                if answer.kind is ServerKind.RANK_FORKED and rank.number == answer.rank:
                    rank.pid = answer.pid
                elif answer.kind is ServerKind.RANK_ENDED and rank.pid == answer.pid:
                    rank.read()  # all it sent has arrived before the news of its end
                    rank.exited = True
                    if not rank.settled:
                        rank.error = self._diagnosis.error_of_end(
                            rank, answer.status, answer.when
                        )

    def _give_up(
        self, has_arrived: Callable[[Peer], bool], *, at_deadline: bool
    ) -> None:
        """Stop waiting: find out where the ranks are that have not arrived."""
        # pytest itself may have stood still (a blocked terminal, say) while they
        # delivered
        self._take_in()
        pending = [
            rank for rank in self._ranks if not (has_arrived(rank) or rank.error)
        ]
        if not pending and self._remote.settled():
            return
        when = time.monotonic()
        self._remote.stop(when, at_deadline=at_deadline)
        if all(rank.result is not None and rank.error is None for rank in self._timed):
            self._remote.await_end()  # their results may be complete, too
        delivered = (
            all(rank.result is not None for rank in self._timed)
            and self._remote.settled()
        )
        if (
            delivered
            and not any(rank.error for rank in self._ranks)
            and not self._remote.errors
        ):
            # Every result is here; only clean-up hangs, and teardown is not what was asked to be
            # judged.
            self._notes += self._diagnosis.notes_on_clean_up(pending)
            for rank in pending:
                rank.done = True
            return
        self._diagnosis.add_hanging(pending, when, at_deadline=at_deadline)

    def _release(self) -> None:
        """Let the ranks end by themselves, for a moment."""
        self._remote.release()
        wake(self._ranks)
        until = time.monotonic() + _EXIT_SECONDS
        while (
            not all(rank.exited for rank in self._ranks)
            and (left := until - time.monotonic()) > 0
        ):
            self._wait(left)

    def _end(self) -> None:
        """No process of the launch is alive when this returns."""
        if self.over or not self._begun:
            return
        try:
            self._server.send(ServerMessage(ServerKind.END_LAUNCH))
            while ServerKind.LAUNCH_ENDED not in [
                answer.kind for answer in self._server.receive(_END_SECONDS)
            ]:
                pass
        except BaseException:
            # its late answers would be taken for those of the next launch
            self._server.stop()
            raise
        self.over = True

    def _cost(self, ended: int) -> LaunchCost:
        """Return the cost of the launch. A phase lasts from when the last rank enters it to when
        the last rank enters the next one; ranks of other nodes do not count."""
        timed = [rank.number for rank in self._timed]
        last = {
            phase: max((self._board.entered(rank, phase) for rank in timed), default=0)
            for phase in Phase
        }
        entered = [self._requested]
        for phase in (
            Phase.GROUP,
            Phase.SETUP,
            Phase.WARMUP,
            Phase.STEPS,
            Phase.DELIVERY,
        ):
            # a task without that phase spent nothing there
            entered.append(last[phase] or entered[-1])
        entered.append(ended)
        start, group, setup, warmup, steps, end = (
            (after - before) / 1e9 for before, after in pairwise(entered)
        )
        return LaunchCost(
            start=start, group=group, setup=setup, warmup=warmup, steps=steps, end=end
        )


class Leader(Protocol):
    """The connection to the leader."""

    @property
    def socket(self) -> socket.socket: ...

    def order_by_now(self) -> Order | None:
        """Return the next order if there is one."""

    def send(self, event: Event) -> None: ...


class LocalShareLaunch(Launch):
    """This node's part of a Launch (`OrderKind.TAKE_SHARE`), without a deadline: that is the
    leader's."""

    def serve(self, leader: Leader) -> None:
        """Start the ranks, report on them, and end them when the leader says so; raises
        ServerError."""
        # so that it looks up when the leader says something
        self._remote = RemoteRanks(leader.socket)
        self.begin()
        failed: set[int] = set()
        settled = False
        while (order := leader.order_by_now()) is None:
            self._wait(TICK_SECONDS)
            for rank in self._ranks:
                if rank.error is not None and rank.number not in failed:
                    failed.add(rank.number)
                    leader.send(Event(EventKind.RANK_FAILED, errors=(rank.error,)))
            if not settled and all(rank.done for rank in self._ranks):
                settled = True
                leader.send(Event(EventKind.SHARE_SETTLED, results=self._results()))
        if order.kind is OrderKind.RELEASE_RANKS:
            self._release()
        else:
            self._give_up(lambda rank: rank.settled, at_deadline=order.at_deadline)
        self._end()
        failures = self._diagnosis.failures(self._ranks)
        failed = {rank.number for rank in self._ranks if rank.error is not None}
        ended = Event(
            EventKind.SHARE_ENDED,
            errors=tuple(error for error in failures if error.rank in failed),
            waiting=tuple(error for error in failures if error.rank not in failed),
            output=self._output(),
            notes=tuple(self._notes),
            results={} if settled else self._results(),
        )
        leader.send(ended)

    def _results(self) -> dict[int, bytes]:
        """Return the results that have come, by process."""
        return {
            rank.number: rank.result for rank in self._timed if rank.result is not None
        }
