"""Clocks: how the ends of a rank's steps are marked on the host-wide monotonic clock.

A clock writes steps + 1 marks, in nanoseconds of CLOCK_MONOTONIC, into the buffer it was made with: the start of
the window, then the end of each step. Differences of marks add up to the wall time of the window.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, Protocol

import torch

Marks = memoryview  # of signed 8-byte integers


class StepClock(Protocol):
    def start(self) -> None:
        """Mark the start of the window."""

    def mark(self, step: int) -> None:
        """Mark the end of `step` (from 0)."""

    def finish(self) -> None:
        """After the last step: all marks are in the buffer when it returns."""


class HostClock:
    """Reads the host's clock after each step, behind a device synchronisation where there is a device."""

    def __init__(self, marks: Marks, synchronize: Callable[[], None] | None = None) -> None:
        self._marks = marks
        self._synchronize = synchronize

    def start(self) -> None:
        self.mark(-1)

    def mark(self, step: int) -> None:
        if self._synchronize is not None:
            self._synchronize()
        self._marks[step + 1] = time.monotonic_ns()

    def finish(self) -> None:
        pass


class EventClock:
    """Records a device event after each step and synchronises only around the whole window, as training runs.

    Events are placed on the host's clock by the two moments that both clocks know: the synchronisations at the
    start and at the end of the window.
    """

    def __init__(self, marks: Marks, steps: int) -> None:
        self._marks = marks
        self._events = [torch.Event(enable_timing=True) for _ in range(steps + 1)]

    def start(self) -> None:
        torch.accelerator.synchronize()
        self._events[0].record()
        torch.accelerator.synchronize()
        self._marks[0] = time.monotonic_ns()

    def mark(self, step: int) -> None:
        self._events[step + 1].record()

    def finish(self) -> None:
        torch.accelerator.synchronize()
        self._marks[len(self._events) - 1] = time.monotonic_ns()
        first = self._events[0]
        place_events(self._marks, [first.elapsed_time(event) for event in self._events[1:]])


def place_events(marks: Marks, elapsed_milliseconds: list[float]) -> None:
    """Fill the marks between the first and the last, both on the host's clock, in proportion to device time.

    `elapsed_milliseconds[k]` is the device's time from the first event to the end of step k. The scale absorbs
    the drift between the clocks and the latency of the last synchronisation.
    """
    start, span = marks[0], marks[len(elapsed_milliseconds)] - marks[0]
    total = elapsed_milliseconds[-1]
    for step, elapsed in enumerate(elapsed_milliseconds[:-1]):
        marks[step + 1] = start + round(span * elapsed / total) if total > 0 else start


def make_clock(timing: Literal["free", "step"], device: torch.device, marks: Marks) -> StepClock:
    """The clock for a mode and a device. A CPU has no queue: a step has ended when it returns, in both modes."""
    if device.type == "cpu":
        return HostClock(marks)
    if timing == "step":
        return HostClock(marks, torch.accelerator.synchronize)
    return EventClock(marks, len(marks) - 1)
