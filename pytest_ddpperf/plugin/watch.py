"""The progress of a measurement on the terminal."""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf import text
from pytest_ddpperf.launch import Observer, placement
from pytest_ddpperf.plugin.outcomes import Took
from pytest_ddpperf.plugin.state import RUN
from pytest_ddpperf.records.quantiles import quantile
from pytest_ddpperf.records.samples import LaunchSamples, Outputs
from pytest_ddpperf.wire.channels import Phase

_REDRAW_SECONDS = 0.25
# Without a line to redraw, a long wait for other runs is reported, whose launches last seconds, and
# a long measurement: first after so many seconds, again each time that they have doubled.
_FIRST_REPORT_SECONDS = 10.0
_FIRST_LAUNCH_SECONDS = 60.0


class Watcher(Observer):
    """The observer of a run's launches: shows what the ranks do on a terminal, and reports long
    waits."""

    def __init__(self, config: pytest.Config, *, warmup: int) -> None:
        uncaptured = config.getoption("capture", "no") == "no"
        self.streams = uncaptured and not hasattr(config, "workerinput")
        self._config = config
        # None in a worker of xdist's
        self._reporter: Any = config.pluginmanager.get_plugin(
            "terminalreporter"
        )
        # Not under -s: the ranks' lines come then, and would tear the progress line. A dumb
        # terminal shows escapes.
        live = (
            getattr(self._reporter, "isatty", False)
            and not self.streams
            and os.environ.get("TERM") != "dumb"
        )
        self._writer = config.get_terminal_writer() if live else None
        self._capture = config.pluginmanager.get_plugin("capturemanager")
        self._warmup = warmup
        self.written: Outputs = ()  # by the processes of a call
        self.launch = 0  # from 1; the one under way, or the last
        self.launches = 0  # to the next look
        # step times of the launches that have ended
        self._seconds: list[float] = []
        self._at = (Phase.START, 0, 0)  # the last step, of so many
        self._began = time.monotonic()
        self._launch_began = self._began
        # seconds of each, by when it began
        self._waits: dict[float, float] = {}
        self._drawn = 0.0
        self._waits_since = 0.0
        self._next_report = _FIRST_REPORT_SECONDS
        self._next_launch = _FIRST_LAUNCH_SECONDS

    def wrote(self, output: Outputs) -> None:
        self.written = output

    def begin(self, launch: int, launches: int) -> None:
        self.launch, self.launches = launch + 1, launches
        self._waits_since = 0.0
        self._launch_began = time.monotonic()
        seconds = self._launch_began - self._began
        waited = sum(self._waits.values())
        if not launch:
            self._first_began = self._launch_began - waited
        if self._writer is None and launch and seconds >= self._next_launch:
            self._next_launch = 2 * seconds
            taken = self._launch_began - self._first_began - waited
            left = taken / launch * (launches - launch)
            self._report(
                f"{seconds:.0f} s so far: launch {launch + 1} of {launches} begins, about"
                f" {left:.0f} s left, more if the verdict is open then"
            )

    @property
    def took(self) -> Took:
        """Return the time since this began to watch, and of waiting for other runs."""
        return Took(time.monotonic() - self._began, sum(self._waits.values()))

    def launched(self, samples: LaunchSamples) -> None:
        self._seconds += samples.step_seconds
        self.erase()

    def waiting(self, resource: Path) -> None:
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        self._launch_began = now
        waited = now - self._waits_since
        self._waits[self._waits_since] = waited
        if self._writer is not None:
            if now - self._drawn < _REDRAW_SECONDS:
                return
            line = waiting_line(resource, waited)
            what, comma, seconds = line.rpartition(",")
            self._draw(what, comma + seconds)
        elif waited >= self._next_report:
            self._next_report = 2 * waited
            self._report(waiting_line(resource, waited))

    def _report(self, line: str) -> None:
        if self._reporter is None:
            return
        with self._uncaptured():
            self._reporter.ensure_newline()
            # Under -q there are letters for tests on a line without a path.
            if self._config.get_terminal_writer().width_of_current_line > 0:
                line = f"\n{line}"
            self._reporter.write_line(line)
            self._reporter.flush()

    def line(self, p50_seconds: float | None = None) -> str:
        """Return what goes on, in words."""
        phase, step, steps = self._at
        run = self._config.stash[RUN]
        return progress_line(
            phase,
            (step, self._warmup if phase is Phase.WARMUP else steps),
            launch=(self.launch, self.launches),
            test=(len(run.begun), len(run.items)),
            p50_seconds=p50_seconds,
        )

    def progress(
        self, phase: Phase, step: int, steps: int, marks_ns: Sequence[int]
    ) -> None:
        self._at = (phase, step, steps)
        now = time.monotonic()
        if self._writer is None or now - self._drawn < _REDRAW_SECONDS:
            return
        seconds = list(self._seconds)
        if phase is Phase.STEPS:
            done = [mark for mark in marks_ns[: step + 1] if mark]
            seconds += [
                (after - before) / 1e9 for before, after in pairwise(done)
            ]
        line = self.line(quantile(seconds, 50) if seconds else None)
        end = ""
        if phase is Phase.STEPS and step:
            # the part of this launch that is done
            share = (self._warmup + step) / (self._warmup + steps)
            # the time left, as a multiple of this launch's time so far
            left = (self.launches - self.launch + 1) / share - 1
            minutes = (now - self._launch_began) * left / 60
            if minutes >= 1:
                end = f", {minutes:.0f} min left (fewer --ddp-steps shorten it)"
        self._draw(line, end)

    def output(self, name: str, stream: str, line: str) -> None:
        file = sys.stderr if stream == "stderr" else sys.stdout
        encoding = getattr(file, "encoding", None) or "utf-8"
        shown = f"[{name}] {line}".encode(encoding, "backslashreplace")
        print(shown.decode(encoding), file=file, flush=True)

    def erase(self) -> None:
        if self._drawn:
            self._write("\x1b7\x1b[K\x1b8")
            self._drawn = 0.0

    def _draw(self, text: str, end: str) -> None:
        """Show a line; if there is not enough room, without a part of `text`, which comes before
        `end`."""
        writer = self._writer
        if writer is None:
            return
        room = max(writer.fullwidth - writer.width_of_current_line - 2, 0)
        line = (text[: max(room - len(end), 0)] + end)[:room]
        # the cursor goes back to behind the test's name
        self._write(f"\x1b7 {line}\x1b[K\x1b8")
        self._drawn = time.monotonic()

    def _write(self, text: str) -> None:
        with self._uncaptured():
            sys.stdout.write(text)
            sys.stdout.flush()

    def _uncaptured(self) -> AbstractContextManager[None]:
        return (
            self._capture.global_and_fixture_disabled()
            if self._capture is not None
            else nullcontext()
        )


