"""User code in a rank: what its set-up makes, what its steps return, and how its errors are
summarised."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from pytest_ddpperf.rank import context, lifecycle
from pytest_ddpperf.rank.sampling import Prepared
from pytest_ddpperf.records.errors import DdpPerfError


def argument(x: torch.Tensor) -> torch.Tensor:
    return x


def yields() -> Any:
    yield 1


async def awaits() -> None:
    pass


async def yields_later() -> Any:
    yield 1


class Yields:
    def __call__(self) -> Any:
        yield 1


class Later:
    def __await__(self) -> Any:
        yield


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "None"),
        (3, "3"),
        (
            torch.zeros(99, 99),
            "tensor([[0., 0., 0., ..., 0., 0., 0.], [0., 0., 0., ..., 0., 0., 0.], [0., 0.,",
        ),
        (argument, "argument, which needs arguments"),
        (torch.nn.Linear(2, 2), "Linear, which needs arguments"),
    ],
    ids=["None", "number", "tensor", "function", "model"],
)
def test_setup_must_make_a_step_without_arguments(
    made: Any, words: str
) -> None:
    with pytest.raises(DdpPerfError) as caught:
        _ = Prepared(lambda: made).step
    said = str(caught.value)
    assert said.startswith(f"setup returned {words}")
    assert said.endswith(
        "; it must return the step to time, a callable without arguments (or yield it, and clean up"
        " after)"
    )
    assert "\n" not in said
    assert len(said) < 320


def test_setup_must_yield_once() -> None:
    def setup() -> Any:
        yield argument
        yield argument

    with pytest.raises(
        DdpPerfError, match=r"^setup yielded twice; it must yield once$"
    ):
        Prepared(setup).clean_up()


COROUTINE, ASYNC_GENERATOR = (
    "a value of type coroutine",
    "a value of type async_generator",
)


@pytest.mark.parametrize(
    ("setup", "kind"), [(awaits, COROUTINE), (yields_later, ASYNC_GENERATOR)]
)
def test_a_setup_that_never_runs_is_refused(
    setup: Callable[..., Any], kind: str
) -> None:
    with pytest.raises(DdpPerfError) as caught:
        Prepared(setup)
    assert (
        str(caught.value)
        == f"setup returned {kind}, which did not run: it must be a plain function that returns the"
        " step, or a generator that yields it"
    )


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (yields, "a value of type generator"),
        (Yields(), "a value of type generator"),
        (partial(partial(awaits)), COROUTINE),
        (lambda: awaits(), COROUTINE),
        (yields_later, ASYNC_GENERATOR),
        (Later, "a value of type Later"),
    ],
    ids=["function", "object", "partial", "returned", "both", "awaitable"],
)
@pytest.mark.filterwarnings("error")  # a coroutine that was never awaited
def test_a_step_that_never_runs_is_refused(step: Any, kind: str) -> None:
    with pytest.raises(DdpPerfError) as caught:
        context.read_examples(step())
    assert (
        str(caught.value)
        == f"the step returned {kind}, which did not run: a step must do its work when it is"
        " called, "
        "without yield or async"
    )


@pytest.mark.parametrize(
    "value", [5, torch.tensor(5), torch.tensor([5], dtype=torch.uint8)]
)
def test_examples_are_whole_numbers_of_any_kind(value: Any) -> None:
    assert context.count_examples([context.read_examples(value)] * 2) == (5, 5)


@pytest.mark.parametrize(
    "value", [None, True, 1.5, torch.tensor(1.5), torch.tensor([1, 2]), "5"]
)
def test_anything_else_is_no_number_of_examples(value: Any) -> None:
    assert context.count_examples([context.read_examples(value)]) is None


@pytest.mark.parametrize(
    ("returned", "examples"),
    [
        ({"examples": 5}, 5),
        ({"loss": None}, None),
        (OrderedDict(x=1), None),
        (5, 5),
    ],
)
def test_a_step_may_return_a_dict_of_examples_and_the_loss(
    returned: Any, examples: Any
) -> None:
    kept: list[Any] = []
    assert (
        context.read_returned(returned, lambda *figure: kept.append(figure))
        == examples
    )
    assert kept == []
    assert (
        context.read_returned(
            {"examples": 5, "loss": 2.5}, lambda *figure: kept.append(figure)
        )
        == 5
    )
    assert kept == [("loss", 2.5)]
    assert (
        context.read_returned(
            {"loss": 1.0, "logits": 2, 3: 4},
            lambda *figure: kept.append(figure),
        )
        is None
    )
    assert len(kept) == 1


def test_first_losses_end_where_a_step_has_none() -> None:
    assert context.first_losses(
        [2, torch.tensor(1.5), math.nan, 1e200, None, 1]
    ) == (
        2.0,
        1.5,
        None,
        None,
    )
    assert context.first_losses([None, 1]) == ()
    assert context.first_losses([1] * 99) == (1.0,) * 10


def test_a_step_cannot_process_less_than_nothing() -> None:
    with pytest.raises(DdpPerfError) as caught:
        context.count_examples([context.read_examples(torch.tensor(-1))])
    assert (
        str(caught.value)
        == "the step returned -1: a step may only return the number of examples that it processed"
    )


class Broken(RuntimeError):
    def __str__(self) -> str:
        raise KeyError("no words")


@pytest.mark.parametrize(
    ("error", "summary"),
    [
        (ValueError("bad shape\nof a tensor"), "ValueError: bad shape"),
        (SystemExit(3), "sys.exit(3) was called"),
        (Broken(), "Broken: <exception str() failed>"),
        (DdpPerfError("no step"), "no step"),
        (
            RuntimeError("Resource temporarily unavailable"),
            (
                "RuntimeError: Resource temporarily unavailable; if no process or thread could be"
                " started, see the limits of ulimit -u and -v, and a container's on processes"
            ),
        ),
        (
            RuntimeError("can't start new thread"),
            "limits of ulimit -u and -v, and a container's on processes",
        ),
    ],
)
def test_an_error_has_a_summary(error: BaseException, summary: str) -> None:
    assert lifecycle._summary(error).endswith(summary)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), True),
        (ConnectionRefusedError("connection refused"), True),
        (ValueError("broken pipe"), False),
    ],
)
def test_a_lost_connection_is_known_by_its_words(
    error: BaseException, lost: bool
) -> None:
    assert lifecycle.is_lost_connection(error) == lost
