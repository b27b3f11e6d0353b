"""Collectives on real ranks: what is timed does what it should, and what does not is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pytest_ddpperf.rank import operation as on_rank
from pytest_ddpperf.records.collective import OPS, collective
from pytest_ddpperf.records.errors import LaunchError, WrongResultError
from tests.launch.conftest import Bench


@pytest.mark.parametrize("op", OPS)
def test_every_operation_passes_its_check(bench: Bench, op: str) -> None:
    asked = collective(op, 3 * 4 * 1000, "float32", 3)
    samples = bench.launch(replace(bench.plan(ranks=3, warmup=3), collective=asked), None)
    assert len(samples.step_seconds) == 3
    if op == "all_reduce":
        assert samples.counters["all_reduce.bytes"] == asked.size


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("all_reduce", name) for name in ("float64", "bfloat16", "float16", "int8", "uint8", "int64")]
    + [("broadcast", "bool"), ("all_gather", "complex64"), ("all_to_all", "int64")],
)
def test_of_any_dtype(bench: Bench, op: str, dtype: str) -> None:
    asked = collective(op, 4096, dtype, 2)
    assert len(bench.launch(replace(bench.plan(), collective=asked), None).step_seconds) == 3


def test_both_sides_of_a_comparison_can_hold_one(bench: Bench) -> None:
    of_test = replace(bench.plan(), collective=collective("all_reduce", 1024, "float32", 2))
    with bench.launcher.hold(of_test, None, bench.recorder) as held:
        held.stretch(1)
        held.stretch(4)
        assert len(held.deliver().step_seconds) == 3


def test_what_a_backend_cannot_do_is_red_with_its_own_words(bench: Bench) -> None:
    with pytest.raises(LaunchError) as caught:
        bench.launch(replace(bench.plan(), collective=collective("all_reduce", 8, "int16", 2)), None)
    assert caught.value.cause.phase == "setup"
    assert caught.value.cause.summary == "RuntimeError: Invalid scalar type"


def test_a_dtype_that_this_torch_lacks_is_named(bench: Bench) -> None:
    with pytest.raises(LaunchError, match=r"has no dtype float8_nosuch"):
        bench.launch(replace(bench.plan(), collective=collective("all_reduce", 8, "float8_nosuch", 2)), None)


def planted(ctx: Any, op: str, culprit: int, after: int) -> list[str]:
    """What each check says where rank `culprit` spoils one element of what it receives, from one run on."""
    patched = on_rank._IN_PLACE if op in on_rank._IN_PLACE else on_rank._MOVES
    right, runs = patched[op], []

    def wrong(received: torch.Tensor, *others: Any, **where: Any) -> None:
        right(received, *others, **where)
        runs.append(1)
        if ctx.rank == culprit and len(runs) > after:
            received[7] += 1

    patched[op] = wrong  # type: ignore[index]
    made = on_rank.setup(ctx, collective(op, 4 * 24, "float32", ctx.world_size))
    said = []
    for check in ("before", "after")[: after + 1]:  # none runs it without the other
        try:
            next(made, None)
        except WrongResultError as error:
            said.append(f"{check}: {error}")
    return said


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("after", "when"), [(0, "before"), (1, "after")])
def test_a_wrong_result_is_found_on_the_rank_that_has_it(bench: Bench, op: str, after: int, when: str) -> None:
    culprit = 0 if op == "reduce" else 1
    said = bench.call(planted, op, culprit, after)
    assert said[1 - culprit] == []
    (problem,) = said[culprit]
    elements = 12 if op == "reduce_scatter" else 24
    assert problem.startswith(f"{when}: {op} of 96B float32: 1 of {elements} elements are wrong: element 7 is ")


def shifted(ctx: Any) -> list[str]:
    """Every element right, in another place."""
    right = on_rank._MOVES["all_gather"]

    def wrong(received: torch.Tensor, sent: torch.Tensor) -> None:
        right(received, sent)
        received.copy_(received.roll(len(sent)))  # each rank's block where another's belongs

    on_rank._MOVES["all_gather"] = wrong  # type: ignore[index]
    with pytest.raises(WrongResultError) as caught:
        next(on_rank.setup(ctx, collective("all_gather", 4 * 24, "float32", ctx.world_size)))
    return [str(caught.value)]


def test_blocks_in_each_others_places_are_wrong(bench: Bench) -> None:
    for (problem,) in bench.call(shifted):
        assert "24 of 24 elements are wrong" in problem


@pytest.mark.parametrize(("after", "phase"), [(0, "setup"), (5, "clean-up")], ids=["before", "after the window"])
def test_a_wrong_result_names_the_rank(
    bench: Bench, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, after: int, phase: str
) -> None:
    (tmp_path / f"spoils{after}.py").write_text(
        "import torch.distributed as dist\n"
        "from pytest_ddpperf.rank import operation\n"
        "right, runs = operation._IN_PLACE['all_reduce'], []\n"
        "def wrong(sent):\n"
        "    right(sent)\n"
        "    runs.append(1)\n"
        f"    if dist.get_rank() == 1 and len(runs) > {after}: sent[0] = 5\n"
        "operation._IN_PLACE['all_reduce'] = wrong\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    asked = collective("all_reduce", 1024, "float32", 2)
    with pytest.raises(LaunchError) as caught:  # the first check, a step of warm-up, three timed, the second check
        bench.launch(replace(bench.plan(), collective=asked, preload=(f"spoils{after}",)), None)
    assert str(caught.value).startswith(
        f"rank 1 failed in {phase}: all_reduce of 1KiB float32: 1 of 256 elements are wrong: "
        "element 0 is 5.0 instead of 3.0"
    )
