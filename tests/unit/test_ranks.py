"""Whom a failure names, and what it says of work and waiting: by given figures of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pytest_ddpperf.records import (
    Baseline,
    BaselineSide,
    Comparison,
    Interval,
    Limit,
    Measurement,
    Outcome,
    Plan,
    Recording,
    Samples,
    Status,
    TestId,
    Verdict,
)
from pytest_ddpperf.report import failure
from tests.unit.test_baseline_side import BESIDE

NOT_TOLD = "slowest rank: unknown (ranks wait for each other in collectives)"
WAITED = "the rest is waiting (sleep, I/O, communication)"
LOAD = "or other load on the machine: measure again when it is quiet, or with --ddp-against"


def side(step: float, *, cpu: Sequence[float] | None, own: Sequence[float] = ()) -> Measurement:
    """In ms: the group's step, and each rank's CPU time and own step; without `own` all are as long as the group's."""

    def launches(by_rank: Sequence[float]) -> tuple[tuple[tuple[float, ...], ...], ...]:
        return (tuple((ms / 1000,) * 3 for ms in by_rank),) * 2

    return Measurement(
        samples=Samples(
            step_seconds=((step / 1000,) * 3,) * 2,
            rank_seconds=launches(own or [step] * len(cpu or own)),
            cpu_seconds=None if cpu is None else launches(cpu),
        )
    )


def reported(
    now: Measurement,
    *base: Measurement,
    metric: str = "p50",
    status: Status = Status.REGRESSED,
    baseline_side: BaselineSide | None = None,
) -> list[str]:
    """Lines about ranks, of a verdict on `metric` between the first session and now."""
    before, after = (side.samples.step_seconds[0][0] for side in (base[0], now))
    change = Comparison(
        limit=Limit(metric=metric, value=0.1, unit="%"),
        status=status,
        reason="x",
        baseline_seconds=before,
        now_seconds=after,
        change=Interval(estimate=after / before - 1, low=0.0, high=9.0),
        p_value=0.0,
        level=0.05,
        resolution=0.1,
        alarm_rate=0.0,
        settled=True,
    )
    test = TestId(module="m", name="t")
    outcome = Outcome(
        nodeid="m::t",
        test=test,
        plan=Plan(world_size=len(now.samples.rank_seconds[0]), backend="gloo", device="cpu"),
        launches=2,
        batch_size=None,
        verdict=Verdict(status=status, reason="x", comparisons=(change,)),
        fails=True,
        measurement=now,
        baseline_side=baseline_side,
    )
    sessions = tuple(Recording(measurement=side) for side in base)
    return list(failure.rank_lines(outcome, Baseline(test=test, sessions=sessions)))


def test_a_rank_that_works_more_is_named() -> None:
    assert reported(side(30, cpu=(10, 29)), side(11, cpu=(10, 10))) == [
        "slowest rank: 1, its CPU time +19.0ms of +19.0ms at p50; others +0s at most"
    ]


def test_several_ranks_that_work_more_are_named_together() -> None:
    assert reported(side(30, cpu=(10, 29, 11, 28)), side(11, cpu=(10, 10, 10, 10))) == [
        "slowest ranks: 1, 3, their CPU time +18.0ms to +19.0ms of +19.0ms at p50; others +1.00ms at most"
    ]


def test_where_all_ranks_work_more_none_stands_out() -> None:
    assert reported(side(30, cpu=(20, 29)), side(11, cpu=(10, 10))) == [
        "slowest rank: none; every rank's CPU time rose, +10.0ms to +19.0ms of +19.0ms at p50"
    ]


def test_nobody_is_named_for_a_change_that_cpu_time_does_not_explain() -> None:
    """Rank 1 is late by sleeping; that rank 0's CPU time rose, too, has nothing to do with it."""
    assert reported(side(31, cpu=(10.13, 10)), side(11, cpu=(10, 10))) == [
        f"CPU time: +130us at most of +20.0ms at p50: {WAITED} {LOAD}",
        NOT_TOLD,
    ]


