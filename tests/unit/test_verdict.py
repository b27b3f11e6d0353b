from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_ddpperf.options.definitions import FAIL_ON_NAMES
from pytest_ddpperf.records.metric import SENT
from pytest_ddpperf.records.plan import COUNTER_LIMITS, TIME_LIMITS, Limit
from pytest_ddpperf.records.reason import Reason
from pytest_ddpperf.records.samples import (
    Environment,
    Measurement,
    Samples,
    Scalar,
    Status,
    Verdict,
)
from pytest_ddpperf.records.step_phases import (
    FORWARD,
    PHASES,
    RANK_WAIT,
    StepPhases,
)
from pytest_ddpperf.report import sentences
from pytest_ddpperf.text import loss_change
from pytest_ddpperf.verdict.decision import fails, judge, with_counters
from pytest_ddpperf.verdict.observed import of_one_length
from pytest_ddpperf.verdict.stats import Drift
from pytest_ddpperf.verdict.times import (
    ASSUMED_DRIFT,
    coarse,
    resolutions,
    unsupported,
)
from tests.reports import Drawn, outcome

NO_DRIFT = Drift(floor=0.0, share=0.0, freedom=8)
P50 = Limit(metric="p50", value=0.10, unit="%")
STEADY = (1.00, 1.01, 0.99, 1.00, 1.00)
NEARLY = (0.9, 1.1, 0.95, 1.05, 1.0)
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
            rank_seconds=tuple(
                (launch(level), launch(level)) for level in levels
            ),
            cpu_seconds=(
                None
                if cpu is None
                else tuple((launch(level / 2), launch(level)) for level in cpu)
            ),
        ),
        environment=Environment(must_match=must or {}, recorded=recorded or {}),
    )


def times(factor: float, levels: Sequence[float] = STEADY) -> tuple[float, ...]:
    return tuple(factor * level for level in levels)


def decide(
    now: Measurement, base: Measurement | None, *limits: Limit, **kwargs: Any
) -> Verdict:
    """As if sessions did not drift, unless said otherwise."""
    sessions = () if base is None else (base,)
    return judge(
        now, sessions, limits or (P50,), **{"assumed": NO_DRIFT, **kwargs}
    )


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
    assert comparison.now_seconds == pytest.approx(
        1.2 * comparison.baseline_seconds
    )


MS = Limit(metric="p50", value=0.150, unit="ms")
BUSBW = Limit(metric="busbw", value=0.2, unit="%")


@pytest.mark.parametrize(
    ("factor", "levels", "limit", "status", "reason"),
    [
        (1.08, STEADY, P50, "PASS", "within-limit"),
        (1.2, NOISY, P50, "INCONCLUSIVE", "not-significant"),
        (1 / 1.2, STEADY, P50, "IMPROVED", "improved"),
        (1 / 1.2, NOISY, P50, "INCONCLUSIVE", "too-noisy"),
        (1 / 1.08, STEADY, P50, "PASS", None),
        (1.2, STEADY, MS, "REGRESSED", None),
        (1.1, STEADY, MS, "PASS", None),
        (0.8, STEADY, MS, "IMPROVED", None),
        (1.24, STEADY, BUSBW, "PASS", None),
        # bandwidth falls by 20 % at 1 / 0.8 = 1.25
        (1.26, STEADY, BUSBW, "REGRESSED", None),
        (0.79, STEADY, BUSBW, "IMPROVED", None),
    ],
)
def test_limit_and_evidence_decide(
    factor: float,
    levels: Sequence[float],
    limit: Limit,
    status: str,
    reason: str | None,
) -> None:
    verdict = decide(
        measurement(times(factor, levels)), measurement(levels), limit
    )
    assert (verdict.status.value, verdict.reason) == (
        status,
        reason or verdict.reason,
    )


def noisy_by(spread: float) -> Verdict:
    """The verdict on interleaved pairs that differ by so much, either way."""
    ratios = [math.exp(spread), math.exp(-spread)] * 5
    now = measurement(times(1.0, ratios))
    base = measurement(times(1.0, [1.0] * 10))
    return judge(now, [base], (P50,), interleaved=True)


def test_a_pass_means_that_three_limits_would_have_been_seen() -> None:
    # the one-sided 95 % bound: 1.83 standard errors, against log(1.3)
    seen = math.log(1.3) / (1.833 * math.sqrt(10 / 9) / math.sqrt(10))
    assert noisy_by(0.99 * seen).status is Status.PASS
    found = noisy_by(1.01 * seen)
    assert (found.status, found.reason) == (Status.INCONCLUSIVE, "too-noisy")


def test_an_early_look_needs_more_evidence_and_shows_the_same_range() -> None:
    levels = (1.0, 1.03, 0.98, 1.02, 0.97)
    sides = measurement(times(1.2, levels)), [measurement(STEADY)]
    last = judge(*sides, (P50,), interleaved=True)
    early = judge(*sides, (P50,), interleaved=True, share=1e-9)
    assert (last.status, early.status) == (
        Status.REGRESSED,
        Status.INCONCLUSIVE,
    )
    assert early.comparisons[0].change == last.comparisons[0].change
    assert not early.comparisons[0].settled


def test_one_regressed_metric_outweighs_the_others() -> None:
    p10 = Limit(metric="p10", value=0.5, unit="%")
    verdict = decide(measurement(times(1.2)), measurement(STEADY), p10, P50)
    assert verdict == "REGRESSED"
    assert [c.status for c in verdict.comparisons] == [
        Status.PASS,
        Status.REGRESSED,
    ]
    assert verdict.worst is verdict.comparisons[1]


def test_the_largest_improvement_is_the_one_that_is_shown() -> None:
    limits = [
        Limit(metric=name, value=0.1, unit="%") for name in ("p10", "p90")
    ]
    before = measurement(STEADY)
    launches = tuple(
        tuple(
            seconds * (0.4 if number % 2 else 0.8)
            for number, seconds in enumerate(launch)
        )
        for launch in before.samples.step_seconds
    )
    now = replace(
        before, samples=replace(before.samples, step_seconds=launches)
    )
    verdict = decide(now, before, *limits)
    assert verdict == "IMPROVED"
    least = min(each.change.estimate for each in verdict.comparisons)
    assert verdict.worst is not None
    assert verdict.worst.change.estimate == least


def test_cpu_time_is_compared_with_cpu_time() -> None:
    limit = Limit(metric="cpu_p50", value=0.05, unit="%")
    now, base = (
        measurement(STEADY, cpu=times(1.1)),
        measurement(STEADY, cpu=STEADY),
    )
    assert decide(now, base, limit) == "REGRESSED"
    assert decide(base, base, limit) == "PASS"


def with_phases(
    measured: Measurement, *forward: tuple[float, ...]
) -> Measurement:
    """With so many seconds of forward by launch and rank; of a launch without any, phases are
    unknown."""
    phases = []
    for of_ranks in forward:
        unknown: dict[str, tuple[float | None, ...]] = {
            name: (None,) * len(of_ranks) for name in (*PHASES, RANK_WAIT)
        }
        phases.append(
            StepPhases(steps=9, own={**unknown, FORWARD: of_ranks}, path={})
        )
    return replace(measured, phases=tuple(phases))


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_phase_is_compared_with_itself_on_the_rank_that_it_takes_longest(
    interleaved: bool,
) -> None:
    limit = Limit(metric=FORWARD, value=0.05, unit="%")
    base = with_phases(measurement(STEADY), *((level, 0.1) for level in STEADY))
    slower = with_phases(
        measurement(STEADY), *((1.1 * level, 0.1) for level in STEADY)
    )
    verdict = decide(slower, base, limit, P50, interleaved=interleaved)
    assert verdict == "REGRESSED"
    assert [c.status for c in verdict.comparisons] == [
        Status.REGRESSED,
        Status.PASS,
    ]
    assert verdict.comparisons[0].change.estimate == pytest.approx(0.1)
    assert decide(base, base, limit, interleaved=interleaved) == "PASS"
    assert (
        decide(base, base, replace(limit, metric="backward")).reason
        == "unknown-metric-now"
    )


