"""A rank that never ends: red at the deadline with every rank's stack, or green where its result
had arrived.

What hangs does so for an hour: a test that ends has shown that nobody waits for it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pytest_ddpperf.launch import stacks
from pytest_ddpperf.records.errors import LaunchError
from tests.launch.conftest import Bench, arrive, hang
from tests.torch_version import NEEDS_RECORDER


def all_reduce() -> None:
    dist.all_reduce(torch.ones(1))


def hang_in_python() -> None:
    arrive()
    while True:
        time.sleep(0.1)


def hang_in_c_with_the_gil() -> None:
    arrive()
    empty, _ = os.pipe()
    # a sleep would end with the signal for stacks
    ctypes.PyDLL(None).read(empty, ctypes.create_string_buffer(1), 1)


@pytest.mark.parametrize(
    "hang",
    [
        pytest.param(hang_in_python, marks=NEEDS_RECORDER),
        hang_in_c_with_the_gil,
    ],
)
def test_the_rank_that_hangs_is_first_and_those_that_wait_for_it_follow(
    bench: Bench, hang: Any
) -> None:
    def setup(ctx: Any) -> Any:
        def step() -> None:
            (hang if ctx.rank == 1 else arrive)()
            all_reduce()

        return step

    with bench.over_once(arrived=2), pytest.raises(LaunchError) as caught:
        bench.measure(setup)
    error = caught.value
    late = "did not end within 300 s (--ddp-timeout)"
    # A rank whose threads do not run cannot say where it is.
    known = (
        "; rank 1 never entered all_reduce 1 (4 bytes); rank 0 waits for it"
        * (hang is hang_in_python)
    )
    assert error.cause.summary == late + known
    assert error.cause.traceback.count("hread 0x") == 1
    assert (error.cause.rank, error.cause.phase) == (1, "warm-up step 1 of 1")
    assert f"in {hang.__name__}" in error.cause.traceback
    assert [other.rank for other in error.others] == [0]
    assert "in all_reduce" in error.others[0].traceback
    assert (
        "pytest_ddpperf/rank"
        not in error.cause.traceback + error.others[0].traceback
    )


@pytest.mark.parametrize(
    "says",
    [
        "RuntimeError: got signal 3",
        "sys.exit(5) was called",
        "killed by SIGQUIT",
    ],
)
def test_a_program_that_handles_the_signal_for_stacks_did_not_end_in_time(
    bench: Bench, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_STACKS_LONGEST_SECONDS", 1.0)

    def handle(number: int, frame: object) -> None:
        if says.startswith("sys"):
            sys.exit(5)
        raise RuntimeError(f"got signal {number}")

    def function(ctx: Any) -> None:
        if ctx.rank == 1:
            signal.signal(
                signal.SIGQUIT,
                signal.SIG_DFL if says.startswith("killed") else handle,
            )
            hang()

    with bench.over_once(arrived=1), pytest.raises(LaunchError) as caught:
        bench.call(function)
    assert caught.value.cause.rank == 1
    assert (
        caught.value.cause.summary
        == f"did not end within 300 s (--ddp-timeout); then: {says}"
    )


@NEEDS_RECORDER
def test_ranks_that_disagree_on_the_number_of_collectives(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        yield all_reduce
        if ctx.rank == 0:
            arrive()
            all_reduce()

    with bench.over_once(arrived=1):
        # all results are there: only clean-up hangs, and it is told
        samples = bench.measure(setup)
    assert samples.notes == (
        "rank 0's clean-up did not end within 300 s (--ddp-timeout); it was killed",
    )

    def function(ctx: Any) -> None:
        if ctx.rank == 0:
            arrive()
            all_reduce()

    with bench.over_once(arrived=1), pytest.raises(LaunchError) as caught:
        bench.call(function)
    assert caught.value.cause.rank == 0
    assert caught.value.cause.summary.endswith(
        "rank 1 never entered all_reduce 1 (4 bytes); rank 0 waits for it"
    )
    assert "in all_reduce" in caught.value.cause.traceback
    assert (
        caught.value.others[0].summary
        == "had delivered its result and waited for the others"
    )


def test_a_set_up_that_starts_ranks_is_told_so_at_the_deadline(
    bench: Bench,
) -> None:
    # nobody is at that port
    worker = """
import datetime, torch.distributed as dist
dist.init_process_group("gloo", "tcp://127.0.0.1:1", rank=1, world_size=2,
                        timeout=datetime.timedelta(seconds=0.1))
"""

    def setup(ctx: Any) -> Any:
        subprocess.run([sys.executable, "-c", worker], check=False)
        hang()

    with bench.over_once(arrived=1), pytest.raises(LaunchError) as caught:
        bench.measure(setup, ranks=1)
    assert (
        caught.value.cause.summary
        == "did not end within 300 s (--ddp-timeout); it started processes that form a process"
        " group of their own: the plugin starts the ranks, and calls setup in each"
    )


def test_a_clean_up_that_hangs_is_green_and_told(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        yield all_reduce
        if ctx.rank == 1:
            hang()

    with bench.over_once(arrived=1):
        samples = bench.measure(setup)
    assert len(samples.step_seconds) == 3
    assert samples.notes == (
        "rank 1's clean-up did not end within 300 s (--ddp-timeout); it was killed",
    )


class SlowToDie:
    def __del__(self) -> None:
        time.sleep(3600)


def test_a_destructor_that_hangs_is_green(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        paused = SlowToDie()

        def step() -> None:
            all_reduce()
            assert paused

        return step

    samples = bench.measure(setup)
    assert (len(samples.step_seconds), samples.notes) == (3, ())
