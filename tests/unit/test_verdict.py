from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pytest_ddpperf.asked import FAIL_ON_NAMES
from pytest_ddpperf.records import Environment, Limit, Measurement, Samples, Scalar, Status, Verdict
from pytest_ddpperf.verdict import fails, judge, unsupported

P50 = Limit(metric="p50", value=0.10, unit="%")
STEADY = (1.00, 1.01, 0.99, 1.00, 1.00)
NOISY = (0.6, 1.5, 0.7, 1.6, 0.8)


def measurement(
    levels: Sequence[float],
    *,
    steps: int = 30,
    cpu: Sequence[float] | None = None,
    must: dict[str, Scalar] | None = None,
    recorded: dict[str, Scalar] | None = None,
) -> Measurement:
    """One launch a level: its steps are that long, in seconds, with a little spread."""

    def launch(level: float) -> tuple[float, ...]:
        return tuple(level * (1 + 0.001 * (step % 5)) for step in range(steps))

    return Measurement(
        samples=Samples(
            step_seconds=tuple(launch(level) for level in levels),
            rank_seconds=tuple((launch(level), launch(level)) for level in levels),
            cpu_seconds=None if cpu is None else tuple((launch(level / 2), launch(level)) for level in cpu),
        ),
        environment=Environment(must_match=must or {}, recorded=recorded or {}),
    )


def times(factor: float, levels: Sequence[float] = STEADY) -> tuple[float, ...]:
    return tuple(factor * level for level in levels)


def decide(now: Measurement, base: Measurement | None, *limits: Limit, **kwargs: Any) -> Verdict:
    return judge(now, base, limits or (P50,), **kwargs)


def test_the_same_figures_pass() -> None:
    verdict = decide(measurement(STEADY), measurement(STEADY))
    assert (verdict.status, verdict.reason) == (Status.PASS, "within-limit")
    assert verdict.comparisons[0].change.estimate == pytest.approx(0.0)


def test_a_change_beyond_the_limit_with_evidence_is_a_regression() -> None:
    verdict = decide(measurement(times(1.2)), measurement(STEADY))
    assert (verdict, verdict.reason) == ("REGRESSED", "beyond-limit")
    comparison = verdict.comparisons[0]
    assert comparison.change.estimate == pytest.approx(0.2)
    assert 0 < comparison.change.low < 0.2 < comparison.change.high
    assert comparison.baseline_seconds == pytest.approx(1.002, abs=2e-3)
    assert comparison.now_seconds == pytest.approx(1.2 * comparison.baseline_seconds)


def test_a_change_within_the_limit_passes_however_certain() -> None:
    assert decide(measurement(times(1.08)), measurement(STEADY)) == "PASS"


def test_a_change_beyond_the_limit_without_evidence_is_inconclusive() -> None:
    verdict = decide(measurement(times(1.2, NOISY)), measurement(NOISY))
    assert (verdict.status, verdict.reason) == (Status.INCONCLUSIVE, "not-significant")


def test_an_improvement_is_the_mirror_of_a_regression() -> None:
    assert decide(measurement(times(1 / 1.2)), measurement(STEADY)) == "IMPROVED"
    assert decide(measurement(times(1 / 1.2, NOISY)), measurement(NOISY)) == "PASS"
    assert decide(measurement(times(1 / 1.08)), measurement(STEADY)) == "PASS"


def test_one_regressed_metric_outweighs_the_others() -> None:
    p10 = Limit(metric="p10", value=0.5, unit="%")
    verdict = decide(measurement(times(1.2)), measurement(STEADY), p10, P50)
    assert verdict == "REGRESSED"
    assert [c.status for c in verdict.comparisons] == [Status.PASS, Status.REGRESSED]
    assert verdict.worst is verdict.comparisons[1]


def test_a_limit_in_milliseconds_bounds_the_difference() -> None:
    limit = Limit(metric="p50", value=0.150, unit="ms")
    assert decide(measurement(times(1.2)), measurement(STEADY), limit) == "REGRESSED"
    assert decide(measurement(times(1.1)), measurement(STEADY), limit) == "PASS"
    assert decide(measurement(times(0.8)), measurement(STEADY), limit) == "IMPROVED"


def test_cpu_time_is_held_against_cpu_time() -> None:
    limit = Limit(metric="cpu_p50", value=0.05, unit="%")
    now, base = measurement(STEADY, cpu=times(1.1)), measurement(STEADY, cpu=STEADY)
    assert decide(now, base, limit) == "REGRESSED"
    assert decide(base, base, limit) == "PASS"


