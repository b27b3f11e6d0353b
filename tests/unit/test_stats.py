from __future__ import annotations

import math
import random
from statistics import stdev, variance

import pytest

from pytest_ddpperf.records import quantiles
from pytest_ddpperf.verdict import stats
from pytest_ddpperf.verdict.stats import t_quantile


@pytest.mark.parametrize(
    ("q", "expected"), [(0, 1.0), (25, 1.75), (50, 2.5), (90, 3.7), (100, 4.0)]
)
def test_quantile_interpolates_as_numpy_does(q: float, expected: float) -> None:
    assert quantiles.quantile([4.0, 1.0, 3.0, 2.0], q) == pytest.approx(
        expected
    )


def test_quantile_of_one_value_is_that_value() -> None:
    assert quantiles.quantile([7.0], 95) == 7.0


def test_the_estimator_is_the_geometric_mean_over_launches() -> None:
    assert quantiles.launch_quantiles(
        [[1.0, 2.0, 3.0], [8.0, 8.0, 8.0]], 50
    ) == (
        2.0,
        8.0,
    )
    assert quantiles.geometric_mean((2.0, 8.0)) == pytest.approx(4.0)
    assert quantiles.geometric_mean((0.0, 8.0)) == 0.0


# Student's t, one-sided 95 %, from printed tables; the last two are fractional (scipy.stats.t.ppf).
# --- differences


def test_on_one_occasion_equal_variances_have_students_degrees() -> None:
    difference = stats.difference([1.1, 1.2, 1.3], [[1.0, 1.1, 1.2]])
    assert difference.estimate == pytest.approx(0.1)
    assert difference.freedom == pytest.approx(4)
    assert difference.error == pytest.approx(math.sqrt(2 * 0.01 / 3))
    assert difference.reach(0.05) == pytest.approx(
        t_quantile(0.95, 4) * difference.error
    )


def test_without_any_spread_there_is_no_doubt() -> None:
    slower = stats.difference([2.0, 2.0], [[1.0, 1.0]])
    assert (
        slower.error,
        slower.p_value(),
        slower.mirrored().p_value(),
        slower.resolution(0.05),
    ) == (0, 0, 1, 0)
    same = stats.difference([1.0, 1.0], [[1.0, 1.0]])
    assert same.p_value() == same.mirrored().p_value() == 1


def test_variances_that_vanish_when_squared_are_stood() -> None:
    assert math.isfinite(
        stats.difference([1.0, 1.0 + 1e-100, 1e-170], [[0.0, 1e-170]]).reach(
            0.05
        )
    )


def normal(
    source: random.Random, number: int, mean: float = 0.0
) -> list[float]:
    return [source.gauss(mean, 1) for _ in range(number)]


def test_the_one_sided_test_holds_its_five_percent() -> None:
    # 2,000 identical pairs with a fixed seed: a p-value below 5 % in 5 % of them (binomial sd 0.5
    # %).
    source = random.Random(20261121)
    found = [
        stats.difference(normal(source, 5), [normal(source, 5)]).p_value()
        < 0.05
        for _ in range(2000)
    ]
    assert 0.03 < sum(found) / len(found) < 0.065


def test_the_resolution_is_found_four_times_out_of_five() -> None:
    source = random.Random(20261121)
    typical = stats.Difference(
        estimate=0.0,
        now=stats.Part(0.1, 9),
        base=stats.Part(0.1, 9),
        drift=stats.NOTHING,
        launches=10,
    )
    shift = typical.resolution(0.05)
    found = [
        stats.difference(
            normal(source, 10, shift), [normal(source, 10)]
        ).p_value()
        < 0.05
        for _ in range(2000)
    ]
    assert 0.76 < sum(found) / len(found) < 0.84


DRIFT = stats.Drift(floor=0.04, share=0.5, freedom=6)


def test_with_one_session_the_drift_is_what_is_assumed() -> None:
    difference = stats.difference(
        [1.1, 1.2, 1.3], [[1.0, 1.1, 1.2]], drift=DRIFT
    )
    assert difference.drift == stats.Part(
        pytest.approx(0.04**2 + 0.5**2 * 0.01), 6
    )
    assert difference.error**2 == pytest.approx(
        2 * 0.01 / 3 + 2 * difference.drift.variance
    )


