"""When to stop, as tables of verdicts: no figures, no time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_ddpperf.measuring.judging import early_stop, follow, schedule
from pytest_ddpperf.records import Comparison, Interval, Limit, Status, Verdict

PASS, REGRESSED, INCONCLUSIVE, IMPROVED = Status.PASS, Status.REGRESSED, Status.INCONCLUSIVE, Status.IMPROVED


def verdict(status: Status, *, settled: bool = False, metric: str = "p50") -> Verdict:
    comparison = Comparison(
        limit=Limit(metric=metric, value=0.1, unit="%"),
        status=status,
        reason="x",
        baseline_seconds=1.0,
        now_seconds=1.0,
        change=Interval(estimate=0.0, low=0.0, high=0.0),
        p_value=0.5,
        level=0.05,
        resolution=0.1,
        alarm_rate=0.0,
        settled=settled,
    )
    return Verdict(status=status, reason="x", comparisons=(comparison,))


def course(looks: tuple[int, ...], said: dict[tuple[int, int], Verdict]) -> tuple[Verdict, int]:
    """The final verdict, and after how many launches, where `said` is asked for launches start..stop."""
    for number, count in enumerate(looks, 1):
        judged, ended = follow(looks[:number], lambda start, stop, _: said[start, stop], final=number == len(looks))
        if ended:
            return judged, count
    raise AssertionError("the last look did not end it")


@pytest.mark.parametrize(
    ("first", "most", "looks"),
    [
        (5, 20, (5, 10, 20)),
        (5, 39, (5, 10, 20)),
        (5, 10, (5, 10)),
        (5, 5, (5,)),
        (2, 20, (2, 4, 8, 16)),
        (1, 3, (1, 2)),
    ],
)
def test_the_looks_double_up_to_the_most(first: int, most: int, looks: tuple[int, ...]) -> None:
    assert schedule(first, most) == looks


def test_a_settled_pass_ends_at_the_first_look() -> None:
    assert course((5, 10, 20), {(0, 5): verdict(PASS, settled=True)}) == (verdict(PASS, settled=True), 5)


def test_an_open_pass_goes_on_and_the_last_look_ends_it() -> None:
    said = {(0, count): verdict(PASS) for count in (5, 10, 20)}
    assert course((5, 10, 20), said)[1] == 20


@pytest.mark.parametrize("status", [PASS, REGRESSED, IMPROVED, INCONCLUSIVE])
@pytest.mark.parametrize("settled", [False, True])
def test_between_looks_nothing_ends_it_but_what_claims_nothing(status: Status, settled: bool) -> None:
    said = verdict(status, settled=settled)
    assert early_stop(7, lambda *asked: {(0, 7, 1.0): said}[asked]) == (said, status is PASS and settled)


def test_what_was_not_compared_ends_at_once() -> None:
    nothing = Verdict(status=Status.NO_BASELINE, reason="no-baseline")
    assert course((5, 10, 20), {(0, 5): nothing}) == (nothing, 5)


def test_a_suspicion_stands_once_fresh_launches_show_it_too() -> None:
    said = {(0, 5): verdict(REGRESSED), (0, 10): verdict(REGRESSED), (5, 10): verdict(REGRESSED)}
    assert course((5, 10, 20), said) == (verdict(REGRESSED), 10)


def test_what_confirms_may_err_twice_as_often_as_what_decides() -> None:
    asked: list[tuple[int, int, float]] = []

    def judge(start: int, stop: int, ease: float) -> Verdict:
        asked.append((start, stop, ease))
        return verdict(REGRESSED)

    follow((5, 10), judge, final=True)
    assert asked == [(0, 5, 1.0), (0, 10, 1.0), (5, 10, 2.0)]


@pytest.mark.parametrize("fresh", [PASS, INCONCLUSIVE])
def test_a_suspicion_that_fresh_launches_do_not_show_is_not_confirmed(fresh: Status) -> None:
    said = {(0, count): verdict(REGRESSED) for count in (5, 10, 20)}
    said |= {(5, 10): verdict(fresh), (5, 20): verdict(fresh)}
    judged, launches = course((5, 10, 20), said)
    assert (judged, judged.reason, launches) == ("INCONCLUSIVE", "not-confirmed", 20)
    assert judged.comparisons[0].status is INCONCLUSIVE


def test_a_suspicion_of_the_last_look_has_nothing_to_confirm_it() -> None:
    said = {(0, 5): verdict(PASS), (0, 10): verdict(PASS), (0, 20): verdict(REGRESSED)}
    assert course((5, 10, 20), said)[0].reason == "not-confirmed"


def test_a_suspicion_that_time_leaves_unconfirmed_fails_nothing() -> None:
    judged, ended = follow((5,), lambda *_: verdict(REGRESSED), final=True)
    assert (judged, judged.reason, ended) == ("INCONCLUSIVE", "not-confirmed", True)
    assert follow((5,), lambda *_: verdict(REGRESSED), final=False) == (verdict(REGRESSED), False)


def test_the_same_metric_must_be_confirmed() -> None:
    said = {(0, 5): verdict(REGRESSED), (0, 10): verdict(REGRESSED), (5, 10): verdict(REGRESSED, metric="p10")}
    assert course((5, 10), said)[0].reason == "not-confirmed"


def test_what_got_faster_confirms_no_slowdown() -> None:
    slower, faster = verdict(REGRESSED, metric="p10").comparisons[0], verdict(IMPROVED, metric="p50").comparisons[0]
    mixed = replace(verdict(REGRESSED), comparisons=(slower, faster))
    said = {(0, 5): mixed, (0, 10): mixed, (5, 10): verdict(IMPROVED, metric="p50")}
    assert course((5, 10), said)[0].reason == "not-confirmed"
    said[5, 10] = mixed
    assert course((5, 10), said) == (mixed, 10)


def test_what_was_inconclusive_first_is_a_suspicion_too() -> None:
    said = {(0, 5): verdict(INCONCLUSIVE), (0, 10): verdict(REGRESSED), (5, 10): verdict(REGRESSED)}
    assert course((5, 10), said) == (verdict(REGRESSED), 10)


def test_hopelessly_inconclusive_ends_early() -> None:
    assert course((5, 10), {(0, 5): verdict(INCONCLUSIVE, settled=True)})[1] == 5


def test_an_improvement_is_confirmed_likewise() -> None:
    said = {(0, 5): verdict(IMPROVED), (0, 10): verdict(IMPROVED), (5, 10): verdict(IMPROVED)}
    assert course((5, 10), said) == (verdict(IMPROVED), 10)
    said[5, 10] = verdict(PASS)
    assert course((5, 10), said)[0] == "PASS"


def test_a_slowdown_does_not_confirm_an_improvement() -> None:
    said = {(0, 5): verdict(REGRESSED), (0, 10): verdict(IMPROVED)}  # launches 5 to 10 are never asked for
    assert course((5, 10), said)[0] == "PASS"
