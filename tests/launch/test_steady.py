"""Warm-up goes on while something still settles, and what settles in the window is told. By counts,
never by times."""

from __future__ import annotations

import gc
import itertools
import logging
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf.rank.warm_up import WARMUP_BEYOND
from tests.launch.conftest import Bench
from tests.torch_version import COUNTS_IN_COMPILED_CODE, NEEDS_RECORDER


def compiling(at: set[int], rank: int = 0, *, fullgraph: bool = False) -> Any:
    """A set-up whose step hands a new function to torch.compile in its calls number `at`, on one
    rank; all ranks return how often they were called so far as their examples."""

    def setup(ctx: Any) -> Any:
        calls = 0

        def step() -> int:
            nonlocal calls
            calls += 1
            if calls in at and ctx.rank == rank:
                add = eval(f"lambda x: x + {calls}")
                torch.compile(add, backend="eager", fullgraph=fullgraph)(
                    torch.ones(2)
                )
            dist.all_reduce(torch.ones(1))
            return calls

        return step

    return setup


def first_timed(samples: Any) -> list[int]:
    assert samples.examples is not None
    return [rank[0] for rank in samples.examples]


def test_a_steady_step_is_warmed_up_as_asked(bench: Bench) -> None:
    samples = bench.measure(compiling(set()), warmup=3)
    assert first_timed(samples) == [4, 4]
    assert (samples.unfit, samples.unsettled) == ("", "")


def test_what_compiles_before_the_last_warm_up_step_does_not_matter(
    bench: Bench,
) -> None:
    assert first_timed(bench.measure(compiling({1, 2}), warmup=3)) == [4, 4]


def test_warm_up_goes_on_in_all_ranks_while_one_compiles(bench: Bench) -> None:
    samples = bench.measure(compiling({2, 3, 4}, rank=1), warmup=2)
    assert first_timed(samples) == [6, 6]
    assert samples.unsettled == ""


def test_warm_up_has_a_cap_that_is_told(bench: Bench) -> None:
    samples = bench.measure(compiling(set(range(1, 40))), warmup=1, steps=2)
    assert first_timed(samples) == [WARMUP_BEYOND + 2] * 2
    assert samples.unsettled == "compiling"
    assert samples.unfit == "rank 0 recompiled at step 1: raise --ddp-warmup"


def test_without_warm_up_none_is_added(bench: Bench) -> None:
    samples = bench.measure(compiling({1}), warmup=0)
    assert first_timed(samples) == [1, 1]
    assert samples.unfit == "rank 0 recompiled at step 1: raise --ddp-warmup"


def test_a_step_that_resets_the_compiler_and_compiles_again_is_unfit(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        add = torch.compile(lambda x: x + 1, backend="eager")

        def step() -> None:
            torch.compiler.reset()
            add(torch.ones(2))
            dist.all_reduce(torch.ones(1))

        return step

    samples = bench.measure(setup, warmup=1, steps=2)
    assert samples.unsettled == "compiling"
    assert samples.unfit.endswith("recompiled at step 1: raise --ddp-warmup")


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_recompilation_in_the_window_is_told_with_its_step(
    bench: Bench, fullgraph: bool
) -> None:
    setup = compiling({5}, rank=1, fullgraph=fullgraph)
    samples = bench.measure(setup, warmup=2, steps=4)
    assert samples.unfit == "rank 1 recompiled at step 3: raise --ddp-warmup"


def test_a_collection_in_what_torch_compile_leaves_to_python_is_no_compilation(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        def add(x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            gc.collect()
            return x + 1

        compiled = torch.compile(add, backend="eager")

        def step() -> None:
            dist.all_reduce(compiled(torch.ones(2)))

        return step

    samples = bench.measure(setup, warmup=4, steps=4)
    assert samples.unfit == ""
    assert samples.collector_seconds is not None
    assert min(samples.collector_seconds) > 0


@pytest.mark.parametrize("logged", [True, False])
def test_buckets_are_rebuilt_before_the_window(
    bench: Bench, logged: bool
) -> None:
    def setup(ctx: Any) -> Any:
        if not logged:
            logging.disable(logging.CRITICAL)
        model = DistributedDataParallel(nn.Linear(4, 4))
        calls = 0

        def step() -> int:
            nonlocal calls
            calls += 1
            model(torch.ones(2, 4)).sum().backward()
            return calls

        return step

    # The first step brings the order of gradients, the second rebuilds, the third finds nothing to
    # do.
    assert first_timed(bench.measure(setup, warmup=1)) == [2, 2]
    assert first_timed(bench.measure(setup, warmup=2)) == [4, 4]


# --- steps that do not do the same work


def sending(counts: list[int]) -> Any:
    """A set-up whose step sends so many collectives in its first calls, and none later."""

    def setup(ctx: Any) -> Any:
        left = iter(counts)

        def step() -> None:
            for _ in range(next(left, 0)):
                dist.broadcast(torch.ones(1), 0)
            dist.barrier()  # sends nothing

        return step

    return setup


@NEEDS_RECORDER
@pytest.mark.parametrize(
    ("sent", "words"), [(1, "1 collective"), (3, "3 collectives")]
)
def test_a_step_that_no_longer_sends_anything_is_doubted(
    bench: Bench, sent: int, words: str
) -> None:
    note = f"the first warm-up step sent {words}, a later one none: does the step still train?"
    assert bench.measure(sending([sent, 1]), warmup=4).doubts["sent"] == note


@NEEDS_RECORDER
def test_trainers_that_no_longer_send_anything_are_doubted(
    bench: Bench,
) -> None:
    plan = replace(bench.plan(warmup=3), parameter_servers=1)
    assert (
        "sent 2 collectives"
        in bench.launch(plan, sending([2]), None, None).doubts["sent"]
    )


@pytest.mark.parametrize(
    ("counts", "warmup"),
    [([], 3), ([0, 5, 5], 4), ([5, 5, 1], 4), ([5], 2)],
    ids=["never sent", "sent later", "still sends", "not counted"],
)
def test_other_changes_of_what_a_step_sends_are_not_doubted(
    bench: Bench, counts: list[int], warmup: int
) -> None:
    assert "sent" not in bench.measure(sending(counts), warmup=warmup).doubts


@NEEDS_RECORDER
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=COUNTS_IN_COMPILED_CODE)]
)
def test_ordinary_training_is_not_doubted(bench: Bench, compiled: bool) -> None:
    """DDP sends its gradients in other buckets from the second step on."""

    def setup(ctx: Any) -> Any:
        model = nn.Sequential(*[nn.Linear(200, 200) for _ in range(4)])
        if compiled:
            replicated = DistributedDataParallel(
                torch.compile(model, backend="eager")
            )
        else:
            replicated = DistributedDataParallel(model, bucket_cap_mb=1e-5)
        inputs = torch.ones(64, 200)
        return lambda: replicated(inputs).sum().backward()

    samples = bench.measure(setup, warmup=5, steps=9)
    assert samples.counters["all_reduce.count"] == (1 if compiled else 8)
    assert samples.doubts == {}


