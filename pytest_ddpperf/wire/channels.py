"""Channels between pytest, the rank server and the ranks.

Three channels, all of one machine: JSON lines with file descriptors between pytest and the rank
server; frames from a rank to pytest; the board, memory that every rank writes and pytest reads, so
that a rank's phase and step are known even of a rank that was killed.
"""

import json
import mmap
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

from pytest_ddpperf.records import codec
from pytest_ddpperf.records.plan import UPDATE, Plan


def readable(
    channels: Iterable[socket.socket | int], seconds: float | None = None
) -> list[Any]:
    """Return the `channels` that have something to read or have ended, once there is one or after
    so many `seconds`.

    Not `select.select`, which takes no descriptor from 1,024 on.
    """
    with selectors.PollSelector() as selector:
        for channel in channels:
            selector.register(channel, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


class Lines:
    """JSON messages, one a line, over a stream socket; a message may carry one file descriptor."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        # whatever socket.setdefaulttimeout says: the flag goes with a descriptor
        sock.setblocking(True)
        # of a line whose end has not come, for one may be hundreds of megabytes
        self._begun: list[bytes] = []
        self._descriptors: list[int] = []

    def send(self, message: object, descriptor: int | None = None) -> None:
        """Send a record; raises OSError."""
        data = codec.to_json(message) + b"\n"
        if descriptor is None:
            self.socket.sendall(data)
        else:
            sent = socket.send_fds(self.socket, [data], [descriptor])
            self.socket.sendall(data[sent:])

    def receive(self, kind: Any = Any) -> list[Any] | None:
        """Return all messages that have arrived, waiting for bytes if there are none; None at the
        end of the stream, and where it broke or, of a socket with a timeout, nothing came in time.

        `kind` is their type, or the union of their types; raises CodecError for any other."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 16, 64)
        except OSError:
            return None
        if not data:
            return None
        self._descriptors += descriptors
        *ended, begun = data.split(b"\n")
        if ended:
            ended[0] = b"".join((*self._begun, ended[0]))
            self._begun.clear()
        if begun:
            self._begun.append(begun)
        return [codec.decode(kind, json.loads(line)) for line in ended]

    def take_descriptor(self) -> int:
        """Return the oldest descriptor that has arrived with a message and was not taken yet."""
        return self._descriptors.pop(0)


class Kind(IntEnum):
    """The frames of a rank."""

    RESULT = 1  # the pickled result; the launch needs one from every rank
    ERROR = 2  # JSON: a RankError
    DONE = 3  # clean-up has ended, nothing more will come
    RESTING = 4  # JSON: a Resting; a word says what comes next


_SHOWN = 8  # ranks of which all are named
_HEADER = struct.Struct(">BQ")


def send_frame(sock: socket.socket, kind: Kind, data: bytes = b"") -> None:
    sock.sendall(_HEADER.pack(kind, len(data)))
    sock.sendall(data)


_WORD = struct.Struct(">I")


def send_word(sock: socket.socket, number: int) -> None:
    """Let a waiting rank go on or, if it is paused, run that many steps."""
    sock.sendall(_WORD.pack(number))


def receive_word(sock: socket.socket) -> int:
    """Wait for the number that pytest sends; 0, too, if pytest is gone."""
    data = sock.recv(_WORD.size, socket.MSG_WAITALL)
    return int(_WORD.unpack(data)[0]) if len(data) == _WORD.size else 0


def take_frames(buffer: bytearray) -> Iterator[tuple[Kind, bytes]]:
    """Take the whole frames from what has arrived so far; results may be hundreds of megabytes."""
    while len(buffer) >= _HEADER.size:
        kind, length = _HEADER.unpack_from(buffer)
        end = _HEADER.size + length
        if len(buffer) < end:
            return
        data = bytes(memoryview(buffer)[_HEADER.size : end])
        del buffer[:end]
        yield Kind(kind), data


class Phase(IntEnum):
    """The phases of a rank, in order of time except for the last."""

    START = 0
    GROUP = 1
    SETUP = 2
    WARMUP = 3
    STEPS = 4
    DELIVERY = 5
    CLEANUP = 6
    DONE = 7
    # in an RPC launch, a process that others call: after its set-up, before its
    # delivery
    LEADER = 8


class Board:
    """A file in memory: per rank its phase, its step and of how many, the updates of a program,
    when it entered each phase, and its marks.

    All cells are 8-byte integers; times are nanoseconds of CLOCK_MONOTONIC, which all processes of
    a host share. A cell has one writer, and aligned 8-byte stores are whole.
    """

    STEP_CELL = 1
    _STEPS = 2
    _BEGIN = 3
    UPDATES_CELL = 4
    _ENTERED = 5  # the first of len(Phase) cells
    _MARKS = _ENTERED + len(Phase)

    def __init__(self, path: Path, world_size: int, steps: int) -> None:
        """Make the file, or open it if another process has; with room for so many `steps` a window.
        Raises OSError."""
        self._row = self._MARKS + steps + 1
        size = world_size * self._row * 8
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < size:
                # Zeros take space now: a process that writes to memory for which there is none dies
                # of SIGBUS.
                with open(descriptor, "wb", closefd=False) as file:
                    file.write(bytes(size))
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._cells = memoryview(self._map).cast("q")

    def enter(self, rank: int, phase: Phase) -> None:
        row = self.row(rank)
        row[self.STEP_CELL] = 0
        row[self._ENTERED + phase] = time.monotonic_ns()
        row[0] = phase

    def row(self, rank: int) -> memoryview:
        """The cells of one rank, for a loop that cannot spare a method call: `STEP_CELL` is the
        step's."""
        return self._cells[rank * self._row : (rank + 1) * self._row]

    def set_steps(self, rank: int, steps: int) -> None:
        """Say how many steps the rank's window has."""
        self.row(rank)[self._STEPS] = steps

    def steps(self, rank: int) -> int:
        """Return the number of steps of the rank's window; 0 until it is known, or without a
        window."""
        return self.row(rank)[self._STEPS]

    def set_begin(self, update: int) -> None:
        """Say after which update of a program the window begins, once its steps are known: until
        then ranks wait. It is a cell of rank 0."""
        self._cells[self._BEGIN] = update

    def begin(self) -> int:
        """Return after which update of a program the window begins; 0 until it is known."""
        return self._cells[self._BEGIN]

    def updates(self) -> list[int]:
        """Return how many updates of a program have ended in each rank."""
        return self._cells[self.UPDATES_CELL :: self._row].tolist()

    def set_updates(self, updates: Mapping[int, int]) -> None:
        """Say how many updates have ended in ranks of another node."""
        for rank, ended in updates.items():
            self.row(rank)[self.UPDATES_CELL] = ended

    def describe_updates(self, boundary: str) -> str:
        """Say how many updates each rank of a program took, or how often it reached the
        `boundary`, where that differs."""
        updates = self.updates()
        ranks = [*range(len(updates))]
        if len(ranks) > _SHOWN:
            ranks = [updates.index(min(updates)), updates.index(max(updates))]
        if boundary != UPDATE:
            times = (f"rank {rank} {updates[rank]} times" for rank in ranks)
            return (
                f'boundary="{boundary}" was reached by {", ".join(times)}: name what all ranks'
                " reach equally often"
            )
        took = (f"rank {rank} took {updates[rank]}" for rank in ranks)
        return (
            f"ranks take different numbers of updates: {', '.join(took)} (give all ranks"
            " equally many batches, or call pytest_ddpperf.step_end() where steps end, with"
            ' boundary="mark": at the end of an epoch, or of each iteration if one rank has another'
            " optimizer)"
        )

    def marks(self, rank: int) -> memoryview:
        """The steps + 1 marks of one rank: the start, then the end of each step of its window."""
        return self.row(rank)[self._MARKS : self._MARKS + self.steps(rank) + 1]

    def phase(self, rank: int) -> Phase:
        return Phase(self.row(rank)[0])

    def step(self, rank: int) -> int:
        """Steps ended in the phase that the rank is in."""
        return self.row(rank)[self.STEP_CELL]

    def entered(self, rank: int, phase: Phase) -> int:
        """Return when the rank entered a phase, in nanoseconds; 0 if it has not yet."""
        return self.row(rank)[self._ENTERED + phase]

    def describe(self, rank: int, plan: Plan) -> str:
        """The rank's place in words, for a message; a launch without steps calls a function. "" of
        a command."""
        if plan.command:
            return ""
        phase, step, steps = (
            self.phase(rank),
            self.step(rank) + 1,
            self.steps(rank),
        )
        if phase is Phase.WARMUP:
            if step > plan.warmup:
                return f"warm-up step {step} ({plan.warmup} asked)"
            return f"warm-up step {step} of {plan.warmup}"
        if phase is Phase.STEPS:
            return (
                f"step {min(step, steps)} of {steps}"
                if steps
                else "the function"
            )
        begin = "the program's first steps" if plan.boundary else "setup"
        if plan.boundary not in ("", UPDATE):
            begin = (
                f'the program, which has not reached boundary="{plan.boundary}"'
            )
        return {
            Phase.START: "the start",
            Phase.GROUP: "init_process_group",
            Phase.SETUP: begin,
            Phase.DELIVERY: "the delivery of its result",
            Phase.CLEANUP: "clean-up",
            Phase.LEADER: "serving",
        }.get(phase, "the end")

    def close(self) -> None:
        # The traceback of what interrupted may hold a view, and the memory goes with the last of
        # them.
        with suppress(BufferError):
            self._cells.release()
            self._map.close()
