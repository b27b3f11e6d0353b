"""Failed ranks: which one was the first cause, where each one was, and its stacks."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pytest_ddpperf.launch import output
from pytest_ddpperf.launch.ranks import Peer
from pytest_ddpperf.records.errors import DdpPerfError, LaunchError
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import RankError, RankOutput
from pytest_ddpperf.wire.channels import Board, Phase


def describe_exit(status: int, *, delivered: bool = False) -> str:
    """Describe the early end of a rank, with its result `delivered` or not; `status` is negative
    for a signal."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        hint = (
            " (the kernel's out-of-memory killer sends it too)"
            if name == "SIGKILL"
            else ""
        )
        return f"killed by {name}{hint}"
    return (
        f"exited with status {status}"
        f" {'in its clean-up' if delivered else 'without delivering a result'}"
    )


def describe_end(status: int) -> str:
    """Describe the end of another process."""
    return describe_exit(status) if status < 0 else f"exited with status {status}"


def launch_error(
    errors: Iterable[RankError], output: tuple[RankOutput, ...], differing: str = ""
) -> LaunchError:
    """Return the error of a launch, with the first cause first: the earliest one that is not a lost
    connection.

    Connections are lost because a rank ended. Ranks that merely had not finished come last.
    `differing` is how the collectives differ in which ranks hang. If all ranks ended early, the
    advice on that is given."""

    def order(error: RankError) -> tuple[bool, bool, float, bool]:
        return error.when == math.inf, error.lost_connection, error.when, error.waits

    cause, *others = sorted(errors, key=order)
    if cause.advice:
        went_on = differing or any(other.when == math.inf for other in others)
        rest = ", while other ranks went on" if went_on else f": {cause.advice}"
        cause = replace(cause, summary=f"{cause.summary}{rest}")
    if differing:
        cause = replace(cause, summary=f"{cause.summary}; {differing}")
    return LaunchError(cause, tuple(others), output)


_OURS = str(Path(__file__).parents[1] / "rank")


def without_our_frames(stacks: str) -> str:
    """faulthandler's stacks without our own thread and the frames between the rank's start and the
    user's code."""
    lines = _without_our_thread(stacks).splitlines()
    return "\n".join(
        line
        for line in lines
        if f'File "{_OURS}' not in line and 'File "<string>"' not in line
    )


def _without_our_thread(stacks: str) -> str:
    return "\n\n".join(
        thread for thread in stacks.split("\n\n") if " in _tell_started" not in thread
    )


_FRAME = re.compile(r'^  File "([^"]+)"', re.MULTILINE)


def frames_written(stacks: str) -> int:
    """Return how many frames a rank has written, 0 until all are there: a busy rank may pause
    anywhere. The main thread's frames come last, and faulthandler ends a stack that is too long
    with "..."."""
    return len(_FRAME.findall(_without_our_thread(stacks))) * stacks.endswith(
        (" in <module>\n", "...\n")
    )


# Locks and queues are waited for in Python: who does so is the frame above.
_LOCKS = ("/threading.py", "/queue.py")
# The phase of those who only serve, as `Board.describe` has it, and where torch runs what they are
# called for.
LEADER = "serving"
_HANDLER = "/torch/distributed/rpc/internal.py"


def waits_for_others(phase: str, stacks: str) -> bool:
    """Judge by its stacks whether a rank that hung most likely waits for the one at fault.

    Its main thread is in torch or in this package or, if it only serves, all its handlers are in
    torch."""
    if phase == LEADER:
        return all(map(_waits, _handlers(stacks)))
    threads = stacks.split("\n\n")
    return _waits(
        next(
            (thread for thread in threads if thread.startswith("Current thread")),
            threads[-1],
        )
    )


def _handlers(stacks: str) -> list[str]:
    """Return the threads of a process that run a call for another one."""
    return [thread for thread in stacks.split("\n\n") if _HANDLER in thread]


def _waits(thread: str) -> bool:
    innermost = next(
        (path for path in _FRAME.findall(thread) if not path.endswith(_LOCKS)), ""
    )
    return "/torch/" in innermost or innermost.startswith(_OURS)


_SHOWN = 2000  # characters of what a rank wrote


def text_with_output(error: DdpPerfError) -> str:
    """Return the text of an error of a remote launch, with the stderr of its ranks."""
    written = (
        [output for output in error.output if output.stderr]
        if isinstance(error, LaunchError)
        else []
    )
    return "\n".join(
        [
            str(error),
            *(
                f"stderr {output.name}:\n{output.stderr[-_SHOWN:]}"
                for output in written
            ),
        ]
    )


# "CUDA kernel errors might be reported at some other call" follows each error.
_OF_DEVICE = re.compile(
    r"\b(CUDA|HIP|NCCL|XPU)\b(?! kernel errors might).*\b(error|exception|failure|timeout)",
    re.IGNORECASE,
)
_OF_DEVICE_SHOWN = 300


