"""What becomes of a suspicion, for all that turns may show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_ddpperf.records import Comparison, CounterChange, Interval, Limit, Status, Verdict
from pytest_ddpperf.verdict import Circumstances, fails, settled, suspected

LIMIT = Limit(metric="p50", value=0.1, unit="%")


def verdict(status: Status, estimate: float, *, high: float | None = None, limit: Limit = LIMIT) -> Verdict:
    comparison = Comparison(
        limit=limit,
        status=status,
        reason="",
        baseline_seconds=0.1,
        now_seconds=0.1 * (1 + estimate),
        change=Interval(estimate=estimate, low=estimate - 0.05, high=estimate + 0.05 if high is None else high),
        p_value=0.5,
        level=0.05,
        resolution=0.01,
        alarm_rate=0.0,
        settled=True,
    )
    return Verdict(status=status, reason="from-the-baseline", comparisons=(comparison,))


FOUND = Circumstances(another_host=False, environment=(), code_differs=True, code_is_todays=False)
OTHER_TORCH = replace(FOUND, environment=("torch 2.12 -> 2.13",))
SUSPECTED = [verdict(Status.REGRESSED, 0.3), verdict(Status.INCONCLUSIVE, 0.3), verdict(Status.PASS, 0.08)]
NOT_SLOWER = verdict(Status.PASS, 0.01)


@pytest.mark.parametrize(
    ("status", "estimate", "limit", "expected"),
    [
        (Status.PASS, 0.02, LIMIT, False),
        (Status.PASS, -0.3, LIMIT, False),
        (Status.PASS, 0.06, LIMIT, True),
        (Status.REGRESSED, 0.3, LIMIT, True),
        (Status.INCONCLUSIVE, 0.3, LIMIT, True),
        (Status.PASS, 0.06, Limit(metric="p50", value=0.02, unit="ms"), False),  # 6 of 20 ms
        (Status.PASS, 0.16, Limit(metric="p50", value=0.02, unit="ms"), True),
        (Status.PASS, 0.06, Limit(metric="busbw", value=0.1, unit="%"), True),
        (Status.NO_BASELINE, 0.3, LIMIT, False),
    ],
)
def test_an_estimate_beyond_half_the_limit_is_suspected(
    status: Status, estimate: float, limit: Limit, expected: bool
) -> None:
    assert suspected(verdict(status, estimate, limit=limit)) is expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.02, 0.02, False), (0.06, -0.2, True), (-0.2, 0.06, False), (None, None, False)],
    ids=["neither", "the lowest percentile", "another one", "one occasion"],
)
def test_the_fastest_launches_of_the_lowest_percentile_raise_a_suspicion(
    low: float | None, high: float | None, expected: bool
) -> None:
    """Of a baseline that other work made slower: its mean hides slower code."""
    (p50,) = verdict(Status.PASS, -0.1).comparisons
    p10 = replace(p50, limit=replace(LIMIT, metric="p10"), fastest=low)
    both = replace(verdict(Status.PASS, -0.1), comparisons=(replace(p50, fastest=high), p10))
    assert suspected(both) is expected


def test_what_improved_by_both_stays_so() -> None:
    improved = verdict(Status.IMPROVED, -0.2)
    assert settled(improved, improved, FOUND).status is Status.IMPROVED
    assert settled(improved, NOT_SLOWER, FOUND).status is Status.PASS


def test_counters_need_no_second_look() -> None:
    assert not suspected(replace(verdict(Status.REGRESSED, 0.3), reason="counter-rose"))


def test_no_machine_makes_a_counter_rise() -> None:
    limit = Limit(metric="all_reduce.bytes", value=0.0, unit="%")
    risen = CounterChange(limit=limit, status=Status.REGRESSED, baseline=100, now=200)
    stored = replace(SUSPECTED[0], counters=(risen,))
    assert settled(stored, NOT_SLOWER, FOUND) is stored
    assert settled(stored, verdict(Status.REGRESSED, 0.25), FOUND).reason == "confirmed"


@pytest.mark.parametrize("stored", SUSPECTED)
@pytest.mark.parametrize("found", [FOUND, OTHER_TORCH, replace(FOUND, another_host=True)])
def test_what_turns_show_to_be_slower_is_red(stored: Verdict, found: Circumstances) -> None:
    turned = verdict(Status.REGRESSED, 0.25)
    final = settled(stored, turned, found)
    assert (final.status, final.reason, final.comparisons) == (Status.REGRESSED, "confirmed", turned.comparisons)


@pytest.mark.parametrize("stored", SUSPECTED)
def test_the_same_code_that_is_slower_than_with_the_baselines_variables_is_slower_for_these(stored: Verdict) -> None:
    variables = replace(FOUND, variables=("OMP_NUM_THREADS 4 -> 1",))
    turned = verdict(Status.REGRESSED, 0.25)
    assert settled(stored, turned, replace(variables, code_differs=False)).reason == "environment"
    assert settled(stored, turned, variables).reason == "confirmed", "it may be either, and the code is looked at first"
    assert settled(SUSPECTED[0], NOT_SLOWER, variables).reason == "machine-drifted", "it is not the variables"


@pytest.mark.parametrize("stored", SUSPECTED)
@pytest.mark.parametrize("turned", [verdict(Status.INCONCLUSIVE, 0.2, high=0.3), verdict(Status.PASS, 0.06, high=0.3)])
def test_where_turns_cannot_tell_the_baseline_decides(stored: Verdict, turned: Verdict) -> None:
    assert settled(stored, turned, FOUND) is stored


UNSURE = verdict(Status.PASS, 0.02, high=0.13)


@pytest.mark.parametrize(
    ("stored", "turned", "found", "reason"),
    [
        (verdict(Status.REGRESSED, 0.3), UNSURE, FOUND, "not-settled"),
        (verdict(Status.REGRESSED, 0.3), UNSURE, replace(FOUND, another_host=True), "not-settled"),
        (verdict(Status.REGRESSED, 0.17), UNSURE, FOUND, "from-the-baseline"),  # 12 % at least: it may be so
        (verdict(Status.REGRESSED, 0.3), verdict(Status.INCONCLUSIVE, 0.12, high=0.2), FOUND, "from-the-baseline"),
        (verdict(Status.INCONCLUSIVE, 0.3), UNSURE, FOUND, "from-the-baseline"),
        (verdict(Status.REGRESSED, 0.3), UNSURE, OTHER_TORCH, "from-the-baseline"),
        (verdict(Status.REGRESSED, 0.3), UNSURE, replace(FOUND, unaccounted=("kernels",)), "from-the-baseline"),
        (verdict(Status.REGRESSED, 0.3), UNSURE, replace(FOUND, code_differs=False), "from-the-baseline"),
    ],
)
def test_a_claim_that_turns_leave_no_room_for_is_not_red(
    stored: Verdict, turned: Verdict, found: Circumstances, reason: str
) -> None:
    final = settled(stored, turned, found)
    assert final.reason == reason
    assert final.status is (Status.INCONCLUSIVE if reason == "not-settled" else stored.status)


@pytest.mark.parametrize("stored", SUSPECTED)
def test_turns_of_the_same_files_acquit_only_where_the_baselines_ranks_had_them_too(stored: Verdict) -> None:
    same = replace(FOUND, code_differs=False)
    assert settled(stored, NOT_SLOWER, same) is stored, "what is installed is the same on both sides"
    assert settled(stored, NOT_SLOWER, replace(same, code_is_todays=True)) is not stored


@pytest.mark.parametrize("stored", SUSPECTED)
def test_turns_acquit_nothing_of_which_nobody_knows_what_it_held_or_what_they_did_not_compare(stored: Verdict) -> None:
    assert settled(stored, NOT_SLOWER, replace(FOUND, unaccounted=("kernels",))) is stored
    other = verdict(Status.PASS, 0.01, limit=Limit(metric="p90", value=0.1, unit="%"))
    assert settled(stored, other, FOUND) is stored


@pytest.mark.parametrize(
    ("stored", "found", "status", "reason"),
    [
        (SUSPECTED[2], OTHER_TORCH, Status.PASS, "within-limit"),
        (SUSPECTED[2], replace(FOUND, another_host=True), Status.PASS, "within-limit"),
        (SUSPECTED[0], replace(OTHER_TORCH, another_host=True), Status.REGRESSED, "environment"),
        (SUSPECTED[1], replace(OTHER_TORCH, another_host=True), Status.INCONCLUSIVE, "environment-differs"),
        (SUSPECTED[0], replace(FOUND, another_host=True), Status.INCONCLUSIVE, "other-machine"),
        (SUSPECTED[1], replace(FOUND, another_host=True), Status.INCONCLUSIVE, "other-machine"),
        (SUSPECTED[0], FOUND, Status.INCONCLUSIVE, "machine-drifted"),
        (SUSPECTED[1], FOUND, Status.INCONCLUSIVE, "machine-drifted"),
        (SUSPECTED[0], OTHER_TORCH, Status.REGRESSED, "environment"),
        (SUSPECTED[1], OTHER_TORCH, Status.INCONCLUSIVE, "environment-differs"),
    ],
)
def test_code_that_is_not_slower_is_not_what_made_it_slower(
    stored: Verdict, found: Circumstances, status: Status, reason: str
) -> None:
    final = settled(stored, NOT_SLOWER, found)
    assert (final.status, final.reason) == (status, reason)
    lead = stored if reason == "environment" else NOT_SLOWER
    assert final.comparisons == lead.comparisons


def test_a_drifted_machine_fails_a_test_only_where_that_was_asked() -> None:
    final = settled(SUSPECTED[0], NOT_SLOWER, FOUND)
    other = settled(SUSPECTED[0], NOT_SLOWER, replace(FOUND, another_host=True))

    def failing(one: Verdict, *named: str) -> bool:
        return fails(one, fail_on=frozenset(named) if named else None, baseline_missing="fail")

    assert not failing(final)
    assert failing(final, "drifted")
    assert failing(final, "inconclusive")
    assert not failing(other, "drifted"), "this row alone"
    assert not failing(final, "regressed")