def test_sessions_that_drift_replace_the_assumption_bit_by_bit() -> None:
    sessions = [[level, level + 0.01] for level in (1.0, 1.2, 1.4, 1.6)]
    difference = stats.difference([1.3, 1.31], sessions, drift=DRIFT)
    seen = variance([1.0, 1.2, 1.4, 1.6]) - 0.00005 / 2
    assumed = 0.04**2 + 0.5**2 * 0.00005
    assert difference.drift == stats.Part(
        pytest.approx((6 * assumed + 3 * seen) / 9), 9
    )
    assert difference.estimate == pytest.approx(0.0)


def test_sessions_apart_no_further_than_their_launches_explain_do_not_drift() -> (
    None
):
    alike = stats.difference(
        [1.0, 2.0], [[1.0, 2.0], [1.1, 1.9]], drift=stats.Drift(0.0, 0.0, 1.0)
    )
    assert alike.drift.variance == 0


def test_the_test_across_sessions_holds_its_five_percent_where_they_drift_as_assumed() -> (
    None
):
    source = random.Random(20261121)

    def session() -> list[float]:
        level = source.gauss(0, 0.07)
        return [source.gauss(level, 0.05) for _ in range(5)]

    for sessions in (1, 2, 5):
        drift = stats.Drift(floor=0.07, share=0.0, freedom=6)
        found = [
            stats.difference(
                session(), [session() for _ in range(sessions)], drift=drift
            ).p_value()
            < 0.05
            for _ in range(2000)
        ]
        assert 0.02 < sum(found) / len(found) < 0.065


# --- pairs


def test_in_pairs_the_test_is_students_on_the_differences() -> None:
    difference = stats.paired([1.1, 1.3, 1.2, 1.4], [1.0, 1.0, 1.0, 1.0])
    assert difference.estimate == pytest.approx(0.25)
    assert (difference.launches, difference.freedom) == (4, pytest.approx(3))
    assert difference.error == pytest.approx(math.sqrt(0.05 / 3 / 4))
    # t is the root of 15; with 3 degrees of freedom Student's distribution has a closed form.
    assert difference.p_value() == pytest.approx(
        0.5 - (math.atan(math.sqrt(5)) + math.sqrt(5) / 6) / math.pi
    )


def test_what_drifts_from_pair_to_pair_cancels() -> None:
    drifting = [1.0, 5.0, 2.0, 9.0]
    pairs = stats.paired(
        [
            level + change
            for level, change in zip(
                drifting, (0.1, 0.2, 0.3, 0.2), strict=True
            )
        ],
        drifting,
    )
    assert pairs.estimate == pytest.approx(0.2)
    assert pairs.error == pytest.approx(
        math.sqrt(variance([0.1, 0.2, 0.3, 0.2]) / 4)
    )
    assert pairs.p_value() < 0.05


def test_pairs_swapped_are_the_mirror() -> None:
    now, base = [1.0, 2.0, 4.0], [1.5, 2.0, 3.0]
    there, back = stats.paired(now, base), stats.paired(base, now)
    assert back.estimate == pytest.approx(-there.estimate)
    assert (back.error, back.p_value()) == (
        pytest.approx(there.error),
        pytest.approx(there.mirrored().p_value()),
    )


