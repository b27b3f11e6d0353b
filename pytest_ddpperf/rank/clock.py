"""Clocks: how the ends of a rank's steps are marked on the host-wide monotonic clock, the CPU time
of its threads, the time of its garbage collector, and its page faults.

A step clock writes steps + 1 marks, in nanoseconds of CLOCK_MONOTONIC, into the buffer it was made
with: the start of the window, then the end of each step. Differences of marks add up to the wall
time of the window.
"""

import gc
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import torch

Marks = memoryview  # of signed 8-byte integers


class StepClock:
    """Marks steps of a launch in a timing mode.

    A CPU has no queue: a step has ended when it returns, in both modes. On a device, `step`
    synchronises after each step. `free` records a device event after each step and synchronises
    only around the whole window, as training runs. Events are placed on the host's clock by the two
    moments that both clocks know: the synchronisations at the start and at the end of the window.
    """

    def __init__(
        self,
        timing: Literal["free", "step"],
        device: torch.device,
        marks: Marks,
    ) -> None:
        self._marks = marks
        self._on_device = device.type != "cpu"
        with_events = self._on_device and timing == "free"
        self._events = (
            [torch.Event(enable_timing=True) for _ in marks]
            if with_events
            else []
        )
        self._ns_per_ms = 0.0  # of the device's clock

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

    def finish(
        self, steps: int, at_step: Callable[[int], None] = lambda step: None
    ) -> None:
        """Fill all marks, after so many steps. `at_step` is called with each step that a device is
        at meanwhile."""
        if self._events:
            for step, event in enumerate(self._events[1 : steps + 1]):
                at_step(step)
                event.synchronize()
            self._read_clock(steps)
            # The scale absorbs the drift between the clocks and the latency of the last
            # synchronisation.
            taken = self._events[0].elapsed_time(self._events[steps])
            self._ns_per_ms = (
                (self._marks[steps] - self._marks[0]) / taken
                if taken > 0
                else 0.0
            )
            for step in range(1, steps):
                self._marks[step] = self.place(self._events[step])

    def place(self, event: torch.Event) -> int:
        """Return when the device reached an event of the window that is finished, on the host's
        clock."""
        return self._marks[0] + round(
            self._events[0].elapsed_time(event) * self._ns_per_ms
        )

    def _read_clock(self, index: int) -> None:
        if self._on_device:
            torch.accelerator.synchronize()
        self._marks[index] = time.monotonic_ns()


class CpuClock:
    """The CPU time of this thread and of the other Python threads that are alive now, which may do
    a step's work.

    Native threads, such as Gloo's and OpenMP's, are left out, also where they have called Python.
    """

    def __init__(self) -> None:
        idents = {
            each.ident
            for each in threading.enumerate()
            if not isinstance(each, threading._DummyThread)
        }
        others = idents - {None, threading.get_ident()}
        # macOS has none
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        self._others_ns: dict[int, int] = (
            {clock_of(ident): 0 for ident in others}
            if clock_of is not None
            else {}
        )

    def read_ns(self) -> int:
        """Return the time so far; a thread that has ended keeps what it had when it was last
        read."""
        for clock in self._others_ns:
            with suppress(OSError):
                self._others_ns[clock] = time.clock_gettime_ns(clock)
        return time.thread_time_ns() + sum(self._others_ns.values())


class CollectorClock:
    """The time that Python's garbage collector takes in this process, from `start` to `stop`."""

    def __init__(self) -> None:
        self._ns = 0
        self._began = 0
        self._callback: Callable[[str, object], None] = self._collect
        # A collection may begin in code that torch.compile leaves to Python. There it would compile
        # the callback, too, and the window would be unfit. Not imported here: it costs a second.
        if "torch._dynamo" in sys.modules:
            compiler: Any = torch.compiler
            self._callback = compiler.disable(self._collect)

    def start(self) -> None:
        self._began = time.monotonic_ns()  # of a collection that runs now
        gc.callbacks.append(self._callback)

    def stop(self) -> int:
        """Return the time so far, in nanoseconds."""
        # unless a step cleared them
        with suppress(ValueError):
            gc.callbacks.remove(self._callback)
        return self._ns

    def _collect(self, phase: str, info: object) -> None:
        now = time.monotonic_ns()
        if phase == "start":
            self._began = now
        else:
            self._ns += now - self._began


def page_faults() -> int:
    """Return the minor page faults of this process so far: each maps a page of 4 KiB, or more, that
    it had not."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
