"""When a measurement ends: what the rule says of rounds, beyond the rules of looks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pytest_ddpperf.compare.job import Job
from pytest_ddpperf.compare.rounds import Round, combine
from pytest_ddpperf.compare.rule import Rule, Stop, Take
from pytest_ddpperf.compare.sides import OtherVersion, StoredBaseline
from pytest_ddpperf.records.outcome import Version
from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.samples import (
    GOES_ON,
    LaunchCost,
    LaunchSamples,
    Recording,
    Verdict,
)
from tests.unit.test_launches import LAUNCH, job
from tests.unit.test_machine import settings

JOB = replace(
    job(),
    level=0.015,
    settings=settings(limits=(Limit(metric="p50", value=0.1, unit="%"),)),
)


def launch(seconds: float, **figures: Any) -> LaunchSamples:
    """A launch of half a second, with steps that all last as long."""
    steps = (seconds,) * 30
    cost = LaunchCost(steps=0.5)
    return replace(
        LAUNCH, step_seconds=steps, rank_seconds=(steps,), cost=cost, **figures
    )


def pairs(ratios: Sequence[float], **figures: Any) -> list[Round]:
    """Rounds in which the current side is slower by each of `ratios`."""
    return [
        Round(now=launch(0.01 * ratio, **figures), before=launch(0.01))
        for ratio in ratios
    ]


INTERLEAVED = Rule(
    job=JOB,
    max_seconds=1e9,
    other=OtherVersion(version=Version(ref="main", commit="", now=""), job=JOB),
)


def stored(of_test: Job, *seconds: float) -> Rule:
    """Compare with a session of launches whose steps last so long."""
    launches = tuple(launch(each) for each in seconds)
    session = Recording(measurement=combine(launches, of_test.environment({})))
    return replace(
        INTERLEAVED,
        job=of_test,
        other=None,
        stored=StoredBaseline(sessions=(session,)),
    )


def follow(
    rule: Rule, rounds: Sequence[Round]
) -> tuple[Verdict, int, list[int]]:
    """Return the verdict, after how many of the rounds, and as what numbers they were announced."""
    planned: list[int] = []
    taken: tuple[Round, ...] = ()
    while isinstance(asked := rule.next(taken), Take):
        planned.append(asked.planned)
        taken = tuple(rounds[: len(taken) + 1])
        assert len(taken) == len(planned), (
            "more rounds are asked for than there are"
        )
    return asked.verdict, len(taken), planned


STEADY = (1.0, 1.001, 0.999, 1.0005, 0.9995) * 4
SLOWER = (1.3, 1.31, 1.29, 1.3, 1.305) * 4
STEADY_SECONDS = [0.01 * ratio for ratio in STEADY[:5]]
OPEN = (1.0, 1.16, 1.08, 1.12, 0.98)  # within the limit, and not settled


@pytest.mark.parametrize(
    ("rule", "count"),
    [
        (INTERLEAVED, 7),
        (replace(INTERLEAVED, confirms=True), 10),
        (stored(JOB, *STEADY_SECONDS), 10),
    ],
    ids=["early stop", "confirming", "stored"],
)
def test_interleaved_launches_may_end_between_two_looks(
    rule: Rule, count: int
) -> None:
    verdict, taken, planned = follow(rule, pairs((*OPEN, 0.98, *STEADY[:14])))
    assert (taken, verdict.status) == (count, "PASS")
    assert planned == [5] * 5 + [10] * (count - 5), "of which look each is one"


def test_no_launch_follows_one_for_which_the_other_version_failed() -> None:
    *first, seventh = pairs((*OPEN, 0.98, 1.0))
    failed = replace(seventh, before=None, error="it is gone")
    verdict, taken, _ = follow(INTERLEAVED, [*first, failed, *pairs(STEADY)])
    assert (taken, verdict.status) == (7, "NO BASELINE")


def test_slow_launches_are_counted_up_to_the_last_look() -> None:
    """One of the first five pairs, so that these do not pass."""
    slow = (1.0, 1.0, 1.25, 1.0, 1.0)
    two = (*slow, 1.25, 1.0)
    verdict, taken, _ = follow(INTERLEAVED, pairs((*two, *STEADY)))
    assert (taken, verdict.status, verdict.reason) == (
        20,
        "INCONCLUSIVE",
        "two-speeds",
    )
    verdict, taken, _ = follow(INTERLEAVED, pairs((*two, *slow * 4)))
    assert (taken, verdict.status, verdict.reason) == (
        20,
        "REGRESSED",
        "two-speeds",
    )
    # a single one is an exception
    verdict, taken, _ = follow(INTERLEAVED, pairs((*slow, *STEADY)))
    assert (taken, verdict.status) == (7, "PASS")


def test_slow_launches_against_a_stored_baseline_are_counted_too() -> None:
    rule = stored(JOB, *STEADY_SECONDS * 8)
    slow = pairs((1.25, 1.0, 1.0, 1.25, 1.0) * 4)
    verdict, taken, _ = follow(rule, slow)
    assert (taken, verdict.status, verdict.reason) == (
        20,
        "REGRESSED",
        "two-speeds",
    )


def drawn(seed: int, slower: float, spread: float) -> list[float]:
    source = random.Random(seed)
    return [source.gauss(slower, spread) for _ in range(20)]


@pytest.mark.parametrize(
    ("ratios", "count", "status"),
    [
        # its range does not reach twice the limit
        (drawn(6, 1.11, 0.12), 15, "PASS"),
        (drawn(9, 1.14, 0.25), 19, "INCONCLUSIVE"),
    ],
    ids=["near the limit", "too noisy"],
)
def test_a_measurement_that_would_hardly_be_settled_ends(
    ratios: Sequence[float], count: int, status: str
) -> None:
    verdict, taken, _ = follow(INTERLEAVED, pairs(ratios))
    assert (taken, verdict.status, verdict.reason) == (
        count,
        status,
        "undecided",
    )
    same = replace(JOB, settings=replace(JOB.settings, against="self"))
    assert follow(replace(INTERLEAVED, job=same), pairs(ratios))[1] == 20


def test_a_slowdown_that_further_launches_may_confirm_is_not_given_up() -> None:
    verdict, taken, _ = follow(INTERLEAVED, pairs(drawn(11, 1.11, 0.12)))
    assert (taken, verdict.status) == (20, "REGRESSED")


@pytest.mark.parametrize(
    ("ratios", "count"),
    [(SLOWER, 5), ((1.3, 1.25, 1.35, 1.28, 1.32) * 4, 10)],
    ids=["evident", "noisy"],
)
def test_a_red_waits_for_a_look_with_enough_evidence(
    ratios: Sequence[float], count: int
) -> None:
    verdict, taken, _ = follow(INTERLEAVED, pairs(ratios))
    assert (taken, verdict.status) == (count, "REGRESSED")


def test_an_improvement_goes_on_until_there_is_evidence() -> None:
    ratios = (0.8, 0.75, 0.85, 0.78, 0.82) * 4
    verdict, taken, _ = follow(INTERLEAVED, pairs(ratios))
    assert (taken, verdict.status) == (10, "IMPROVED")


@pytest.mark.parametrize(
    ("ratios", "status", "reason"),
    [
        (STEADY, "INCONCLUSIVE", "recompiled"),
        (SLOWER, "REGRESSED", "beyond-limit"),
    ],
    ids=["within the limit", "slower"],
)
def test_launches_that_are_mostly_unfit_are_within_no_limit(
    ratios: Sequence[float], status: str, reason: str
) -> None:
    verdict, *_ = follow(INTERLEAVED, pairs(ratios, unfit="rank 0 recompiled"))
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
    doubts = {GOES_ON: "threads still work"}
    rounds = [
        Round(
            now=replace(
                each.now, doubts=doubts if "current" in goes_on else {}
            ),
            before=launch(0.01, doubts=doubts if "baseline" in goes_on else {}),
        )
        for each in pairs([0.5 * ratio for ratio in STEADY])
    ]
    assert follow(INTERLEAVED, rounds)[0] == status


@pytest.mark.parametrize(
    ("fast", "slow", "status"),
    [(0.006, 0.015, "PASS"), (0.004, 0.025, "INCONCLUSIVE")],
)
def test_launches_of_two_speeds_are_measured_until_a_slowdown_would_be_seen(
    fast: float, slow: float, status: str
) -> None:
    speeds = (
        launch(fast, page_faults=(0.0,)),
        launch(slow, page_faults=(5000.0,)),
    )
    rounds = [Round(now=each, before=launch(0.01)) for each in speeds * 10]
    verdict, taken, _ = follow(INTERLEAVED, rounds)
    assert verdict == status
    (compared,) = verdict.comparisons
    assert (compared.change.high < 0.3) is (status == "PASS")
    # further launches would hardly bring a PASS of the slower ones
    assert taken == (18 if status == "PASS" else 10)


def test_time_that_is_up_ends_it_at_a_look() -> None:
    """A round lasts a second."""
    rounds = pairs((1.4, 0.9) * 10)
    verdict, taken, _ = follow(replace(INTERLEAVED, max_seconds=12.0), rounds)
    assert (taken, verdict.status) == (10, "INCONCLUSIVE")
    assert follow(replace(INTERLEAVED, max_seconds=20.0), rounds)[1] == 20


def test_what_went_wrong_on_the_baseline_side_leaves_nothing_to_compare_with() -> (
    None
):
    rounds = pairs(STEADY)[:4]
    failed = replace(rounds[0], before=None, error="gone")
    alone = [replace(failed, error="")] * 5
    assert follow(INTERLEAVED, [*rounds, failed])[0] == "NO BASELINE"
    assert follow(INTERLEAVED, [failed, *alone])[:2] == ("NO BASELINE", 5)


def test_the_same_rounds_always_get_the_same_answer() -> None:
    rounds = tuple(pairs(SLOWER)[:10])
    first, second = (INTERLEAVED.next(rounds[:5]) for _ in range(2))
    assert isinstance(first, Stop)
    assert first == second
    assert INTERLEAVED.next(rounds[:4]) == Take(5)


def test_launches_of_the_baseline_that_are_mostly_unfit_count_too() -> None:
    before = launch(0.01, unfit="rank 0 recompiled")
    rounds = [
        Round(now=launch(0.01 * ratio), before=before) for ratio in STEADY
    ]
    verdict, *_ = follow(INTERLEAVED, rounds)
    assert (verdict.status, verdict.reason) == ("INCONCLUSIVE", "recompiled")
