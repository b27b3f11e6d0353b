"""The values by which a collective is checked: exact in every dtype, and different by rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_ddpperf.rank.operation import _Buffers
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.plan import OPS, collective

DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "int8",
    "uint8",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
)
SUMMING = ("all_reduce", "reduce_scatter", "reduce")


def buffers(op: str, ranks: int, dtype: str, count: int = 64) -> Any:
    """Rank 0's, of `count` elements, or of blocks of so many."""
    blocks = (
        ranks if op in ("all_gather", "all_to_all", "reduce_scatter") else 1
    )
    ctx: Any = SimpleNamespace(rank=0, device=torch.device("cpu"))
    element = getattr(torch, dtype)
    return _Buffers(
        ctx,
        collective(op, count * blocks * element.itemsize, dtype, ranks),
        element,
    )


def all_sent(op: str, ranks: int, dtype: str, count: int = 64) -> list[Tensor]:
    """What each rank sends."""
    each = buffers(op, ranks, dtype, count)
    return [
        torch.full_like(each.sent, each._value(rank)) for rank in range(ranks)
    ]


def received(op: str, sent: list[Tensor], rank: int) -> Tensor:
    """What `rank` should have of it."""
    ranks = len(sent)
    if op in SUMMING:
        total = (
            torch.stack(sent)
            .to(torch.complex128 if sent[0].is_complex() else torch.float64)
            .sum(0)
        )
        return (
            total.chunk(ranks)[rank] if op == "reduce_scatter" else total
        ).to(sent[0].dtype)
    if op == "broadcast":
        return sent[0]
    if op == "send_recv":
        return sent[rank - 1]
    return torch.cat(
        [
            part if op == "all_gather" else part.chunk(ranks)[rank]
            for part in sent
        ]
    )


def check(op: str, ranks: int, dtype: str, got: Tensor) -> None:
    """The check of rank 0, which received that; raises DdpPerfError."""
    mine = buffers(op, ranks, dtype)
    mine.step = lambda: mine.received.copy_(got)
    mine.check()


@pytest.mark.parametrize("op", SUMMING)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("ranks", [2, 16, 100])
def test_a_sum_without_the_last_rank_is_found(
    op: str, ranks: int, dtype: str
) -> None:
    sent = all_sent(op, ranks, dtype, 64)
    if op == "reduce_scatter":
        sent = all_sent(op, ranks, dtype)
    check(op, ranks, dtype, received(op, sent, 0))
    last = sent[-1].clone()
    sent[-1].zero_()
    with pytest.raises(DdpPerfError, match="are wrong"):
        check(op, ranks, dtype, received(op, sent, 0))
    sent[-1] = last
    sent[1] = sent[0].clone()  # the first one twice instead of the second
    with pytest.raises(DdpPerfError, match="are wrong"):
        check(op, ranks, dtype, received(op, sent, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 5, 16, 128])
def test_sums_are_exact_in_every_dtype(ranks: int, dtype: str) -> None:
    (total,) = buffers("all_reduce", ranks, dtype)._expected()
    element = getattr(torch, dtype)
    assert torch.tensor(total, dtype=element).item() == total
    added = torch.zeros(1, dtype=element)
    for part in all_sent("all_reduce", ranks, dtype, 1):
        added = (added.to(torch.float64) + part.to(torch.float64)).to(element)
    assert added.item() == total > 0


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "dtype",
    [*DTYPES, "bool", "float64", "complex64", "uint16", "float8_e4m3fnuz"],
)
@pytest.mark.parametrize("ranks", [2, 11])
def test_the_right_result_passes_and_that_of_another_rank_fails(
    op: str, dtype: str, ranks: int
) -> None:
    sent = all_sent(op, ranks, dtype)
    check(op, ranks, dtype, received(op, sent, 0))
    if op == "send_recv" and dtype != "bool":
        with pytest.raises(DdpPerfError):
            check(op, ranks, dtype, received(op, sent, 1))


@pytest.mark.parametrize("op", ["all_gather", "all_to_all"])
def test_blocks_in_the_wrong_order_are_found(op: str) -> None:
    right = received(op, all_sent(op, 4, "float32"), 0)
    with pytest.raises(DdpPerfError):
        check(op, 4, "float32", right.roll(64))
