from __future__ import annotations

import math
import random

import pytest

from pytest_ddpperf import stats


@pytest.mark.parametrize(("q", "expected"), [(0, 1.0), (25, 1.75), (50, 2.5), (90, 3.7), (100, 4.0)])
def test_quantile_interpolates_as_numpy_does(q: float, expected: float) -> None:
    assert stats.quantile([4.0, 1.0, 3.0, 2.0], q) == pytest.approx(expected)


def test_quantile_of_one_value_is_that_value() -> None:
    assert stats.quantile([7.0], 95) == 7.0


def test_completions_add_up_to_the_wall_time_of_the_window() -> None:
    starts = [0.0, 0.5]
    ends = [[2.0, 3.0, 6.0], [1.5, 4.0, 5.0]]
    steps = stats.completions(starts, ends)
    assert steps == (1.5, 2.0, 2.0)
    assert sum(steps) == max(6.0, 5.0) - max(starts)


def test_a_delay_after_the_last_collective_is_counted_once() -> None:
    # Rank 0 is late in step 1, rank 1 in step 2: the largest own durations would add up to 2 + 2 + 1.
    ends = [[2.0, 3.0, 4.0], [1.0, 3.0, 4.0]]
    assert sum(stats.completions([0.0, 0.0], ends)) == 4.0


def test_completions_keep_the_unit_of_their_clock() -> None:
    assert stats.completions([10, 12], [[15, 20], [14, 22]]) == (3, 7)


def test_ranks_with_different_numbers_of_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        stats.completions([0.0, 0.0], [[1.0, 2.0], [1.0]])


def test_the_estimator_is_the_geometric_mean_over_launches() -> None:
    assert stats.launch_quantiles([[1.0, 2.0, 3.0], [8.0, 8.0, 8.0]], 50) == (2.0, 8.0)
    assert stats.geometric_mean((2.0, 8.0)) == pytest.approx(4.0)
    assert stats.geometric_mean((0.0, 8.0)) == 0.0


def test_cpu_time_is_that_of_the_busiest_rank() -> None:
    launches = (((1.0, 1.0), (3.0, 3.0)), ((4.0, 4.0), (2.0, 2.0)))
    assert stats.cpu_quantiles(launches, 50) == (3.0, 4.0)


# Student's t, one-sided 95 %, from printed tables; the last two are fractional (scipy.stats.t.ppf).
@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 6.313751515), (2, 2.919985580), (4, 2.131846786), (8, 1.859548038), (30, 1.697260887), (2.5, 2.558218614)],
)
def test_t_quantile_agrees_with_tables(freedom: float, expected: float) -> None:
    assert stats.t_quantile(0.95, freedom) == pytest.approx(expected, abs=1e-8)
    assert stats.t_quantile(0.05, freedom) == pytest.approx(-expected, abs=1e-8)


def test_t_nears_the_normal_distribution() -> None:
    assert stats.t_quantile(0.975, 1e6) == pytest.approx(1.959966, abs=1e-5)


def test_t_cdf_of_one_degree_is_cauchys() -> None:
    for t in (-3.0, -0.2, 0.0, 1.0, 12.0):
        assert stats.t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)


def test_welch_of_equal_variances_has_students_degrees() -> None:
    interval = stats.welch([1.1, 1.2, 1.3], [1.0, 1.1, 1.2])
    assert interval.estimate == pytest.approx(0.1)
    reach = stats.t_quantile(0.95, 4) * math.sqrt(2 * 0.01 / 3)
    assert (interval.low, interval.high) == (pytest.approx(0.1 - reach), pytest.approx(0.1 + reach))


def test_welch_without_any_spread_has_no_width() -> None:
    interval = stats.welch([2.0, 2.0], [1.0, 1.0])
    assert (interval.estimate, interval.low, interval.high) == (1.0, 1.0, 1.0)


def test_welch_stands_variances_that_vanish_when_squared() -> None:
    assert math.isfinite(stats.welch([1.0, 1.0 + 1e-100, 1e-170], [0.0, 1e-170]).high)


def test_the_one_sided_bound_holds_its_five_percent() -> None:
    # 2,000 identical pairs with a fixed seed: the lower bound is above zero in 5 % of them (binomial sd 0.5 %).
    source = random.Random(20261121)

    def side() -> list[float]:
        return [source.gauss(0, 1) for _ in range(5)]

    flagged = sum(stats.welch(side(), side()).low > 0 for _ in range(2000)) / 2000
    assert 0.03 < flagged < 0.065


@pytest.mark.parametrize(("q", "steps"), [(50, 5), (10, 29), (90, 29), (95, 59), (99, 299), (1, 299), (99.9, 2995)])
def test_steps_that_support_a_percentile(q: float, steps: int) -> None:
    share = max(q, 100 - q) / 100
    assert stats.steps_needed(q) == steps
    assert 1 - share**steps >= 0.95 > 1 - share ** (steps - 1)
