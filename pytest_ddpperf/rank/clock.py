"""Clocks: how the ends of a rank's steps are marked on the host-wide monotonic clock, and the CPU time of its threads.

A step clock writes steps + 1 marks, in nanoseconds of CLOCK_MONOTONIC, into the buffer it was made with: the start of
the window, then the end of each step. Differences of marks add up to the wall time of the window.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Literal

import torch

Marks = memoryview  # of signed 8-byte integers


class StepClock:
    """Marks steps of a launch in a timing mode.

    A CPU has no queue: a step has ended when it returns, in both modes. On a device, `step` synchronises after each
    step. `free` records a device event after each step and synchronises only around the whole window, as training runs.
    Events are placed on the host's clock by the two moments that both clocks know: the synchronisations at the start
    and at the end of the window.
    """

    def __init__(self, timing: Literal["free", "step"], device: torch.device, marks: Marks) -> None:
        self._marks = marks
        self._on_device = device.type != "cpu"
        with_events = self._on_device and timing == "free"
        self._events = [torch.Event(enable_timing=True) for _ in marks] if with_events else []

    def start(self) -> None:
        """Mark the start of the window."""
        if self._events:
            torch.accelerator.synchronize()
            self._events[0].record()
        self._read_clock(0)

    def mark(self, step: int) -> None:
        """Mark the end of `step` (from 0)."""
        if self._events:
            self._events[step + 1].record()
        else:
            self._read_clock(step + 1)

    def finish(self, steps: int) -> None:
        """Fill all marks, after so many steps."""
        if self._events:
            self._read_clock(steps)
            first, *later = self._events[: steps + 1]
            place_events(self._marks, [first.elapsed_time(event) for event in later])

    def _read_clock(self, index: int) -> None:
        if self._on_device:
            torch.accelerator.synchronize()
        self._marks[index] = time.monotonic_ns()


class CpuClock:
    """The CPU time of this thread and of the other Python threads that are alive now, which may do a step's work.

    Native threads, such as Gloo's and OpenMP's, are left out, also where they have called Python.
    """

    def __init__(self) -> None:
        idents = {each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}
        others = idents - {None, threading.get_ident()}
        clock_of = getattr(time, "pthread_getcpuclockid", None)  # macOS has none
        self._others_ns: dict[int, int] = {clock_of(ident): 0 for ident in others} if clock_of is not None else {}

    def read_ns(self) -> int:
        """Return the time so far; a thread that has ended keeps what it had when it was last read."""
        for clock in self._others_ns:
            with suppress(OSError):
                self._others_ns[clock] = time.clock_gettime_ns(clock)
        return time.thread_time_ns() + sum(self._others_ns.values())


def place_events(marks: Marks, elapsed_milliseconds: list[float]) -> None:
    """Fill the marks between the first and the last, both on the host's clock, in proportion to device time.

    `elapsed_milliseconds[k]` is the device's time from the first event to the end of step k. The scale absorbs
    the drift between the clocks and the latency of the last synchronisation.
    """
    start, span = marks[0], marks[len(elapsed_milliseconds)] - marks[0]
    total = elapsed_milliseconds[-1]
    for step, elapsed in enumerate(elapsed_milliseconds[:-1]):
        marks[step + 1] = start + round(span * elapsed / total) if total > 0 else start
