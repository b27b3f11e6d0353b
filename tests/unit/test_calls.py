"""What can be seen of a function before it is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf.wire import payload


def none() -> None: ...


def one(ctx: Any) -> None: ...


def two(ctx: Any, shared: Any) -> None: ...


def by_keyword(ctx: Any, *, size: int) -> None: ...


def adding(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(ctx: Any) -> Any:
        return function(ctx, 2)

    return wrapper


class Net(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Whole(nn.Module):
    def forward(self) -> None: ...


def replica(module: nn.Module) -> DistributedDataParallel:
    """As DDP holds it: to make one takes a process group."""
    made = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(made)
    made.module = module
    return made


@pytest.mark.parametrize(
    ("function", "counts"),
    [
        (none, [0]),
        (one, [1]),
        (two, [2]),
        (partial(two, 1), [1]),
        (by_keyword, []),
        (partial(by_keyword, size=1), [1]),
        (lambda *args: None, [0, 1, 2]),
        (adding(two), [1]),
        (Net(), [1]),
        (Whole(), [0]),
        (replica(Net()), [1]),
        (replica(Whole()), [0]),
        (range(3).__class__, [0, 1, 2]),  # of C: who knows
    ],
)
def test_how_many_arguments_a_function_takes(
    function: Any, counts: list[int]
) -> None:
    assert [
        count for count in range(3) if payload.accepts(function, count)
    ] == counts


def test_a_function_is_named_by_itself_and_an_object_by_its_type() -> None:
    assert [
        payload.name_of(thing) for thing in (none, Net, Net(), partial(one))
    ] == [
        "none",
        "Net",
        "Net",
        "partial",
    ]
