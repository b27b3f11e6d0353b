"""A launch that pauses between stretches of its window, each of which runs on request: meanwhile it
uses no core.

So both sides of a comparison can be alive at once and be interleaved: what disturbs the machine for
longer than a stretch disturbs both. Paused ranks are stopped by signal, with all that they started,
because threads may spin and workers of a loader run on.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from pytest_ddpperf.launch.feeders import count_helpers, find_feeder
from pytest_ddpperf.launch.ranks import wake
from pytest_ddpperf.launch.run import Delivery, Launch
from pytest_ddpperf.records.errors import (
    BaseSideError,
    DdpPerfError,
    ServerError,
)
from pytest_ddpperf.records.messages import (
    PauseRanks,
    RanksPaused,
    Resting,
    ResumeRanks,
    ServerAnswer,
)
from pytest_ddpperf.records.samples import LaunchCost, LaunchSamples
from pytest_ddpperf.wire.channels import Phase

# For the server to send its signals.
_PAUSE_SECONDS = 30.0


class PausedLaunch(Launch):
    """A Launch that is paused between stretches; its deadline does not count meanwhile."""

    def __init__(
        self, samples: Callable[[Delivery], LaunchSamples], *launch: Any
    ) -> None:
        """`samples` makes LaunchSamples of what the launch brought back; `launch` are the arguments
        of Launch."""
        super().__init__(*launch)
        self._samples = samples
        self._window = Resting(steps=0, step_ns=0)  # until all have warmed up
        # how many processes each rank has started when it is warm: workers of a loader, say
        self.helpers = 0
        self._is_stopped = False  # by signal
        self._left_seconds = 0.0  # until its deadline, while it is paused
        self._warm_ns = 0  # when it was warm
        self._asked_ns = 0  # when it was to end
        self._stretches_ns = 0

    def begin(self) -> None:
        """Start the ranks; returns when all have warmed up and rest. Raises LaunchError or
        ServerError."""
        super().begin()
        self._rest()
        self._warm_ns = time.monotonic_ns()
        self._window = self._ranks[0].resting or self._window
        self.helpers = count_helpers(self._server.pid, len(self._ranks))

    @property
    def steps(self) -> int:
        """The steps of the window."""
        return self._window.steps

    @property
    def step_seconds(self) -> float:
        """The approximate time of a step; 0 without a warm-up."""
        return self._window.step_ns / 1e9

    def stretch(self, steps: int) -> None:
        """Run so many, the first of them uncounted; returns when all ranks are stopped. Raises as
        `begin`, and BaseSideError if something that is not stopped feeds the ranks."""
        began = time.monotonic_ns()
        self._resume(steps)
        self._rest()
        # Not before the first stretch: what set-up and warm-up began in the background must finish.
        self._pause()
        # Once they are stopped: a child that ranks start meanwhile would be taken for a feeder.
        if not self._stretches_ns and (feeder := find_feeder(self._server.pid)):
            raise BaseSideError(
                f"{feeder} writes to a pipe that ranks read, and goes on while they are stopped"
            )
        self._stretches_ns += time.monotonic_ns() - began

    def deliver(self) -> LaunchSamples:
        """Return the samples of all stretches; raises as `begin`."""
        return self._samples(self.finish())

    def drop(self) -> None:
        """End it as `deliver` does, clean-up included, whatever comes of it; nothing if it has
        ended."""
        if self._has_processes:
            with suppress(DdpPerfError):
                self.finish()

    def finish(self) -> Delivery:
        self._asked_ns = time.monotonic_ns()
        self._resume(0)
        return super().finish()

    def _rest(self) -> None:
        self._collect(lambda rank: rank.resting is not None)
        left = self._deadline - time.monotonic()
        # pytest itself may have stood still, for longer than that
        self._left_seconds = left if left > 0 else _PAUSE_SECONDS
        self._check()

    def _pause(self) -> None:
        """Stop the ranks by signal, and all that they started."""
        self._server.send(PauseRanks())
        until = time.monotonic() + _PAUSE_SECONDS
        while not self._is_stopped:
            left = until - time.monotonic()
            if left <= 0:
                raise ServerError("does not answer", "")
            self._take_in(left)

    def _take_answer(self, answer: ServerAnswer) -> None:
        if isinstance(answer, RanksPaused):
            self._is_stopped = True
        else:
            super()._take_answer(answer)

    def _resume(self, steps: int) -> None:
        self._take_in()  # a rank that ended while paused did not end in a step
        self._deadline = time.monotonic() + self._left_seconds
        if self._is_stopped:
            self._is_stopped = False
            self._server.send(ResumeRanks())
        wake(self._ranks, steps)

    def _cost(self, ended: int) -> LaunchCost:
        warmed_from = max(
            self._board.entered(rank, Phase.WARMUP)
            for rank in range(self._plan.world_size)
        )
        return replace(
            super()._cost(ended),
            warmup=(self._warm_ns - warmed_from) / 1e9,
            steps=self._stretches_ns / 1e9,
            end=(ended - self._asked_ns) / 1e9,
        )


_L = TypeVar("_L", bound=Any)


@contextmanager
def dropping(launch: _L) -> Iterator[_L]:
    """Drop a launch when the context is left."""
    try:
        yield launch
    except Exception:  # an interrupt of pytest does not wait
        launch.drop()
        raise
    launch.drop()
