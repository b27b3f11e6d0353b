"""Collectives on real ranks: what is timed does what it should, and what does not is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_ddpperf.records.errors import LaunchError
from pytest_ddpperf.records.plan import OPS, collective
from tests.launch.conftest import Bench
from tests.torch_version import NEEDS_RECORDER


@NEEDS_RECORDER
@pytest.mark.parametrize("op", OPS)
def test_every_operation_passes_its_check(bench: Bench, op: str) -> None:
    asked = collective(op, 3 * 4 * 1000, "float32", 3)
    samples = bench.launch(
        replace(bench.plan(ranks=3, warmup=3), collective=asked), None
    )
    assert len(samples.step_seconds) == 3
    if op == "all_reduce":
        assert samples.counters["all_reduce.bytes"] == asked.size


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("all_reduce", name) for name in ("bfloat16", "int8")]
    + [
        ("broadcast", "bool"),
        ("all_gather", "complex64"),
        ("all_to_all", "int64"),
    ],
)
def test_of_any_dtype(bench: Bench, op: str, dtype: str) -> None:
    asked = collective(op, 4096, dtype, 2)
    assert (
        len(
            bench.launch(
                replace(bench.plan(), collective=asked), None
            ).step_seconds
        )
        == 3
    )


def test_both_sides_of_a_comparison_can_hold_one(bench: Bench) -> None:
    of_test = replace(
        bench.plan(), collective=collective("all_reduce", 1024, "float32", 2)
    )
    with bench.launcher.pause(of_test, None, bench.recorder) as paused_launch:
        paused_launch.stretch(1)
        paused_launch.stretch(4)
        assert len(paused_launch.deliver().step_seconds) == 3


def test_what_a_backend_cannot_do_is_red_with_its_own_words(
    bench: Bench,
) -> None:
    with pytest.raises(LaunchError) as caught:
        bench.launch(
            replace(
                bench.plan(), collective=collective("all_reduce", 8, "int16", 2)
            ),
            None,
        )
    assert caught.value.cause.phase == "setup"
    assert caught.value.cause.summary == "RuntimeError: Invalid scalar type"


def test_a_dtype_that_this_torch_lacks_is_named(bench: Bench) -> None:
    with pytest.raises(LaunchError, match=r"has no dtype float8_nosuch"):
        bench.launch(
            replace(
                bench.plan(),
                collective=collective("all_reduce", 8, "float8_nosuch", 2),
            ),
            None,
        )


def test_a_wrong_result_names_the_rank(
    bench: Bench, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the window, or after it."""
    (tmp_path / "spoils.py").write_text(
        "import os\n"
        "import torch.distributed as dist\n"
        "from pytest_ddpperf.rank import operation\n"
        "right, runs = operation._IN_PLACE['all_reduce'], []\n"
        "def wrong(sent):\n"
        "    right(sent)\n"
        "    runs.append(1)\n"
        "    if dist.get_rank() == 1 and len(runs) > int(os.environ['SPOILS_AFTER']): sent[0] = 5\n"
        "operation._IN_PLACE['all_reduce'] = wrong\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    asked = collective("all_reduce", 1024, "float32", 2)
    # The first check, a step of warm-up, three timed, the second check.
    for after, phase in (("0", "setup"), ("5", "clean-up")):
        monkeypatch.setenv("SPOILS_AFTER", after)
        with pytest.raises(LaunchError) as caught:
            bench.launch(
                replace(bench.plan(), collective=asked, preload=("spoils",)),
                None,
            )
        assert str(caught.value).startswith(
            f"rank 1 failed in {phase}: all_reduce of 1KiB float32: 1 of 256 elements are wrong: "
            "element 0 is 5.0 instead of 3.0"
        )
