from __future__ import annotations

from typing import Any

import pytest

from pytest_ddpperf.launch.collect import collect, completions
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.samples import Window
from tests.unit.test_benchmark import job


def test_completions_add_up_to_the_wall_time_of_the_window() -> None:
    steps = completions([[0.0, 2.0, 3.0, 6.0], [0.5, 1.5, 4.0, 5.0]])
    assert steps == (1.5, 2.0, 2.0)
    assert sum(steps) == 6.0 - 0.5


def test_a_delay_after_the_last_collective_is_counted_once() -> None:
    # Rank 0 is late in step 1, rank 1 in step 2: the largest own durations would add up to 2 + 2 +
    # 1.
    assert sum(completions([[0.0, 2.0, 3.0, 4.0], [0.0, 1.0, 3.0, 4.0]])) == 4.0


def test_completions_keep_the_unit_of_their_clock() -> None:
    assert completions([[10, 15, 20], [12, 14, 22]]) == (3, 7)


def test_ranks_with_different_numbers_of_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        completions([[0.0, 1.0, 2.0], [0.0, 1.0]])


def test_windows_of_different_lengths_are_refused() -> None:
    windows = [
        Window(
            marks_ns=(tuple(range(steps + 1)),),
            cpu_ns=None,
            examples=None,
            blocked_ns=(0,) * steps,
            counters={},
            unsettled="",
            warmup=0,
        )
        for steps in (2, 3)
    ]
    unused: Any = None
    with pytest.raises(
        DdpPerfError, match=r"^ranks differ in the steps that they took$"
    ):
        collect(job().plan, windows, unused, facts={}, files={}, others=())
