"""What processes say to each other, in the pieces that sockets yield."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_ddpperf.records.plan import MARK, UPDATE, Plan
from pytest_ddpperf.wire.channels import (
    Board,
    Kind,
    Lines,
    Phase,
    send_frame,
    take_frames,
)

PLAN = Plan(world_size=2, backend="gloo", device="cpu", warmup=5)


@pytest.fixture
def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


@pytest.mark.parametrize("piece", [1, 3, 9, 10, 1000])
def test_frames_are_put_together_from_any_pieces(
    pair: tuple[socket.socket, socket.socket], piece: int
) -> None:
    one, other = pair
    with one, other:
        for kind, data in (
            (Kind.RESULT, b"x" * 100),
            (Kind.ERROR, b""),
            (Kind.DONE, b""),
        ):
            send_frame(one, kind, data)
        one.shutdown(socket.SHUT_WR)
        arrived, frames = bytearray(), []
        while data := other.recv(piece):
            arrived += data
            frames += take_frames(arrived)
    assert frames == [
        (Kind.RESULT, b"x" * 100),
        (Kind.ERROR, b""),
        (Kind.DONE, b""),
    ]


def test_lines_carry_descriptors_in_their_order(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    one, other = pair
    with one, other:
        sender, receiver = Lines(one), Lines(other)
        for name in ("a", "b"):
            (tmp_path / name).write_text(name)
            with (tmp_path / name).open() as file:
                sender.send({"name": name}, file.fileno())
        sender.send({"name": "none"})
        one.shutdown(socket.SHUT_WR)
        messages: list[object] = []
        while (more := receiver.receive()) is not None:
            messages += more
        assert messages == [{"name": "a"}, {"name": "b"}, {"name": "none"}]
        for name in ("a", "b"):
            with os.fdopen(receiver.take_descriptor()) as file:
                assert file.read() == name


def test_the_board_tells_where_each_rank_is(tmp_path: Path) -> None:
    written, read = (
        Board(tmp_path / "board", world_size=2, steps=3) for _ in range(2)
    )
    began_ns = time.monotonic_ns()
    written.enter(1, Phase.WARMUP)
    written.row(1)[Board.STEP_CELL] = 1
    assert (read.steps(1), len(read.marks(1))) == (0, 1), (
        "before the rank knows"
    )
    written.set_steps(1, 2)
    written.marks(1)[:] = memoryview(bytes(8 * 3)).cast("q")
    assert (read.steps(0), read.steps(1), len(read.marks(1))) == (0, 2, 3)
    assert (read.phase(0), read.phase(1)) == (Phase.START, Phase.WARMUP)
    entered_ns = read.entered(1, Phase.WARMUP)
    assert began_ns <= entered_ns <= time.monotonic_ns()
    assert read.describe(1, PLAN) == "warm-up step 2 of 5"
    written.row(1)[Board.STEP_CELL] = 11
    assert read.describe(1, PLAN) == "warm-up step 12 (5 asked)"
    written.enter(1, Phase.STEPS)
    written.row(1)[Board.STEP_CELL] = 1
    assert read.describe(1, PLAN) == "step 2 of 2"
    written.enter(0, Phase.STEPS)
    assert read.describe(0, PLAN) == "the function"
    written.enter(0, Phase.START)
    assert read.describe(0, PLAN) == "the start"
    written.enter(0, Phase.SETUP)
    assert read.describe(0, PLAN) == "setup"
    assert (
        read.describe(0, replace(PLAN, boundary=UPDATE))
        == "the program's first steps"
    )
    assert (
        read.describe(0, replace(PLAN, boundary=MARK))
        == 'the program, which has not reached boundary="mark"'
    )
    for board in (written, read):
        board.close()
