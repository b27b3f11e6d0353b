"""What is asked of a measurement: how many steps a window has, which limits matter to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_ddpperf.options import parse
from pytest_ddpperf.records.metric import COUNTERS, WORK
from pytest_ddpperf.records.plan import (
    COUNTER_LIMITS,
    Plan,
    collective,
    limits_for,
)

PLAN = Plan(
    world_size=2,
    backend="gloo",
    device="cpu",
    steps=30,
    min_seconds=1.0,
    most_steps=150,
)


# --- backends


@pytest.mark.parametrize(
    ("backend", "device", "between_devices"),
    [
        ("gloo", "cpu", "gloo"),
        ("nccl2", "cuda", "nccl2"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
    ],
)
def test_of_a_composite_backend_that_of_the_device_is_known(
    backend: str, device: str, between_devices: str
) -> None:
    plan = replace(PLAN, backend=backend, device=device)
    assert plan.device_backend == between_devices


# --- limits


PLANS = {
    "ddp": PLAN,
    "rpc": replace(PLAN, parameter_servers=1),
    "collective": replace(
        PLAN, collective=collective("all_reduce", 1024, "float32", 2)
    ),
}


@pytest.mark.parametrize(
    ("asked", "of_ddp", "of_rpc", "of_collective"),
    [
        ("p95:5%", "p95:5%", "p95:5% rpc.bytes:0%", "p95:5%"),
        (
            "busbw:5%",
            "p10:10% p50:10% mean:25%",
            "p10:10% p50:10% mean:25% rpc.bytes:0%",
            "busbw:5%",
        ),
        (
            "forward:5%",
            "forward:5%",
            "p10:10% p50:10% mean:25% rpc.bytes:0%",
            "p10:10% p50:10% mean:25%",
        ),
        ("p95:5%,busbw:5%", "p95:5%", "p95:5% rpc.bytes:0%", "p95:5% busbw:5%"),
        (
            "rpc.bytes:2%",
            "p10:10% p50:10% mean:25%",
            "rpc.bytes:2%",
            "p10:10% p50:10% mean:25%",
        ),
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
    found = {
        name: limits_for(plan, parse.limits(asked), {})
        for name, plan in PLANS.items()
    }
    # one of them is enough
    ours = {str(limit) for limit in COUNTER_LIMITS} - {
        "rpc.bytes:0%",
        *asked.split(","),
    }
    reported = {
        name: " ".join(text for text in map(str, limits) if text not in ours)
        for name, limits in found.items()
    }
    assert reported == {
        "ddp": of_ddp,
        "rpc": of_rpc,
        "collective": of_collective,
    }
    named = asked.split(",")
    assert all(
        limit.default is (str(limit) not in named)
        for limits in found.values()
        for limit in limits
    )


def test_all_counters_have_a_default_limit_but_what_varies_and_what_may_grow() -> (
    None
):
    limits = {
        limit.metric: str(limit)
        for limit in limits_for(PLANS["rpc"], (), {})
        if limit.kind.is_exact
    }
    assert {*COUNTERS} - limits.keys() == {
        "peak_rss.bytes",
        "buckets.largest_bytes",
        "parameters.bytes",
        *WORK,
    }
    assert limits.pop("peak_memory.bytes") == "peak_memory.bytes:5%"
    assert all(limit == f"{name}:0%" for name, limit in limits.items())
