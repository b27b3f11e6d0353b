"""A launch whose ranks, and their server, are played by the test: what arrives when, and what is made of it."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.launch import Observer, failure, paused, placement, run
from pytest_ddpperf.launch.remote_ranks import Part
from pytest_ddpperf.launch.request import LaunchRequest
from pytest_ddpperf.records import Plan, messages
from pytest_ddpperf.records.errors import LaunchError, ServerError
from pytest_ddpperf.wire.channels import Board, Kind, Lines, send_frame

PLAN = Plan(world_size=2, backend="gloo", device="cpu")
PID = 1 << 22  # of rank 0: beyond what Linux gives


class Ranks:
    """A rank server's handle, and what its ranks say."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._ours, self._theirs = Lines(ours), Lines(theirs)
        self.channels: list[socket.socket] = []
        self.asked_for_stacks: Callable[[], None] = lambda: None
        self.stopped = False

    @property
    def socket(self) -> socket.socket:
        return self._ours.socket

    def send(self, request: messages.ServerRequest, descriptor: int | None = None) -> None:
        if self.stopped:
            raise ServerError("is not running", "")
        if isinstance(request, messages.BeginLaunch):
            self.folder = Path(request.folder)
        elif isinstance(request, messages.ForkRank):
            assert descriptor is not None
            self.channels.append(socket.socket(fileno=os.dup(descriptor)))
            self.answer(messages.RankForked(request.rank, PID + request.rank))
        elif request is messages.Request.DUMP_STACKS:
            self.asked_for_stacks()
        elif request is messages.Request.END_LAUNCH:
            self.answer(messages.Answer.LAUNCH_ENDED)

    def receive(self, timeout: float | None = None) -> list[messages.ServerAnswer]:
        return [messages.decode(fields) for fields in self._ours.receive() or ()]

    def stop(self) -> None:
        self.stopped = True

    def answer(self, answer: messages.ServerAnswer) -> None:
        self._theirs.send(messages.encode(answer))

    def end(self, rank: int, status: int, *, when: float = 0.0) -> None:
        self.answer(messages.RankEnded(PID + rank, status, when))

    def deliver(self) -> None:
        """All of them."""
        for rank, channel in enumerate(self.channels):
            send_frame(channel, Kind.RESULT, b"%d" % rank)
            send_frame(channel, Kind.DONE)
            self.end(rank, 0)

    def rest(self, *ranks: int) -> None:
        for rank in ranks:
            send_frame(self.channels[rank], Kind.RESTING, b'{"steps": 30, "step_ns": 1000, "memory": null}')

    def close(self) -> None:
        for channel in (self._ours.socket, self._theirs.socket, *self.channels):
            channel.close()


class Clock:
    """In place of `time`."""

    monotonic_ns = staticmethod(time.monotonic_ns)
    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """After each test no folder of a launch is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(failure, "await_stacks", lambda send, sizes: send())
    played = Ranks()
    yield played
    played.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(run, "time", clock)
    monkeypatch.setattr(paused, "time", clock)
    return clock


class Drawing(Observer):
    """Does something each time that progress is drawn."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def progress(self, phase: object, step: int, steps: int, marks_ns: Sequence[int]) -> None:
        self._act()


class StandingStill(Drawing):
    """Draws until far beyond the deadline, while something happens once."""

    def __init__(self, clock: Clock, meanwhile: Callable[[], None] = lambda: None) -> None:
        super().__init__(self._stand_still)
        self._clock, self._meanwhile = clock, [meanwhile]

    def _stand_still(self) -> None:
        self._clock.ahead += 10 * PLAN.timeout_seconds
        while self._meanwhile:
            self._meanwhile.pop()()


def request() -> LaunchRequest:
    part = Part(processes=PLAN.part(0))
    return LaunchRequest(plan=PLAN, payload=b"", modules={}, placement=placement.place(2, {}), part=part)


def launch_of(ranks: Ranks, observer: Observer) -> run.Launch:
    return run.Launch(ranks, request(), observer)  # type: ignore[arg-type]


def held_launch_of(ranks: Ranks, observer: Observer) -> paused.PausableLaunch:
    return paused.PausableLaunch(ranks, request(), observer)  # type: ignore[arg-type]


# --- what arrives late


def test_a_cause_that_arrives_while_stacks_are_asked_for_comes_before_who_waits_for_it(
    ranks: Ranks, clock: Clock
) -> None:
    def die() -> None:
        (ranks.folder / "rank0.stacks").write_text(
            'Current thread 0x1 (most recent call first):\n  File "/x/torch/distributed/c10d.py", line 5 in all_reduce'
        )
        ranks.end(1, -9, when=clock.monotonic() + 3)

    ranks.asked_for_stacks = die
    with pytest.raises(LaunchError) as caught, launch_of(ranks, StandingStill(clock)) as launch:
        launch.run()
    assert caught.value.cause.rank == 1
    assert caught.value.cause.summary.startswith("killed by SIGKILL")
    assert [other.summary for other in caught.value.others] == ["did not end within 300 s (--ddp-timeout)"]


def test_a_rank_that_is_killed_at_rest_did_not_fail_in_a_step(ranks: Ranks) -> None:
    due = [0, 1]

    def rest() -> None:
        ranks.rest(*due)
        due.clear()

    with held_launch_of(ranks, Drawing(rest)) as launch:
        launch.begin()
        ranks.end(0, -9)
        due.append(1)
        with pytest.raises(LaunchError) as caught:
            launch.stretch(2)
    assert (caught.value.cause.rank, caught.value.cause.phase) == (0, "rest")


# --- interruptions


def interrupt(*_: object) -> Any:
    raise KeyboardInterrupt


def test_ctrl_c_while_progress_is_drawn_is_told_as_such(ranks: Ranks) -> None:
    """The traceback holds a view of the board."""
    with pytest.raises(KeyboardInterrupt), launch_of(ranks, Drawing(interrupt)) as launch:
        launch.run()


def test_whatever_goes_wrong_at_its_end_a_launch_leaves_no_folder(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Board.close

    def fail(board: Board) -> None:
        close(board)
        raise ValueError("not closed")

    monkeypatch.setattr(Board, "close", fail)
    with pytest.raises(ValueError, match="not closed"), launch_of(ranks, Observer()):
        pass
