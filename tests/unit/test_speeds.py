"""Launches of two speeds: when they are seen, and when more slow ones are a regression."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from pytest_ddpperf.options import parse
from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.samples import Comparison, Measurement, Verdict
from pytest_ddpperf.verdict import stats
from pytest_ddpperf.verdict.decision import is_suspected, judge
from pytest_ddpperf.verdict.speeds import find_lowest
from pytest_ddpperf.verdict.times import TEST_LEVEL
from tests.unit.test_verdict import measurement

LIMITS = [
    Limit(metric="p50", value=0.05, unit="%"),
    Limit(metric="p10", value=0.05, unit="%"),
]
FAST, SLOW = 0.025, 0.031  # seconds


def launches(count: int, slow: int, level: float = 1.0) -> Measurement:
    """So many launches with a little noise, of which so many are slow, the first one not."""
    source = random.Random(f"{count} {slow} {level}")
    seconds = [FAST] * (count - slow) + [SLOW] * slow
    return measurement(
        [level * each * source.lognormvariate(0, 0.005) for each in seconds]
    )


def judged(
    now: Measurement, *before: Measurement, share: float = 1.0
) -> Verdict:
    """Interleaved with the one before, if there is one of as many launches; else stored."""
    counts = [each.samples.launches for each in before]
    interleaved = counts == [now.samples.launches]
    return judge(now, before, LIMITS, interleaved=interleaved, share=share)


def of_p10(verdict: Verdict) -> Comparison:
    """The comparison that shows speeds."""
    assert verdict.comparisons[0].speeds is None
    return verdict.comparisons[1]


# --- the two groups


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([0.0, 0.01, 0.02, 0.25, 0.3], 0.25),
        ([0.3, 0.02, 0.25, 0.0, 0.01], 0.25),  # in any order
        ([0.0, 0.01, 0.02, 0.01, 0.3], None),  # one is no group
        ([0.0, 0.01, 0.2, 0.25, 0.3], None),  # most are no exception
        ([0.0, 0.1, 0.15, 0.29, 0.3], None),  # as far apart as the small ones
        ([0.0, 0.01, 0.02, 0.06, 0.07], None),  # no further than the least gap
        ([0.0, 0.3], None),
        ([], None),
    ],
)
def test_values_in_two_groups_have_a_gap_between_them(
    values: Sequence[float], found: float | None
) -> None:
    assert stats.find_gap(values, 0.05) == found


# --- how likely it is that no more launches are slow


@pytest.mark.parametrize(
    ("table", "p_value"),
    [
        ((3, 4, 1, 4), 17 / 70),  # Fisher's tea
        ((6, 20, 0, 20), 0.0101),
        ((4, 20, 0, 40), 0.0099),
        ((0, 20, 3, 20), 1.0),
    ],
)
def test_shares_are_compared_by_fishers_exact_test(
    table: tuple[int, int, int, int], p_value: float
) -> None:
    assert stats.fisher(*table) == pytest.approx(p_value, abs=5e-5)


def probability(slower: int, faster: int, pairs: int, rate: float) -> float:
    """Of so many pairs with the slow launch on either side, if launches are slow at a rate."""
    differs = rate * (1 - rate)
    ways = math.comb(pairs, slower) * math.comb(pairs - slower, faster)
    both = slower + faster
    return ways * differs**both * (1 - 2 * differs) ** (pairs - both)


@pytest.mark.parametrize("pairs", [5, 10, 20])
def test_pairs_with_a_slow_launch_err_as_often_as_they_may(pairs: int) -> None:
    results = [
        each
        for each in product(range(pairs + 1), repeat=2)
        if sum(each) <= pairs
    ]
    p_values = {
        each: stats.more_are_slower(*each, pairs=pairs) for each in results
    }
    for level, rate in product((0.2, 0.0126, 0.001), (0.05, 0.3, 0.5)):
        errs = sum(
            probability(*each, pairs, rate)
            for each, p_value in p_values.items()
            if p_value <= level
        )
        assert errs <= level * 1.001


def test_five_slow_launches_of_twenty_are_evidence_at_the_last_look() -> None:
    last = TEST_LEVEL - stats.spent(TEST_LEVEL, 0.5)
    assert stats.more_are_slower(5, 0, 20) <= last * 7 / 8
    assert stats.more_are_slower(4, 0, 20) > 2 * last
    assert stats.more_are_slower(0, 5, 20) > 0.9


def test_of_many_pairs_mcnemars_test_is_taken() -> None:
    assert stats.more_are_slower(10, 0, 101) == 2**-10
    assert stats.more_are_slower(10, 0, 100) < 2**-10


# --- the verdict


def test_more_slow_launches_are_a_regression_with_evidence() -> None:
    found = judged(launches(20, 5), launches(20, 0))
    assert (found, found.reason) == ("REGRESSED", "two-speeds")
    speeds = of_p10(found).speeds
    assert speeds is not None
    assert (speeds.slow, speeds.launches) == (5, 20)
    assert (speeds.slow_before, speeds.launches_before) == (0, 20)
    assert speeds.fast_seconds == pytest.approx(FAST, rel=0.01)
    assert speeds.slow_seconds == pytest.approx(SLOW, rel=0.01)
    assert speeds.p_value == stats.more_are_slower(5, 0, 20)


@pytest.mark.parametrize("launch", [0.010, 0.00999])
def test_one_fast_launch_makes_no_slow_ones_of_the_others(
    launch: float,
) -> None:
    """Next to stored launches of which none is faster."""
    now = measurement([0.0085] + [launch] * 19)
    before = measurement([0.010] * 19 + [0.0101])
    found = judge(now, [before, before], LIMITS)
    assert found == "PASS"
    mirrored = judge(before, [now, now], LIMITS)
    assert mirrored != "REGRESSED"


def test_the_two_speeds_of_pairs_are_those_of_pairs_that_differ() -> None:
    """The machine was slower in the first pairs, whose launches count as fast."""
    levels = [1.3] * 15 + [1.0] * 5
    before = measurement([FAST * level for level in levels])
    seconds = [FAST * 1.3] * 15 + [SLOW] * 5
    speeds = of_p10(judged(measurement(seconds), before)).speeds
    assert speeds is not None
    assert (speeds.slow, speeds.slow_before) == (5, 0)
    assert speeds.fast_seconds == pytest.approx(FAST)
    assert speeds.slow_seconds == pytest.approx(SLOW)


@pytest.mark.parametrize(
    ("limits", "lowest"),
    [
        ("forward:5%,p50:10%", "p50"),
        ("p50:10%,forward:5%", "p50"),
        ("tps:5%,p90:10%,p75:10%", "p75"),
        ("cpu_p10:5%,mean:10%", "mean"),
        ("forward:5%", "forward"),
    ],
)
def test_speeds_are_those_of_the_step_whatever_the_order_of_limits(
    limits: str, lowest: str
) -> None:
    asked = parse.limits(limits)
    assert asked[find_lowest(asked)].metric == lowest


def test_without_evidence_they_are_inconclusive_and_not_settled() -> None:
    for found in (
        judged(launches(20, 4), launches(20, 0)),
        judged(launches(20, 5), launches(20, 0), share=0.5),
        judged(launches(5, 2), launches(5, 0)),
    ):
        assert (found, found.reason) == ("INCONCLUSIVE", "two-speeds")
        assert not of_p10(found).settled
        assert is_suspected(found)


def reverse(side: Measurement) -> Measurement:
    """The launches in the opposite order, so that slow ones are in other pairs."""
    steps = side.samples.step_seconds[::-1]
    return replace(side, samples=replace(side.samples, step_seconds=steps))


@pytest.mark.parametrize(("slow", "before"), [(3, 3), (0, 5)])
def test_no_more_slow_launches_than_before_are_none(
    slow: int, before: int
) -> None:
    found = judged(reverse(launches(20, slow)), launches(20, before))
    assert of_p10(found).reason != "two-speeds"
    speeds = of_p10(found).speeds
    assert speeds is not None
    assert (speeds.slow, speeds.slow_before) == (slow, before)


def test_launches_of_one_speed_have_none() -> None:
    for now in (
        launches(20, 0),
        launches(20, 1),
        launches(20, 0, 1.04),
        launches(20, 0, 1.3),
        launches(20, 20),
    ):
        assert of_p10(judged(now, launches(20, 0))).speeds is None


def test_limits_keep_an_eighth_of_the_error_rate_if_slow_launches_could_be_evidence() -> (
    None
):
    none = launches(20, 0)
    for slow, level in ((3, TEST_LEVEL), (4, TEST_LEVEL), (7, TEST_LEVEL)):
        found = judged(launches(20, slow), none)
        levels = [each.level for each in found.comparisons]
        assert min(levels) == pytest.approx(level / 2)
    mixed = judged(reverse(launches(20, 3)), launches(20, 2))
    assert min(each.level for each in mixed.comparisons) == pytest.approx(
        TEST_LEVEL / 16
    )
    both = judged(launches(20, 5, 1.3), none)
    assert (both, both.reason) == ("REGRESSED", "beyond-limit")


def test_sessions_of_a_baseline_are_counted_together() -> None:
    sessions = [launches(10, 0, level) for level in (1.0, 1.02, 0.99, 1.01)]
    found = judged(launches(20, 4), *sessions)
    assert (found, found.reason) == ("REGRESSED", "two-speeds")
    speeds = of_p10(found).speeds
    assert speeds is not None
    assert speeds.p_value == stats.fisher(4, 20, 0, 40)
    fewer = judged(launches(20, 4), *sessions[:2])
    assert (fewer, fewer.reason) == ("INCONCLUSIVE", "two-speeds")


def test_more_slow_launches_are_suspected_however_little_the_mean_changes() -> (
    None
):
    limit = replace(LIMITS[1], value=0.1)
    found = judge(launches(10, 2), [launches(20, 0)], [limit])
    (compared,) = found.comparisons
    assert compared.change.estimate < 0.05
    assert (found, found.reason) == ("INCONCLUSIVE", "two-speeds")
    assert is_suspected(found)


def test_a_session_that_is_slower_as_a_whole_has_one_speed() -> None:
    found = judged(launches(20, 0, 1.25), launches(10, 0), launches(10, 0, 1.2))
    assert of_p10(found).speeds is None


def test_launches_that_are_as_often_slow_are_too_noisy() -> None:
    found = judged(launches(10, 1), launches(5, 2))
    assert (found, found.reason) == ("INCONCLUSIVE", "too-noisy")
    assert of_p10(found).speeds is not None


def test_a_slower_mean_is_said_to_be_one_of_slow_launches() -> None:
    found = judged(launches(20, 10), launches(20, 0))
    assert [each.status for each in found.comparisons] == ["REGRESSED"] * 2
    assert [each.reason for each in found.comparisons] == [
        "beyond-limit",
        "two-speeds",
    ]


def test_below_forty_launches_more_slow_ones_are_no_evidence() -> None:
    found = judged(launches(19, 5), launches(19, 0))
    assert (found, found.reason) == ("INCONCLUSIVE", "two-speeds")
