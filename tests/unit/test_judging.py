"""When a measurement ends: what is asked of the judge beyond the rules of looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pytest_ddpperf.measuring.judging import Judge, Terms
from pytest_ddpperf.measuring.launches import measurement
from pytest_ddpperf.records import Environment, LaunchSamples, Limit, Measurement
from tests.unit.test_launches import LAUNCH

ENVIRONMENT = Environment(key={}, must_match={}, recorded={})
LOOKS = (5, 10, 20)


def launches(*seconds: float) -> list[LaunchSamples]:
    """One each, with steps that all last as long."""
    steps = [(length,) * 30 for length in seconds]
    return [replace(LAUNCH, step_seconds=window, rank_seconds=(window,)) for window in steps]


@dataclass
class Beside:
    """The other side of pairs."""

    theirs: Sequence[LaunchSamples]
    replaced = False

    def kept(self, start: int = 0, stop: int | None = None) -> tuple[Measurement, ...]:
        return (measurement(self.theirs[start:stop], ENVIRONMENT),)

    as_taken = kept


def looks_taken(ratios: Sequence[float], *, settles: bool) -> int:
    """How many launches were judged until the measurement ended; by each the side at hand is slower."""
    terms = Terms(
        limits=(Limit(metric="p50", value=0.1, unit="%"),),
        level=0.015,
        interleaved=True,
        not_gated=None,
        confirming=10,
        max_seconds=1e9,
        settles=settles,
    )
    now = launches(*(0.01 * ratio for ratio in ratios))
    there: Any = Beside(launches(*(0.01,) * len(ratios)))
    for number, count in enumerate(LOOKS, 1):
        here: Any = type("Here", (), {"kept": now[:count], "as_taken": now[:count]})
        if Judge(terms, here, there, ENVIRONMENT)(LOOKS[:number], final=count == LOOKS[-1]).ended:
            return count
    raise AssertionError("the last look ends it")


STEADY = (1.0, 1.001, 0.999, 1.0005, 0.9995) * 4
NOISY = (1.0, 1.12, 0.92, 1.08, 0.89) * 4  # within the limit, though nobody can say that it is not 10 % slower
SLOWER = (1.3, 1.31, 1.29, 1.3, 1.305) * 4


@pytest.mark.parametrize(
    ("ratios", "gate", "suspicion"),
    [(STEADY, 5, 5), (NOISY, 5, 20), (SLOWER, 10, 10)],
    ids=["steady", "noisy", "slower"],
)
def test_what_settles_a_suspicion_goes_on_until_it_is_slower_or_certainly_not(
    ratios: Sequence[float], gate: int, suspicion: int
) -> None:
    assert looks_taken(ratios, settles=False) == gate
    assert looks_taken(ratios, settles=True) == suspicion