_PHASES = {
    Phase.START: "starting ranks",
    Phase.GROUP: "init_process_group",
    Phase.DELIVERY: "collecting",
    Phase.CLEANUP: "clean-up",
    Phase.DONE: "ending",
}


def progress_line(
    phase: Phase,
    step: tuple[int, int],
    *,
    launch: tuple[int, int],
    test: tuple[int, int],
    p50_seconds: float | None,
) -> str:
    """Return "test 3/12, launch 2/5, step 30/50, p50 so far 0.243s".

    Each pair is a number and how many there are; `launch` and `test` count from 1, `step` counts
    those that have ended. A launch without steps runs a function or a command."""
    if phase is Phase.STEPS:
        place = f"step {step[0]}/{step[1]}" if step[1] else "running"
    elif phase is Phase.WARMUP:
        place = f"warm-up {step[0]}/{step[1]}"
    else:
        place = _PHASES.get(phase, phase.name.lower())
    parts: list[str] = []
    # first: a narrow terminal has room for no more
    if test[1] > 1:
        parts.append(f"test {test[0]}/{test[1]}")
    if launch[1]:
        parts.append(f"launch {launch[0]}/{launch[1]}")
    parts.append(place)
    if p50_seconds is not None:
        parts.append(f"p50 so far {text.seconds(p50_seconds)}")
    return ", ".join(parts)


def waiting_line(resource: Path, seconds: float) -> str:
    """Return the line of a run that waits for a core or device, with the pid of the process that
    uses it, if that is known. The path of one on another node is relative, below the node's
    name."""
    holder = placement.holder(resource)
    pid = f" (pid {holder})" if holder is not None else ""
    node = "" if resource.is_absolute() else f" on {resource.parent}"
    what = "devices" if placement.is_device(resource) else "cores"
    return f"waiting for another timed run{pid}{node} to release its {what}, {seconds:.0f} s"