def test_a_limit_on_a_phase_that_is_unknown_or_takes_no_time_is_incomparable() -> (
    None
):
    limit = Limit(metric=FORWARD, value=0.05, unit="%")
    plain, known = (
        measurement(STEADY),
        with_phases(measurement(STEADY), *((level, level) for level in STEADY)),
    )
    verdict = decide(known, plain, limit)
    assert (verdict.status, verdict.reason) == (
        Status.INCOMPARABLE,
        "unknown-metric",
    )
    for other in (
        plain,
        with_phases(plain, (1.0, 1.0)),
        with_phases(plain, *((0.0, 0.0) for _ in STEADY)),
    ):
        assert decide(other, known, limit).reason == "unknown-metric-now"
    assert resolutions(known, [limit, P50]).keys() == {FORWARD, "p50"}
    assert resolutions(plain, [limit, P50]).keys() == {"p50"}


def test_a_cpu_limit_without_cpu_time_is_incomparable() -> None:
    limit = Limit(metric="cpu_p50", value=0.05, unit="%")
    now = measurement(STEADY, cpu=STEADY)
    verdict = decide(now, measurement(STEADY), limit)
    assert (verdict.status, verdict.reason) == (
        Status.INCOMPARABLE,
        "unknown-metric",
    )
    for count, status in (
        (9, "REGRESSED"),
        (8, verdict.status),
        (7, verdict.status),
    ):
        current, base = (
            replace(side, counters={"rpc.bytes": each})
            for side, each in ((now, count), (measurement(STEADY), 8))
        )
        found = decide(current, base, limit, BYTES).status
        assert found == status, "what is unknown hides no rise"
    idle = measurement(STEADY, cpu=(0.0, 1.0, 1.0, 1.0, 1.0))
    assert (
        decide(idle, measurement(STEADY, cpu=STEADY), limit).reason
        == "unknown-metric-now"
    )
    assert (
        decide(measurement(STEADY, cpu=STEADY), idle, limit).reason
        == "unknown-metric"
    )


def test_a_baseline_that_cannot_support_a_limit_is_incomparable() -> None:
    p95 = Limit(metric="p95", value=0.1, unit="%")
    verdict = decide(measurement(STEADY), measurement(STEADY, steps=5), p95)
    assert (verdict, verdict.reason) == ("INCOMPARABLE", "baseline-support")
    assert "p95:10%: needs at least 59 timed steps" in verdict.differences[0]


def test_a_default_limit_that_a_baseline_cannot_support_is_dropped() -> None:
    """It may have been saved after fewer launches than a comparison takes."""
    p50 = Limit(metric="p50", value=0.1, unit="%")
    p95 = Limit(metric="p95", value=0.1, unit="%", default=True)
    verdict = decide(
        measurement(STEADY), measurement(STEADY, steps=5), p95, p50
    )
    assert verdict == "PASS"
    assert [each.limit.metric for each in verdict.comparisons] == ["p50"]
    (dropped,) = verdict.dropped_limits
    assert dropped.limit == p95
    assert dropped.why == "the baseline has too few steps or launches"
    verdict = decide(measurement(STEADY), measurement(STEADY, steps=5), p95)
    assert (verdict, verdict.reason) == ("NOT GATED", "no-supported-limit")


def followed_by(
    short: Measurement, factor: float, *, steps: int = 60
) -> Measurement:
    """With more steps in each launch, by such a factor longer or shorter than its first."""
    samples = short.samples
    assert samples.cpu_seconds is not None

    def longer(launch: Sequence[float]) -> tuple[float, ...]:
        return (*launch, *(factor * launch[0],) * steps)

    def by_rank(
        table: Sequence[Sequence[Sequence[float]]],
    ) -> tuple[tuple[tuple[float, ...], ...], ...]:
        return tuple(tuple(map(longer, launch)) for launch in table)

    return replace(
        short,
        samples=Samples(
            step_seconds=tuple(map(longer, samples.step_seconds)),
            rank_seconds=by_rank(samples.rank_seconds),
            cpu_seconds=by_rank(samples.cpu_seconds),
            examples=tuple(
                tuple((1,) * (steps + 30) for _ in launch)
                for launch in samples.rank_seconds
            ),
            blocked_seconds=by_rank(samples.rank_seconds),
        ),
    )


def test_all_that_is_known_of_a_step_is_cut_with_it() -> None:
    short, longer = (
        measurement(STEADY, cpu=STEADY).samples,
        followed_by(measurement(STEADY, cpu=STEADY), 2.0).samples,
    )
    cut, kept = of_one_length([longer, short])
    assert kept is short
    assert (longer.steps, cut.steps) == (90, 30)
    assert (cut.step_seconds, cut.rank_seconds, cut.cpu_seconds) == (
        short.step_seconds,
        short.rank_seconds,
        short.cpu_seconds,
    )
    assert cut.blocked_seconds == short.rank_seconds
    assert cut.examples == (((1,) * 30,) * 2,) * len(STEADY)


def test_without_a_baseline_there_is_no_verdict_on_speed() -> None:
    verdict = decide(measurement(STEADY), None)
    assert (verdict.status, verdict.reason) == (
        Status.NO_BASELINE,
        "no-baseline",
    )


def test_facts_that_must_match_make_it_incomparable_and_are_named() -> None:
    now = measurement(
        STEADY,
        must={"batch_size": 64, "warmup": 5},
        recorded={"torch": "2.13.0", "clock_mhz": 1755},
    )
    base = measurement(
        STEADY,
        must={"batch_size": 32, "warmup": 5},
        recorded={"torch": "2.12.0", "clock_mhz": 1980},
    )
    verdict = decide(now, base)
    assert (verdict.status, verdict.reason) == (
        Status.INCOMPARABLE,
        "must-match",
    )
    assert verdict.differences == (
        "batch_size 32 -> 64",
        "torch 2.12.0 -> 2.13.0",
        "clock_mhz 1980 -> 1755",
    )


def test_recorded_facts_that_differ_are_reported() -> None:
    now = measurement(
        STEADY, recorded={"torch": "2.13.0", "env:NCCL_ALGO": "Ring"}
    )
    base = measurement(STEADY, recorded={"torch": "2.12.0"})
    verdict = decide(now, base)
    assert verdict == "PASS"
    assert verdict.differences == (
        "NCCL_ALGO unset -> Ring",
        "torch 2.12.0 -> 2.13.0",
    )


