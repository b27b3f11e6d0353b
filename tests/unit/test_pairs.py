"""How long the stretches of a window are."""

from __future__ import annotations

import math
import random
from itertools import accumulate
from typing import NamedTuple

import pytest

from pytest_ddpperf.compare.interleaving import (
    NotTogether,
    interleave,
    stretch_lengths,
)


def drawn(steps: int, warm: float, real: float, seed: int) -> list[int]:
    """Return the stretches of a window whose steps last `warm` seconds in the warm-up and `real`
    ones afterwards."""
    lengths = stretch_lengths(steps, warm, random.Random(seed))
    found = [next(lengths)]
    while length := lengths.send(real):
        found.append(length)
    return found


def least(steps: int, step_seconds: float) -> int:
    return max(
        3,
        min(steps // 8, math.ceil(0.03 / step_seconds) if step_seconds else 0),
    )


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 30, 150, 400])
@pytest.mark.parametrize("step_seconds", [0.0, 0.0005, 0.005, 0.5])
def test_they_add_up_and_none_is_short(steps: int, step_seconds: float) -> None:
    for seed in range(20):
        found = drawn(steps, step_seconds, step_seconds, seed)
        assert sum(found) == steps
        assert min(found) >= min(steps, 3)
        shortest = least(steps, step_seconds)
        assert (
            len(found) == 1
            or shortest <= min(found) <= max(found) < 3 * shortest
        )


class WithHelpers(NamedTuple):
    """A side whose ranks have started so many processes each."""

    steps = 60
    step_seconds = 0.01
    helpers: int
    stretches: list[int]

    def stretch(self, steps: int) -> None:
        self.stretches.append(steps)


def test_sides_with_different_numbers_of_helpers_are_not_interleaved() -> None:
    """What eight workers wait for goes on while they are stopped, four times as much as of two."""
    sides = WithHelpers(2, []), WithHelpers(8, [])
    with pytest.raises(NotTogether, match="2 further processes on this side"):
        interleave(sides, random.Random(1))  # type: ignore[arg-type]
    assert sides[0].stretches == []


@pytest.mark.parametrize("helpers", [0, 1, 5, 99])
def test_as_many_steps_as_ranks_have_helpers_are_not_counted(
    helpers: int,
) -> None:
    """What workers of a loader waited for while they were stopped has cost no time."""

    sides = WithHelpers(helpers, []), WithHelpers(helpers, [])
    interleave(sides, random.Random(1))  # type: ignore[arg-type]
    before = max(min(helpers, 16) - 1, 0)
    for side in sides:
        first, *rest = side.stretches
        assert first == 1
        counted = rest[before :: before + 1]
        assert sum(steps - 1 for steps in counted) == 60
        assert min(counted) > max(before, 3)
        assert {*rest} <= {1, *counted}
        assert len(rest) == len(counted) * (before + 1)


def test_steps_that_take_longer_than_in_the_warm_up_come_in_shorter_stretches() -> (
    None
):
    first, *rest = drawn(400, 0.0005, 0.004, 1)
    assert least(400, 0.0005) <= first <= 2 * least(400, 0.0005)
    assert len(rest) > 400 // (3 * least(400, 0.004))
    assert max(rest) < 3 * least(400, 0.004)


def test_a_stretch_that_is_disturbed_changes_no_length() -> None:
    lengths = stretch_lengths(10_000, 0.005, random.Random(3))
    next(lengths)
    for step_seconds in (0.005, 0.005, 0.5, 0.005, 0.3, 0.005):
        assert 6 <= lengths.send(step_seconds) <= 12


def test_the_step_that_is_not_counted_is_no_certain_one_of_two_or_four() -> (
    None
):
    for every in (2, 4):
        found = [0] * every
        for seed in range(50):
            lengths = drawn(150, 0.005, 0.005, seed)
            for before in accumulate(
                (length + 1 for length in lengths[:-1]), initial=0
            ):
                found[before % every] += 1
        assert min(found) > 0.8 * sum(found) / every
