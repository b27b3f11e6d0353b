"""One launch, from the request to the last process: the seam *run launch k of this plan, return its
samples*."""

import math
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from getpass import getuser
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from pytest_ddpperf.launch import output
from pytest_ddpperf.launch.failed_ranks import (
    Diagnosis,
    describe_differing,
    launch_error,
)
from pytest_ddpperf.launch.ranks import Peer, wake
from pytest_ddpperf.launch.remote_ranks import RemoteRanks
from pytest_ddpperf.launch.server_client import (
    RankServer,
    writing_temporary_files,
)
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import ServerError
from pytest_ddpperf.records.messages import (
    AskProgress,
    BeginLaunch,
    DumpStacks,
    EndLaunch,
    Event,
    ForkRank,
    HoldStore,
    LaunchEnded,
    Order,
    RankEnded,
    RankFailed,
    RankForked,
    RankRequest,
    ReleaseRanks,
    ServerAnswer,
    SetWindow,
    ShareEnded,
    ShareProgress,
    ShareSettled,
    Started,
    StopRanks,
)
from pytest_ddpperf.records.record import record
from pytest_ddpperf.records.samples import (
    Digests,
    LaunchCost,
    Outputs,
    RankError,
)
from pytest_ddpperf.wire.boot import contents
from pytest_ddpperf.wire.channels import Board, Phase, readable
from pytest_ddpperf.wire.opened import OWN_GROUP, Opened

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


@record
class Delivery:
    """The results of a launch, still in bytes."""

    results: tuple[bytes, ...]  # by rank
    cost: LaunchCost
    output: Outputs
    notes: tuple[str, ...]
    opened: Opened  # by the processes of this node
    # of each other node, as `RemoteRanks.files`
    files: Mapping[str, Digests]
    # of ranks on other nodes
    clocks_ahead_ns: Mapping[int, float]


class LaunchFiles(NamedTuple):
    """What ranks and pytest share in a launch."""

    folder: Path
    request: RankRequest
    board: Board


@contextmanager
def launch_files(
    server: RankServer, request: Callable[[Path], RankRequest], task: bytes
) -> Iterator[LaunchFiles]:
    """Make the folder of a launch, with its `request` and the pickled `task`, and remove it in the
    end. Raises DdpPerfError."""
    with ExitStack() as closing:
        with writing_temporary_files():
            folder = Path(tempfile.mkdtemp(prefix="ddpperf-"))
            closing.callback(shutil.rmtree, folder, ignore_errors=True)
            # from here on it does not outlive us
            server.send(BeginLaunch(str(folder)))
            made = request(folder)
            board = Board(folder / "board", made.plan.processes, made.plan.room)
            closing.callback(board.close)
            temporary = made.environ["TMPDIR"]
            os.mkdir(temporary)
            cache = made.environ["TORCHINDUCTOR_CACHE_DIR"]
            # Inductor puts precompiled headers into the folder of temporary files, wherever its
            # cache is. Without the link each launch compiles them anew, as for a user whose name
            # is unknown.
            with suppress(KeyError, OSError):
                if os.path.isdir(cache):
                    os.symlink(cache, f"{temporary}/torchinductor_{getuser()}")
            (folder / "request.json").write_bytes(codec.to_json(made))
            (folder / "payload").write_bytes(task)
        yield LaunchFiles(folder, made, board)


_L = TypeVar("_L", bound="Launch")


