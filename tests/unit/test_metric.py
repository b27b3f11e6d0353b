"""Each kind of metric: its names, its figures, and where it applies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_ddpperf.records.metric import NAMED, metric_of
from pytest_ddpperf.records.plan import Limit, Plan, collective
from pytest_ddpperf.records.samples import Measurement, Samples
from pytest_ddpperf.records.step_phases import (
    FORWARD,
    PHASES,
    RANK_WAIT,
    StepPhases,
)
from pytest_ddpperf.verdict.observed import bound

LAUNCHES = ((1.0, 2.0, 3.0), (2.0, 4.0, 9.0))
MEASURED = Measurement(
    samples=Samples(
        step_seconds=LAUNCHES,
        rank_seconds=tuple((launch, launch) for launch in LAUNCHES),
        cpu_seconds=(((1.0, 1.0), (3.0, 3.0)), ((4.0, 4.0), (2.0, 2.0))),
    ),
    phases=(
        StepPhases(
            steps=3,
            own={
                **dict.fromkeys((*PHASES, RANK_WAIT), (0.0, None)),
                FORWARD: (2, 5),
            },
            path={},
        ),
    ),
)
PLAN = Plan(world_size=2, backend="gloo", device="cpu")
PLANS = {
    "ddp": PLAN,
    "rpc": replace(PLAN, parameter_servers=1),
    "collective": replace(
        PLAN, collective=collective("broadcast", 64, "int8", 2)
    ),
}


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("p50", (2.0, 4.0)),
        ("p100", (3.0, 9.0)),
        ("mean", (2.0, 5.0)),
        ("busbw", (2.0, 4.0)),
        ("cpu_p50", (3.0, 4.0)),
        ("forward", (5.0,)),
        ("data", (0.0,)),
    ],
)
def test_a_metric_has_a_figure_of_each_launch(
    name: str, figures: tuple[float, ...]
) -> None:
    assert metric_of(name).figures(MEASURED) == figures


@pytest.mark.parametrize("name", ["p50", "mean", "busbw"])
@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_time_that_is_no_duration_is_an_error(
    name: str, wrong: float
) -> None:
    samples = replace(MEASURED.samples, step_seconds=((1.0, wrong),))
    with pytest.raises(ValueError, match="is not a duration in seconds"):
        metric_of(name).figures(replace(MEASURED, samples=samples))


def test_a_count_is_no_figure_of_a_launch() -> None:
    with pytest.raises(
        ValueError, match=r"rpc\.bytes is no figure of a launch"
    ):
        metric_of("rpc.bytes").figures(MEASURED)


def test_an_unknown_name_is_that_of_a_figure_which_is_not_known() -> None:
    assert metric_of("of another version").figures(MEASURED) == ()


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        ("p10", {"ddp", "rpc", "collective"}),
        ("cpu_p50", {"ddp", "rpc", "collective"}),
        ("mean", {"ddp", "rpc", "collective"}),
        ("backward", {"ddp"}),
        ("busbw", {"collective"}),
        ("rpc.calls", {"rpc"}),
        ("buckets", {"ddp", "rpc", "collective"}),
    ],
)
def test_a_metric_applies_to_launches_that_have_it(
    name: str, plans: set[str]
) -> None:
    assert {
        key for key in PLANS if metric_of(name).applies_to(PLANS[key])
    } == plans


@pytest.mark.parametrize(
    ("name", "percentile", "is_in_stretches"),
    [
        ("p10", 10.0, False),
        ("p25", 25.0, True),
        ("p75", 75.0, True),
        ("p99.9", 99.9, False),
        ("cpu_p50", 50.0, False),
        ("mean", 50.0, False),
        ("forward", 50.0, False),
        ("busbw", 50.0, True),
    ],
)
def test_middle_percentiles_of_the_step_are_compared_in_stretches(
    name: str, percentile: float, is_in_stretches: bool
) -> None:
    found = metric_of(name)
    assert (found.percentile, found.is_in_stretches) == (
        percentile,
        is_in_stretches,
    )


def test_each_name_is_of_one_metric() -> None:
    assert {name: type(metric_of(name)) for name in NAMED} == {
        name: type(metric) for name, metric in NAMED.items()
    }


def test_the_limit_of_a_metric_of_which_less_is_worse_is_one_on_its_reciprocal() -> (
    None
):
    less = Limit(metric="busbw", value=0.5, unit="%")
    more = Limit(metric="p50", value=1.0, unit="%")
    assert bound(less, 0.0) == pytest.approx(bound(more, 0.0))
    assert less.kind.shown(2.0, collective("broadcast", 8, "int8", 2)) == 4e-9
