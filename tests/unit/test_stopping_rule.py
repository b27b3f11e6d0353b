"""When a measurement ends: what the judge asks beyond the rules of looks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf.compare.launches import Job, measurement
from pytest_ddpperf.compare.stopping_rule import Judge
from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.samples import (
    GOES_ON,
    Environment,
    LaunchSamples,
    Measurement,
    Verdict,
)
from tests.unit.test_launches import LAUNCH, job
from tests.unit.test_machine import settings

JOB = replace(
    job(),
    level=0.015,
    settings=settings(limits=(Limit(metric="p50", value=0.1, unit="%"),)),
)


def launches(*seconds: float) -> list[LaunchSamples]:
    """One each, with steps that all last as long."""
    steps = [(length,) * 30 for length in seconds]
    return [
        replace(LAUNCH, step_seconds=window, rank_seconds=(window,)) for window in steps
    ]


class BaselineSide:
    """The baseline side: all its steps last 0.01 s, a launch takes a second."""

    mostly_unfit = goes_on = False

    def __init__(self, *, interleaved: bool) -> None:
        self.interleaved = interleaved
        self.planned: list[int] = []  # as what number of launches each was announced

    def read(self, environment: Environment, not_gated: str | None) -> None:
        self._environment = environment

    def measurements(
        self, start: int = 0, stop: int | None = None
    ) -> tuple[Measurement, ...]:
        return (measurement(launches(*(0.01,) * 20)[start:stop], self._environment),)

    counted = measurements

    def take(self, current: Any, count: int, *, planned: int) -> None:
        self.planned.append(planned)
        current.taken = current.every[:count]

    def seconds(self, current: Any, count: int) -> float:
        return 1.0 * count


def decided(
    ratios: Sequence[float],
    of_test: Job = JOB,
    *,
    interleaved: bool = True,
    stops_early: bool = True,
    gives_up: bool = True,
    max_seconds: float = 1e9,
    recompiled: bool = False,
    goes_on: tuple[str, ...] = (),
) -> tuple[Verdict, int, list[int]]:
    """Return the verdict, after how many launches, and as what numbers they were announced. The
    current side is slower by each of `ratios`. `goes_on`: the sides whose steps leave work behind.
    """
    every = launches(*(0.01 * ratio for ratio in ratios))
    current: Any = SimpleNamespace(
        every=every, taken=[], facts={}, mostly_unfit=recompiled
    )
    current.doubts = lambda: {GOES_ON: "work goes on"} if "current" in goes_on else {}
    side: Any = BaselineSide(interleaved=interleaved)
    side.goes_on = "baseline" in goes_on
    ends = {
        "max_seconds": max_seconds,
        "stops_early": stops_early,
        "gives_up": gives_up,
    }
    verdict = Judge(of_test, current, side, **ends).decide()
    return verdict, len(current.taken), side.planned


STEADY = (1.0, 1.001, 0.999, 1.0005, 0.9995) * 4
SLOWER = (1.3, 1.31, 1.29, 1.3, 1.305) * 4
OPEN = (1.0, 1.16, 1.0, 1.16, 1.0)  # within the limit, and not settled


@pytest.mark.parametrize(
    ("asked", "count"),
    [({}, 7), ({"stops_early": False}, 10), ({"interleaved": False}, 10)],
    ids=["early stop", "none", "stored"],
)
def test_interleaved_launches_may_end_between_two_looks(
    asked: dict[str, bool], count: int
) -> None:
    verdict, taken, planned = decided((*OPEN, 0.98, *STEADY[:14]), **asked)
    assert (taken, verdict.status) == (count, "PASS")
    assert planned[0] == 5
    assert set(planned[2:]) == {10}, "of which look each is one"


def drawn(seed: int, slower: float, spread: float) -> list[float]:
    source = random.Random(seed)
    return [source.gauss(slower, spread) for _ in range(20)]


@pytest.mark.parametrize(
    ("ratios", "count", "status"),
    [
        (drawn(6, 1.11, 0.12), 10, "PASS"),  # its range does not reach twice the limit
        (drawn(7, 1.14, 0.25), 17, "INCONCLUSIVE"),
    ],
    ids=["near the limit", "too noisy"],
)
def test_a_measurement_that_would_hardly_be_settled_ends(
    ratios: Sequence[float], count: int, status: str
) -> None:
    verdict, taken, _ = decided(ratios)
    assert (taken, verdict.status, verdict.reason) == (count, status, "undecided")
    assert decided(ratios, gives_up=False)[1] == 20


def test_a_slowdown_that_further_launches_may_confirm_is_not_given_up() -> None:
    verdict, taken, _ = decided(drawn(4, 1.11, 0.12))
    assert (taken, verdict.status) == (20, "REGRESSED")


def test_a_red_waits_for_the_look() -> None:
    verdict, taken, _ = decided(SLOWER)
    assert (taken, verdict.status) == (10, "REGRESSED")


@pytest.mark.parametrize(
    ("ratios", "status", "reason"),
    [(STEADY, "INCONCLUSIVE", "recompiled"), (SLOWER, "REGRESSED", "beyond-limit")],
    ids=["within the limit", "slower"],
)
def test_launches_that_are_mostly_unfit_are_within_no_limit(
    ratios: Sequence[float], status: str, reason: str
) -> None:
    verdict, *_ = decided(ratios, recompiled=True)
    assert (verdict.status, verdict.reason) == (status, reason)


@pytest.mark.parametrize(
    ("goes_on", "status"),
    [
        ((), "IMPROVED"),
        (("current",), "INCONCLUSIVE"),
        (("current", "baseline"), "IMPROVED"),
    ],
)
def test_steps_that_leave_work_behind_as_those_of_the_baseline_do_not_are_not_faster(
    goes_on: tuple[str, ...], status: str
) -> None:
    assert decided([0.5 * ratio for ratio in STEADY], goes_on=goes_on)[0] == status


@pytest.mark.parametrize(
    ("fast", "slow", "status"), [(0.006, 0.015, "PASS"), (0.004, 0.025, "INCONCLUSIVE")]
)
def test_launches_of_two_speeds_are_measured_until_a_slowdown_would_be_seen(
    fast: float, slow: float, status: str
) -> None:
    every = launches(*(fast, slow) * 10)
    current: Any = SimpleNamespace(taken=[], facts={}, mostly_unfit=False, doubts=dict)
    current.every = [
        replace(each, page_faults=(0.0 if each.step_seconds[0] == fast else 5000.0,))
        for each in every
    ]
    side: Any = BaselineSide(interleaved=True)
    verdict = Judge(
        JOB, current, side, max_seconds=1e9, stops_early=True, gives_up=True
    ).decide()
    assert verdict == status
    (compared,) = verdict.comparisons
    assert (compared.change.high < 0.3) is (status == "PASS")
    assert (
        10 < len(current.taken) < 20 if status == "PASS" else len(current.taken) == 20
    )


def test_time_that_is_up_ends_it_at_a_look() -> None:
    verdict, taken, _ = decided((1.3, 1.0) * 10, max_seconds=12.0)
    assert (taken, verdict.status) == (10, "INCONCLUSIVE")