def with_ddp(kind: str) -> Any:
    """A set-up with a DDP module, whose step calls it as `kind` says."""

    def setup(ctx: Any) -> Any:
        model, calls = (
            DistributedDataParallel(nn.Linear(4, 4)),
            itertools.count(),
        )

        def step() -> None:
            called = model.module if kind == "inner" else model
            synchronises = kind == "other steps" and next(calls) % 2
            with nullcontext() if synchronises else model.no_sync():
                called(torch.ones(2, 4)).sum().backward()

        return step

    return setup


@NEEDS_RECORDER
@pytest.mark.parametrize(
    ("setup", "plan", "is_silent"),
    [
        (lambda ctx: lambda: None, {"warmup": 3}, True),
        (lambda ctx: lambda: None, {"warmup": 2}, False),  # nothing was counted
        (lambda ctx: lambda: None, {"warmup": 3, "ranks": 1}, False),
        (sending([1] * 9), {"warmup": 3}, False),
        (with_ddp("inner"), {"warmup": 3}, True),
        (with_ddp("other steps"), {"warmup": 6}, False),
    ],
    ids=[
        "empty",
        "not counted",
        "alone",
        "sends",
        "inner module",
        "accumulates",
    ],
)
def test_ranks_that_are_known_to_send_nothing_are_noticed(
    bench: Bench, setup: Any, plan: dict[str, int], is_silent: bool
) -> None:
    assert bench.measure(setup, **plan).is_silent is is_silent


@NEEDS_RECORDER
def test_trainers_over_rpc_may_send_nothing_to_each_other(bench: Bench) -> None:
    plan = replace(bench.plan(warmup=3), parameter_servers=1)
    samples = bench.launch(plan, lambda ctx: lambda: None, None, None)
    assert (samples.counters["collectives.count"], samples.is_silent) == (
        0,
        False,
    )


def sleeping(calls: set[int]) -> Any:
    """A set-up whose step takes fifty times as long in its calls of these numbers, from 1."""

    def setup(ctx: Any) -> Any:
        numbers = iter(range(1, 1000))
        return lambda: time.sleep(1.0 if next(numbers) in calls else 0.02)

    return setup


def test_a_first_timed_step_that_is_far_longer_is_doubted(bench: Bench) -> None:
    doubt = bench.measure(sleeping({2}), steps=5).doubts["first step"]
    assert doubt.endswith(
        "x the median of the others: does the step do the same work each time?"
    )
    with bench.paused(sleeping({2}), steps=5) as paused_launch:
        paused_launch.stretch(5)
        paused_launch.stretch(5)
        assert "first step" in paused_launch.deliver().doubts


@pytest.mark.parametrize(
    ("calls", "warmup"), [({1}, 0), ({1, 3}, 1)], ids=["no warm-up", "later"]
)
def test_other_long_steps_are_not_doubted(
    bench: Bench, calls: set[int], warmup: int
) -> None:
    assert bench.measure(sleeping(calls), warmup=warmup, steps=5).doubts == {}


def test_the_first_of_empty_steps_is_not_doubted(bench: Bench) -> None:
    assert (
        bench.measure(lambda ctx: lambda: None, warmup=3, steps=30).doubts == {}
    )


def test_a_first_timed_step_that_compiles_is_not_doubted(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        step = compiling({2})(ctx)
        sleep = sleeping({2})(ctx)
        return lambda: (step(), sleep())

    samples = bench.measure(setup, steps=5)
    assert (samples.unfit, samples.doubts) == (
        "rank 0 recompiled at step 1: raise --ddp-warmup",
        {},
    )
