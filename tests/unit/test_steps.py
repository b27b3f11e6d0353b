"""Steps in one series: found where the level jumps, and not where it walks or a point is off."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from pytest_ddpperf.history import steps, walk
from pytest_ddpperf.history.steps import Point, Step
from pytest_ddpperf.history.walk import Series

ALTERNATING = [(-1.0) ** place for place in range(40)]  # unit noise that neither walks nor jumps


def series(values: Sequence[float], noise: Sequence[float] = (), moves: Sequence[float] = ()) -> Series:
    ones = [1.0] * len(values)
    return Series(values, noise or ones, moves or ones)


def gaussian(points: int, *, share: float = 0.0, seed: int = 1) -> list[float]:
    random_ = random.Random(seed)
    level, values = 0.0, []
    for _ in range(points):
        level += random_.gauss(0, math.sqrt(share))
        values.append(level + random_.gauss(0, 1))
    return values


def jumping(values: Sequence[float], *jumps: tuple[int, float]) -> list[float]:
    return [value + sum(by for place, by in jumps if at >= place) for at, value in enumerate(values)]


def explained(points: Series, share: float = 0.0) -> walk.Jumps:
    return walk.jumps(points, walk.filtered(points, set(), share))


# --- the walk


@pytest.mark.parametrize("share", [0.0, 0.3, 5.0])
def test_what_a_jump_explains_is_what_the_innovations_lose_by_it(share: float) -> None:
    values = jumping(gaussian(12), (7, 2.0))
    known = walk.filtered(series(values), set(), share)
    explained = walk.jumps(series(values), known)
    step = explained.sizes[7] * explained.errors[7]
    without = walk.filtered(series(jumping(values, (7, -step))), set(), share)
    assert without.squares == pytest.approx(known.squares - explained.sizes[7] ** 2)
    nearby = [walk.filtered(series(jumping(values, (7, -step + by))), set(), share).squares for by in (-0.01, 0.01)]
    assert min(nearby) > without.squares
    assert known.deviance(explained.sizes[7] ** 2) == pytest.approx(without.deviance())


def test_without_a_walk_a_jump_is_the_difference_of_means() -> None:
    known = explained(series([1.0, 3.0, 5.0, 9.0, 11.0]))
    assert known.sizes[3] * known.errors[3] == pytest.approx(10.0 - 3.0)
    assert known.errors[3] == pytest.approx(math.sqrt(1 / 3 + 1 / 2))


def test_points_count_by_their_own_error() -> None:
    known = explained(series([0.0, 0.0, 4.0, 8.0], noise=[1.0, 1.0, 1.0, 3.0]))
    assert known.sizes[2] * known.errors[2] == pytest.approx((4.0 * 3 + 8.0) / 4)


def test_a_level_that_is_reset_knows_nothing_of_what_was_before() -> None:
    points = series([5.0, 6.0, 105.0, 106.0])
    halves = walk.filtered(points, {2}, 0.5)
    assert halves.free == 2
    assert halves.squares == pytest.approx(2 / 2.5)
    assert walk.jumps(points, halves).sizes[2] == 0.0


def test_how_far_a_point_lies_is_told_by_all_others() -> None:
    (_, _, far, *_) = walk.apart(series([0.0, 0.0, 6.0, 0.0, 0.0]), set(), 0.0)
    assert far == pytest.approx(6.0 / math.sqrt(1 + 1 / 4))


def test_a_longer_way_lets_the_level_move_further() -> None:
    values = [0.0, 0.0, 3.0, 3.0]
    near, late = (explained(series(values, moves=[1, 1, m, 1]), 0.1) for m in (1, 100))
    assert abs(late.sizes[2]) < abs(near.sizes[2]) / 2


def test_the_level_at_a_point_is_what_all_points_tell_of_it() -> None:
    points = series([0.0, 3.0, 9.0], noise=[1.0, 1.0, 4.0])
    assert walk.levels(points, set(), 0.0) == pytest.approx([(4 * 0 + 4 * 3 + 9) / 9] * 3)
    assert walk.levels(points, {2}, 0.0) == pytest.approx([1.5, 1.5, 9.0])


def test_a_level_that_walks_lies_between_its_points() -> None:
    # Two points: the level moves by the share of their difference that the walk has of all that lies between them.
    low, high = walk.levels(series([0.0, 3.0]), set(), 1.0)
    assert (low, high) == pytest.approx((1.0, 2.0))


def test_a_point_that_is_off_does_not_pull_the_level() -> None:
    values = jumping([0.1 * each for each in ALTERNATING], (20, 50.0), (21, -50.0))
    fitted = steps.fitted(series(values), set())
    assert max(map(abs, fitted.levels)) < 0.1


# --- the steps


def test_a_step_is_found_with_its_size_and_place() -> None:
    (step,) = steps.steps(series(jumping(gaussian(60), (40, 5.0))), 0.01)
    assert step.place == 40
    assert step.change == pytest.approx(5.0, abs=1.0)
    low, high = step.bounds()
    assert low < math.expm1(5.0) < high
    assert step.p_value < 1e-5


def test_several_steps_are_found_each_beside_the_others() -> None:
    found = steps.steps(series(jumping(gaussian(120), (30, 6.0), (60, -4.0), (100, 5.0))), 0.01)
    assert sorted(step.place for step in found) == [30, 60, 100]
    assert [step.change > 0 for step in sorted(found, key=lambda s: s.place)] == [True, False, True]


def test_a_step_that_was_undone_is_two() -> None:
    found = steps.steps(series(jumping(gaussian(80), (40, 6.0), (46, -6.0))), 0.01)
    assert sorted(step.place for step in found) == [40, 46]


@pytest.mark.parametrize("share", [0.0, 0.1, 1.25])
def test_neither_noise_nor_a_walk_is_a_step(share: float) -> None:
    assert [steps.steps(series(gaussian(100, share=share, seed=seed)), 0.001) for seed in range(10)] == [[]] * 10


def test_a_step_is_seen_in_a_walk_too() -> None:
    (step,) = steps.steps(series(jumping(gaussian(100, share=0.3), (70, 12.0))), 0.01)
    assert step.place == 70


def test_one_point_that_is_off_is_no_step_and_hides_none() -> None:
    values = jumping(gaussian(60), (20, 40.0), (21, -40.0))
    assert steps.steps(series(values), 0.01) == []
    (step,) = steps.steps(series(jumping(values, (50, 5.0))), 0.01)
    assert step.place == 50


def test_two_points_at_the_end_that_differ_from_each_other_are_no_step() -> None:
    assert steps.steps(series([*ALTERNATING, 9.0, 0.0]), 0.01) == []


def test_few_points_tell_nothing() -> None:
    assert steps.largest(series([0.0, 0.1, 0.0, 5.0, 5.1])) is None
    assert steps.largest(series([0.0, 0.1, 0.0, 5.0, 5.1, 5.0])) is not None


def test_a_series_that_does_not_vary_has_no_step() -> None:
    assert steps.steps(series([1.0] * 20), 0.01) == []
    assert steps.suspicion(series([1.0] * 20)) is None


def test_a_step_of_points_without_noise_is_found() -> None:
    (step,) = steps.steps(series([1.0] * 10 + [1.1] * 10), 0.01)
    assert (step.place, step.change) == (10, pytest.approx(0.1))


def test_a_single_point_is_suspected() -> None:
    usual = steps.suspicion(series([*gaussian(39), -1.5, 1.5]))
    far = steps.suspicion(series([*ALTERNATING, 9.0]))
    assert usual is not None
    assert usual.p_value > 0.05
    assert steps.suspicion(series([*gaussian(39), 0.1, 0.2])) is None
    assert far is not None
    assert (far.place, far.p_value < 1e-6) == (40, True)
    assert far.change == pytest.approx(9.0, abs=0.5)


def test_a_step_is_moved_to_a_place_that_is_hardly_less_likely() -> None:
    between = [*ALTERNATING[:20], 2.5, *(value + 5.0 for value in ALTERNATING[20:])]  # 20 or 21, nobody can say
    (step,) = steps.steps(series(between), 0.01)
    for place in (20, 21):
        moved = steps.moved(series(between), step, set(), [place])
        assert (moved.place, moved.p_value) == (place, step.p_value)
        assert moved.change == pytest.approx(5.0, abs=0.5)
    assert steps.moved(series(between), step, set(), [18, 19, 20, 21, 22]).place == step.place
    assert steps.moved(series(between), step, set(), [18, 23]) == step, "clearly less likely"
    assert steps.moved(series(between), step, set(), []) == step


def test_a_step_is_not_moved_to_where_a_side_has_too_few_points_or_beyond_another_step() -> None:
    step = Step(19, 1.0, 1.0, 10.0, 0.001)
    assert steps.moved(series([*ALTERNATING[:20], 9.0]), step, set(), [20]) == step
    jump = series(jumping(ALTERNATING, (22, 9.0)))
    assert steps.moved(jump, step, set(), [22]).place == 22
    assert steps.moved(jump, step, {21}, [22]) == step


def test_a_first_point_after_a_step_is_not_suspected_again() -> None:
    assert steps.suspicion(series(jumping(ALTERNATING, (39, 9.0))), {39}) is None


# --- points


def test_a_point_of_noisy_launches_weighs_less() -> None:
    quiet, loud = (Point(0.0, launches=20, spread=spread) for spread in (0.01, 1.0))
    noise = steps.series_of([*[quiet, loud] * 10]).noise
    assert noise[1] > 5 * noise[0]  # not ten times: a spread of few launches is uncertain itself


def test_the_drift_between_sessions_is_in_all_points() -> None:
    exact = [Point(value, launches=5, spread=1e-6) for value in gaussian(30)]
    loud = Point(0.0, launches=5, spread=1e-3)
    noise = steps.series_of([*exact, loud]).noise
    assert noise[-1] == pytest.approx(noise[0], rel=0.01)  # next to the spread of the points it is nothing


def test_points_without_any_noise_weigh_alike() -> None:
    assert steps.series_of([Point(1.0)] * 3).noise == [1.0, 1.0, 1.0]