def test_a_cpu_limit_without_cpu_time_is_incomparable() -> None:
    limit = Limit(metric="cpu_p50", value=0.05, unit="%")
    verdict = decide(measurement(STEADY, cpu=STEADY), measurement(STEADY), limit)
    assert (verdict.status, verdict.reason) == (Status.INCOMPARABLE, "no-cpu-time")
    idle = measurement(STEADY, cpu=(0.0, 1.0, 1.0, 1.0, 1.0))
    assert decide(idle, measurement(STEADY, cpu=STEADY), limit).reason == "no-cpu-time"


def test_without_a_baseline_there_is_no_verdict_on_speed() -> None:
    verdict = decide(measurement(STEADY), None)
    assert (verdict.status, verdict.reason) == (Status.NO_BASELINE, "no-baseline")


def test_facts_that_must_match_make_it_incomparable_and_are_named() -> None:
    now = measurement(STEADY, must={"batch_size": 64, "warmup": 5}, recorded={"torch": "2.13.0"})
    base = measurement(STEADY, must={"batch_size": 32, "warmup": 5}, recorded={"torch": "2.12.0"})
    verdict = decide(now, base)
    assert (verdict.status, verdict.reason) == (Status.INCOMPARABLE, "must-match")
    assert verdict.differences == ("batch_size 32 -> 64", "torch 2.12.0 -> 2.13.0")


def test_recorded_facts_that_differ_are_told() -> None:
    now = measurement(STEADY, recorded={"torch": "2.13.0", "env:NCCL_ALGO": "Ring"})
    base = measurement(STEADY, recorded={"torch": "2.12.0"})
    verdict = decide(now, base)
    assert verdict == "PASS"
    assert verdict.differences == ("NCCL_ALGO unset -> Ring", "torch 2.12.0 -> 2.13.0")


def test_a_reason_not_to_gate_comes_before_all_else() -> None:
    verdict = decide(measurement(times(2)), measurement(STEADY), not_gated="saving")
    assert (verdict.status, verdict.reason) == (Status.NOT_GATED, "saving")


def test_a_limit_without_support_is_dropped_and_said() -> None:
    p99 = Limit(metric="p99", value=0.1, unit="%", default=True)
    verdict = decide(measurement(times(1.2)), measurement(STEADY), p99, P50)
    assert verdict == "REGRESSED"
    assert [c.limit for c in verdict.comparisons] == [P50]
    assert "p99:10%: needs at least 299 timed steps" in verdict.dropped[0]


def test_with_no_limit_left_nothing_is_gated() -> None:
    verdict = decide(measurement((1.0,)), measurement(STEADY))
    assert (verdict.status, verdict.reason) == (Status.NOT_GATED, "no-supported-limit")
    assert "needs at least 2, 1 was asked" in verdict.dropped[0]


def test_a_baseline_of_one_launch_is_incomparable() -> None:
    verdict = decide(measurement(STEADY), measurement((1.0,)))
    assert (verdict.status, verdict.reason) == (Status.INCOMPARABLE, "baseline-launches")


def test_unsupported_says_what_a_limit_needs() -> None:
    p99 = Limit(metric="p99", value=0.05, unit="%")
    assert unsupported(p99, steps=60, launches=5) is None
    told = unsupported(p99, steps=30, launches=5)
    assert told is not None
    assert "299" in told
    assert "30 x 5 = 150" in told
    assert "raise --ddp-steps to 60" in told


STATUSES = list(Status)


@pytest.mark.parametrize("status", STATUSES)
def test_what_a_verdict_does_to_a_test(status: Status) -> None:
    verdict = Verdict(status=status, reason="x")
    missing = status in (Status.NO_BASELINE, Status.INCOMPARABLE)
    assert fails(verdict, fail_on=None, baseline_missing="warn") == (status is Status.REGRESSED)
    assert fails(verdict, fail_on=None, baseline_missing="fail") == (status is Status.REGRESSED or missing)


def test_a_debugging_variable_counts_as_a_missing_baseline() -> None:
    verdict = Verdict(status=Status.NOT_GATED, reason="debugging-variable")
    assert fails(verdict, fail_on=None, baseline_missing="fail")
    assert not fails(verdict, fail_on=None, baseline_missing="warn")


@pytest.mark.parametrize("name", FAIL_ON_NAMES)
def test_fail_on_names_exactly_what_fails(name: str) -> None:
    for status in Status:
        verdict = Verdict(status=status, reason="x")
        assert fails(verdict, fail_on=frozenset({name}), baseline_missing="fail") == (
            status == name.upper().replace("-", " ")
        )


def test_fail_on_has_a_name_for_every_verdict_but_pass() -> None:
    assert {name.upper().replace("-", " ") for name in FAIL_ON_NAMES} == {*Status} - {Status.PASS}