def test_stretch_by_stretch_the_median_ratio_counts() -> None:
    base = [1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    now = [1.1 * step for step in base]
    assert stats.by_stretches(now, base, [3, 2, 3], 50) == pytest.approx(
        math.log(1.1)
    ), "each stretch is its own yardstick"
    now[:3] = 50.0, 50.0, 50.0
    assert stats.by_stretches(now, base, [3, 2, 3], 50) == pytest.approx(
        math.log(1.1)
    ), "whatever disturbs one of them"
    assert stats.by_stretches(base, now, [3, 2, 3], 50) == pytest.approx(
        -math.log(1.1)
    )
    assert stats.by_stretches(
        [2.0, 8.0], [1.0, 2.0], [1, 1], 50
    ) == pytest.approx(math.log(math.sqrt(8)))


def test_pairs_that_all_differ_alike_leave_no_doubt() -> None:
    slower = stats.paired([2.0, 4.0], [1.0, 3.0])
    assert (
        slower.error,
        slower.p_value(),
        slower.mirrored().p_value(),
        slower.resolution(0.05),
    ) == (0, 0, 1, 0)
    same = stats.paired([1.0, 3.0], [1.0, 3.0])
    assert same.p_value() == same.mirrored().p_value() == 1


def test_a_value_without_its_partner_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        stats.paired([1.0, 2.0, 3.0], [1.0, 2.0])


def test_pairs_for_a_resolution_reach_it() -> None:
    pairs = stats.paired(
        normal(random.Random(1), 5), normal(random.Random(2), 5)
    )
    assert pairs.launches_for(pairs.resolution(0.05) / 2, 0.05) == 20, (
        "half the error takes four times the pairs"
    )


def test_the_test_in_pairs_holds_its_five_percent_however_pairs_drift() -> None:
    source = random.Random(20261121)

    def significant() -> bool:
        drift = [source.gauss(0, 10) for _ in range(5)]
        now, base = (
            [level + source.gauss(0, 1) for level in drift] for _ in range(2)
        )
        return stats.paired(now, base).p_value() < 0.05

    found = [significant() for _ in range(2000)]
    assert 0.035 < sum(found) / len(found) < 0.065


def test_a_trimmed_mean_of_pairs_leaves_out_the_ends() -> None:
    now = [-10.0, 1.0, 20.0, 2.0, 3.0, -9.0, 1.0, 30.0, 2.0, 3.0]
    pairs = stats.paired(now, [0.0] * 10, trim=0.2)
    assert (pairs.estimate, pairs.launches, pairs.freedom) == (
        2.0,
        10,
        pytest.approx(5),
    )
    # Winsorised 1 1 1 1 2 2 3 3 3 3 have the squares 8 around their mean: the square root of
    # 8 / (6 x 5) is the standard error.
    assert pairs.error == pytest.approx(math.sqrt(8 / 30))
    few = now[:9], [0.0] * 9
    assert stats.paired(*few, trim=0.2) == stats.paired(*few)


@pytest.mark.parametrize("pairs", [10, 20])
def test_of_pairs_of_which_some_differ_much_it_holds_its_five_percent_and_errs_less(
    pairs: int,
) -> None:
    source = random.Random(20261122)

    def differences() -> list[float]:
        return [
            source.gauss(0, 10 if source.random() < 0.15 else 1)
            for _ in range(pairs)
        ]

    nothing = [0.0] * pairs
    drawn = [differences() for _ in range(2000)]
    trimmed = [stats.paired(now, nothing, trim=0.2) for now in drawn]
    assert (
        sum(found.p_value() < 0.05 for found in trimmed) / len(trimmed) < 0.065
    )
    plain = [stats.paired(now, nothing) for now in drawn]
    assert 1.4 * stdev(found.estimate for found in trimmed) < stdev(
        found.estimate for found in plain
    )


# --- several p-values


def test_holm_takes_them_in_order_and_stops_at_the_first_that_fails() -> None:
    found = stats.holm([0.04, 0.01, 0.03], 0.06)
    assert [evidence.enough for evidence in found] == [True, True, True]
    assert [evidence.level for evidence in found] == pytest.approx(
        [0.06, 0.02, 0.03]
    )
    found = stats.holm([0.04, 0.01, 0.03], 0.05)
    assert [evidence.enough for evidence in found] == [False, True, False]
    assert [evidence.level for evidence in found] == pytest.approx(
        [0.025, 0.05 / 3, 0.025]
    )


def test_one_p_value_is_held_against_the_whole_level() -> None:
    assert stats.holm([0.05], 0.05) == (stats.Evidence(True, 0.05),)


def test_holm_shares_the_level_by_weights() -> None:
    found = stats.holm([0.009, 0.02, 0.001], 0.021, (1.0, 1.0, 0.1))
    assert [each.enough for each in found] == [True, True, True]
    assert [each.level for each in found] == pytest.approx(
        [0.01, 0.021, 0.021 / 11], rel=0.05
    )


@pytest.mark.parametrize(
    ("q", "steps"),
    [(50, 5), (10, 29), (90, 29), (95, 59), (99, 299), (1, 299), (99.9, 2995)],
)
def test_steps_that_support_a_percentile(q: float, steps: int) -> None:
    share = max(q, 100 - q) / 100
    assert stats.steps_needed(q) == steps
    assert 1 - share**steps >= 0.95 > 1 - share ** (steps - 1)
