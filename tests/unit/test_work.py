"""What the operators of a step do, against figures derived by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_ddpperf.rank.sent import Dispatched, Sent
from pytest_ddpperf.rank.torch_names import NAMES
from pytest_ddpperf.rank.work import Work

ABSENT = "torch.autograd:absent"


def work_of(step: Callable[[], Any]) -> Work:
    dispatched = Dispatched([])
    with dispatched:
        step()
    return dispatched.work


def test_each_call_of_an_operator_counts() -> None:
    x = torch.ones(8)
    assert work_of(lambda: [x.mul_(2), x.add_(1), x.mul_(2)]).operators == 3


@pytest.mark.parametrize(("foreach", "operators"), [(True, 1), (False, 6)])
def test_a_loop_over_parameters_calls_an_operator_for_each(
    foreach: bool, operators: int
) -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(6)]
    for each in parameters:
        each.grad = torch.ones(2)
    step = torch.optim.SGD(parameters, lr=0.1, foreach=foreach).step
    plain = work_of(torch.optim.SGD([parameters[0]], lr=0.1).step).operators
    assert work_of(step).operators == plain - 1 + operators


LAYER = nn.Linear(20, 8)
CONVOLUTION = nn.Conv2d(3, 4, 3, padding=1, bias=False)
QUERY = torch.randn(2, 3, 5, 7, requires_grad=True)


@pytest.mark.parametrize(
    ("step", "flops"),
    [
        (lambda: torch.ones(6, 5) @ torch.ones(5, 4), 2 * 6 * 5 * 4),
        (lambda: torch.ones(9) + 1, 0),
        # the product, and in the backward pass that of the weights' gradient
        (lambda: LAYER(torch.ones(4, 20)).sum().backward(), 2 * 2 * 4 * 20 * 8),
        # a product of a window of 3 x 3 x 3 for each of 4 x 6 x 6 outputs
        (lambda: CONVOLUTION(torch.ones(2, 3, 6, 6)), 2 * 2 * 27 * 4 * 36),
        # scores of 5 x 5, and their product with the values; backward computes scores anew, and
        # the gradients of scores, values, queries and keys
        (
            lambda: (
                F.scaled_dot_product_attention(QUERY, QUERY, QUERY)
                .sum()
                .backward()
            ),
            (2 + 5) * 2 * 2 * 3 * 5 * 5 * 7,
        ),
        # the average of upsampled pixels is no product
        (
            lambda: F.interpolate(
                torch.ones(1, 1, 4, 4), scale_factor=2, mode="bilinear"
            ),
            0,
        ),
    ],
    ids="product sum linear convolution attention upsampling".split(),
)
def test_flops_are_those_of_products(
    step: Callable[[], Any], flops: int
) -> None:
    assert work_of(step).flops == flops


@torch.library.custom_op("ddpperf_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    "step",
    [
        lambda: nn.LSTM(4, 5)(torch.ones(3, 2, 4)),
        lambda: torch.ones(3, 3) @ torch.ones(3),
        lambda: doubled(torch.ones(3)),
    ],
    ids=["rnn", "matrix times vector", "operator of another package"],
)
def test_flops_without_a_formula_are_unknown(step: Callable[[], Any]) -> None:
    work = work_of(step)
    assert work.flops is None
    assert work.operators > 0


def test_flops_are_unknown_if_torch_has_no_formulas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = "torch.utils.flop_counter:flop_registry"
    monkeypatch.setitem(NAMES, path, ABSENT)
    work = work_of(lambda: torch.ones(3) + 1)
    assert (work.flops, work.operators) == (None, 2)


def test_flops_of_compiled_code_are_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pytest_ddpperf.rank.sent.recorded", lambda own: None)
    sent: Any = Sent(None, has_compiled=False)  # type: ignore[arg-type]  # the recorder is not asked
    assert sent.work(has_compiled=False) == {"operators.count": 0, "flops": 0}
    assert sent.work(has_compiled=True)["flops"] is None