@pytest.mark.parametrize(
    ("before", "after", "differences"),
    [
        (
            {"clock_mhz": 1965.0, "temperature_c": 39.0},
            {"clock_mhz": 1980.0, "temperature_c": 36.0},
            (),
        ),
        (
            {"clock_mhz": 1980.0, "temperature_c": 36.0},
            {"clock_mhz": 1965.0, "temperature_c": 39.0},
            (),
        ),
        (
            {"clock_mhz": 1980.0},
            {"clock_mhz": 1200.0},
            ("clock_mhz 1980.0 -> 1200.0",),
        ),
        ({"clock_mhz": 1980.0}, {}, ()),
        # of two devices
        (
            {"clock_mhz": "1980.0 + 1965.0"},
            {"clock_mhz": "1200.0 + 1980.0"},
            (),
        ),
        ({"slowdown": "heat or power"}, {}, ()),
        (
            {"temperature_c": 60.0},
            {"temperature_c": 88.0, "slowdown": "heat or power"},
            ("slowdown unset -> heat or power", "temperature_c 60.0 -> 88.0"),
        ),
    ],
)
def test_clocks_and_temperatures_are_reported_only_if_they_may_explain_a_slowdown(
    before: Any, after: Any, differences: tuple[str, ...]
) -> None:
    verdict = decide(
        measurement(times(1.2), recorded=after),
        measurement(STEADY, recorded=before),
    )
    assert verdict == "REGRESSED"
    assert verdict.differences == differences


def test_a_reason_not_to_gate_comes_before_all_else() -> None:
    verdict = decide(
        measurement(times(2)), measurement(STEADY), not_gated="saving"
    )
    assert (verdict.status, verdict.reason) == (Status.NOT_GATED, "saving")


def test_a_limit_without_support_is_dropped_and_said() -> None:
    p99 = Limit(metric="p99", value=0.1, unit="%", default=True)
    verdict = decide(measurement(times(1.2)), measurement(STEADY), p99, P50)
    assert verdict == "REGRESSED"
    assert [c.limit for c in verdict.comparisons] == [P50]
    assert "p99:10%: needs at least 299 timed steps" in verdict.dropped[0]


def test_with_no_limit_left_nothing_is_gated() -> None:
    verdict = decide(measurement((1.0,)), measurement(STEADY))
    assert (verdict.status, verdict.reason) == (
        Status.NOT_GATED,
        "no-supported-limit",
    )
    assert "needs at least 2 launches, 1 was asked" in verdict.dropped[0]


# --- sessions, resolution, several limits


def test_the_fastest_launches_are_compared_too_where_sides_are_of_other_occasions() -> (
    None
):
    busy = measurement((1.0, 1.5, 1.6, 1.5, 1.4))
    (found,) = judge(
        measurement(times(1.2)), [busy, measurement(STEADY)], (P50,)
    ).comparisons
    assert found.change.estimate < 0.05
    assert found.fastest == pytest.approx(1.2 * 0.99 / (1.0 * 0.99) ** 0.5 - 1)
    turned = judge(measurement(times(1.2)), [busy], (P50,), interleaved=True)
    assert turned.comparisons[0].fastest is None


def test_another_host_drifts_further_and_sessions_of_one_host_say_little_of_it() -> (
    None
):
    def on(host: str | None, level: float = 1.0) -> Measurement:
        return measurement(
            times(level), recorded={"host": host} if host else {}
        )

    def resolved(now: Measurement, *base: Measurement) -> float:
        return judge(now, base, (P50,)).comparisons[0].resolution

    own = [on("a", level) for level in (1.0, 1.001, 0.999)]
    one = resolved(on("a"), own[0])
    assert resolved(on(None), on(None)) == pytest.approx(one), (
        "what does not tell its host is taken for the same"
    )
    assert resolved(on("b"), own[0]) > 1.5 * one
    on_nodes = [
        measurement(times(1.0), recorded={"host": "a", "hosts": hosts})
        for hosts in ("a, b", "a, c")
    ]
    mixed = resolved(on("a"), own[0], on("b", 1.001))
    assert mixed > 1.5 * resolved(on("a"), *own[:2]), "one is of another host"
    assert resolved(*on_nodes) == pytest.approx(resolved(on("b"), own[0])), (
        "another host of several nodes is another one"
    )
    assert resolved(on("b"), *own) > 0.98 * resolved(on("b"), own[0]), (
        "three sessions of one host are one of another"
    )
    assert resolved(on("a"), *own) < one
    other_nodes = [
        on(host, level)
        for host, level in zip("acd", (1.0, 1.001, 0.999), strict=True)
    ]
    assert resolved(on("b"), *other_nodes) < resolved(on("b"), *own), (
        "three hosts tell how hosts differ"
    )


def test_how_likely_a_false_red_is_follows_from_limit_and_noise() -> None:
    side = measurement(NOISY)
    wide, narrow = (
        judge(
            side,
            [side],
            (Limit(metric="p50", value=value, unit="%"),),
            level=0.05,
        ).comparisons[0]
        for value in (5.0, 0.01)
    )
    assert wide.alarm_rate < narrow.alarm_rate == pytest.approx(0.05), (
        "the limit asks for more than the level"
    )


def test_sessions_that_agree_make_the_gate_finer_and_such_that_do_not_coarser() -> (
    None
):
    now = measurement(times(1.15))
    alike = [
        measurement(times(level)) for level in (1.0, 1.001, 0.999, 1.0, 1.002)
    ]
    apart = [measurement(times(level)) for level in (1.0, 1.3, 0.8, 1.1, 0.75)]
    one, five, wild = (
        judge(now, sessions, (P50,)).comparisons[0].resolution
        for sessions in (alike[:1], alike, apart)
    )
    assert five < one < wild
    assert judge(now, alike, (P50,)) == "REGRESSED"
    assert judge(now, apart, (P50,)) == "INCONCLUSIVE"


def test_the_resolution_is_told_with_what_would_make_it_finer() -> None:
    comparison = decide(
        measurement(times(1, NEARLY)), measurement(STEADY)
    ).comparisons[0]
    assert comparison.resolution > 0.11
    assert comparison.launches_needed is not None
    assert 5 < comparison.launches_needed < 20
    coarse_base = decide(measurement(NOISY), measurement(NOISY)).comparisons[0]
    assert coarse_base.resolution > 1
    assert coarse_base.launches_needed is None, (
        "it is the baseline that allows no finer one"
    )
    fine = decide(measurement(STEADY), measurement(STEADY)).comparisons[0]
    assert fine.resolution < 0.1
    assert fine.launches_needed is None
    drifting = decide(
        measurement(STEADY), measurement(STEADY), assumed=ASSUMED_DRIFT
    ).comparisons[0]
    assert drifting.resolution > 0.1
    assert drifting.launches_needed is None


def test_resolutions_of_a_measurement_are_those_against_one_like_it() -> None:
    current = measurement(NOISY)
    assert (
        resolutions(current, [P50])["p50"]
        == decide(current, current).comparisons[0].resolution
    )
    assert coarse(current, [P50])
    assert not coarse(measurement(STEADY), [P50])
    assert not coarse(
        measurement(STEADY), [Limit(metric="p50", value=100.0, unit="ms")]
    )
    assert coarse(
        measurement(STEADY), [Limit(metric="p50", value=0.001, unit="ms")]
    )


def test_evidence_is_shared_among_limits_and_tests() -> None:
    now, base = measurement(times(1.25, NEARLY)), measurement(NEARLY)
    p_value = decide(now, base).comparisons[0].p_value
    assert decide(now, base, level=p_value * 1.01) == "REGRESSED"
    assert decide(now, base, level=p_value * 0.99) == "INCONCLUSIVE"
    many = [Limit(metric=f"p{q}", value=0.1, unit="%") for q in (40, 50, 60)]
    assert decide(now, base, *many, level=p_value * 1.5) == "INCONCLUSIVE"


