"""Failed ranks: which one was the first cause, where each one was, and its stacks."""

import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from pytest_ddpperf.launch import output
from pytest_ddpperf.launch.placement import kernel_list
from pytest_ddpperf.launch.ranks import Peer
from pytest_ddpperf.launch.stacks import (
    await_stacks,
    frames_written,
    handlers,
    waits_for_others,
    without_our_frames,
)
from pytest_ddpperf.records.errors import DdpPerfError, LaunchError
from pytest_ddpperf.records.messages import ShareProgress, Started
from pytest_ddpperf.records.plan import UPDATE, Plan
from pytest_ddpperf.records.samples import Outputs, RankError
from pytest_ddpperf.wire.boot import contents
from pytest_ddpperf.wire.channels import Board, Phase
from pytest_ddpperf.wire.opened import OWN_GROUP, OWN_GROUP_OF_ONE


def describe_end(status: int) -> str:
    """Describe the end of a process; `status` is negative for a signal."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        if name == "SIGKILL":
            name += " (the kernel's out-of-memory killer sends it too)"
        return f"killed by {name}"
    return f"exited with status {status}"


def launch_error(
    errors: Iterable[RankError], output: Outputs, differing: str = ""
) -> LaunchError:
    """Return the error of a launch, with the first cause first: the earliest one that is not a lost
    connection.

    Connections are lost because a rank ended. Ranks that merely had not finished come last.
    `differing` is how the collectives differ in which ranks hang. If all ranks ended early, the
    advice on that is given."""

    def order(error: RankError) -> tuple[bool, bool, float, bool]:
        return (
            error.when == math.inf,
            error.lost_connection,
            error.when,
            error.waits,
        )

    cause, *others = sorted(errors, key=order)
    if cause.advice:
        # a rank that waits in no collective may have ended its training, too
        went_on = differing or any(
            other.when == math.inf and (other.waits or not other.traceback)
            for other in others
        )
        rest = ", while other ranks went on" if went_on else f": {cause.advice}"
        cause = replace(cause, summary=f"{cause.summary}{rest}")
    if differing:
        cause = replace(cause, summary=f"{cause.summary}; {differing}")
    return LaunchError(cause, tuple(others), output)


_SHOWN = 2000  # characters of what a rank wrote


def text_with_output(error: DdpPerfError) -> str:
    """Return the text of an error of a remote launch, with the stderr of its ranks."""
    parts = [str(error)]
    if isinstance(error, LaunchError):
        for output in error.output:
            if output.stderr:
                parts.append(
                    f"stderr {output.name}:\n{output.stderr[-_SHOWN:]}"
                )
    return "\n".join(parts)


# "CUDA kernel errors might be reported at some other call" follows each error.
_OF_DEVICE = re.compile(
    r"\b(CUDA|HIP|NCCL|XPU)\b(?! kernel errors might).*\b(error|exception|failure|timeout)",
    re.IGNORECASE,
)
_OF_DEVICE_SHOWN = 300


class _Place(NamedTuple):
    """Where a rank is."""

    serves: bool  # whether it waits for the calls of others
    words: str


@dataclass
class Diagnosis:
    """Finds out what happened to the ranks of one launch."""

    _folder: Path
    _board: Board
    _plan: Plan
    _dump: Callable[[], None]  # asks every rank for its stacks
    _take_in: Callable[[], None]  # reads what has arrived from them
    # by rank, where some hang
    started: Mapping[int, Started] = field(default_factory=dict)
    # that the ranks of a program have made
    _progress: list[int] = field(default_factory=list)
    _progress_at: float = 0.0

    def __post_init__(self) -> None:
        plan = self._plan
        self.late = f"did not end within {plan.timeout_seconds:g} s ({plan.timeout_setting})"

    def _place(self, rank: Peer) -> _Place:
        serves = self._board.phase(rank.number) is Phase.LEADER
        if rank.resting is not None:
            return _Place(serves, "its pause")
        return _Place(serves, self._board.describe(rank.number, self._plan))

    def _stacks(self, rank: Peer) -> str:
        path = self._folder / f"rank{rank.number}.stacks"
        return path.read_text(errors="replace") if path.exists() else ""

    def notes_on_clean_up(self, ranks: Sequence[Peer]) -> list[str]:
        """Return notes on ranks that delivered their results and whose clean-up does not end."""
        return [
            f"{self._plan.name(rank.number)}'s clean-up {self.late}; it was killed"
            for rank in ranks
            if not self._place(rank).serves
        ]

    def add_hanging(
        self, ranks: Sequence[Peer], when: float, *, at_deadline: bool
    ) -> None:
        """Give an error to each of `ranks` that has neither delivered nor failed when the launch is
        given up."""
        # the signal may wake a rank from its sleep
        places = {rank.number: self._place(rank) for rank in ranks}
        await_stacks(
            self._dump,
            lambda: [frames_written(self._stacks(rank)) for rank in ranks],
        )
        self.started = self.ask_started()
        if at_deadline and self.started:
            time.sleep(_MOVES_SECONDS)
            if self.ask_started() != self.started:
                # they go on, so no rank hangs
                self.started = {}
                self.late += self._without_updates(
                    "it goes on, but too few of its updates were seen: raise --ddp-timeout, or"
                    ' mark where steps end (boundary="mark")'
                )
        if at_deadline:
            self.late += self._without_updates(
                contents(self._folder / OWN_GROUP_OF_ONE)
            )
            if any(map(self._starts_ranks, ranks)):
                self.late += (
                    "; it started processes that form a process group of their own: the plugin"
                    " starts the ranks, and calls setup in each"
                )
        # Asking takes up to seconds, in which the cause may have come or, if it was no deadline,
        # what was waited for.
        self._take_in()
        for rank in ranks:
            error = rank.error
            if error is not None:
                # It came after the launch was given up: perhaps because the program handles the
                # signal that asks for stacks, or ends by it.
                summary = error.summary
                if at_deadline:
                    summary = f"{self.late}; then: {summary}"
                # at that time at the latest: whoever waits for this rank comes after it
                when_known = min(error.when, when)
                rank.error = replace(error, when=when_known, summary=summary)
            elif at_deadline or (rank.result is None and rank.resting is None):
                place, stacks = places[rank.number], self._stacks(rank)
                if place.serves and not handlers(stacks):
                    idle = "was waiting for calls"
                    rank.error = self._error(rank, math.inf, idle, place)
                    continue
                late, since = self.late, when
                if not at_deadline:
                    # what stopped the launch is the cause, even a lost connection
                    late = "was still running when the launch was stopped"
                    since = math.inf
                rank.error = self._error(rank, since, late, place, stacks)

    def _without_updates(self, hint: str) -> str:
        """Return a hint for a program of which no update was seen."""
        has_none = self._plan.boundary == UPDATE and not any(
            self._board.updates()
        )
        return f"; {hint}" if hint and has_none else ""

    def _starts_ranks(self, rank: Peer) -> bool:
        """Whether a set-up function has started ranks itself. Programs are refused for that."""
        plan = self._plan
        if plan.boundary or plan.command or plan.rpc:
            return False
        if not contents(self._folder / OWN_GROUP):
            return False
        return self._board.phase(rank.number) <= Phase.SETUP

    def wait_in_vain(
        self,
        ranks: Sequence[Peer],
        ask_others: Callable[[bool], Iterable[ShareProgress]],
    ) -> bool:
        """Return whether `ranks` of a program are late because they wait in collectives for the
        others, which have taken their updates and do nothing more. `ask_others` asks other nodes,
        and is given whether some ranks of this one have delivered."""
        progress, now = self._board.updates(), time.monotonic()
        if progress != self._progress or len(ranks) == len(progress):
            self._progress, self._progress_at = progress, now
        if now < self._progress_at + _PROGRESS_SECONDS:
            return False
        self._progress_at = now
        late = {rank.number for rank in ranks}
        started: dict[int, Started] = {}
        for answer in ask_others(len(ranks) < len(self._plan.part(0))):
            self._board.set_updates(answer.updates)
            late.update(answer.waiting)
            started |= answer.started
        if self._board.updates() != progress or len(late) == len(progress):
            return False
        started |= self.ask_started()
        waiting = [started.pop(rank, {}) for rank in late]
        if not any(
            _is_ahead(each, other)
            for each in waiting
            for other in started.values()
        ):
            return False
        self.late = self._board.describe_updates(self._plan.boundary)
        return True

    def ask_started(self) -> dict[int, Started]:
        """Return the collectives that each rank has started, of those that answer; see
        `recorder.started`."""
        if self._plan.rpc:
            return {}  # its processes are in no group together
        asked = []
        for pipe in self._folder.glob("rank*.ask"):
            with suppress(OSError):  # nobody reads: the rank has ended
                pipe.with_suffix(".started").unlink(missing_ok=True)
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
                asked.append(pipe.with_suffix(".started"))
        until = time.monotonic() + _STARTED_SECONDS
        while (
            not all(path.exists() for path in asked)
            and time.monotonic() < until
        ):
            time.sleep(0.01)
        return {
            int(path.stem.removeprefix("rank")): json.loads(path.read_text())
            for path in asked
            if path.exists()
        }

    def error_of_end(self, rank: Peer, status: int, when: float) -> RankError:
        """Return the error of a rank that ended too early."""
        summary = describe_end(status)
        if status < 0:
            summary += self._of_device(rank)
        elif rank.result is None:
            summary += " without delivering a result"
        else:
            summary += " in its clean-up"
        return self._error(
            rank, when, summary, self._place(rank), self._stacks(rank)
        )

    def _of_device(self, rank: Peer) -> str:
        """Return what CUDA or NCCL wrote last, whose threads end a process before Python can say
        what happened."""
        (written,) = output.read(self._folder, {rank.number: ""})
        for line in reversed(written.stderr.splitlines()):
            if _OF_DEVICE.search(line):
                said = line.strip().removeprefix("what():").strip()
                return f": {said[:_OF_DEVICE_SHOWN]}"
        return ""

    def error_of_own_group(self, rank: Peer, summary: str) -> RankError:
        """Return the error of a rank whose children form a process group; it is the first
        cause."""
        return self._error(rank, 0.0, summary, self._place(rank))

    def idle(self, rank: Peer) -> RankError:
        """Return an entry for a rank without an error."""
        idle = "had delivered its result and waited for the others"
        if rank.resting is not None:
            idle = "was paused while the other side ran"
        return self._error(rank, math.inf, idle, self._place(rank))

    def _error(
        self,
        rank: Peer,
        when: float,
        summary: str,
        place: _Place,
        stacks: str = "",
    ) -> RankError:
        if self._plan.command:
            stacks = ""  # of what waits for it
        return RankError(
            rank=rank.number,
            name=self._plan.name(rank.number),
            when=when,
            phase=place.words,
            summary=summary,
            traceback=without_our_frames(stacks),
            waits=waits_for_others(stacks, serves=place.serves),
        )


# Ranks of a program that have made no progress for so long are asked what they wait for: they may
# evaluate.
_PROGRESS_SECONDS = 3.0
# A rank that has not answered by then never lets its threads run.
_STARTED_SECONDS = 2.0
# Ranks that go on start a collective meanwhile.
_MOVES_SECONDS = 0.5
_DEFAULT_GROUP = "0"
# Of these, all ranks give as many bytes.
_ALIKE = ("all_reduce", "broadcast")


def _is_ahead(one: Started, other: Started) -> bool:
    """Whether a rank has started a later collective of a group than another one."""
    return any(
        one[group][-1][0] > other[group][-1][0] for group in one.keys() & other
    )


def describe_differing(started: Mapping[int, Started]) -> str:
    """Return which ranks have not entered a collective for which others wait, or that they have
    entered different ones; "" if they all are in the same. `started` is by rank."""
    for group in sorted(
        {group for groups in started.values() for group in groups}
    ):
        of_group = (
            "" if group == _DEFAULT_GROUP else f" of process group {group}"
        )
        # Whoever has started nothing on a subgroup may not be in it.
        by_rank = {
            rank: {
                number: (name, size)
                for number, name, size in groups.get(group, ())
            }
            for rank, groups in sorted(started.items())
            if group in groups or group == _DEFAULT_GROUP
        }
        last = {rank: max(each, default=0) for rank, each in by_rank.items()}
        fewest = min(last.values())
        behind = [rank for rank in by_rank if last[rank] == fewest]
        # Asked first: a rank that starts two collectives at once is ahead of one that has missed
        # none.
        entered = {
            rank: each[fewest]
            for rank, each in by_rank.items()
            if fewest in each
        }
        kinds = {
            (name, size if name in _ALIKE else 0)
            for name, size in entered.values()
        }
        if len(kinds) > 1:
            each = (
                f"rank {rank} {name} ({size:,} bytes)"
                for rank, (name, size) in entered.items()
            )
            return f"ranks entered different collectives {fewest}{of_group}: {', '.join(each)}"
        ahead = [rank for rank in by_rank if fewest + 1 in by_rank[rank]]
        if ahead:
            name, size = by_rank[ahead[0]][fewest + 1]
            verb = "waits" if len(ahead) == 1 else "wait"
            return (
                f"{_names(behind)} never entered {name} {fewest + 1} ({size:,} bytes){of_group};"
                f" {_names(ahead)} {verb} for it"
            )
    return ""


_NAMED = 8  # ranks, each by its number


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) > _NAMED:
        return f"ranks {kernel_list(ranks)}"
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
