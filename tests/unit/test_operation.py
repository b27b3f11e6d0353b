"""The values by which a collective is checked: sums are exact in every dtype, and what is misplaced differs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_ddpperf.rank import operation
from pytest_ddpperf.rank.operation import _PERIOD, _Buffers
from pytest_ddpperf.records.collective import OPS, collective
from pytest_ddpperf.records.errors import WrongResultError

DTYPES = ("float32", "bfloat16", "float16", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "int64")
SUMMING = ("all_reduce", "reduce_scatter", "reduce")
RANKS = (2, 3, 4, 8, 9, 11, 16, 17, 33, 64, 100, 127, 128, 256)
LARGEST = {"float8_e4m3fn": 16, "float8_e5m2": 8}  # sums, of dtypes that count less far than int8


def buffers(op: str, ranks: int, dtype: str, count: int = 64) -> Any:
    """Rank 0's, of `count` elements, or of blocks of so many."""
    blocks = ranks if op in ("all_gather", "all_to_all", "reduce_scatter") else 1
    ctx: Any = SimpleNamespace(rank=0, device=torch.device("cpu"))
    of = getattr(torch, dtype)
    return _Buffers(ctx, collective(op, count * blocks * of.itemsize, dtype, ranks), of)


def all_sent(op: str, ranks: int, dtype: str, count: int = 64) -> list[Tensor]:
    """What each rank sends."""
    each = buffers(op, ranks, dtype, count)
    return [each._values(rank, torch.arange(len(each.sent))) for rank in range(ranks)]


def received(op: str, sent: list[Tensor], rank: int) -> Tensor:
    """What `rank` should have of it."""
    ranks = len(sent)
    if op in SUMMING:
        total = torch.stack(sent).to(torch.complex128 if sent[0].is_complex() else torch.float64).sum(0)
        return (total.chunk(ranks)[rank] if op == "reduce_scatter" else total).to(sent[0].dtype)
    if op == "broadcast":
        return sent[0]
    if op == "send_recv":
        return sent[rank - 1]
    return torch.cat([part if op == "all_gather" else part.chunk(ranks)[rank] for part in sent])


def check(op: str, ranks: int, dtype: str, got: Tensor) -> None:
    """The check of rank 0, which received that; raises WrongResultError."""
    mine = buffers(op, ranks, dtype)
    mine.step = lambda: mine.received.copy_(got)
    mine.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_sums_are_exact_differ_and_need_every_rank(ranks: int, dtype: str) -> None:
    made = buffers("all_reduce", ranks, dtype)
    each = torch.stack(all_sent("all_reduce", ranks, dtype, _PERIOD)).to(torch.float64)
    total = each.sum(0)
    assert total.max() <= LARGEST.get(dtype, 127)
    assert torch.equal(made._sums.to(torch.float64), total)
    added = torch.zeros(_PERIOD, dtype=made._sums.dtype)
    for part in each:  # in the dtype, in this order as in any other: none of them is less than 0
        added = (added.to(torch.float64) + part).to(added.dtype)
    assert torch.equal(added.to(torch.float64), total)
    assert len(total.unique()) >= 4
    assert (each != 0).any(1).all(), "a rank that is left out is missed somewhere"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "float8_e5m2"])
@pytest.mark.parametrize("ranks", [2, 4, 11, 64])
def test_no_two_blocks_are_alike(op: str, dtype: str, ranks: int) -> None:
    sent = all_sent(op, ranks, dtype)
    parts = [block for part in sent for block in part.chunk(ranks)] if op == "all_to_all" else sent
    if op in SUMMING:  # what a reduce-scatter deals out
        parts = list(received("all_reduce", all_sent("all_reduce", ranks, dtype, 64 * ranks), 0).chunk(ranks))
    assert len({bytes(part.view(torch.uint8).tolist()) for part in parts}) == len(parts)


@pytest.mark.parametrize("op", ["all_gather", "send_recv"])
def test_blocks_of_a_single_element_differ(op: str) -> None:
    each = [int(part) for part in all_sent(op, operation._VALUES, "float32", 1)]
    assert len(set(each)) == operation._VALUES


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [*DTYPES, "bool", "float64", "complex64", "uint16", "float8_e4m3fnuz"])
@pytest.mark.parametrize("ranks", [2, 4, 11])
def test_what_is_right_passes_and_another_ranks_does_not(op: str, dtype: str, ranks: int) -> None:
    sent = all_sent(op, ranks, dtype)
    check(op, ranks, dtype, received(op, sent, 0))
    if op in ("reduce_scatter", "all_to_all", "send_recv"):
        with pytest.raises(WrongResultError):
            check(op, ranks, dtype, received(op, sent, 1))


@pytest.mark.parametrize("ranks", [4, 11, 33, 64, 128])
@pytest.mark.parametrize("op", SUMMING)
def test_sums_in_another_place_are_wrong(op: str, ranks: int) -> None:
    right = received(op, all_sent(op, ranks, "float32"), 0)
    for wrong in (right.roll(1), right.roll(16), right.flip(0)):
        with pytest.raises(WrongResultError):
            check(op, ranks, "float32", wrong)


def test_of_many_ranks_no_two_send_alike() -> None:
    sent = torch.stack(all_sent("all_gather", 256, "float32"))
    assert len(sent.unique(dim=0)) == 256