class Launch:
    """The processes of one launch. A context manager: whatever happens, nothing of it is left
    behind."""

    def __init__(
        self,
        server: RankServer,
        files: LaunchFiles,
        observer: output.Observer,
        remote: RemoteRanks,
        store: socket.socket | None = None,
    ) -> None:
        """`remote`: the ranks that other nodes start. `store`: a bound socket where all ranks will
        meet."""
        self._server, self._observer = server, observer
        self._folder, self._request = files.folder, files.request
        self._board, self._plan = files.board, files.request.plan
        self._remote, self._store = remote, store
        self._names = {
            process: self._plan.name(process)
            for process in self._request.processes
        }
        self._stream = output.Stream(self._folder, self._names, observer)
        dump = partial(server.send, DumpStacks())
        self._diagnosis = Diagnosis(
            self._folder, self._board, self._plan, dump, self._take_in
        )
        self._ranks: list[Peer] = []
        # those that only serve the others, and wait for their end
        self._serving: list[Peer] = []
        self._notes: list[str] = []
        self._requested_ns = 0
        self._deadline = math.inf
        self._has_processes = False

    def __enter__(self: _L) -> _L:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._end()
        except ServerError:
            # it took its ranks along, but what they had started may be stopped
            if self._request.in_stretches:
                self._continue_groups()
        finally:
            # nothing, where it has ended
            self._remote.stop(time.monotonic())
            # what interrupts pytest waits for nobody
            if kind is None or issubclass(kind, Exception):
                self._remote.await_end()
            for rank in self._ranks:
                rank.channel.close()

    def _continue_groups(self) -> None:
        for rank in self._ranks:
            if rank.pid:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.pid, signal.SIGCONT)

    def begin(self) -> None:
        """Start the ranks."""
        self._has_processes = True
        self._requested_ns = time.monotonic_ns()
        self._deadline = time.monotonic() + self._plan.timeout_seconds
        if self._store is not None:
            self._server.send(HoldStore(), self._store.fileno())
        self._remote.begin()
        for number in self._request.processes:
            self._fork(number)

    def finish(self) -> Delivery:
        """Wait for the ranks' results and for their end; raises LaunchError with the first cause,
        or ServerError."""
        self._collect(lambda rank: rank.settled)
        self._check()
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
            results=tuple(
                results[process] for process in range(self._plan.processes)
            ),
            cost=self._cost(time.monotonic_ns()),
            output=self._output(),
            notes=(*self._notes, *self._remote.notes),
            opened=Opened(str(self._folder)),
            files=self._remote.files,
            clocks_ahead_ns=self._remote.clocks_ahead_ns(),
        )

    def _output(self) -> Outputs:
        """Return the output of all processes, once they have ended."""
        every = (*output.read(self._folder, self._names), *self._remote.output)
        return tuple(sorted(every, key=lambda one: one.rank))

    def _check(self) -> None:
        """End it and raise LaunchError if a rank failed."""
        if not self._errors():
            return
        self._stream.pump(last=True)
        self._remote.stop(time.monotonic())
        self._remote.await_end()
        self._end()
        own = (rank.error or self._diagnosis.idle(rank) for rank in self._ranks)
        named = (
            replace(one, name=self._remote.name(one.rank) or one.name)
            for one in (*own, *self._remote.errors)
        )
        started = {**self._diagnosis.started, **self._remote.started}
        raise launch_error(named, self._output(), describe_differing(started))

    def _errors(self) -> list[RankError]:
        """Return the errors so far, of all nodes."""
        own = (rank.error for rank in self._ranks if rank.error is not None)
        return [*own, *self._remote.errors]

    def _fork(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._server.send(ForkRank(number), theirs.fileno())
        ours.setblocking(False)
        rank = Peer(number, ours)
        self._ranks.append(rank)
        if number >= self._plan.world_size:
            self._serving.append(rank)

    def _pending(self, has_arrived: Callable[[Peer], bool]) -> list[Peer]:
        return [
            rank
            for rank in self._ranks
            if not (has_arrived(rank) or rank.error)
        ]

    def _collect(self, has_arrived: Callable[[Peer], bool]) -> None:
        """Wait until every rank `has_arrived` or failed, or until it is clear that one will do
        neither."""
        give_up, failed = self._deadline, 0
        while (
            pending := self._pending(has_arrived)
        ) or not self._remote.settled():
            now = time.monotonic()
            if now >= give_up:
                self._give_up(
                    has_arrived, at_deadline=give_up == self._deadline
                )
                return
            self._wait(min(TICK_SECONDS, give_up - now))
            self._dismiss_servers()
            if self._plan.boundary:
                self._share_window()
                self._refuse_own_group()
                if not failed and self._diagnosis.wait_in_vain(
                    pending, self._remote.ask_progress
                ):
                    give_up = now
                    self._deadline = now
            errors = self._errors()
            if len(errors) > failed:
                failed, grace = len(errors), _GRACE_SECONDS
                if all(error.lost_connection for error in errors):
                    grace = _CAUSE_GRACE_SECONDS
                give_up = min(self._deadline, time.monotonic() + grace)

    def _share_window(self) -> None:
        """Let the ranks of a program on other nodes know its window, which rank 0 decides by the
        updates that they have taken."""
        board = self._board
        steps = board.steps(0)
        if steps:
            self._remote.set_window(board.begin(), steps)
        for answer in self._remote.progress.values():
            board.set_updates(answer.updates)
            for rank in answer.updates:
                board.set_steps(rank, steps)

    def _refuse_own_group(self) -> None:
        """Give a rank of a program an error if what it started formed a process group."""
        first = self._ranks[0]
        own_group = contents(self._folder / OWN_GROUP)
        if own_group:
            first.error = self._diagnosis.error_of_own_group(first, own_group)

    @property
    def _timed(self) -> list[Peer]:
        """The ranks that are timed: in an RPC launch, the trainers."""
        return [
            rank for rank in self._ranks if rank.number < self._plan.world_size
        ]

    def _dismiss_servers(self) -> None:
        """Let the processes that only serve end when the ranks that they serve have ended."""
        if all(rank.done for rank in self._timed) and self._remote.settled():
            wake(self._serving)
            self._serving = []

    def _wait(self, seconds: float) -> None:
        """Take in whatever arrives, for at most `seconds`, and show it."""
        self._take_in(seconds)
        self._stream.pump()
        board = self._board
        for first in self._request.processes[:1]:
            self._observer.progress(
                board.phase(first),
                board.step(first),
                board.steps(first),
                board.marks(first),
            )

    def _take_in(self, seconds: float = 0.0) -> None:
        """Take in what has arrived, or what arrives within `seconds`."""
        channels = {
            rank.channel: rank for rank in self._ranks if not rank.silent
        }
        ready = readable(
            [self._server.socket, *self._remote.channels(), *channels], seconds
        )
        for channel in ready:
            if channel in channels:
                channels[channel].read()
        if self._server.socket in ready:
            for answer in self._server.receive():
                self._take_answer(answer)
        self._remote.receive()

    def _take_answer(self, answer: ServerAnswer) -> None:
        match answer:
            case RankForked(number, pid):
                for rank in self._ranks:
                    if rank.number == number:
                        rank.pid = pid
            case RankEnded(pid, status, when):
                for rank in self._ranks:
                    if rank.pid != pid:
                        continue
                    # all it sent has arrived before the news of its end
                    rank.read()
                    rank.exited = True
                    if not rank.settled:
                        rank.error = self._diagnosis.error_of_end(
                            rank, status, when
                        )

    def _give_up(
        self, has_arrived: Callable[[Peer], bool], *, at_deadline: bool
    ) -> None:
        """Stop waiting: find out where the ranks are that have not arrived."""
        # pytest itself may have stood still (a blocked terminal, say) while they
        # delivered
        self._take_in()
        pending = self._pending(has_arrived)
        if not pending and self._remote.settled():
            return
        when = time.monotonic()
        late = self._diagnosis.late if at_deadline else ""
        if all(rank.result is not None for rank in self._timed):
            self._remote.stop(when, late)
            self._remote.await_end()  # their results may be complete, too
            if self._remote.settled() and not self._errors():
                # Every result is here; only clean-up hangs, and teardown is not what was asked to
                # be judged.
                self._notes += self._diagnosis.notes_on_clean_up(pending)
                for rank in pending:
                    rank.done = True
                return
        self._diagnosis.add_hanging(pending, when, at_deadline=at_deadline)
        # only now, for ranks here lose their connections with the ends of others
        self._remote.stop(when, late)

    def _release(self) -> None:
        """Let the ranks end by themselves, for a moment."""
        self._remote.release()
        wake(self._ranks)
        until = time.monotonic() + _EXIT_SECONDS
        while not all(rank.exited for rank in self._ranks):
            left = until - time.monotonic()
            if left <= 0:
                return
            self._wait(left)

    def _end(self) -> None:
        """No process of the launch is alive when this returns."""
        if not self._has_processes:
            return
        try:
            self._server.send(EndLaunch())
            while LaunchEnded() not in self._server.receive(_END_SECONDS):
                pass
        except BaseException:
            # its late answers would be taken for those of the next launch
            self._server.stop()
            raise
        self._has_processes = False

    def _cost(self, ended: int) -> LaunchCost:
        """Return the cost of the launch. A phase lasts from when the last rank enters it to when
        the last rank enters the next one; ranks of other nodes do not count."""
        entered = [self._requested_ns]
        for phase in Phase:
            if not Phase.GROUP <= phase <= Phase.DELIVERY:
                continue
            times = [
                self._board.entered(rank.number, phase) for rank in self._timed
            ]
            # a task without that phase spent nothing there
            entered.append(max(times, default=0) or entered[-1])
        entered.append(ended)
        start, group, setup, warmup, steps, end = (
            (after - before) / 1e9 for before, after in pairwise(entered)
        )
        return LaunchCost(
            start=start,
            group=group,
            setup=setup,
            warmup=warmup,
            steps=steps,
            end=end,
        )


class Leader(Protocol):
    """The connection to the leader."""

    @property
    def socket(self) -> socket.socket: ...

    def order_by_now(self) -> Order | None:
        """Return the next order if there is one."""

    def send(self, event: Event) -> None: ...


class LocalShareLaunch(Launch):
    """This node's part of a Launch (TakeShare), without a deadline: that is the leader's."""

    def serve(
        self, leader: Leader, digests: Callable[[Opened], Digests]
    ) -> None:
        """Start the ranks, report on them, and end them when the leader says so; raises
        ServerError. `digests` returns those of files that ranks opened; it raises
        BaseSideError."""
        self.begin()
        reported: set[int] = set()
        settled = False
        while True:
            order = leader.order_by_now()
            match order:
                case None:
                    pass
                case SetWindow(begin, steps):
                    self._board.set_steps(0, steps)
                    self._board.set_begin(begin)
                    leader.send(self._progress())
                case AskProgress(some_delivered):
                    leader.send(self._progress(some_delivered))
                case _:
                    break
            self._wait(TICK_SECONDS)
            if self._plan.boundary:
                self._refuse_own_group()
            for rank in self._ranks:
                if rank.error is not None and rank.number not in reported:
                    reported.add(rank.number)
                    leader.send(RankFailed(rank.error))
            if not settled and all(rank.done for rank in self._ranks):
                settled = True
                leader.send(ShareSettled(self._results()))
        started: Mapping[int, Started] = {}
        if isinstance(order, ReleaseRanks):
            self._release()
        else:
            late = order.late if isinstance(order, StopRanks) else ""
            if late:
                self._diagnosis.late = late
            self._give_up(lambda rank: rank.settled, at_deadline=late != "")
            started = self._diagnosis.started or self._diagnosis.ask_started()
        self._end()
        leader.send(
            ShareEnded(
                started=started,
                errors=tuple(self._errors()),
                waiting=tuple(
                    self._diagnosis.idle(rank)
                    for rank in self._ranks
                    if rank.error is None
                ),
                output=self._output(),
                notes=tuple(self._notes),
                results={} if settled else self._results(),
                files=digests(Opened(str(self._folder))),
            )
        )

    def _progress(self, some_delivered: bool = False) -> ShareProgress:
        """Return how far the ranks of a program are; `some_delivered`, on other nodes."""
        waiting = [rank.number for rank in self._ranks if not rank.settled]
        started: Mapping[int, Started] = {}
        if some_delivered or len(waiting) < len(self._ranks):
            started = self._diagnosis.ask_started()
        updates = self._board.updates()
        own = {rank.number: updates[rank.number] for rank in self._ranks}
        return ShareProgress(own, tuple(waiting), started)

    def _results(self) -> dict[int, bytes]:
        """Return the results that have come, by process."""
        return {
            rank.number: rank.result
            for rank in self._timed
            if rank.result is not None
        }
