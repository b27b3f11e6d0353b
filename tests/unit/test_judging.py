"""When a measurement ends: what is asked of the judge beyond the rules of looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pytest_ddpperf.measuring.benchmark import _looked
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

    def take(self, here: Any, count: int, *, of: int) -> None:
        here.asked.append(of)
        here.kept = here.as_taken = here.every[:count]

    def seconds(self, now: Any, count: int) -> float:
        return 1.0 * count


class Here:
    """The side at hand."""

    def __init__(self, every: list[LaunchSamples]) -> None:
        self.every, self.kept, self.as_taken = every, list[LaunchSamples](), list[LaunchSamples]()
        self.asked: list[int] = []  # of how many launches each was said to be


TERMS = Terms(
    limits=(Limit(metric="p50", value=0.1, unit="%"),),
    level=0.015,
    interleaved=True,
    not_gated=None,
    confirming=10,
    max_seconds=1e9,
    settles=False,
)


def looked(ratios: Sequence[float], terms: Terms = TERMS, *, asked: int = 0, all_wanted: bool = False) -> Any:
    """What a measurement comes to, and the side at hand as it was left; by each of `ratios` that is slower. `asked` is
    the other side's batch size."""
    here: Any = Here(launches(*(0.01 * ratio for ratio in ratios)))
    there: Any = Beside(launches(*(0.01,) * len(ratios)), asked)
    there.take(here, LOOKS[0], of=LOOKS[0])
    found, looks = _looked(Judge(terms, here, there, ENVIRONMENT), here, there, LOOKS, all_wanted=all_wanted)
    return found, looks, here


def judged(ratios: Sequence[float], *, settles: bool, asked: int = 0) -> tuple[int, Verdict]:
    """How many launches were taken until the measurement ended, and what that came to."""
    found, _, here = looked(ratios, replace(TERMS, settles=settles), asked=asked)
    assert found.ended
    return len(here.kept), found.verdict


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


OPEN = (1.0, 1.16, 1.0, 1.16, 1.0)  # within the limit, and not settled


@pytest.mark.parametrize(
    ("terms", "count", "looks"),
    [
        (TERMS, 7, (5,)),
        (replace(TERMS, interleaved=False), 10, (5, 10)),
        (replace(TERMS, settles=True), 10, (5, 10)),
    ],
    ids=["in turns", "stored", "a suspicion"],
)
def test_in_turns_what_is_settled_between_two_looks_ends_there(
    terms: Terms, count: int, looks: tuple[int, ...]
) -> None:
    found, taken, here = looked((*OPEN, 0.98, *STEADY[:14]), terms)
    assert (len(here.kept), taken, found.verdict.status) == (count, looks, "PASS")
    assert here.asked[:2] == [5, 5]
    assert set(here.asked[2:]) == {10}, "of which look it is one of"


def test_a_red_waits_for_the_look() -> None:
    found, looks, here = looked(SLOWER)
    assert (len(here.kept), looks, found.verdict.status) == (10, (5, 10), "REGRESSED")


def test_to_see_how_far_code_differs_from_itself_all_are_taken() -> None:
    _, looks, here = looked(STEADY, all_wanted=True)
    assert (len(here.kept), looks) == (20, LOOKS)


def test_time_that_is_up_ends_it_at_a_look() -> None:
    found, looks, here = looked((1.3, 1.0) * 10, replace(TERMS, max_seconds=12.0))
    assert (len(here.kept), looks, found.verdict.status) == (10, (5, 10), "INCONCLUSIVE")