def test_the_bounds_exclude_no_change_exactly_where_there_is_evidence() -> None:
    for level in (0.5, 0.1, 0.05, 0.01, 0.001):
        (comparison,) = decide(
            measurement(times(1.25, NEARLY)), measurement(NEARLY), level=level
        ).comparisons
        assert (comparison.change.low > 0) == (
            comparison.status is Status.REGRESSED
        )
        assert comparison.level == level


def test_settled_says_whether_launches_could_still_turn_it() -> None:
    assert (
        decide(measurement(STEADY), measurement(STEADY)).comparisons[0].settled
    )
    assert (
        not decide(measurement(times(1.05, NEARLY)), measurement(NEARLY))
        .comparisons[0]
        .settled
    )
    assert (
        not decide(
            measurement(times(1.2, NOISY)), measurement(NOISY), level=0.05
        )
        .comparisons[0]
        .settled
    )


# --- properties

# The steps of a launch, in percent of its level: a few that recur.
SHAPES = st.lists(st.integers(50, 200), min_size=6, max_size=6)
FACTORS = st.floats(0.01, 100)


def launches_of(
    levels: Sequence[int], shapes: Sequence[Sequence[int]]
) -> Measurement:
    groups = tuple(
        tuple(level * percent / 100_000 for percent in shape * 5)
        for level, shape in zip(levels, shapes, strict=True)
    )
    return Measurement(
        samples=Samples(
            step_seconds=groups,
            rank_seconds=tuple(
                (group, tuple(reversed(group))) for group in groups
            ),
            cpu_seconds=tuple(
                (group, tuple(step / 2 for step in group)) for group in groups
            ),
        )
    )


def measurements(launches: int) -> st.SearchStrategy[Measurement]:
    """Of launches whose levels differ: in milliseconds."""
    levels = st.integers(20, 100)
    return st.builds(
        launches_of,
        st.lists(levels, min_size=launches, max_size=launches, unique=True),
        st.lists(SHAPES, min_size=launches, max_size=launches),
    )


def mapped(measured: Measurement, change: Callable[[Any], Any]) -> Measurement:
    """`change` applied to each table: launch x step and twice launch x rank x step."""
    samples = measured.samples
    assert samples.cpu_seconds is not None
    return replace(
        measured,
        samples=Samples(
            step_seconds=change(samples.step_seconds),
            rank_seconds=change(samples.rank_seconds),
            cpu_seconds=change(samples.cpu_seconds),
        ),
    )


def scaled(table: Any, factor: float) -> Any:
    return tuple(
        scaled(row, factor) if isinstance(row, tuple) else row * factor
        for row in table
    )


LIMITS = tuple(
    Limit(metric=metric, value=0.1, unit="%")
    for metric in ("p10", "p50", "p90", "cpu_p50")
)


def check_same_figures(one: Verdict, other: Verdict) -> None:
    assert other == one.status.value
    for before, after in zip(figures(one), figures(other), strict=True):
        assert after == pytest.approx(before)


def figures(verdict: Verdict) -> list[tuple[float, ...]]:
    return [
        (
            c.change.estimate,
            c.change.low,
            c.change.high,
            c.p_value,
            c.resolution,
            c.drift or 0.0,
        )
        for c in verdict.comparisons
    ]


@given(
    now=measurements(5),
    base=st.lists(measurements(4), min_size=1, max_size=3),
    factor=FACTORS,
)
def test_scaling_the_current_side_scales_every_ratio_by_just_that(
    now: Measurement, base: list[Measurement], factor: float
) -> None:
    before = judge(now, base, LIMITS)
    after = judge(
        mapped(now, lambda table: scaled(table, factor)), base, LIMITS
    )
    for one, other in zip(before.comparisons, after.comparisons, strict=True):
        assert 1 + other.change.estimate == pytest.approx(
            (1 + one.change.estimate) * factor
        )
        assert other.now_seconds == pytest.approx(one.now_seconds * factor)


@given(now=measurements(5), base=measurements(4), factor=FACTORS)
def test_scaling_everything_changes_nothing(
    now: Measurement, base: Measurement, factor: float
) -> None:
    before = judge(now, [base], LIMITS)
    larger = [
        mapped(side, lambda table: scaled(table, factor))
        for side in (now, base)
    ]
    check_same_figures(before, judge(larger[0], larger[1:], LIMITS))


@given(
    now=measurements(5),
    base=st.lists(measurements(4), min_size=3, max_size=3),
    order=st.permutations(range(5)),
)
def test_the_order_of_launches_and_of_ranks_changes_nothing(
    now: Measurement, base: list[Measurement], order: list[int]
) -> None:
    before = judge(now, base, LIMITS)
    launches = mapped(now, lambda table: tuple(table[index] for index in order))
    cpu = now.samples.cpu_seconds
    assert cpu is not None
    ranks = replace(
        now,
        samples=replace(
            now.samples,
            rank_seconds=tuple(
                launch[::-1] for launch in now.samples.rank_seconds
            ),
            cpu_seconds=tuple(launch[::-1] for launch in cpu),
        ),
    )
    for changed, sessions in (
        (launches, base),
        (ranks, base),
        (now, base[::-1]),
    ):
        check_same_figures(before, judge(changed, sessions, LIMITS))


@pytest.mark.parametrize(
    "interleaved", [True, False], ids=["paired", "sessions"]
)
@pytest.mark.parametrize("unit", ["%", "ms"])
@example(  # some launches are slow, but not as slow as those before
    now=launches_of([20, 21, 47, 48, 68], [[50] * 6] * 5),
    of_pairs=launches_of([100, 99, 98, 97, 96], [[50] * 6] * 5),
    of_a_session=launches_of(
        [47, 78, 88, 95], [[69, 84, 90, 109, 121, 67], *[[50] * 6] * 3]
    ),
    factor=0.5,
)
@given(
    now=measurements(5),
    of_pairs=measurements(5),
    of_a_session=measurements(4),
    factor=st.sampled_from([0.5, 0.9, 1.0, 1.1, 2.0]),
)
def test_swapping_the_sides_mirrors_the_verdict(
    unit: Literal["%", "ms"],
    interleaved: bool,
    now: Measurement,
    of_pairs: Measurement,
    of_a_session: Measurement,
    factor: float,
) -> None:
    now = mapped(now, lambda table: scaled(table, factor))
    base = of_pairs if interleaved else of_a_session
    limits = [
        replace(limit, unit=unit, value=0.1 if unit == "%" else 0.005)
        for limit in LIMITS
    ]
    there = judge(now, [base], limits, interleaved=interleaved)
    back = judge(base, [now], limits, interleaved=interleaved)
    mirror = {
        Status.REGRESSED: Status.IMPROVED,
        Status.IMPROVED: Status.REGRESSED,
    }
    for one, other in zip(there.comparisons, back.comparisons, strict=True):
        # what might be better may pass, what might be worse is left open
        assert mirror.get(one.status) == (
            other.status if other.status in mirror else None
        )
        assert math.log1p(other.change.estimate) == pytest.approx(
            -math.log1p(one.change.estimate)
        )
        assert math.log1p(other.change.low) == pytest.approx(
            -math.log1p(one.change.high)
        )
        assert other.p_value == pytest.approx(one.p_value)