def test_other_load_takes_the_cores_and_some_cpu_time() -> None:
    assert reported(side(21.5, cpu=(9.8, 9.7)), side(10, cpu=(9, 9)))[0].startswith(
        "CPU time: +800us at most of +11.5ms"
    )


@pytest.mark.parametrize(("risen", "named"), [(9.9, False), (10.1, True)])
def test_half_of_the_change_is_its_main_part(risen: float, named: bool) -> None:
    first = reported(side(31, cpu=(10 + risen, 10)), side(11, cpu=(10, 10)))[0]
    assert first.startswith("slowest rank: 0, its CPU time +10.1ms of +20.0ms") is named
    assert first.startswith("CPU time: +9.90ms at most of +20.0ms") is not named


def test_other_load_is_on_both_sides_where_they_take_turns() -> None:
    assert reported(side(31, cpu=(10, 10)), side(11, cpu=(10, 10)), baseline_side=BESIDE) == [
        f"CPU time: +0s at most of +20.0ms at p50: {WAITED}; other load would be on both sides",
        NOT_TOLD,
    ]


def test_where_ranks_do_not_wait_for_each_other_their_own_steps_tell_who_slept() -> None:
    lines = reported(side(31, cpu=(10, 10), own=(31, 11)), side(11, cpu=(10, 10)))
    assert lines[1] == "slowest rank: 0, its own step time +20.0ms of +20.0ms at p50; others +0s at most"


def test_off_cpu_the_ranks_own_steps_are_all_there_is() -> None:
    base = side(11, cpu=None, own=(11, 11))
    assert reported(side(31, cpu=None, own=(11, 31)), base) == [
        "slowest rank: 1, its own step time +20.0ms of +20.0ms at p50; others +0s at most"
    ]
    assert reported(side(31, cpu=None, own=(31, 31)), base) == [NOT_TOLD]
    assert reported(side(31, cpu=(11, 31)), base) == [NOT_TOLD]  # the baseline has no CPU time


def test_a_rank_alone_is_not_told_from_others() -> None:
    assert reported(side(30, cpu=(29,)), side(11, cpu=(10,))) == []
    (line,) = reported(side(31, cpu=(10,)), side(11, cpu=(10,)))
    assert line.startswith("CPU time: +0s at most")


def test_a_rank_is_held_against_the_mean_of_all_sessions() -> None:
    assert reported(side(30, cpu=(10, 30)), side(11, cpu=(10, 5)), side(11, cpu=(10, 20))) == [
        "slowest rank: 1, its CPU time +20.0ms of +19.0ms at p50; others +0s at most"
    ]


def test_ranks_are_compared_by_as_many_steps_as_the_sides() -> None:
    now, base = side(30, cpu=(10, 29)), side(11, cpu=(10, 10))
    assert base.samples.cpu_seconds is not None
    more = replace(
        base.samples,
        step_seconds=tuple((*launch, *(9.0,) * 9) for launch in base.samples.step_seconds),
        rank_seconds=tuple(tuple((*rank, *(9.0,) * 9) for rank in launch) for launch in base.samples.rank_seconds),
        cpu_seconds=tuple(tuple((*rank, *(9.0,) * 9) for rank in launch) for launch in base.samples.cpu_seconds),
    )
    assert reported(now, replace(base, samples=more)) == reported(now, base)


def test_a_limit_on_cpu_time_is_explained_by_cpu_time_alone() -> None:
    lines = reported(side(31, cpu=(30, 29), own=(31, 11)), side(11, cpu=(10, 10)), metric="cpu_p90")
    assert lines == ["slowest rank: none; every rank's CPU time rose, +19.0ms to +20.0ms of +20.0ms at p90"]


def test_what_got_better_has_no_slowest_rank() -> None:
    assert reported(side(11, cpu=(10, 10)), side(31, cpu=(10, 30)), status=Status.IMPROVED) == []


def test_sides_of_other_world_sizes_have_no_ranks_in_common() -> None:
    assert reported(side(31, cpu=(10, 10)), side(11, cpu=(10, 10, 10, 10))) == []
