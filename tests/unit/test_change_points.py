"""Change points in one series: found where the level jumps, and not where it drifts or a point is
an outlier."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_ddpperf.history.change_points import (
    Observations,
    estimate_jumps,
    filter_level,
    find_change_points,
    find_largest,
    measure_distances,
    smallest_change,
    weigh_runs,
)
from pytest_ddpperf.verdict.stats import Part

# unit noise that neither drifts nor jumps
ALTERNATING = [(-1.0) ** place for place in range(40)]


def observed(
    values: Sequence[float],
    noise: Sequence[float] = (),
    moves: Sequence[float] = (),
) -> Observations:
    ones = [1.0] * len(values)
    return Observations(values, noise or ones, moves or ones)


def gaussian(points: int, *, share: float = 0.0, seed: int = 1) -> list[float]:
    random_ = random.Random(seed)
    level, values = 0.0, []
    for _ in range(points):
        level += random_.gauss(0, math.sqrt(share))
        values.append(level + random_.gauss(0, 1))
    return values


def jumping(values: Sequence[float], *jumps: tuple[int, float]) -> list[float]:
    return [
        value + sum(by for place, by in jumps if at >= place)
        for at, value in enumerate(values)
    ]


def jumps_of(
    observations: Observations, share: float = 0.0
) -> list[tuple[float, float]]:
    return estimate_jumps(
        observations, filter_level(observations, set(), share)
    )


def found(
    values: Sequence[float], level: float = 0.01
) -> list[tuple[int, bool]]:
    """Indexes of change points, and whether they are upwards."""
    return [
        (point.index, point.change > 0)
        for point in find_change_points(observed(values), level)
    ]


# --- the local level


@given(
    values=st.lists(st.floats(-5, 5), min_size=12, max_size=12),
    index=st.integers(1, 11),
    share=st.floats(0, 5),
)
def test_a_jump_explains_what_the_innovations_lose_by_it(
    values: list[float], index: int, share: float
) -> None:
    known = filter_level(observed(values), set(), share)
    in_errors, error = estimate_jumps(observed(values), known)[index]
    size = in_errors * error
    without = filter_level(
        observed(jumping(values, (index, -size))), set(), share
    )
    assert without.squares == pytest.approx(
        known.squares - in_errors**2, abs=1e-9
    )
    nearby = [
        filter_level(
            observed(jumping(values, (index, -size + by))), set(), share
        ).squares
        for by in (-0.01, 0.01)
    ]
    assert min(nearby) > without.squares
    # else it is rounding, whose logarithm may be any
    if without.squares > 1e-3:
        assert known.deviance(in_errors**2) == pytest.approx(without.deviance())


def test_without_drift_a_jump_is_the_difference_of_means() -> None:
    jumps = jumps_of(observed([1.0, 3.0, 5.0, 9.0, 11.0]))
    assert math.prod(jumps[3]) == pytest.approx(10.0 - 3.0)
    assert jumps[3][1] == pytest.approx(math.sqrt(1 / 3 + 1 / 2))


def test_points_count_by_their_own_error() -> None:
    jumps = jumps_of(observed([0.0, 0.0, 4.0, 8.0], noise=[1.0, 1.0, 1.0, 3.0]))
    assert math.prod(jumps[2]) == pytest.approx((4.0 * 3 + 8.0) / 4)


def test_a_reset_level_is_independent_of_the_points_before() -> None:
    points = observed([5.0, 6.0, 105.0, 106.0])
    halves = filter_level(points, {2}, 0.5)
    assert halves.free == 2
    assert halves.squares == pytest.approx(2 / 2.5)
    assert estimate_jumps(points, halves)[2][0] == 0.0


def test_the_distance_of_a_point_is_from_all_others() -> None:
    (_, _, far, *_) = measure_distances(
        observed([0.0, 0.0, 6.0, 0.0, 0.0]), set(), 0.0
    )
    assert far == pytest.approx(6.0 / math.sqrt(1 + 1 / 4))


def test_a_longer_time_lets_the_level_move_further() -> None:
    values = [0.0, 0.0, 3.0, 3.0]
    near, late = (
        jumps_of(observed(values, moves=[1, 1, move, 1]), 0.1)
        for move in (1, 100)
    )
    assert abs(late[2][0]) < abs(near[2][0]) / 2


# --- change points


def test_a_change_point_has_its_index_and_size() -> None:
    (point,) = find_change_points(
        observed(jumping(gaussian(60), (40, 5.0))), 0.01
    )
    assert point.index == 40
    assert point.change == pytest.approx(5.0, abs=1.0)
    interval = point.interval()
    assert interval.low < math.expm1(5.0) < interval.high
    assert point.p_value < 1e-5


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            jumping(gaussian(120), (30, 6.0), (60, -4.0), (100, 5.0)),
            [(30, True), (60, False), (100, True)],
        ),
        (
            jumping(gaussian(80), (40, 6.0), (46, -6.0)),
            [(40, True), (46, False)],
        ),
        (jumping(gaussian(100, share=0.3), (70, 12.0)), [(70, True)]),
        (jumping(gaussian(60), (20, 40.0), (21, -40.0)), []),
        (
            jumping(gaussian(60), (20, 40.0), (21, -40.0), (50, 5.0)),
            [(50, True)],
        ),
        ([*ALTERNATING, 9.0, 0.0], []),
        ([1.0] * 20, []),
        ([1.0] * 10 + [1.1] * 10, [(10, True)]),
    ],
    ids=[
        "several",
        "undone",
        "drift",
        "outlier",
        "behind an outlier",
        "last two differ",
        "constant",
        "no noise",
    ],
)
def test_change_points_are_found_and_outliers_are_none(
    values: Sequence[float], expected: list[tuple[int, bool]]
) -> None:
    assert found(values) == expected


@pytest.mark.parametrize("share", [0.0, 0.1, 1.25])
def test_neither_noise_nor_drift_is_a_change_point(share: float) -> None:
    assert [
        found(gaussian(100, share=share, seed=seed), 0.001)
        for seed in range(10)
    ] == [[]] * 10


@pytest.mark.parametrize(
    ("drift", "is_a_change"), [(0.12, True), (math.inf, False)]
)
def test_few_points_need_a_limit_of_the_drift(
    drift: float, is_a_change: bool
) -> None:
    """A level that drifts by a third from run to run explains as much: no machine does."""
    logs = [math.log(value) for value in (12, 11, 9, 16, 33, 23, 26, 27)]
    point = find_largest(Observations(logs, [1.0] * 8, [1.0] * 8, drift**2))
    assert point is not None
    assert (point.index, point.p_value <= 0.01) == (4, is_a_change)


def test_a_long_series_shows_that_its_level_drifts_further_than_is_likely() -> (
    None
):
    walk = list(accumulate(gaussian(200)))
    assert (
        find_change_points(
            Observations(walk, [1.0] * 200, [1.0] * 200, 0.12**2), 0.01
        )
        == []
    )


def test_the_smallest_change_is_found_in_most_series_like_it() -> None:
    """In about four of five, with the scatter of a size that rests on eight points."""
    series = [
        [value / 10 for value in gaussian(8, seed=seed)] for seed in range(100)
    ]
    observations = [weigh_runs(values, [Part(0.0, 0)] * 8) for values in series]
    smallest = median(smallest_change(each, 0.01) for each in observations)
    largest = [
        find_largest(
            weigh_runs(
                jumping(values, (4, math.log1p(smallest))), [Part(0.0, 0)] * 8
            )
        )
        for values in series
    ]
    assert (
        70
        <= sum(point is not None and point.p_value <= 0.01 for point in largest)
        <= 95
    )


def test_few_points_have_no_change_point() -> None:
    assert find_largest(observed([0.0, 0.1, 0.0, 5.0, 5.1])) is None
    assert find_largest(observed([0.0, 0.1, 0.0, 5.0, 5.1, 5.0])) is not None


# --- the weights of runs


def test_a_run_of_noisy_launches_weighs_less() -> None:
    noise = weigh_runs([0.0] * 20, [Part(0.01, 19), Part(1.0, 19)] * 10).noise
    # not a hundred times: a spread of few launches is uncertain itself
    assert noise[1] > 5 * noise[0]


def test_the_drift_between_runs_is_in_all_points() -> None:
    noise = weigh_runs(
        [*gaussian(30), 0.0], [*[Part(1e-6, 4)] * 30, Part(1e-3, 4)]
    ).noise
    # next to the spread of the points it is nothing
    assert noise[-1] == pytest.approx(noise[0], rel=0.01)


def test_runs_without_any_noise_weigh_alike() -> None:
    assert weigh_runs([1.0] * 3, [Part(0.0, 0)] * 3).noise == [1.0, 1.0, 1.0]
