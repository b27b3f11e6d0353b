"""How many steps a window has: as many as fill its time, the same in every rank. By counts, and by
sleeps that nothing shortens."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.launch.conftest import Bench
from tests.torch_version import QUIET_GLOO

LONG = 1000.0  # seconds, into which no test's steps come


def plan(bench: Bench, *, warmup: int = 3, **asked: Any) -> Any:
    return replace(bench.plan(warmup=warmup), **asked)


def quick(ctx: Any) -> Any:
    return lambda: dist.all_reduce(torch.ones(1))


def cleaned_up(ctx: Any) -> Iterator[Any]:
    yield quick(ctx)
    print("cleaned up")


@QUIET_GLOO
@pytest.mark.parametrize("setup", [quick, cleaned_up])
def test_a_window_has_the_most_steps_that_it_may_where_its_time_is_long(
    bench: Bench, setup: Any
) -> None:
    samples = bench.launcher.measure(
        plan(bench, min_seconds=LONG, most_steps=7), setup, bench.recorder
    )
    assert len(samples.step_seconds) == 7
    assert samples.cpu_seconds is not None
    assert [
        len(rank) for rank in (*samples.rank_seconds, *samples.cpu_seconds)
    ] == [7] * 4
    assert min(samples.step_seconds) > 0
    assert [output.stdout for output in samples.output] == [
        "cleaned up\n" * (setup is cleaned_up)
    ] * 2


@pytest.mark.parametrize(
    "asked",
    [
        {"min_seconds": 0.0, "most_steps": 7},
        {"min_seconds": LONG, "most_steps": 2},
    ],
    ids=["no time", "no room"],
)
def test_a_window_has_the_steps_that_were_asked_at_least(
    bench: Bench, asked: dict[str, Any]
) -> None:
    assert (
        len(
            bench.launcher.measure(
                plan(bench, **asked), quick, bench.recorder
            ).step_seconds
        )
        == 3
    )


def test_all_ranks_go_by_the_slowest(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        return lambda: time.sleep(0.02 * ctx.rank)  # none waits for the other

    samples = bench.launcher.measure(
        plan(bench, min_seconds=0.1, most_steps=1000), setup, bench.recorder
    )
    one, other = map(len, samples.rank_seconds)
    assert 3 <= one == other <= 5


def test_what_only_the_first_steps_do_is_not_what_a_step_takes(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        calls = iter(range(100))
        # of warm-up steps 0 to 4
        return lambda: time.sleep(1.0 * (next(calls) in (0, 4)))

    samples = bench.launcher.measure(
        plan(bench, warmup=5, min_seconds=3.5, most_steps=7),
        setup,
        bench.recorder,
    )
    assert len(samples.step_seconds) == 7


def test_what_a_step_returned_does_not_live_through_the_next(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Iterator[Any]:
        made: list[weakref.ref[torch.Tensor]] = []

        def step() -> torch.Tensor:
            assert not any(each() is not None for each in made)
            loss = torch.ones(3)
            made.append(weakref.ref(loss))
            return loss

        yield step
        assert len(made) > 3, "of warm-up and window"

    bench.measure(setup)


def test_trainers_of_an_rpc_launch_have_the_same_number(bench: Bench) -> None:
    of_test = plan(bench, min_seconds=LONG, most_steps=7, parameter_servers=1)
    samples = bench.launcher.measure(
        of_test, quick, bench.recorder, (None, None)
    )
    assert samples.blocked_seconds is not None
    assert [
        len(rank) for rank in (*samples.rank_seconds, *samples.blocked_seconds)
    ] == [7] * 4
