"""The search for slower commits, on differences that are known."""

from __future__ import annotations

import random

import pytest

from pytest_ddpperf.history import bisection
from pytest_ddpperf.history.bisection import SAME, Bisection
from pytest_ddpperf.verdict.stats import Difference, paired

LAUNCHES = (8, 16, 32)


def search(
    slower: dict[int, float],
    *,
    commits: int = 41,
    spread: float = 0.01,
    **kwargs: object,
) -> Bisection:
    """Search among commits of which some are slower by so much, a logarithm, where pairs differ by
    a `spread`."""
    source = random.Random(str((slower, kwargs)))
    unfit = kwargs.get("unfit", ())
    looks = []

    def look(place: int, pairs: int) -> Difference:
        faster = sum(rise for at, rise in slower.items() if at > place)
        return paired(
            [source.gauss(faster, spread) for _ in range(pairs)], [0.0] * pairs
        )

    found = Bisection(
        last=commits - 1, measured={0: look(0, 10), commits - 1: SAME}
    )
    while (place := found.next()) is not None:
        assert place not in (*found.measured, *found.skipped)
        if place in unfit:  # type: ignore[operator]
            found.skipped[place] = "it does not build"
            continue
        for pairs in LAUNCHES:
            looks.append(place)
            difference = look(place, pairs)
            if found.decide(place, difference, one_side=pairs == LAUNCHES[-1]):
                break
        else:
            found.skipped[place] = bisection.UNDECIDED
    assert len(looks) <= kwargs.get("most", 100)  # type: ignore[operator]
    return found


def slower_at(found: Bisection) -> list[tuple[int, int]]:
    return [(gap.before, gap.after) for gap in found.gaps()]


@pytest.mark.parametrize("place", [1, 2, 17, 20, 39, 40])
def test_a_slower_commit_is_found_in_the_logarithm_of_their_number(
    place: int,
) -> None:
    assert slower_at(search({place: 0.15}, most=6)) == [(place - 1, place)]


def test_of_two_neighbours_the_second_is_known_without_a_search() -> None:
    assert slower_at(search({1: 0.15}, commits=2, most=0)) == [(0, 1)]


@pytest.mark.parametrize("shares", [(0.15, 0.15), (0.08, 0.2), (0.2, 0.08)])
def test_two_slower_commits_are_both_found_with_their_shares(
    shares: tuple[float, float],
) -> None:
    found = search({7: shares[0], 23: shares[1]}, most=14)
    assert slower_at(found) == [(6, 7), (22, 23)]
    parts = [gap.rise.estimate for gap in found.gaps()]
    assert parts == pytest.approx(shares, abs=0.02)


def test_commits_that_cannot_be_measured_are_passed_over() -> None:
    found = search({17: 0.15}, unfit=(20, 19, 10))
    assert slower_at(found) == [(16, 17)]
    assert set(found.skipped) <= {20, 19, 10}


def test_a_gap_of_such_commits_is_the_answer() -> None:
    found = search({17: 0.15}, unfit=(16, 17))
    assert slower_at(found) == [(15, 18)]
    assert set(found.skipped) == {16, 17}


def test_a_gap_is_not_split_once_two_of_its_commits_were_too_noisy() -> None:
    found = Bisection(
        last=40, measured={0: paired([0.15, 0.151], [0, 0]), 40: SAME}
    )
    noisy = paired([0.0, 0.3], [0, 0])
    for place in (20, 19):
        assert found.next() == place
        assert not found.decide(place, noisy, one_side=True)
        found.skipped[place] = bisection.UNDECIDED
    assert found.next() is None
    assert slower_at(found) == [(0, 40)]


def test_a_slower_commit_that_a_later_one_partly_makes_up_for_is_found() -> (
    None
):
    found = search({10: 0.3, 30: -0.1})
    assert slower_at(found) == [(9, 10)]


def test_noise_is_met_by_more_launches() -> None:
    assert slower_at(search({17: 0.15}, spread=0.05)) == [(16, 17)]


def test_a_wrong_commit_is_rarely_named() -> None:
    wrong = 0
    for number in range(200):
        found = search({11: 0.1}, spread=0.04, number=number)
        wrong += any(not gap.before < 11 <= gap.after for gap in found.gaps())
    assert wrong <= 10  # 5 %


def test_nothing_that_was_measured_decides_more_than_its_own_error_allows() -> (
    None
):
    found = Bisection(
        last=40, measured={0: paired([0.15, 0.151], [0, 0]), 40: SAME}
    )
    assert not found.decide(20, paired([0.0, 0.3], [0, 0]))
    assert not found.decide(20, paired([0.0, 0.3], [0, 0]), one_side=True)
    assert 20 not in found.measured
    assert found.decide(20, paired([0.15, 0.1501, 0.1499] * 5, [0] * 15))
    assert found.decide(10, SAME)
    assert set(found.measured) == {0, 10, 20, 40}


def test_in_the_end_it_is_enough_that_one_side_is_slower() -> None:
    found = Bisection(
        last=40, measured={0: paired([0.15, 0.151], [0, 0]), 40: SAME}
    )
    # 0.10
    near_the_fast_one = paired(
        [0.02, 0.16, 0.11, 0.06, 0.15, 0.12, 0.05, 0.13], [0] * 8
    )
    assert not found.decide(20, near_the_fast_one)
    assert found.decide(20, near_the_fast_one, one_side=True)
    assert slower_at(found) == [(20, 40)]


def test_a_rise_has_bounds() -> None:
    change = bisection.interval(paired([0.1, 0.11, 0.09, 0.1], [0.0] * 4), 0.01)
    assert change.low < change.estimate < change.high
    assert change.estimate == pytest.approx(0.105, abs=0.001)


@pytest.mark.parametrize(
    ("rise", "spread", "expected"),
    [
        (0.15, 0.005, True),
        (0.08, 0.005, False),
        (0.15, 0.3, None),
        (0.06, 0.1, None),
        (0.02, 0.3, False),
    ],
)
def test_ends_differ_do_not_or_may(
    rise: float, spread: float, expected: bool | None
) -> None:
    source = [-1.0, -0.7, -0.4, -0.1, 0.1, 0.4, 0.7, 1.0]
    first = paired(
        [rise + spread * each for each in source], [0.0] * len(source)
    )
    assert (
        Bisection(last=1, measured={0: first, 1: SAME}).became_slower(
            bound=0.1, level=0.01
        )
        is expected
    )
