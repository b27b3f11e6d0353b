"""A round of launches: of the current side alone, or of both sides.

Where both launches of a round can be alive together, they are interleaved in stretches: each is
paused while the other one runs some steps. Else one launch follows the other.
"""

import math
import random
import statistics
import time
from collections.abc import Generator
from contextlib import ExitStack
from typing import cast

from pytest_ddpperf.compare.rounds import Round, Rounds, find_apart, find_error
from pytest_ddpperf.compare.sides import CurrentSide, PausedSide, Side
from pytest_ddpperf.launch import Observer
from pytest_ddpperf.records.errors import BaseSideError, LaunchError
from pytest_ddpperf.records.samples import LaunchSamples

# A short stretch is better: a disturbance that lasts longer is in both sides. But waking up,
# stopping and filling caches at its beginning must be small compared with it.
_STRETCH_SECONDS = 0.03
_STRETCH_STEPS = 3
# Of so many helpers of a rank, at most, batches are taken before a stretch counts.
_HELPERS = 16
# A short window has so many stretches, for the median over them to leave some out: none has to be
# longer than this part of the window.
_STRETCHES = 8


class NotTogether(Exception):
    """Both sides have to be measured one launch after the other. Either the first launches failed
    while both were alive, for they may need what only one can have; or one side would gain from
    being stopped."""


def take_round(
    rounds: Rounds,
    planned: int,
    current: CurrentSide,
    other: Side | None,
    observer: Observer,
    steps: int | None,
) -> Round:
    """Take the next of `planned` rounds, as progress shows them: a launch of each side, or of the
    current side alone if there is no other one or it failed.

    The first launch decides how long windows are, unless `steps` says so. Raises the errors of a
    launch of the current side.
    """
    place = len(rounds)
    if rounds:
        steps = len(rounds[-1].now.step_seconds)
    error = find_error(rounds)
    apart = ""
    job = current.job
    are_paired = job.settings.in_stretches(job.plan) and not find_apart(rounds)
    if other is not None and not error and are_paired:
        try:
            return _take_pair(planned, current, other, observer, steps)
        except NotTogether as problem:
            apart = str(problem)
        except BaseSideError as problem:
            error = str(problem)
    found: dict[str, LaunchSamples] = {}
    for name in _draw_order():
        if name == "n":
            observer.begin(place, planned)
            found[name] = current.measure(observer, steps)
            observer.launched(found[name])
            steps = len(found[name].step_seconds)
        elif other is not None and not error:
            observer.begin(place, planned)
            try:
                found[name] = other.measure(observer, steps)
                steps = steps or len(found[name].step_seconds)
            except BaseSideError as problem:
                error = str(problem)
    order = "".join(found)
    return Round(found["n"], found.get("b"), order, apart, error)


def _draw_order() -> list[str]:
    return random.Random().sample(["b", "n"], 2)


def _take_pair(
    planned: int,
    current: CurrentSide,
    other: Side,
    observer: Observer,
    steps: int | None,
) -> Round:
    """Take a launch of each side, both alive and interleaved. Raises NotTogether, BaseSideError and
    the errors of a launch."""
    plan = current.job.plan
    sides: dict[str, Side] = {"n": current, "b": other}
    paused: dict[str, PausedSide] = {}
    try:
        with ExitStack() as alive:
            alive.enter_context(current.launcher.alone(plan, observer))
            for name in _draw_order():
                observer.begin(current.place, planned)
                launch = sides[name].pause(observer, steps)
                # of a union, mypy joins what is yielded to `object`
                paused[name] = cast("PausedSide", alive.enter_context(launch))
                # On a device both sides keep what the plan has room for.
                if not plan.spreads:
                    steps = paused[name].steps
            interleave((paused["n"], paused["b"]), random.Random())
            found = {name: paused[name].deliver() for name in _draw_order()}
    except (LaunchError, BaseSideError) as error:
        if current.place == 0 and paused:
            raise NotTogether(str(error).partition("\n")[0]) from error
        raise
    observer.launched(found["n"])
    return Round(found["n"], found["b"], "".join(paused))


def interleave(
    sides: tuple[PausedSide, PausedSide], source: random.Random
) -> None:
    """Run the windows of both sides, which have the same number of steps, to their ends.

    While a rank is stopped, what its helpers wait for goes on: a worker of a loader then has a
    batch that cost no time. As many steps as it has helpers take these batches, and do not
    count. The side with more helpers would gain more. So with different numbers of them it raises
    NotTogether."""
    one, other = (side.helpers for side in sides)
    if one != other:
        raise NotTogether(
            f"a rank has {one} further processes on this side and {other} on the other"
        )
    for side in source.sample(sides, 2):
        side.stretch(1)  # which counts nothing
    helpers = min(one, _HELPERS)
    lengths = stretch_lengths(
        sides[0].steps,
        max(side.step_seconds for side in sides),
        source,
        max(_STRETCH_STEPS, helpers),
    )
    counted = next(lengths)
    while counted:
        began = time.monotonic()
        for side in source.sample(sides, 2):
            for _ in range(helpers - 1):
                side.stretch(1)
            side.stretch(counted + 1)
        taken = len(sides) * (counted + max(helpers, 1))
        counted = lengths.send((time.monotonic() - began) / taken)


def stretch_lengths(
    steps: int,
    step_seconds: float,
    source: random.Random,
    fewest: int = _STRETCH_STEPS,
) -> Generator[int, float, None]:
    """Yield how many steps each stretch of a window counts, then 0; send how long a step of the
    last stretch took.

    Lengths are drawn, from a least to twice that, so that what a step does every second or fourth
    time is left out, at the beginning of stretches, as often as not. `step_seconds` is the
    approximate time of a step for the first stretch, or 0. From then on it is the median over the
    stretches so far: warm-up shows steps that nothing disturbed, and where many are, stretches by
    that would be few.
    """
    left = steps
    seen: list[float] = []
    while left:
        step = statistics.median(seen) if seen else step_seconds
        long_enough = math.ceil(_STRETCH_SECONDS / step) if step > 0 else 0
        least = max(fewest, min(long_enough, steps // _STRETCHES))
        length = min(source.randint(least, 2 * least), left)
        if left - length < least:
            length = left
        left -= length
        seen.append((yield length))
    yield 0
