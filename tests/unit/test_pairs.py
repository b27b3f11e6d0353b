"""How long the stretches of a window are."""

from __future__ import annotations

import math
import random
from itertools import accumulate

import pytest

from pytest_ddpperf.measuring.pairs import stretches


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 30, 150, 400])
@pytest.mark.parametrize("step_seconds", [0.0, 0.0005, 0.005, 0.5])
def test_they_add_up_and_none_is_short(steps: int, step_seconds: float) -> None:
    for seed in range(20):
        found = list(stretches(steps, step_seconds, random.Random(seed)))
        assert sum(found) == steps
        least = min(steps, 3)
        assert min(found) >= least
        shortest = max(3, min(steps // 8, math.ceil(0.03 / step_seconds) if step_seconds else 0))
        assert len(found) == 1 or shortest <= min(found) <= max(found) < 3 * shortest


def test_the_step_that_is_not_counted_is_no_certain_one_of_two_or_four() -> None:
    for every in (2, 4):
        found = [0] * every
        for seed in range(50):
            lengths = list(stretches(150, 0.005, random.Random(seed)))
            for before in accumulate((length + 1 for length in lengths[:-1]), initial=0):
                found[before % every] += 1
        assert min(found) > 0.8 * sum(found) / every