class Diagnosis:
    """Finds out what happened to the ranks of one launch."""

    def __init__(
        self,
        folder: Path,
        board: Board,
        plan: Plan,
        dump: Callable[[], None],
        take_in: Callable[[], None],
    ) -> None:
        """`dump` asks every rank for its stacks, `take_in` reads what has arrived from them."""
        self._folder, self._board, self._plan, self._dump, self._take_in = (
            folder,
            board,
            plan,
            dump,
            take_in,
        )
        self.differing = ""  # in which collectives the ranks are that hang
        self._progress: list[int] = []  # that the ranks of a program have made
        self._progress_at = 0.0
        self._late = (
            f"did not end within {plan.timeout_seconds:g} s ({plan.timeout_setting})"
        )

    def place(self, rank: Peer) -> str:
        """Describe where a rank is."""
        if rank.resting is not None:
            return "rest"
        return self._board.describe(rank.number, self._plan)

    def _stacks(self, rank: Peer) -> str:
        path = self._folder / f"rank{rank.number}.stacks"
        return path.read_text(errors="replace") if path.exists() else ""

    def notes_on_clean_up(self, ranks: Sequence[Peer]) -> list[str]:
        """Return notes on ranks that delivered their results and whose clean-up does not end."""
        timed = [
            rank for rank in ranks if self._board.phase(rank.number) is not Phase.LEADER
        ]
        return [
            f"{self._plan.name(rank.number)}'s clean-up {self._late}; it was killed"
            for rank in timed
        ]

    def add_hanging(
        self, ranks: Sequence[Peer], when: float, *, at_deadline: bool
    ) -> None:
        """Give an error to each of `ranks` that has neither delivered nor failed when the launch is
        given up."""
        # the signal may wake a rank from its sleep
        places = {rank.number: self.place(rank) for rank in ranks}
        await_stacks(
            self._dump, lambda: [frames_written(self._stacks(rank)) for rank in ranks]
        )
        self.differing = describe_differing(self._started())
        # Asking takes up to seconds, in which the cause may have come or, if it was no deadline,
        # what was waited for.
        self._take_in()
        late = (
            self._late
            if at_deadline
            else "was still running when the launch was stopped"
        )
        for rank in ranks:
            place, stacks = places[rank.number], self._stacks(rank)
            # at that time at the latest: whoever waits for this rank comes after it
            if rank.error is not None:
                # Perhaps because the program handles the signal that asks for stacks, or ends by
                # it.
                summary = (
                    f"{late}; then: {rank.error.summary}"
                    if at_deadline
                    else rank.error.summary
                )
                rank.error = replace(
                    rank.error, when=min(rank.error.when, when), summary=summary
                )
            elif at_deadline or (rank.result is None and rank.resting is None):
                idle = place == LEADER and not _handlers(stacks)
                if idle:
                    rank.error = self._error(
                        rank, math.inf, "was waiting for calls", place
                    )
                else:
                    rank.error = self._error(rank, when, late, place, stacks)

    def wait_in_vain(self, ranks: Sequence[Peer]) -> bool:
        """Return whether `ranks` of a program are late because they wait in collectives for the
        others, which have taken their updates and do nothing more."""
        progress, now = self._board.updates(), time.monotonic()
        if progress != self._progress or len(ranks) == len(progress):
            self._progress, self._progress_at = progress, now
        if now < self._progress_at + _PROGRESS_SECONDS:
            return False
        self._progress_at = now
        started = self._started()
        waiting = [started.pop(rank.number, {}) for rank in ranks]
        if is_in_vain := any(
            each[group][-1][0] > other[group][-1][0]
            for each in waiting
            for other in started.values()
            for group in each.keys() & other.keys()
        ):
            self._late = self._board.describe_updates()
        return is_in_vain

    def _started(self) -> dict[int, dict[str, list[tuple[int, str, int]]]]:
        """Return the collectives that each rank has started, of those that answer; see
        `counters.started`."""
        asked = []
        # The processes of an RPC launch are in no group together.
        for pipe in self._folder.glob("rank*.ask") if not self._plan.rpc else ():
            with suppress(OSError):  # nobody reads: the rank has ended
                pipe.with_suffix(".started").unlink(missing_ok=True)
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
                asked.append(pipe.with_suffix(".started"))
        until = time.monotonic() + _STARTED_SECONDS
        while not all(path.exists() for path in asked) and time.monotonic() < until:
            time.sleep(0.01)
        return {
            int(path.stem.removeprefix("rank")): json.loads(path.read_text())
            for path in asked
            if path.exists()
        }

    def error_of_end(self, rank: Peer, status: int, when: float) -> RankError:
        """Return the error of a rank that ended too early."""
        summary = describe_exit(status, delivered=rank.result is not None)
        if status < 0:
            summary += self._of_device(rank)
        return self._error(rank, when, summary, self.place(rank), self._stacks(rank))

    def _of_device(self, rank: Peer) -> str:
        """Return what CUDA or NCCL wrote last, whose threads end a process before Python can say
        what happened."""
        (written,) = output.read(self._folder, {rank.number: ""})
        lines = [
            line.strip()
            for line in written.stderr.splitlines()
            if _OF_DEVICE.search(line)
        ]
        return (
            f": {lines[-1].removeprefix('what():').strip()[:_OF_DEVICE_SHOWN]}"
            if lines
            else ""
        )

    def error_of_own_group(self, rank: Peer, size: str) -> RankError:
        """Return the error of a rank whose children form a process group of so many; it is the
        first cause."""
        remedy = (
            "give the program of one rank, which runs as under torchrun, with RANK and "
            "WORLD_SIZE"
        )
        summary = (
            f"the program starts ranks itself, {size} processes that form a group of their own:"
            f" {remedy}"
        )
        return self._error(rank, 0.0, summary, self.place(rank))

    def failures(self, ranks: Sequence[Peer]) -> list[RankError]:
        """Return the errors, and entries for the ranks without one."""

        def idle(rank: Peer) -> str:
            return (
                "rested"
                if rank.resting is not None
                else "had delivered its result and waited for the others"
            )

        return [
            rank.error or self._error(rank, math.inf, idle(rank), self.place(rank))
            for rank in ranks
        ]

    def _error(
        self, rank: Peer, when: float, summary: str, phase: str, stacks: str = ""
    ) -> RankError:
        return RankError(
            rank=rank.number,
            name=self._plan.name(rank.number),
            when=when,
            phase=phase,
            summary=summary,
            traceback=without_our_frames(stacks),
            waits=waits_for_others(phase, stacks),
        )


