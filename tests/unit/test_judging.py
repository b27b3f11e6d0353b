"""When a measurement ends: what is asked of the judge beyond the rules of looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pytest_ddpperf.measuring.judging import Judge, Terms
from pytest_ddpperf.measuring.launches import measurement
from pytest_ddpperf.records import Environment, LaunchSamples, Limit, Measurement, Verdict
from tests.unit.test_launches import LAUNCH

ENVIRONMENT = Environment(key={}, must_match={"batch_size": 0}, recorded={})
LOOKS = (5, 10, 20)


def launches(*seconds: float) -> list[LaunchSamples]:
    """One each, with steps that all last as long."""
    steps = [(length,) * 30 for length in seconds]
    return [replace(LAUNCH, step_seconds=window, rank_seconds=(window,)) for window in steps]


@dataclass
class Beside:
    """The other side of pairs."""

    theirs: Sequence[LaunchSamples]
    batch_size: int = 0
    replaced = False

    def kept(self, start: int = 0, stop: int | None = None) -> tuple[Measurement, ...]:
        environment = replace(ENVIRONMENT, must_match={"batch_size": self.batch_size})
        return (measurement(self.theirs[start:stop], environment),)

    as_taken = kept


def judged(ratios: Sequence[float], *, settles: bool, asked: int = 0) -> tuple[int, Verdict]:
    """How many launches were judged until the measurement ended, and what that came to; by each of `ratios` the side
    at hand is slower. `asked` is the other side's batch size."""
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
    there: Any = Beside(launches(*(0.01,) * len(ratios)), asked)
    for number, count in enumerate(LOOKS, 1):
        here: Any = type("Here", (), {"kept": now[:count], "as_taken": now[:count]})
        found = Judge(terms, here, there, ENVIRONMENT)(LOOKS[:number], final=count == LOOKS[-1])
        if found.ended:
            return count, found.verdict
    raise AssertionError("the last look ends it")


STEADY = (1.0, 1.001, 0.999, 1.0005, 0.9995) * 4
NOISY = (1.0, 1.12, 0.92, 1.08, 0.89) * 4  # within the limit, though nobody can say that it is not 10 % slower
SLOWER = (1.3, 1.31, 1.29, 1.3, 1.305) * 4


@pytest.mark.parametrize(
    ("ratios", "gate", "suspicion"),
    [(STEADY, 5, 5), (NOISY, 5, 10), (SLOWER, 10, 10)],
    ids=["steady", "noisy", "slower"],
)
def test_what_settles_a_suspicion_goes_on_until_it_is_slower_or_certainly_not(
    ratios: Sequence[float], gate: int, suspicion: int
) -> None:
    assert judged(ratios, settles=False)[0] == gate
    assert judged(ratios, settles=True)[0] == suspicion


def test_what_settles_a_suspicion_is_all_that_was_launched_for_it() -> None:
    count, verdict = judged((*NOISY[:5], *STEADY[:15]), settles=True)
    (comparison,) = verdict.comparisons
    assert (count, verdict.status) == (10, "PASS")
    assert comparison.change.high < 0.1
    count, verdict = judged((*NOISY[:5], *SLOWER[:15]), settles=True)
    assert (count, verdict.status) == (20, "REGRESSED")


def test_what_cannot_be_compared_needs_no_further_launches() -> None:
    count, verdict = judged(NOISY, settles=True, asked=4)
    assert (count, verdict.status) == (5, "INCOMPARABLE")