@pytest.mark.parametrize("value", [math.nan, 0.0, -0.1, math.inf])
@pytest.mark.parametrize("side", ["current", "baseline"])
def test_what_is_no_duration_is_an_error_not_a_verdict(
    side: str, value: float
) -> None:
    broken = replace(
        measurement(STEADY),
        samples=replace(
            measurement(STEADY).samples,
            step_seconds=((1.0, value, 1.0) * 10, (1.0,) * 30),
        ),
    )
    pair = (
        (broken, measurement(STEADY))
        if side == "current"
        else (measurement(STEADY), broken)
    )
    with pytest.raises(ValueError, match="is not a duration in seconds"):
        decide(*pair)


def test_a_single_launch_is_not_compared() -> None:
    verdict = decide(measurement(STEADY), measurement((1.0,)))
    assert verdict.status is Status.INCOMPARABLE
    assert verdict.details == (
        "p50:10%: a limit needs at least 2 launches, 1 was asked",
    )


@pytest.mark.parametrize(
    ("sessions", "problem"),
    [
        ([STEADY, STEADY], "too many values"),
        ([STEADY[:-1]], "is shorter than"),
    ],
    ids=["two sessions", "fewer launches"],
)
def test_launches_that_have_no_partner_were_not_interleaved(
    sessions: list[Sequence[float]], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        judge(
            measurement(STEADY),
            list(map(measurement, sessions)),
            (P50,),
            interleaved=True,
        )


# --- launches in turns


def test_what_drifts_from_pair_to_pair_cancels() -> None:
    drifting = (1.0, 1.5, 0.7, 1.2, 2.0)
    now = tuple(
        1.2 * level * wobble
        for level, wobble in zip(drifting, STEADY, strict=True)
    )
    assert (
        decide(measurement(now), measurement(drifting)).status
        is Status.INCONCLUSIVE
    )
    verdict = decide(measurement(now), measurement(drifting), interleaved=True)
    assert verdict == "REGRESSED"
    (comparison,) = verdict.comparisons
    assert comparison.drift is None
    assert comparison.resolution < 0.1


def test_a_pair_that_differs_by_chance_is_no_evidence() -> None:
    now = (1.0, 3.0, 1.0, 1.0, 1.0)
    verdict = decide(measurement(now), measurement(STEADY), interleaved=True)
    assert (verdict, verdict.reason) == ("INCONCLUSIVE", "not-significant")
    assert not verdict.comparisons[0].settled, "further pairs may decide it"
    assert verdict.comparisons[0].launches_needed is not None


def test_interleaved_only_what_is_asked_of_a_step_must_match() -> None:
    now = measurement(
        STEADY,
        must={"deterministic": True, "batch_size": 4},
        recorded={"torch": "2.13"},
    )
    base = measurement(
        STEADY,
        must={"deterministic": False, "batch_size": 4},
        recorded={"torch": "2.12"},
    )
    assert decide(now, base) == "INCOMPARABLE"
    verdict = decide(now, base, interleaved=True)
    assert verdict == "PASS"
    assert verdict.differences == (
        "deterministic False -> True",
        "torch 2.12 -> 2.13",
    )
    other = measurement(STEADY, must={"deterministic": True, "batch_size": 8})
    verdict = decide(now, other, interleaved=True)
    assert (verdict, verdict.differences[0]) == (
        "INCOMPARABLE",
        "batch_size 8 -> 4",
    )
    other = measurement(STEADY, must={"batch_size": 4, "test:bucket_mb": 25})
    verdict = decide(now, other, interleaved=True)
    assert (verdict, verdict.differences[0]) == (
        "INCOMPARABLE",
        "bucket_mb 25 -> unset",
    )


def test_in_turns_the_sides_may_have_other_cores() -> None:
    now, base = (
        replace(
            measurement(STEADY),
            environment=Environment(
                key={"cores": 2, "cores_per_rank": share, "pinned": pin}
            ),
        )
        for share, pin in ((1, True), (0, False))
    )
    verdict = decide(now, base, interleaved=True)
    assert (verdict, verdict.differences) == (
        "PASS",
        ("cores_per_rank 0 -> 1", "pinned False -> True"),
    )


# --- support


def test_unsupported_says_what_a_limit_needs() -> None:
    p99 = Limit(metric="p99", value=0.05, unit="%")
    assert unsupported(p99, steps=60, launches=5) is None
    reported = unsupported(p99, steps=30, launches=5)
    assert reported is not None
    assert "299" in reported
    assert "30 x 5 = 150" in reported
    assert "raise --ddp-steps to 60" in reported


@pytest.mark.parametrize("status", list(Status))
def test_what_a_verdict_does_to_a_test(status: Status) -> None:
    verdict = Verdict(status=status, reason="x")
    missing = status in (Status.NO_BASELINE, Status.INCOMPARABLE)
    assert fails(verdict, fail_on=None, baseline_missing="warn") == (
        status is Status.REGRESSED
    )
    assert fails(verdict, fail_on=None, baseline_missing="fail") == (
        status is Status.REGRESSED or missing
    )


NOT_GATED = frozenset({"not-gated"})


@pytest.mark.parametrize(
    ("reason", "fail_on", "missing", "failed"),
    [
        ("debugging-variable", None, "fail", True),
        ("debugging-variable", None, "warn", False),
        ("saving", NOT_GATED, "fail", False),
        *(
            (reason, NOT_GATED, "warn", True)
            for reason in ("gate-off", "disabled", "debugging-variable")
        ),
        ("no-supported-limit", NOT_GATED, "warn", True),
    ],
)
def test_a_reason_to_compare_nothing_fails_only_where_that_is_asked(
    reason: str,
    fail_on: frozenset[str] | None,
    missing: Literal["warn", "fail"],
    failed: bool,
) -> None:
    verdict = Verdict(status=Status.NOT_GATED, reason=reason)
    assert fails(verdict, fail_on=fail_on, baseline_missing=missing) == failed


@pytest.mark.parametrize("name", FAIL_ON_NAMES)
def test_fail_on_names_exactly_what_fails(name: str) -> None:
    for status in Status:
        verdict = Verdict(status=status, reason="x")
        assert fails(
            verdict, fail_on=frozenset({name}), baseline_missing="fail"
        ) == (status == name.upper().replace("-", " "))


def test_fail_on_has_a_name_for_every_verdict_but_pass() -> None:
    named = {name.upper().replace("-", " ") for name in FAIL_ON_NAMES} - {
        "DIVERGED",
        "LOOSENED",
    }
    assert named == {*Status} - {Status.PASS}


# --- losses


def with_loss(*launches: Sequence[float | None]) -> Measurement:
    steady = measurement(STEADY)
    return replace(
        steady,
        samples=replace(
            steady.samples, losses=tuple(map(tuple, launches)) or None
        ),
    )


SAME = ((2.25, 2.0),) * 3
NAN = ((2.25, None),) * 3
SPREAD = ((2.0,), (2.2,), (2.4,), (1.9,))
# by a step that not all launches have
LONGER = ((2.25, 2.0, 9.0), (2.25, 2.0), (2.25, 2.0))
DIVERGED: list[tuple[Any, Any, str]] = [
    (((2.25, 2.0 + 6e-6),) * 3, SAME, "2.125 -> 2.125003"),
    (SPREAD, ((0.0,), (0.2,), (0.4,)), "0.2 -> 2.12"),
    (NAN, SAME, "2.12 -> nan"),
    ((*SAME, (2.25, None)), SAME, "2.12 -> nan"),
    (SAME, NAN, "nan -> 2.12"),
    *(
        (now, SAME, "")
        for now in (SAME, LONGER, ((2.25, 2.0 + 4e-6),) * 3, (), ((),) * 3)
    ),
    (SPREAD, ((1.8,), (2.0,), (2.2,)), ""),
    (SAME[:1], ((9.0, 9.0),), ""),
    (NAN, NAN, ""),
    (SAME, (), ""),
]


@pytest.mark.parametrize(("now", "before", "found"), DIVERGED)
def test_losses_that_differ_by_more_than_launches_do_are_noted(
    now: Any, before: Any, found: str
) -> None:
    verdict = decide(with_loss(*now), with_loss(*before))
    assert verdict.status is Status.PASS
    assert (
        loss_change(verdict.diverged) if verdict.diverged is not None else ""
    ) == found
    assert fails(
        verdict, fail_on=frozenset({"diverged"}), baseline_missing="warn"
    ) == bool(found)
    assert not fails(
        verdict, fail_on=frozenset({"improved"}), baseline_missing="warn"
    )


def test_losses_are_compared_with_the_last_session_and_not_where_nothing_is_compared() -> (
    None
):
    other = with_loss(*((9.0, 9.0),) * 3)
    assert (
        judge(
            with_loss(*SAME),
            [other, with_loss(*SAME)],
            (P50,),
            assumed=NO_DRIFT,
        ).diverged
        is None
    )
    assert decide(with_loss(*SAME), other, not_gated="saving").diverged is None


# --- counters

BYTES = Limit(metric="rpc.bytes", value=0.0, unit="%")
DEFAULT = replace(BYTES, default=True)
REDUCED = Limit(metric="all_reduce.bytes", value=0.10, unit="%")


@pytest.mark.parametrize(
    ("before", "now", "limits", "status", "reason"),
    [
        (1000, 1000, [P50, DEFAULT], "PASS", "within-limit"),
        (1000, 1001, [P50, DEFAULT], "REGRESSED", "counter-rose"),
        (1000, 999, [P50, DEFAULT], "IMPROVED", "counter-fell"),
        (0, 8, [P50, DEFAULT], "REGRESSED", "counter-rose"),
        (0, 0, [P50, DEFAULT], "PASS", "within-limit"),
        (1000, 1200, [P50, replace(BYTES, value=0.25)], "PASS", "within-limit"),
        (
            1000,
            1251,
            [P50, replace(BYTES, value=0.25)],
            "REGRESSED",
            "counter-rose",
        ),
        (1000, 810, [P50, replace(BYTES, value=0.25)], "PASS", "within-limit"),
        (
            1000,
            799,
            [P50, replace(BYTES, value=0.25)],
            "IMPROVED",
            "counter-fell",
        ),
        (1000, 1001, [BYTES], "REGRESSED", "counter-rose"),
        (1000, 1000, [BYTES], "PASS", "within-limit"),
        (None, None, [P50, DEFAULT], "PASS", "within-limit"),
        (None, 1000, [P50, DEFAULT], "PASS", "within-limit"),
        (1000, None, [P50, DEFAULT], "PASS", "within-limit"),
        (None, 1000, [P50, BYTES], "INCOMPARABLE", "unknown-metric"),
        (1000, None, [P50, BYTES], "INCOMPARABLE", "unknown-metric-now"),
        (None, None, [BYTES], "INCOMPARABLE", "unknown-metric-now"),
        (100, 115, [P50, replace(BYTES, value=0.15)], "PASS", "within-limit"),
        (1000, 2000, [P50], "PASS", "within-limit"),
    ],
)
def test_counts_have_no_noise(
    before: int | None,
    now: int | None,
    limits: list[Limit],
    status: str,
    reason: str,
) -> None:
    current, base = (
        replace(measurement(STEADY), counters={"rpc.bytes": count})
        for count in (now, before)
    )
    verdict = decide(current, base, *limits)
    assert (verdict.status.value, verdict.reason) == (status, reason)


def test_a_default_limit_on_a_counter_is_dropped_and_a_loss_is_reported() -> (
    None
):
    counted = replace(measurement(STEADY), counters={"rpc.bytes": 8})
    assert decide(counted, measurement(STEADY), P50, DEFAULT).dropped == ()
    assert decide(measurement(STEADY), counted, P50, DEFAULT).dropped == (
        "rpc.bytes:0%: unknown now",
    )
    assert (
        decide(measurement(STEADY), measurement(STEADY), P50, DEFAULT).dropped
        == ()
    )
    assert (
        decide(measurement(STEADY), counted, P50, BYTES).differences[0]
        == "rpc.bytes is unknown now"
    )


def test_the_gravest_of_times_and_counters_is_the_verdict() -> None:
    few, many = ({"all_reduce.bytes": count} for count in (1000, 2000))

    def decided(
        factor: float, before: dict[str, int], now: dict[str, int]
    ) -> tuple[str, str]:
        sides = (
            replace(measurement(times(factor)), counters=now),
            replace(measurement(STEADY), counters=before),
        )
        verdict = decide(*sides, P50, REDUCED)
        return verdict.status.value, verdict.reason

    assert decided(1.0, few, many) == ("REGRESSED", "counter-rose")
    assert decided(0.5, few, many) == ("REGRESSED", "counter-rose")
    assert decided(1.5, many, few) == ("REGRESSED", "beyond-limit")
    assert decided(1.5, few, many) == ("REGRESSED", "beyond-limit")
    assert decided(0.5, many, few) == ("IMPROVED", "improved")
    assert decided(1.0, many, few) == ("IMPROVED", "counter-fell")


@pytest.mark.parametrize(
    ("now", "limit", "verdict"),
    [
        (8, DEFAULT, "NOT GATED"),
        (7, DEFAULT, "NOT GATED"),
        (9, DEFAULT, "REGRESSED"),
        (8, BYTES, "PASS"),
    ],
)
def test_where_no_time_is_compared_a_default_limit_only_finds_regressions(
    now: int, limit: Limit, verdict: str
) -> None:
    current, base = (
        replace(measurement((1.0,)), counters={"rpc.bytes": count})
        for count in (now, 8)
    )
    assert decide(current, base, P50, limit) == verdict


def test_what_is_not_compared_is_not_counted_either() -> None:
    counted = replace(measurement(STEADY), counters={"rpc.bytes": 8})
    assert decide(counted, None, BYTES).status is Status.NO_BASELINE
    assert (
        decide(counted, counted, BYTES, not_gated="saving").reason == "saving"
    )


COUNTS = dict.fromkeys((f"{kind}.count" for kind in (*SENT, "collectives")), 0)
DDP = {
    **COUNTS,
    "all_reduce.count": 1,
    "collectives.count": 1,
    "gradient_bytes": 4000,
}
NO_DDP = {**COUNTS, "gradient_bytes": None}
POWER_SGD = {**DDP, "all_reduce.count": None, "collectives.count": None}
FSDP = {
    **NO_DDP,
    "all_gather.count": 2,
    "reduce_scatter.count": 1,
    "collectives.count": 3,
}
BROADCASTS = {**NO_DDP, "broadcast.count": 2, "collectives.count": 2}
LOST = "gradients are no longer synchronised: all_reduce.count 1 -> 0"
# gradients, and a loss that is logged
WITH_LOSS = {
    **DDP,
    "all_reduce.count": 2,
    "all_reduce.bytes": 1_000_004,
    "collectives.count": 2,
    "gradient_bytes": 1_000_000,
}
LOSS_ALONE = {
    **NO_DDP,
    "all_reduce.count": 1,
    "all_reduce.bytes": 4,
    "collectives.count": 1,
    "gradient_bytes": 0,
}


@pytest.mark.parametrize(
    ("before", "now", "factor", "status", "difference"),
    [
        (DDP, NO_DDP, 0.2, "INCOMPARABLE", LOST),
        (DDP, NO_DDP, 1.0, "INCOMPARABLE", LOST),
        (DDP, NO_DDP, 1.5, "REGRESSED", ""),
        ({**DDP, "gradient_bytes": None}, COUNTS, 0.2, "INCOMPARABLE", LOST),
        (
            POWER_SGD,
            NO_DDP,
            0.2,
            "INCOMPARABLE",
            "gradients are no longer synchronised: gradient_bytes 4,000 -> unknown",
        ),
        (
            BROADCASTS,
            NO_DDP,
            0.2,
            "INCOMPARABLE",
            "a step no longer sends anything: broadcast.count 2 -> 0",
        ),
        (
            WITH_LOSS,
            LOSS_ALONE,
            0.2,
            "INCOMPARABLE",
            "gradients are no longer synchronised: gradient_bytes 1,000,000 -> 0",
        ),
        (
            {**WITH_LOSS, "gradient_bytes": None},
            {**LOSS_ALONE, "gradient_bytes": None},
            0.2,
            "INCOMPARABLE",
            "gradients are no longer synchronised: all_reduce.bytes 1,000,004 -> 4",
        ),
        (  # no limit can be on what is unknown
            WITH_LOSS,
            {**LOSS_ALONE, "gradient_bytes": None},
            0.2,
            "INCOMPARABLE",
            "gradients are no longer synchronised: all_reduce.bytes 1,000,004 -> 4",
        ),
        (  # figures of the training alone
            WITH_LOSS,
            {**LOSS_ALONE, "all_reduce.bytes": 50_000},
            0.2,
            "INCOMPARABLE",
            "gradients are no longer synchronised: gradient_bytes 1,000,000 -> 0",
        ),
        (  # gradients that are sent in another way, as fewer bytes
            WITH_LOSS,
            {**LOSS_ALONE, "all_reduce.bytes": 250_000},
            0.2,
            "IMPROVED",
            "",
        ),
        (  # a hook of DDP that sends nothing
            WITH_LOSS,
            {**NO_DDP, "gradient_bytes": 1_000_000},
            0.2,
            "INCOMPARABLE",
            "gradients are no longer synchronised: all_reduce.count 2 -> 0",
        ),
        (  # PowerSGD
            WITH_LOSS,
            {**WITH_LOSS, "all_reduce.bytes": 4000},
            0.2,
            "IMPROVED",
            "",
        ),
        (DDP, FSDP, 0.2, "REGRESSED", ""),  # it sends more of another kind
        (DDP, dict.fromkeys(COUNTS), 0.2, "IMPROVED", ""),
        (NO_DDP, NO_DDP, 0.2, "IMPROVED", ""),
    ],
)
def test_steps_that_send_nothing_any_more_are_not_called_faster(
    before: Any, now: Any, factor: float, status: str, difference: str
) -> None:
    sides = (
        replace(measurement(times(factor)), counters=now),
        replace(measurement(STEADY), counters=before),
    )
    verdict = decide(*sides, P50, *COUNTER_LIMITS)
    assert (verdict.status.value, "".join(verdict.differences)) == (
        status,
        difference,
    )
    assert (verdict.reason == "not-synchronised") is (status == "INCOMPARABLE")


def test_lost_traffic_is_accepted_by_a_limit_of_the_users_and_is_none_of_rpc_or_of_one_collective() -> (
    None
):
    now, base = (
        replace(measurement(times(0.2)), counters=NO_DDP),
        replace(measurement(STEADY), counters=DDP),
    )
    accepted = Limit(metric="all_reduce.count", value=0.0, unit="%")
    assert decide(now, base, P50, accepted) == "IMPROVED"
    assert decide(now, base, P50, REDUCED) == "INCOMPARABLE"
    for facts in (
        {"key": {"roles": "2 trainers 1 ps"}},
        {"must_match": {"collective": "all_reduce of 4MiB float32"}},
    ):
        sides = (
            replace(side, environment=Environment(**facts))
            for side in (now, base)
        )
        assert decide(*sides, P50, *COUNTER_LIMITS) == "IMPROVED"


def test_losses_that_differ_are_noted_of_steps_that_send_nothing_any_more() -> (
    None
):
    now, base = with_loss(*((9.0, 9.0),) * 3), with_loss(*SAME)
    verdict = decide(
        replace(now, counters=NO_DDP),
        replace(base, counters=DDP),
        P50,
        *COUNTER_LIMITS,
    )
    assert verdict == "INCOMPARABLE"
    assert verdict.diverged is not None


def test_an_unknown_counter_hides_no_regression() -> None:
    verdict = decide(measurement(times(1.5)), measurement(STEADY), P50, BYTES)
    assert (verdict.status, verdict.reason) == (
        Status.REGRESSED,
        "beyond-limit",
    )
    assert verdict.differences == ("rpc.bytes is unknown now",)


# --- pairs whose windows were interleaved

STRETCHES = [(10, 10, 10)] * 5


def disturbed(factor: float, *, stretch: int) -> Measurement:
    """Steps that take `factor` times as long, and in one stretch of each window five times as long
    as that."""
    steady = measurement(times(factor))
    launches = tuple(
        tuple(
            seconds * 5 if number // 10 == stretch else seconds
            for number, seconds in enumerate(launch)
        )
        for launch in steady.samples.step_seconds
    )
    return replace(
        steady, samples=replace(steady.samples, step_seconds=launches)
    )


@pytest.mark.parametrize(
    ("metric", "change"),
    [("p25", 0.2), ("p50", 0.2), ("p75", 0.2), ("p10", 0.2), ("p90", 4.4)],
)
def test_the_middle_is_compared_stretch_by_stretch(
    metric: str, change: float
) -> None:
    """Bursts that meet a third of one side's steps are in its 90th percentile, and not in what most
    stretches show."""
    limit = Limit(metric=metric, value=0.10, unit="%")
    now, base = disturbed(1.2, stretch=2), measurement(STEADY)
    verdict = decide(now, base, limit, interleaved=True, stretches=STRETCHES)
    assert verdict == "REGRESSED"
    assert verdict.comparisons[0].change.estimate == pytest.approx(
        change, rel=0.15
    )


def test_a_burst_in_either_side_is_no_change_of_the_code() -> None:
    one, other = disturbed(1.0, stretch=0), disturbed(1.0, stretch=2)
    for now, base in (
        (one, other),
        (one, measurement(STEADY)),
        (measurement(STEADY), other),
    ):
        comparison = decide(
            now, base, interleaved=True, stretches=STRETCHES
        ).comparisons[0]
        assert comparison.change.estimate == pytest.approx(0.0, abs=0.002)


@pytest.mark.parametrize(
    ("pairs", "metric", "change"),
    [(10, "p50", 0.0), (10, "p10", 0.2), (5, "p50", 0.2)],
    ids=["the middle", "another metric", "too few to leave one out"],
)
def test_a_pair_that_differs_much_is_left_out_of_the_middle_from_ten_pairs_on(
    pairs: int, metric: str, change: float
) -> None:
    """One launch is so much slower that all together are by a fifth."""
    levels = STEADY * (pairs // len(STEADY))
    slow = measurement(times(1.2**pairs)).samples
    steady = measurement(levels)
    launches = (slow.step_seconds[0], *steady.samples.step_seconds[1:])
    now = replace(
        steady, samples=replace(steady.samples, step_seconds=launches)
    )
    limit = Limit(metric=metric, value=0.10, unit="%")
    stretches = [STRETCHES[0]] * pairs
    comparison = decide(
        now, steady, limit, interleaved=True, stretches=stretches
    ).comparisons[0]
    assert comparison.change.estimate == pytest.approx(change, abs=0.002)


def test_a_window_that_took_no_turns_is_compared_as_a_whole() -> None:
    now, base = disturbed(1.2, stretch=2), measurement(STEADY)
    whole = decide(now, base, interleaved=True)
    assert decide(now, base, interleaved=True, stretches=[(30,)] * 5) == whole
    some = decide(
        now, base, interleaved=True, stretches=[(10, 10, 10), *[(30,)] * 4]
    )
    assert (
        some.comparisons[0].change.estimate
        != whole.comparisons[0].change.estimate
    )


def test_cpu_time_is_compared_as_a_whole() -> None:
    limit = Limit(metric="cpu_p50", value=0.10, unit="%")
    now, base = (
        measurement(STEADY, cpu=times(1.2)),
        measurement(STEADY, cpu=STEADY),
    )
    verdicts = [
        decide(now, base, limit, interleaved=True, stretches=every)
        for every in ((), STRETCHES)
    ]
    assert verdicts[0] == verdicts[1]


def test_slow_steps_that_no_percentile_shows_are_a_regression_of_the_mean() -> (
    None
):
    limits = tuple(
        replace(limit, default=False)
        for limit in TIME_LIMITS
        if limit.kind.is_wall_time
    )
    before = measurement(STEADY)
    slower = tuple(
        tuple(15 * s if k % 10 == 9 else s for k, s in enumerate(each))
        for each in before.samples.step_seconds
    )
    now = replace(before, samples=replace(before.samples, step_seconds=slower))
    verdict = decide(now, before, *limits)
    assert [(c.limit.metric, c.status) for c in verdict.comparisons] == [
        ("p10", Status.PASS),
        ("p50", Status.PASS),
        ("mean", Status.REGRESSED),
    ]
    assert verdict.comparisons[2].change.estimate == pytest.approx(
        1.4, abs=0.01
    )


# --- less work is not faster code


def processing(
    factor: float,
    examples: Sequence[int] | None,
    counters: Mapping[str, int | None] | None = None,
) -> Measurement:
    """Steps that take `factor` times as long as steady ones, of two ranks, with `examples` of each
    rank by launch."""
    found = replace(measurement(times(factor)), counters=counters or {})
    if examples is None:
        return found
    table = tuple(((each,) * 30,) * 2 for each in examples)
    return replace(found, samples=replace(found.samples, examples=table))


FULL, HALF = (64,) * len(STEADY), (32,) * len(STEADY)
NONE = (0,) * len(STEADY)  # empty batches


@pytest.mark.parametrize(
    ("factor", "now", "before", "status"),
    [
        (1.0, FULL, FULL, "PASS"),
        (0.5, HALF, FULL, "INCOMPARABLE"),
        (1.0, HALF, FULL, "INCOMPARABLE"),
        # it is slower, and does less
        (1.5, HALF, FULL, "REGRESSED"),
        # it does more
        (2.0, FULL, HALF, "INCOMPARABLE"),
        (0.5, NONE, FULL, "INCOMPARABLE"),
        (2.0, FULL, NONE, "INCOMPARABLE"),
        (1.0, NONE, NONE, "PASS"),
        (0.5, HALF, None, "IMPROVED"),
        (0.5, None, FULL, "IMPROVED"),
        # they vary from launch to launch by as much
        (1.0, (60, *FULL[1:]), (66, *FULL[1:-1], 62), "PASS"),
    ],
)
def test_times_of_steps_with_other_examples_are_not_compared(
    factor: float,
    now: Sequence[int] | None,
    before: Sequence[int] | None,
    status: str,
) -> None:
    verdict = decide(processing(factor, now), processing(1.0, before))
    assert verdict.status.value == status
    if status == "INCOMPARABLE":
        assert verdict.reason == "other-examples"
        assert now
        assert before
        sides = f"examples a step {2 * before[0]} -> {2 * now[0]}"
        assert verdict.differences == (sides,)


def test_what_a_step_does_less_of_is_told_with_every_verdict() -> None:
    before = {"flops": 2_000, "gradient_bytes": 400}
    now = {"flops": 1_000, "gradient_bytes": 300}
    for factor in (0.5, 1.0, 1.5):
        verdict = decide(
            processing(factor, HALF, now), processing(1.0, FULL, before)
        )
        assert [*sentences.left_out(verdict)] == [
            "a step does 0.50x the operations of before",
            "a step synchronises 0.75x the gradient bytes of before",
            "a step takes 0.50x the examples of before",
        ]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"flops": 2_000}, {"flops": 2_000}),
        ({"flops": 2_000}, {"flops": 1_999}),  # 1.00x
        ({"flops": 2_000}, {"flops": 4_000}),
        ({"flops": 2_000}, {"flops": None}),
        ({}, {"flops": 2_000}),
        ({"flops": 0}, {"flops": 0}),
        # as any counter that fell to 0
        ({"gradient_bytes": 8}, {"gradient_bytes": 0}),
    ],
)
def test_work_that_did_not_fall_is_not_told(
    before: dict[str, int | None], now: dict[str, int | None]
) -> None:
    verdict = decide(processing(1.0, None, now), processing(1.0, None, before))
    assert verdict.less == ()


