"""This process in its launch, and its connection to pytest."""

import os
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from pytest_ddpperf.rank import group
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.messages import Resting
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import Imported
from pytest_ddpperf.wire import opened, variables
from pytest_ddpperf.wire.channels import (
    Board,
    Kind,
    Phase,
    receive_word,
    send_frame,
)
from pytest_ddpperf.wire.source_trees import Trees


@dataclass(frozen=True, slots=True)
class Rank:
    """This process in its launch, and its connection to pytest."""

    number: int
    plan: Plan
    board: Board
    channel: socket.socket
    trees: Trees | None  # it reports what it imported from there
    in_stretches: bool  # whether it pauses between stretches of its window
    own_group: group.NoGroup = field(default_factory=group.NoGroup)
    pinned_to: set[int] = field(default_factory=set)  # as `TimedRank` has it
    pid: int = field(default_factory=os.getpid)

    def enter(self, phase: Phase) -> None:
        self.board.enter(self.number, phase)

    def deliver(self, data: bytes) -> None:
        """Deliver a result once the device has done its work. Raises the device's error, and
        BaseSideError if code of the other tree ran."""
        self.end_child()
        self._synchronize()
        self.enter(Phase.DELIVERY)
        if self.trees is not None:
            opened.note_open_files()
            self.trees.refuse_strays()
        send_frame(self.channel, Kind.RESULT, data)

    def end_child(self, error: BaseException | None = None) -> None:
        """End this process as Python would, with an `error` or without, if it is no rank but has
        been forked by one: what it does is not the rank's."""
        if os.getpid() == self.pid:
            return
        code = error.code if isinstance(error, SystemExit) else error
        if code is not None and not isinstance(code, int):
            traceback.print_exception(error)
            code = 1
        flush()
        os._exit(code or 0)

    def end(self) -> None:
        """Say that clean-up is over, with what it gave the device to do. Raises the device's
        error."""
        self._synchronize()
        self.enter(Phase.DONE)
        send_frame(self.channel, Kind.DONE)

    def _synchronize(self) -> None:
        """Wait for the device: CUDA reports that a kernel failed only at a later call."""
        if self.plan.device != "cpu" and not self.plan.command:
            torch.accelerator.synchronize()

    def imported(self) -> Imported:
        read = variables.read_so_far(self.trees)
        if self.trees is None:
            return Imported(variables=read)
        return Imported(
            files=tuple(self.trees.imported()),
            others=tuple(self.trees.others()),
            variables=read,
        )

    def await_word(self) -> int:
        """Wait until pytest says what comes next, or is gone; returns the number that it sends."""
        return receive_word(self.channel)

    def stretches(self, steps: int, step_ns: int) -> Iterator[int]:
        """Yield the number of steps of each stretch of a window of `steps`, each of which takes
        about `step_ns`, as pytest asks for one after the other."""
        resting = codec.to_json(Resting(steps=steps, step_ns=step_ns))
        send_frame(self.channel, Kind.RESTING, resting)
        while stretch := self.await_word():
            yield stretch
            send_frame(self.channel, Kind.RESTING, resting)


def flush() -> None:
    """Write out what this process has printed."""
    for stream in (sys.stdout, sys.stderr):
        # closed or replaced by the user's code, or no space for the log
        with suppress(Exception):
            stream.flush()
