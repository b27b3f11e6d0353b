"""Launches of a small DDP step, to see how far they differ: alone, in pairs that take turns, and on some cores only."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.measuring.pairs import interleave
from pytest_ddpperf.rank.doctor import setup
from pytest_ddpperf.records import LaunchSamples, Plan
from pytest_ddpperf.records.doctor import Cores
from pytest_ddpperf.records.errors import DdpPerfError, ServerError
from pytest_ddpperf.wire.channels import Phase

# For a launch that was begun when time was nearly up.
_LEAST_SECONDS = 5.0


class TimeIsUp(DdpPerfError):
    """There was no more time: for what, in words."""


class Within:
    """An observer that waits for others no longer than until a moment."""

    def __init__(self, watch: Observer, until: float) -> None:
        """`until`: on the clock of time.monotonic."""
        self.streams = False
        self._watch, self._until = watch, until

    def waiting(self, resource: Path) -> None:
        """Raises TimeIsUp."""
        if time.monotonic() >= self._until:
            raise TimeIsUp(f"others timed their steps on {resource.name or 'this host'} for as long as there was time")
        self._watch.waiting(resource)

    def progress(self, phase: Phase, step: int, steps: int, marks_ns: Sequence[int]) -> None:
        self._watch.progress(phase, step, steps, marks_ns)

    def output(self, name: str, stream: str, line: str) -> None:
        pass


class Launching(Protocol):
    """What takes launches."""

    def alone(self, cores: Cores = ()) -> LaunchSamples: ...

    def pair(self) -> tuple[LaunchSamples, LaunchSamples]: ...


class Bench:
    """Takes launches, all with windows of as many steps."""

    def __init__(self, plan: Plan, here: Launcher, there: Launcher | None, watch: Observer, until: float) -> None:
        """`there`: launches the other side of pairs that take turns in stretches; None: one launch after the other.
        `until`: for how long, on the clock of time.monotonic."""
        self._plan, self._here, self._there, self._until = plan, here, there, until
        self._observer = Within(watch, until)
        self._steps: int | None = None
        self._random = random.Random()

    def alone(self, cores: Cores = ()) -> LaunchSamples:
        """A launch by itself, on those cores or on all. Raises the errors of a launch."""
        with confined(cores):
            launched = self._here.measure(self._exactly, setup, self._observer)
        self._steps = len(launched.step_seconds)
        return launched

    def pair(self) -> tuple[LaunchSamples, LaunchSamples]:
        """Two of the same code, in turns. Raises the errors of a launch."""
        if self._there is None:
            return self.alone(), self.alone()
        with ExitStack() as alive:
            alive.enter_context(self._here.alone(self._plan, self._observer))
            launchers = self._random.sample((self._here, self._there), 2)
            one, other = (
                alive.enter_context(launcher.hold(self._exactly, setup, self._observer)) for launcher in launchers
            )
            interleave((one, other), self._random)
            return one.deliver(), other.deliver()

    @property
    def _exactly(self) -> Plan:
        left = max(_LEAST_SECONDS, self._until - time.monotonic())
        plan = replace(self._plan, timeout_seconds=min(self._plan.timeout_seconds, left))
        return plan if self._steps is None else plan.exactly(self._steps)


@contextmanager
def confined(cores: Cores) -> Iterator[None]:
    """Launches meanwhile have these cores, as under taskset; with none given, all that this process may use."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def briefly(error: DdpPerfError) -> str:
    """On one line: what went wrong, with the end of what a server of ranks wrote."""
    first, _, rest = str(error).partition("\n")
    last = rest.strip().splitlines()[-1:] if isinstance(error, ServerError) else []
    return ": ".join([first, *last])


class Taken:
    """What was launched so far."""

    def __init__(self, trials: Sequence[Cores]) -> None:
        self.alone: list[LaunchSamples] = []
        self.pairs: list[tuple[LaunchSamples, LaunchSamples]] = []
        self.on: list[list[LaunchSamples]] = [[] for _ in trials]  # by trial
        self.problem = ""  # why it ended early

    def round(self, bench: Launching, trials: Sequence[Cores]) -> Iterator[int]:
        """One more of each; yields 1 after each."""
        self.alone.append(bench.alone())
        yield 1
        for on, cores in zip(self.on, trials, strict=True):
            on.append(bench.alone(cores))
            yield 1
        self.pairs.append(bench.pair())
        yield 1


def take(
    bench: Launching, trials: Sequence[Cores], *, rounds: int, until: float, told: Callable[[int, int], None]
) -> Taken:
    """Rounds of a launch alone, one on the cores of each of `trials`, and a pair; so many, or as many as there is time
    for `until` a moment on the clock of time.monotonic. `told(done, of)` first and after each
    launch or pair.

    What is compared is of the same rounds, so that what changes meanwhile is in all of it.
    """
    taken, longest, done, of = Taken(trials), 0.0, 0, rounds * (2 + len(trials))
    told(done, of)
    for number in range(rounds):
        began = time.monotonic()
        if began + longest > until:
            taken.problem = f"there was time for {number} of {rounds} rounds"
            return taken
        try:
            for launched in taken.round(bench, trials):
                done += launched
                told(done, of)
        except DdpPerfError as error:
            taken.problem = briefly(error)
            return taken
        longest = max(longest, time.monotonic() - began)
    return taken