# Ranks of a program that have made no progress for so long are asked what they wait for: they may
# evaluate.
_PROGRESS_SECONDS = 3.0
# A rank that has not answered by then never lets its threads run.
_STARTED_SECONDS = 2.0
_DEFAULT_GROUP = "0"
# Of these, all ranks give as many bytes.
_ALIKE = ("all_reduce", "broadcast")


def describe_differing(
    started: Mapping[int, Mapping[str, Sequence[tuple[int, str, int]]]],
) -> str:
    """Return which ranks have not entered a collective for which others wait, or that they have
    entered different ones; "" if they all are in the same. `started` is by rank what
    `counters.started` returns."""
    for group in sorted({group for groups in started.values() for group in groups}):
        of_group = "" if group == _DEFAULT_GROUP else f" of process group {group}"
        # Whoever has started nothing on a subgroup may not be in it.
        by_rank = {
            rank: {number: (name, size) for number, name, size in groups.get(group, ())}
            for rank, groups in sorted(started.items())
            if group in groups or group == _DEFAULT_GROUP
        }
        last = {rank: max(each, default=0) for rank, each in by_rank.items()}
        fewest = min(last.values())
        behind = [rank for rank in by_rank if last[rank] == fewest]
        ahead = [rank for rank in by_rank if fewest + 1 in by_rank[rank]]
        if ahead:
            name, size = by_rank[ahead[0]][fewest + 1]
            wait = f"{_names(ahead)} wait{'s' * (len(ahead) == 1)} for it"
            return (
                f"{_names(behind)} never entered {name} {fewest + 1} ({size:,} bytes){of_group};"
                f" {wait}"
            )
        entered = {
            rank: each[fewest] for rank, each in by_rank.items() if fewest in each
        }
        if (
            len({(name, size * (name in _ALIKE)) for name, size in entered.values()})
            > 1
        ):
            each = (
                f"rank {rank} {name} ({size:,} bytes)"
                for rank, (name, size) in entered.items()
            )
            return f"ranks entered different collectives {fewest}{of_group}: {', '.join(each)}"
    return ""


def _names(ranks: Sequence[int]) -> str:
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


# A process that wrote nothing more from one look to the next has finished.
_STACKS_LOOK_SECONDS = 0.1
# A process that has written nothing by then is stuck in the kernel, or has ended.
_STACKS_LONGEST_SECONDS = 5.0


def await_stacks(send: Callable[[], None], sizes: Callable[[], Sequence[int]]) -> None:
    """Ask for stacks with `send`, and wait until each process has written its own, by the `sizes`
    of them."""
    before = seen = sizes()
    send()
    until = time.monotonic() + _STACKS_LONGEST_SECONDS
    while time.monotonic() < until:
        time.sleep(_STACKS_LOOK_SECONDS)
        now = sizes()
        if now == seen and all(
            size > first for size, first in zip(now, before, strict=True)
        ):
            return
        seen = now
