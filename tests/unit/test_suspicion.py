"""Suspicions, and what an interleaved comparison makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_ddpperf.compare.source import find_changed_facts
from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.reason import Reason
from pytest_ddpperf.records.samples import (
    CounterChange,
    Environment,
    FactChange,
    Interval,
    Measurement,
    Recording,
    Samples,
    Status,
    Verdict,
)
from pytest_ddpperf.verdict.decision import (
    confirm,
    implausible_ratio,
    is_suspected,
    with_two_speeds,
    without_claim,
    without_improvement,
    without_steady_windows,
)
from pytest_ddpperf.wire import variables
from tests.unit.test_codec import MEASUREMENT
from tests.unit.test_report import comparison

LIMIT = Limit(metric="p50", value=0.1, unit="%")


def verdict(
    status: Status,
    estimate: float,
    *,
    high: float | None = None,
    limit: Limit = LIMIT,
) -> Verdict:
    change = Interval(
        estimate=estimate,
        low=estimate - 0.05,
        high=estimate + 0.05 if high is None else high,
    )
    compared = comparison(
        status,
        limit=limit,
        now_seconds=0.1 * (1 + estimate),
        change=change,
        resolution=0.01,
    )
    return Verdict(
        status=status, reason="from-the-baseline", comparisons=(compared,)
    )


SUSPECTED = [
    verdict(Status.REGRESSED, 0.3),
    verdict(Status.INCONCLUSIVE, 0.3),
    verdict(Status.PASS, 0.08),
]
NOT_SLOWER = verdict(Status.PASS, 0.01)
STATED = "from-the-baseline"  # the reason of all of these


@pytest.mark.parametrize(
    ("status", "estimate", "limit", "expected"),
    [
        (Status.PASS, 0.02, LIMIT, False),
        (Status.PASS, -0.3, LIMIT, False),
        (Status.PASS, 0.06, LIMIT, True),
        (Status.REGRESSED, 0.3, LIMIT, True),
        (Status.INCONCLUSIVE, 0.3, LIMIT, True),
        # 6 of 20 ms
        (Status.PASS, 0.06, Limit(metric="p50", value=0.02, unit="ms"), False),
        (Status.PASS, 0.16, Limit(metric="p50", value=0.02, unit="ms"), True),
        (Status.PASS, 0.06, Limit(metric="busbw", value=0.1, unit="%"), True),
        (Status.NO_BASELINE, 0.3, LIMIT, False),
    ],
)
def test_an_estimate_beyond_half_the_limit_is_suspected(
    status: Status, estimate: float, limit: Limit, expected: bool
) -> None:
    assert is_suspected(verdict(status, estimate, limit=limit)) is expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.02, 0.02, False),
        (0.06, -0.2, True),
        (-0.2, 0.06, False),
        (None, None, False),
    ],
    ids=["neither", "the lowest percentile", "another one", "one occasion"],
)
def test_the_fastest_launches_of_the_lowest_percentile_raise_a_suspicion(
    low: float | None, high: float | None, expected: bool
) -> None:
    """Of a baseline that other work made slower: its mean hides slower code."""
    (p50,) = verdict(Status.PASS, -0.1).comparisons
    p10 = replace(p50, limit=replace(LIMIT, metric="p10"), fastest=low)
    both = replace(
        verdict(Status.PASS, -0.1),
        comparisons=(replace(p50, fastest=high), p10),
    )
    assert is_suspected(both) is expected


def test_the_fastest_launches_are_those_of_the_step_whatever_the_order() -> (
    None
):
    (p50,) = verdict(Status.PASS, -0.1).comparisons
    forward = replace(p50, limit=replace(LIMIT, metric="forward"), fastest=0.02)
    slower = replace(p50, fastest=0.06)
    for comparisons in ((forward, slower), (slower, forward)):
        both = replace(verdict(Status.PASS, -0.1), comparisons=comparisons)
        assert is_suspected(both)


def confirmed(
    stored: Verdict, interleaved: Verdict, causes: tuple[str, ...] = ()
) -> Verdict:
    """The verdict of a comparison that decides something."""
    found = confirm(stored, interleaved, causes)
    assert found is not None
    return found


def test_what_improved_by_both_stays_so() -> None:
    improved = verdict(Status.IMPROVED, -0.2)
    assert confirmed(improved, improved).status is Status.IMPROVED
    passed = confirmed(improved, NOT_SLOWER)
    assert (passed.status, passed.reason) == (Status.PASS, Reason.WITHIN_LIMIT)


def test_a_counter_that_rose_is_looked_at_again_if_times_did_too() -> None:
    """The files that differ are known only then."""
    for rise, is_worth_it in ((0.3, True), (0.01, False)):
        risen = replace(verdict(Status.REGRESSED, rise), reason="counter-rose")
        assert is_suspected(risen) is is_worth_it


RISEN = CounterChange(
    limit=Limit(metric="rpc.bytes", value=0.0, unit="%"),
    status=Status.REGRESSED,
    baseline=1,
    now=2,
)


def test_no_machine_makes_a_counter_rise() -> None:
    stored = replace(verdict(Status.REGRESSED, 0.3), counters=(RISEN,))
    assert confirm(stored, NOT_SLOWER, ()) is None


def test_a_counter_that_rose_interleaved_stays_the_reason() -> None:
    interleaved = replace(
        NOT_SLOWER,
        status=Status.REGRESSED,
        reason=Reason.COUNTER_ROSE,
        counters=(RISEN,),
    )
    stored = replace(verdict(Status.REGRESSED, 0.3), counters=(RISEN,))
    found = confirmed(stored, interleaved)
    assert (found.reason, found.shown) == ("counter-rose", RISEN)


def test_a_measurement_with_mostly_unfit_launches_keeps_its_reason_unless_the_code_is_slower() -> (
    None
):
    stored = without_steady_windows(verdict(Status.PASS, 0.08))
    assert is_suspected(stored)
    assert confirm(stored, NOT_SLOWER, ()) is None
    assert (stored, stored.reason) == ("INCONCLUSIVE", "recompiled")
    assert (
        confirmed(stored, verdict(Status.REGRESSED, 0.2)).reason == "confirmed"
    )


def test_steps_that_leave_work_behind_are_not_called_faster() -> None:
    found = without_improvement(verdict(Status.IMPROVED, -0.8))
    assert (found, found.reason) == ("INCONCLUSIVE", "goes-on")
    assert found.comparisons[0].status is Status.INCONCLUSIVE
    for status in (Status.PASS, Status.REGRESSED):
        assert without_improvement(verdict(status, 0.2)) == status.value


def with_page_faults(*by_launch: float) -> Measurement:
    """Return launches of steps of 10 ms."""
    steps = ((0.01,) * 3,) * len(by_launch)
    samples = Samples(
        step_seconds=steps,
        rank_seconds=(steps,),
        page_faults=tuple((each, 0.0) for each in by_launch),
    )
    return Measurement(samples=samples)


@pytest.mark.parametrize(
    ("status", "faults", "reason"),
    [
        (Status.INCONCLUSIVE, (5000, 0), "two-speeds"),
        (Status.INCONCLUSIVE, (5000, 4600), STATED),  # 0.8 ms of 10 ms
        (Status.PASS, (5000, 0), STATED),
        (Status.REGRESSED, (5000, 0), STATED),
        (Status.IMPROVED, (5000, 0), STATED),
    ],
)
def test_two_speeds_are_the_reason_of_what_is_inconclusive(
    status: Status, faults: tuple[float, ...], reason: str
) -> None:
    judged = verdict(status, 0.0)
    now, before = (
        with_page_faults(faults[0], faults[0]),
        with_page_faults(*faults),
    )
    for found in (
        with_two_speeds(judged, now, [before]),
        with_two_speeds(judged, before, []),
    ):
        assert (found.status, found.reason) == (status, reason)
    unknown = replace(now, samples=replace(now.samples, page_faults=None))
    assert with_two_speeds(judged, unknown, [unknown]) is judged


@pytest.mark.parametrize("reason", [Reason.RECOMPILED, Reason.GOES_ON])
def test_two_speeds_hide_nothing_else_that_makes_launches_say_little(
    reason: Reason,
) -> None:
    judged = replace(verdict(Status.INCONCLUSIVE, 0.0, high=0.4), reason=reason)
    before = with_page_faults(5000, 0)
    assert with_two_speeds(judged, before, [before]) is judged


@pytest.mark.parametrize("stored", SUSPECTED)
@pytest.mark.parametrize("causes", [(), ("torch 2.12 -> 2.13",)])
def test_slower_interleaved_is_red_whatever_else_differs(
    stored: Verdict, causes: tuple[str, ...]
) -> None:
    stored = replace(
        stored, facts=(FactChange(name="host", before="a", now="b"),)
    )
    found = confirmed(stored, verdict(Status.REGRESSED, 0.2), causes)
    assert (found.status, found.reason, found.differences) == (
        Status.REGRESSED,
        "confirmed",
        (),  # both sides were on that host
    )
    assert found.comparisons[0].change.estimate == 0.2


@pytest.mark.parametrize("stored", SUSPECTED)
def test_what_may_be_the_cause_leaves_the_stored_verdict(
    stored: Verdict,
) -> None:
    assert confirm(stored, NOT_SLOWER, ("torch 2.12 -> 2.13",)) is None


@pytest.mark.parametrize("stored", SUSPECTED)
@pytest.mark.parametrize(
    "interleaved",
    [
        verdict(Status.INCONCLUSIVE, 0.2, high=0.3),
        replace(
            NOT_SLOWER,
            comparisons=(replace(NOT_SLOWER.comparisons[0], settled=False),),
        ),
        replace(NOT_SLOWER, comparisons=()),
    ],
    ids=["open", "not settled", "another limit"],
)
def test_a_comparison_that_decides_nothing_leaves_the_stored_verdict(
    stored: Verdict, interleaved: Verdict
) -> None:
    interleaved = replace(
        interleaved,
        comparisons=tuple(
            replace(c, change=replace(c.change, high=0.3))
            for c in interleaved.comparisons
        ),
    )
    assert confirm(stored, interleaved, ()) is None


def test_a_bound_that_excludes_the_claim_is_enough() -> None:
    stored, interleaved = (
        verdict(Status.REGRESSED, 0.8),
        verdict(Status.PASS, 0.02, high=0.3),
    )
    interleaved = replace(
        interleaved,
        comparisons=(replace(interleaved.comparisons[0], settled=False),),
    )
    assert confirmed(stored, interleaved).reason == Reason.MACHINE_SLOWER


@pytest.mark.parametrize(
    ("stored", "status", "reason"),
    [
        (Status.REGRESSED, Status.INCONCLUSIVE, Reason.MACHINE_SLOWER),
        (Status.INCONCLUSIVE, Status.INCONCLUSIVE, Reason.MACHINE_SLOWER),
        (Status.PASS, Status.PASS, "within-limit"),
    ],
)
def test_code_that_is_not_slower_is_not_the_cause(
    stored: Status, status: Status, reason: str
) -> None:
    interleaved = replace(NOT_SLOWER, reason=Reason.WITHIN_LIMIT)
    found = confirmed(replace(verdict(stored, 0.3), sessions=3), interleaved)
    assert (found.status, found.reason, found.sessions) == (status, reason, 3)
    assert found.comparisons[0].change.estimate == 0.01


@pytest.mark.parametrize(
    "reason", [Reason.TOO_NOISY, Reason.GOES_ON, Reason.TWO_SPEEDS]
)
def test_a_baseline_that_did_not_say_slower_passes_next_to_its_own_code(
    reason: Reason,
) -> None:
    stored = inconclusive(reason)
    found = confirmed(stored, NOT_SLOWER)
    assert (found.status, found.reason) == (Status.PASS, Reason.WITHIN_LIMIT)


def inconclusive(reason: Reason) -> Verdict:
    stored = verdict(Status.INCONCLUSIVE, 0.06, high=0.5)
    return without_claim(stored, Status.INCONCLUSIVE, reason)


def test_a_baseline_said_slower_if_one_of_its_comparisons_did() -> None:
    """A verdict has the reason of the first comparison that decided it."""
    noisy = inconclusive(Reason.TOO_NOISY)
    slower = inconclusive(Reason.NOT_SIGNIFICANT)
    stored = replace(
        noisy, comparisons=(*noisy.comparisons, *slower.comparisons)
    )
    assert confirmed(stored, NOT_SLOWER).reason == Reason.MACHINE_SLOWER


def test_a_comparison_that_was_given_up_near_its_limit_leaves_the_stored_verdict() -> (
    None
):
    stored = verdict(Status.REGRESSED, 2.0)
    given_up = replace(
        verdict(Status.PASS, 0.11, high=0.14), reason="undecided"
    )
    assert confirm(stored, given_up, ()) is None
    assert (
        confirm(stored, replace(given_up, reason="within-limit"), ())
        is not None
    )


def test_what_else_differs_may_be_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UNREAD_NOW", "5")
    same = {
        "host": "a",
        "torch": "2.13.0",
        "read:SAME": "unset",
        "clock_mhz": 900,
    }
    recorded = {
        **same,
        "env:GLOO_X": "1",
        "read:READ": "unset",
        "read:UNREAD_NOW": variables.digest("5"),
        "--own": 1,
    }
    current = {
        **same,
        "host": "b",  # as each container has another; both sides ran on it
        "env:GLOO_X": "2",
        "read:READ": variables.digest("6"),
        "clock_mhz": 800,
        "read:NEW": "unset",
    }
    samples = Samples(step_seconds=((0.1,),), rank_seconds=(((0.1,),),))
    session = Recording(
        measurement=Measurement(
            samples=samples, environment=Environment(recorded=recorded)
        )
    )
    found = list(find_changed_facts(session, current))
    assert found == ["GLOO_X 1 -> 2", f"READ unset -> {variables.digest('6')}"]
    monkeypatch.setenv("UNREAD_NOW", "7")
    assert (
        f"UNREAD_NOW {variables.digest('5')} -> {variables.digest('7')}"
        in find_changed_facts(session, current)
    )


@pytest.mark.parametrize(
    ("recorded", "now", "ratio"),
    [
        ((10, 10), 24, 0),
        ((10, 10), 26, 2.6),
        ((10, 10), 4.1, 0),
        ((10, 10), 3.9, 0.39),
        ((5, 10), 24, 0),
        ((5, 10), 1.9, 0.19),
    ],
)
def test_only_a_time_that_no_drift_explains_is_implausible(
    recorded: tuple[float, ...], now: float, ratio: float
) -> None:
    def session(milliseconds: float) -> Measurement:
        """The first launch was disturbed."""
        samples = replace(
            MEASUREMENT.samples,
            step_seconds=((1.0,) * 10, (milliseconds / 1e3,) * 10),
        )
        return replace(MEASUREMENT, samples=samples)

    assert implausible_ratio(
        [*map(session, recorded)], session(now)
    ) == pytest.approx(ratio)
