"""What steps record of themselves."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pytest_ddpperf.records.errors import LaunchError
from tests.launch.conftest import Bench


def telling(ctx: Any) -> Any:
    """Each step tells its number, the warm-up step's 0; rank 1 counts from 100."""
    numbers = count(100 * ctx.rank)
    ctx.record("number", -1)  # in set-up: of no step

    def step() -> None:
        dist.all_reduce(torch.ones(1))
        ctx.record("number", next(numbers))

    return step


def test_a_figure_is_kept_of_each_timed_step_and_rank(bench: Bench) -> None:
    samples = bench.measure(telling, steps=3, warmup=2)
    assert samples.recorded == {
        "number": ((2.0, 3.0, 4.0), (102.0, 103.0, 104.0))
    }


def test_trainers_record_too(bench: Bench) -> None:
    of_test = replace(bench.plan(steps=2), parameter_servers=1)
    launched = bench.launch(of_test, telling, None, None)
    assert launched.recorded == {"number": ((1.0, 2.0), (101.0, 102.0))}


def test_what_a_step_does_not_tell_is_none(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        numbers = count()
        warnings.simplefilter("error")

        def step() -> None:
            dist.all_reduce(torch.ones(1))
            number = next(numbers)
            ctx.record("every", math.inf if number == 2 else 1)
            if number % 2 and ctx.rank == 1:
                ctx.record("odd", torch.tensor([number]))
                # the last counts
                ctx.record(
                    "odd", torch.tensor(number + 0.5, requires_grad=True)
                )

        return step

    assert bench.measure(setup, steps=3, warmup=1).recorded == {
        "every": ((1.0, None, 1.0),) * 2,
        "odd": ((None,) * 3, (1.5, None, 3.5)),
    }


def losing(ctx: Any) -> Any:
    """Each step returns its number as its loss, on rank 1 two more; rank 0 compiles in step 3."""
    numbers = count(1)

    def step() -> dict[str, float]:
        number = next(numbers)
        if number == 3 and ctx.rank == 0:
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        dist.all_reduce(torch.ones(1))
        return {"examples": 4, "loss": number + 2 * ctx.rank}

    return step


def test_losses_are_those_of_the_steps_behind_the_asked_warm_up_however_the_window_is_taken(
    bench: Bench,
) -> None:
    samples = bench.measure(losing, steps=9, warmup=3)
    assert samples.losses == tuple(number + 1.0 for number in range(4, 14))
    assert samples.recorded["loss"][1][0] == 7.0, "warm-up took a step more"
    assert samples.examples == ((4,) * 9,) * 2
    with bench.paused(losing, steps=9, warmup=3) as launch:
        for steps in (1, 4, 7):
            launch.stretch(steps)
        assert launch.deliver().losses == samples.losses


def test_nothing_recorded_is_nothing(bench: Bench) -> None:
    assert bench.measure(lambda ctx: lambda: None).losses is None
    assert bench.measure(lambda ctx: lambda: None).recorded == {}


@pytest.mark.parametrize(
    ("name", "value", "reported"),
    [
        (
            "loss",
            "3",
            "TypeError: ctx.record('loss', '3'): the figure must be a number",
        ),
        (
            "loss",
            None,
            "TypeError: ctx.record('loss', None): the figure must be a number",
        ),
        (
            "loss",
            torch.ones(2),
            "TypeError: ctx.record('loss', ...): the figure must be a number, not a tensor of (2,)",
        ),
        (
            "",
            3,
            "ValueError: ctx.record('', ...): the name must be printable text",
        ),
        (
            3,
            3,
            "ValueError: ctx.record(3, ...): the name must be printable text",
        ),
        (
            "a\nb",
            3,
            r"ValueError: ctx.record('a\nb', ...): the name must be printable text",
        ),
    ],
)
def test_what_is_no_figure_is_red_where_it_stands(
    bench: Bench, name: Any, value: Any, reported: str
) -> None:
    def setup(ctx: Any) -> Any:
        return lambda: ctx.record(name, value)

    with pytest.raises(LaunchError) as caught:
        bench.measure(setup)
    assert caught.value.cause.summary == reported
    assert "lambda: ctx.record(name, value)" in caught.value.cause.traceback
