"""When a measurement ends: what is asked of the judge beyond the rules of looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pytest_ddpperf.measuring.judging import Judge, Terms
from pytest_ddpperf.measuring.launches import measurement
from pytest_ddpperf.measuring.measurement import _looked
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
    mostly_recompiled = False

    def measurements(self, start: int = 0, stop: int | None = None) -> tuple[Measurement, ...]:
        environment = replace(ENVIRONMENT, must_match={"batch_size": self.batch_size})
        return (measurement(self.theirs[start:stop], environment),)

    def take(self, here: Any, count: int, *, planned: int) -> None:
        here.asked.append(planned)
        here.taken = here.every[:count]

    def seconds(self, now: Any, count: int) -> float:
        return 1.0 * count


class Here:
    """The side at hand."""

    def __init__(self, every: list[LaunchSamples]) -> None:
        self.every, self.taken, self.mostly_recompiled = every, list[LaunchSamples](), False
        self.asked: list[int] = []  # of how many launches each was said to be


TERMS = Terms(
    limits=(Limit(metric="p50", value=0.1, unit="%"),),
    level=0.015,
    interleaved=True,
    not_gated=None,
    confirming=10,
    max_seconds=1e9,
    stops_early=True,
)


def looked(
    ratios: Sequence[float], terms: Terms = TERMS, *, asked: int = 0, recompiled: bool = False
) -> tuple[Verdict, Any]:
    """What a measurement comes to, and the side at hand as it was left; by each of `ratios` that is slower. `asked` is
    the other side's batch size."""
    here: Any = Here(launches(*(0.01 * ratio for ratio in ratios)))
    here.mostly_recompiled = recompiled
    there: Any = Beside(launches(*(0.01,) * len(ratios)), asked)
    there.take(here, LOOKS[0], planned=LOOKS[0])
    return _looked(Judge(terms, here, there, ENVIRONMENT), here, there, LOOKS), here


STEADY = (1.0, 1.001, 0.999, 1.0005, 0.9995) * 4
NOISY = (1.0, 1.12, 0.92, 1.08, 0.89) * 4  # within the limit, though nobody can say that it is not 10 % slower
SLOWER = (1.3, 1.31, 1.29, 1.3, 1.305) * 4


OPEN = (1.0, 1.16, 1.0, 1.16, 1.0)  # within the limit, and not settled


@pytest.mark.parametrize(
    ("terms", "count"),
    [(TERMS, 7), (replace(TERMS, stops_early=False), 10)],
    ids=["early stop", "none"],
)
def test_interleaved_launches_may_end_between_two_looks(terms: Terms, count: int) -> None:
    verdict, here = looked((*OPEN, 0.98, *STEADY[:14]), terms)
    assert (len(here.taken), verdict.status) == (count, "PASS")
    assert here.asked[:2] == [5, 5]
    assert set(here.asked[2:]) == {10}, "of which look it is one of"


def test_a_red_waits_for_the_look() -> None:
    verdict, here = looked(SLOWER)
    assert (len(here.taken), verdict.status) == (10, "REGRESSED")


@pytest.mark.parametrize(
    ("ratios", "status", "reason"),
    [(STEADY, "INCONCLUSIVE", "recompiled"), (SLOWER, "REGRESSED", "beyond-limit")],
    ids=["within the limit", "slower"],
)
def test_launches_that_mostly_recompiled_are_within_no_limit(ratios: Sequence[float], status: str, reason: str) -> None:
    verdict, _ = looked(ratios, recompiled=True)
    assert (verdict.status, verdict.reason) == (status, reason)


def test_time_that_is_up_ends_it_at_a_look() -> None:
    verdict, here = looked((1.3, 1.0) * 10, replace(TERMS, max_seconds=12.0))
    assert (len(here.taken), verdict.status) == (10, "INCONCLUSIVE")
