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

from pytest_ddpperf import Figure
from pytest_ddpperf.records.errors import DdpPerfError, LaunchError
from pytest_ddpperf.records.figure import FigureValues
from tests.launch.conftest import Bench
from tests.torch_version import COUNTS_IN_COMPILED_CODE


def telling(ctx: Any) -> Any:
    """Each step tells its number, the warm-up step's 0; rank 1 counts from 100."""
    numbers = count(100 * ctx.rank)
    ctx.record("number", -1, better=None)  # in set-up: of no step

    def step() -> None:
        dist.all_reduce(torch.ones(1))
        ctx.record("number", next(numbers), better=None)

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
            ctx.record("every", math.inf if number == 2 else 1, better=None)
            if number % 2 and ctx.rank == 1:
                ctx.record("odd", torch.tensor([number]), better=None)
                # the last counts
                ctx.record(
                    "odd",
                    torch.tensor(number + 0.5, requires_grad=True),
                    better=None,
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


@COUNTS_IN_COMPILED_CODE
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
        return lambda: ctx.record(name, value, better=None)

    with pytest.raises(LaunchError) as caught:
        bench.measure(setup)
    assert caught.value.cause.summary == reported
    assert (
        "ctx.record(name, value, better=None)" in caught.value.cause.traceback
    )


def judged(ctx: Any) -> Any:
    """Rank 1 records its step's number as a rate, from the warm-up on; every other step lacks
    it."""
    numbers = count()

    def step() -> None:
        dist.all_reduce(torch.ones(1))
        number = next(numbers)
        if ctx.rank == 1 and number % 2:
            ctx.record("tps", torch.tensor(number), better="higher")
        ctx.record("rss", 5, better="lower", constant=True)

    return step


def test_figures_with_a_direction_are_those_of_timed_steps_and_of_ranks_that_have_them(
    bench: Bench,
) -> None:
    samples = bench.measure(judged, steps=4, warmup=3)
    assert samples.figures == {
        "tps": FigureValues(
            figure=Figure(better="higher"), values=(((), (3.0, 5.0)),)
        ),
        "rss": FigureValues(
            figure=Figure(better="lower", constant=True),
            values=(((5.0,) * 4,) * 2,),
        ),
    }
    assert samples.recorded["tps"] == (
        (None,) * 4,
        (3.0, None, 5.0, None),
    )
    with bench.paused(judged, steps=4, warmup=3) as launch:
        for steps in (1, 3, 3):
            launch.stretch(steps)
        # the first of each stretch does not count
        figures = launch.deliver().figures
        assert figures["tps"].values == (((), (5.0, 9.0)),)


def test_a_figure_of_the_warm_up_alone_has_no_value(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        numbers = count()

        def step() -> None:
            if next(numbers) == 0:
                ctx.record("tps", 5.0, better="higher")

        return step

    found = bench.measure(setup).figures
    assert found["tps"].values == (((), ()),)


def test_a_figure_that_is_not_finite_is_red(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        numbers = count()

        def step() -> None:
            dist.all_reduce(torch.ones(1))
            # in the warm-up, too, where it does not matter
            number = next(numbers)
            value = math.nan if number in (0, 3) else 1.0
            ctx.record("tps", value, better="higher")

        return step

    with pytest.raises(LaunchError) as caught:
        bench.measure(setup, steps=4, warmup=2)
    assert caught.value.cause.summary == (
        "ctx.record('tps', ...) in timed step 2: a figure must be finite, and not nan"
    )


def test_ranks_that_differ_in_a_direction_are_red(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        better = "lower" if ctx.rank else "higher"
        return lambda: ctx.record("tps", 5.0, better=better)

    with pytest.raises(DdpPerfError) as caught:
        bench.measure(setup)
    assert str(caught.value) == (
        "tps: higher is better; but on rank 1 lower is better: a figure has one direction"
    )


def test_losses_are_recorded_without_a_direction(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        def step() -> dict[str, float]:
            dist.all_reduce(torch.ones(1))
            return {"loss": 2.0}

        return step

    assert bench.measure(setup).figures == {}
