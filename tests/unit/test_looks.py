"""When a measurement ends at a look, and what each look may spend: no figures, no time."""

from __future__ import annotations

import pytest

from pytest_ddpperf.compare.rule import Spending, ends, schedule, spending
from pytest_ddpperf.records.samples import Interval, Status, Verdict
from tests.unit.test_report import comparison

LOOKS = (5, 10, 20)
LEVEL = 0.015


def verdict(status: Status, *, settled: bool) -> Verdict:
    compared = comparison(
        status,
        "p50",
        change=Interval(estimate=0.0, low=0.0, high=0.0),
        settled=settled,
    )
    return Verdict(status=status, reason="x", comparisons=(compared,))


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
def test_the_looks_double_up_to_the_most(
    first: int, most: int, looks: tuple[int, ...]
) -> None:
    assert schedule(first, most) == looks


@pytest.mark.parametrize(
    ("status", "settled", "ended"),
    [
        (Status.PASS, True, True),
        (Status.PASS, False, False),
        (Status.INCONCLUSIVE, True, True),
        (Status.INCONCLUSIVE, False, False),
        (Status.REGRESSED, False, True),
        (Status.IMPROVED, False, True),
    ],
)
def test_a_look_ends_it_with_a_claim_or_if_nothing_is_open(
    status: Status, settled: bool, ended: bool
) -> None:
    assert ends(verdict(status, settled=settled)) is ended


def test_what_was_not_compared_ends_it() -> None:
    assert ends(Verdict(status=Status.NO_BASELINE, reason="no-baseline"))


def spent(launches: int, *, final: bool = False) -> float:
    """The error rate that is spent after so many launches."""
    found = spending(launches, LOOKS, LEVEL, final=final)
    return found.level * found.share


def test_all_looks_together_spend_the_error_rate() -> None:
    by_look = [spent(5), spent(10), spent(20, final=True)]
    assert sum(by_look) == pytest.approx(LEVEL)
    # Lan and DeMets: 2 - 2 Phi(z / sqrt(t)), less what was spent before
    assert by_look == pytest.approx([1.1e-6, 5.8e-4, 0.0144], rel=0.05)


def test_the_last_look_is_the_same_whether_or_not_it_is_called_final() -> None:
    last = spending(20, LOOKS, LEVEL)
    assert last.share == pytest.approx(1.0)
    assert last.level == pytest.approx(spent(20, final=True))
    assert spending(5, LOOKS, LEVEL).level == pytest.approx(last.level)


def test_a_look_that_time_makes_the_last_spends_what_is_left() -> None:
    assert spent(5, final=True) == pytest.approx(LEVEL)
    assert spent(5) + spent(10, final=True) == pytest.approx(LEVEL)
    assert spending(5, (5,), LEVEL, final=True) == Spending(LEVEL, 1.0)


def test_between_two_looks_nothing_is_spent() -> None:
    assert spending(7, LOOKS, LEVEL).share == 0.0
