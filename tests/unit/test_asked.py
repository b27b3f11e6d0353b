"""What is asked of a measurement: how many steps a window has, which limits matter to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_ddpperf import options
from pytest_ddpperf.baseline import content
from pytest_ddpperf.options import parse
from pytest_ddpperf.options.table import ROWS
from pytest_ddpperf.records import Baseline, Measurement, Plan, Recording, Samples, TestId
from pytest_ddpperf.records.asked import TIME_LIMITS, collective, limits_for
from tests.unit.test_machine import settings

PLAN = Plan(world_size=2, backend="gloo", device="cpu", steps=30, min_seconds=1.0, most_steps=150)


@pytest.mark.parametrize(
    ("step_seconds", "steps"),
    [(1e-9, 150), (0.005, 150), (0.0069, 145), (0.01, 100), (0.03, 34), (0.04, 30), (5.0, 30)],
)
def test_a_window_lasts_as_long_as_was_asked_between_two_bounds(step_seconds: float, steps: int) -> None:
    assert PLAN.steps_for(step_seconds) == steps
    assert PLAN.room >= steps


def test_a_window_of_further_launches_has_the_steps_of_the_first() -> None:
    for steps in (1, 30, 99, 400):
        further = PLAN.exactly(steps)
        assert [further.steps_for(seconds) for seconds in (1e-9, 0.01, 5.0)] == [steps] * 3
        assert further.room >= steps


def test_without_a_time_there_are_exactly_the_asked_steps() -> None:
    plan = options.plan(settings(min_seconds=0.0, steps=7), world_size=2, backend="gloo", device="cpu")
    assert (plan.steps_for(1e-9), plan.steps_for(5.0)) == (7, 7)


@pytest.mark.parametrize(("world_size", "launches", "steps"), [(1, 20, 300), (2, 20, 150), (2, 6, 500), (400, 20, 30)])
def test_windows_are_bounded_by_what_a_baseline_would_keep_of_them(world_size: int, launches: int, steps: int) -> None:
    plan = options.plan(settings(max_launches=launches), world_size=world_size, backend="gloo", device="cpu")
    assert plan.steps_for(1e-9) == steps


def test_a_session_of_the_longest_windows_is_small() -> None:
    plan = options.plan(settings(), world_size=2, backend="gloo", device="cpu")
    launch = (0.012345678,) * plan.room
    every = ((launch, launch),) * 20
    samples = Samples(step_seconds=(launch,) * 20, rank_seconds=every, cpu_seconds=every)
    session = Recording(measurement=Measurement(samples=samples))
    baseline = Baseline(test=TestId(module="m", name="t"), sessions=(session,))
    assert 180_000 < len(content.text(baseline)) < 200_000


# --- limits


PLANS = {
    "ddp": PLAN,
    "rpc": replace(PLAN, parameter_servers=1),
    "collective": replace(PLAN, collective=collective("all_reduce", 1024, "float32", 2)),
}


@pytest.mark.parametrize(
    ("asked", "of_ddp", "of_rpc", "of_collective"),
    [
        ("p95:5%", "p95:5%", "p95:5% rpc.bytes:0%", "p95:5%"),
        ("busbw:5%", "p10:10% p50:10%", "p10:10% p50:10% rpc.bytes:0%", "busbw:5%"),
        ("p95:5%,busbw:5%", "p95:5%", "p95:5% rpc.bytes:0%", "p95:5% busbw:5%"),
        ("rpc.bytes:2%", "p10:10% p50:10%", "rpc.bytes:2%", "p10:10% p50:10%"),
        (
            "all_reduce.bytes:0%,rpc.bytes:2%",
            "all_reduce.bytes:0%",
            "all_reduce.bytes:0% rpc.bytes:2%",
            "all_reduce.bytes:0%",
        ),
    ],
)
def test_limits_hold_for_what_they_matter_to_and_the_default_ones_where_none_does(
    asked: str, of_ddp: str, of_rpc: str, of_collective: str
) -> None:
    found = {name: limits_for(plan, parse.limits(asked)) for name, plan in PLANS.items()}
    reported = {name: " ".join(map(str, limits)) for name, limits in found.items()}
    assert reported == {"ddp": of_ddp, "rpc": of_rpc, "collective": of_collective}
    named = asked.split(",")
    assert all(limit.default is (str(limit) not in named) for limits in found.values() for limit in limits)


def test_the_default_limits_are_those_of_the_option() -> None:
    (row,) = (row for row in ROWS if row.field == "limits")
    assert parse.limits(row.default) == tuple(replace(limit, default=False) for limit in TIME_LIMITS)
