"""What can be told of a rank that did not deliver: where it was, its stacks, and what it was most likely at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pytest_ddpperf.launch import stacks
from pytest_ddpperf.launch.failure import SERVING, describe_exit, handles_a_call, waits_for_others, without_our_frames
from pytest_ddpperf.launch.peer import Peer
from pytest_ddpperf.records import Plan, RankError
from pytest_ddpperf.wire.channels import Board, Phase


class Diagnosis:
    """Of the ranks of one launch."""

    def __init__(
        self, folder: Path, board: Board, plan: Plan, dump: Callable[[], None], take_in: Callable[[], None]
    ) -> None:
        """`dump` asks every rank for its stacks, `take_in` reads what has arrived from them."""
        self._folder, self._board, self._plan, self._dump, self._take_in = folder, board, plan, dump, take_in

    def place(self, rank: Peer) -> str:
        """In words."""
        if rank.resting is not None:
            return "rest"
        return self._board.describe(rank.number, warmup=self._plan.warmup)

    def stacks(self, rank: Peer) -> str:
        """As far as it wrote any."""
        return without_our_frames(self._raw_stacks(rank))

    def _raw_stacks(self, rank: Peer) -> str:
        path = self._folder / f"rank{rank.number}.stacks"
        return path.read_text(errors="replace") if path.exists() else ""

    def clean_up_that_hangs(self, ranks: Sequence[Peer]) -> list[str]:
        """Of ranks whose results are all there, what is to be told of those that have not ended."""
        timed = [rank for rank in ranks if self._board.phase(rank.number) is not Phase.SERVING]
        return [f"{self._plan.name(rank.number)}'s clean-up {self._late()}; it was killed" for rank in timed]

    def _late(self) -> str:
        return f"did not end within {self._plan.timeout_seconds:g} s (--ddp-timeout)"

    def of_those_that_hang(self, ranks: Sequence[Peer], when: float, *, at_deadline: bool) -> None:
        """Give an error to each of `ranks` that has not delivered and will not be waited for, since `when`, unless it
        has one by then."""
        places = {rank.number: self.place(rank) for rank in ranks}  # the signal may wake a rank from its sleep
        stacks.ask(self._dump, lambda: [len(self._raw_stacks(rank)) for rank in ranks])
        self._take_in()  # asking takes up to seconds, in which the cause may have come, or what was waited for
        for rank in ranks:
            if rank.error is not None:  # at that time at the latest: whoever waits for this rank comes after it
                rank.error = replace(rank.error, when=min(rank.error.when, when))
            elif rank.result is None and rank.resting is None:
                late = self._late() if at_deadline else "was still running when the launch was given up"
                rank.error = self._of_one_that_hangs(rank, places[rank.number], when, late)

    def _of_one_that_hangs(self, rank: Peer, phase: str, when: float, late: str) -> RankError:
        written = self._raw_stacks(rank)
        if phase == SERVING and not handles_a_call(written):
            return self.error(rank, when=math.inf, phase=phase, summary="was waiting for calls")
        return self.error(
            rank,
            when=when,
            phase=phase,
            summary=late,
            traceback=without_our_frames(written),
            waits=waits_for_others(phase, written),
        )

    def of_the_end(self, rank: Peer, status: int, when: float) -> RankError:
        """Of a rank that ended before it was due."""
        summary = describe_exit(status, delivered=rank.result is not None)
        return self.error(rank, when=when, summary=summary, traceback=self.stacks(rank))

    def failures(self, ranks: Sequence[Peer]) -> list[RankError]:
        """Errors, and for the others the little there is to say."""

        def idle(rank: Peer) -> str:
            return "rested" if rank.resting is not None else "had delivered its result and waited for the others"

        return [rank.error or self.error(rank, when=math.inf, summary=idle(rank)) for rank in ranks]

    def error(
        self,
        rank: Peer,
        *,
        when: float,
        summary: str,
        phase: str | None = None,
        traceback: str = "",
        waits: bool = False,
    ) -> RankError:
        return RankError(
            rank=rank.number,
            name=self._plan.name(rank.number),
            when=when,
            phase=phase if phase is not None else self.place(rank),
            summary=summary,
            traceback=traceback,
            waits=waits,
        )