def test_examples_that_differ_say_what_to_do() -> None:
    now = processing(0.5, HALF)
    verdict = decide(now, processing(1.0, FULL))
    said = outcome("step", Drawn(), verdict, now, baseline_path="x.json")
    assert sentences.why_not_compared(said) == (
        "examples a step 128 -> 64: measure as before, or save a new baseline"
    )


def test_a_default_limit_on_the_mean_has_a_tenth_of_the_weight_of_another() -> (
    None
):
    mean = Limit(metric="mean", value=0.25, unit="%")
    side = measurement(STEADY)
    for default, share in ((True, 0.1), (False, 1.0)):
        limits = [replace(each, default=default) for each in (P50, mean)]
        p50, other = decide(side, side, *limits).comparisons
        assert other.level == pytest.approx(share * p50.level)


@pytest.mark.parametrize(
    ("now", "status"),
    [
        (9, "REGRESSED"),
        (8, "NO BASELINE"),
        (7, "NO BASELINE"),
        (None, "NO BASELINE"),
    ],
)
def test_with_counters_of_another_machine_alone_only_a_rise_is_found(
    now: int | None, status: str
) -> None:
    current, there = (
        replace(measurement(STEADY), counters={"rpc.bytes": count})
        for count in (now, 8)
    )
    nothing = Verdict(status=Status.NO_BASELINE, reason=Reason.NO_BASELINE)
    assert with_counters(nothing, current, [there], (BYTES,)) == status
