"""The node that is slower on both sides: by given waits, or by the work of devices."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pytest_ddpperf.explain.slow_node import describe_slow_node
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import Environment, Measurement, Samples
from pytest_ddpperf.records.step_phases import OTHER, RANK_WAIT, StepPhases

PLAN = Plan(world_size=4, nodes=2, backend="gloo", device="cpu")
ON_B = [10.0, 9.8, 0.1, 0.0]


def side(
    waits: Sequence[float | None],
    *,
    launches: int = 5,
    device: bool = False,
    is_noisy: bool = False,
) -> Measurement:
    """Steps of 20 ms in which ranks wait so many milliseconds for others, in noise; with a `device`
    their devices have as much less to do."""
    source = random.Random(0)
    spread = 20.0 if is_noisy else 0.1
    found = [
        tuple(
            None if wait is None else (wait + source.gauss(0, spread)) / 1e3
            for wait in waits
        )
        for _ in range(launches)
    ]
    phases = tuple(
        StepPhases(
            steps=10, own={RANK_WAIT: launch, OTHER: (0.0,) * 4}, path={}
        )
        for launch in found
    )
    work = tuple(tuple(0.02 - (wait or 0.0) for wait in each) for each in found)
    samples = Samples(
        step_seconds=((0.02,),) * launches,
        rank_seconds=(((0.02,),) * 4,) * launches,
        device_seconds=work if device else None,
    )
    return Measurement(
        samples=samples,
        counters={},
        environment=Environment(recorded={"hosts": "host-a, host-b"}),
        phases=() if device else phases,
    )


def described(*sides: Measurement, plan: Plan = PLAN) -> list[str]:
    return list(describe_slow_node(plan, sides, 0.015))


@pytest.mark.parametrize("device", [False, True])
def test_a_node_for_which_all_others_wait_on_both_sides_is_named(
    device: bool,
) -> None:
    assert described(side(ON_B, device=device), side(ON_B, device=device)) == [
        "node 1, host-b (ranks 2-3) is slower on both sides:"
        " the others wait 9.66 ms of a step of 20.0 ms for it"
    ]


def test_a_node_of_one_rank_has_its_rank() -> None:
    (line,) = described(
        side([0.0, 5.0, 5.0, 5.0]),
        side([0.0, 5.0, 5.0, 5.0]),
        plan=Plan(world_size=4, nodes=4, backend="gloo", device="cpu"),
    )
    assert line.startswith("node 0, host-a (rank 0) is slower on both sides")


@pytest.mark.parametrize(
    ("now", "before"),
    [
        pytest.param(side(ON_B), side([0.0] * 4), id="on one side"),
        pytest.param(
            side(ON_B), side([0.1, 0.0, 10.0, 9.8]), id="another there"
        ),
        pytest.param(
            side([10.0, 0.0, 9.0, 9.0]),
            side([10.0, 0.0, 9.0, 9.0]),
            id="a rank, and not its node",
        ),
        pytest.param(
            side([1.5, 1.5, 0.0, 0.0]),
            side([1.5, 1.5, 0.0, 0.0]),
            id="a little",
        ),
        pytest.param(
            side(ON_B, is_noisy=True), side(ON_B, is_noisy=True), id="noise"
        ),
        pytest.param(
            side(ON_B, launches=1), side(ON_B, launches=1), id="one launch"
        ),
        pytest.param(
            side([10.0, 10.0, 0.0, None]),
            side([10.0, 10.0, 0.0, None]),
            id="unknown",
        ),
    ],
)
def test_else_no_node_is_named(now: Measurement, before: Measurement) -> None:
    assert described(now, before) == []
