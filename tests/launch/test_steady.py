"""Warm-up goes on while something still settles, and what settles in the window is told. By counts, never by times."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf.rank.sampling import WARMUP_BEYOND
from tests.launch.conftest import Bench


def compiling(at: set[int], rank: int = 0) -> Any:
    """A set-up whose step hands a new function to torch.compile in its calls number `at`, on one rank; all ranks
    return how often they were called so far as their examples."""

    def setup(ctx: Any) -> Any:
        calls = 0

        def step() -> int:
            nonlocal calls
            calls += 1
            if calls in at and ctx.rank == rank:
                torch.compile(eval(f"lambda x: x + {calls}"), backend="eager")(torch.ones(2))
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


def test_what_compiles_before_the_last_warm_up_step_does_not_matter(bench: Bench) -> None:
    assert first_timed(bench.measure(compiling({1, 2}), warmup=3)) == [4, 4]


def test_warm_up_goes_on_in_all_ranks_while_one_compiles(bench: Bench) -> None:
    samples = bench.measure(compiling({2, 3, 4}, rank=1), warmup=2)
    assert first_timed(samples) == [6, 6]
    assert samples.unsettled == ""


def test_warm_up_has_a_cap_that_is_told(bench: Bench) -> None:
    samples = bench.measure(compiling(set(range(1, 40))), warmup=1, steps=2)
    assert first_timed(samples) == [WARMUP_BEYOND + 2] * 2
    assert samples.unsettled == "compiling"
    assert samples.unfit == "rank 0 recompiled at step 1"


def test_without_warm_up_none_is_added(bench: Bench) -> None:
    samples = bench.measure(compiling({1}), warmup=0)
    assert first_timed(samples) == [1, 1]
    assert samples.unfit == "rank 0 recompiled at step 1"


def test_a_recompilation_in_the_window_is_told_with_its_step(bench: Bench) -> None:
    samples = bench.measure(compiling({5}, rank=1), warmup=2, steps=4)
    assert samples.unfit == "rank 1 recompiled at step 3"


@pytest.mark.parametrize("logged", [True, False])
def test_buckets_are_rebuilt_before_the_window(bench: Bench, logged: bool) -> None:
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

    # The first step brings the order of gradients, the second rebuilds, the third finds nothing to do.
    assert first_timed(bench.measure(setup, warmup=1)) == [2, 2]
    assert first_timed(bench.measure(setup, warmup=2)) == [4, 4]
