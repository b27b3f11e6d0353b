"""The phases of a step by its stamps, and the way of a step back through all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pytest_ddpperf.launch.collect import on_our_clock
from pytest_ddpperf.launch.phases import step_phases
from pytest_ddpperf.rank.pieces import rank_phases
from pytest_ddpperf.records.samples import Window
from pytest_ddpperf.records.step_phases import (
    BACKWARD,
    DATA,
    EXPOSED,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PHASES,
    RANK_WAIT,
)

F, B, O, W = 1, 2, 3, 4  # noqa: E741  # what a stamp begins or, with a minus, ends


@pytest.mark.parametrize(
    ("stamps", "starts", "expected"),
    [
        # The loss between forward and backward belongs to forward; DDP waits at the end of
        # backward.
        (
            [(10, F), (20, -F), (25, B), (60, -B), (70, O), (90, -O)],
            [40, 50],
            [
                (DATA, 10),
                (FORWARD, 20),
                (FORWARD, 25),
                (BACKWARD, 50),
                (EXPOSED, 60),
                (OTHER, 70),
                (OPTIMIZER, 90),
                (OTHER, 100),
            ],
        ),
        # FSDP waits in Python, in forward and backward: what follows its last collective is not all
        # a wait.
        (
            [
                (10, F),
                (12, W),
                (15, -W),
                (20, -F),
                (20, B),
                (30, W),
                (50, -W),
                (60, -B),
            ],
            [11, 29],
            [
                (DATA, 10),
                (FORWARD, 12),
                (EXPOSED, 15),
                (FORWARD, 20),
                (BACKWARD, 30),
                (EXPOSED, 50),
                (BACKWARD, 60),
                (OTHER, 100),
            ],
        ),
        # Accumulation: what comes before each forward pass is data; a pass without a collective has
        # no wait.
        (
            [
                (10, F),
                (20, -F),
                (20, B),
                (30, -B),
                (40, F),
                (50, -F),
                (50, B),
                (70, -B),
            ],
            [60],
            [
                (DATA, 10),
                (FORWARD, 20),
                (BACKWARD, 30),
                (DATA, 40),
                (FORWARD, 50),
                (BACKWARD, 60),
                (EXPOSED, 70),
                (OTHER, 100),
            ],
        ),
        # Two modules in a row are one forward pass; one that is called in backward (checkpointing)
        # belongs to that.
        (
            [
                (10, F),
                (20, -F),
                (25, F),
                (30, -F),
                (30, B),
                (40, F),
                (50, -F),
                (60, -B),
            ],
            [],
            [
                (DATA, 10),
                (FORWARD, 20),
                (FORWARD, 30),
                (BACKWARD, 60),
                (OTHER, 100),
            ],
        ),
        # An optimizer in backward is neither; one whose closure has the passes is what is left of
        # it, and comes after the data.
        (
            [(1, B), (30, O), (40, -O), (60, -B)],
            [],
            [
                (OTHER, 1),
                (BACKWARD, 30),
                (OTHER, 40),
                (BACKWARD, 60),
                (OTHER, 100),
            ],
        ),
        (
            [(1, O), (10, F), (20, -F), (20, B), (60, -B), (90, -O)],
            [],
            [
                (DATA, 1),
                (OPTIMIZER, 10),
                (FORWARD, 20),
                (BACKWARD, 60),
                (OPTIMIZER, 90),
                (OTHER, 100),
            ],
        ),
        # A wait after backward, without a forward pass before.
        (
            [(1, B), (20, -B), (30, W), (50, -W)],
            [25],
            [
                (OTHER, 1),
                (BACKWARD, 20),
                (OTHER, 30),
                (EXPOSED, 50),
                (OTHER, 100),
            ],
        ),
        ([], [], [(OTHER, 100)]),
    ],
)
def test_stamps_divide_a_step(
    stamps: Sequence[tuple[int, int]],
    starts: Sequence[int],
    expected: Sequence[tuple[str, int]],
) -> None:
    found = rank_phases(
        [(0, 100)],
        stamps,
        ([(when, f"0:{when}") for when in starts], 0),
        has_ddp=True,
    )
    assert found is not None
    assert [(PHASES[index], end) for index, end in found.steps[0]] == expected
    assert set(found.seen) == {phase for phase, _ in expected} | {
        OTHER,
        EXPOSED,
    }


def test_without_arrivals_a_wait_cannot_be_told_from_the_rest() -> None:
    found = rank_phases(
        [(0, 100)], [(1, B), (10, W), (20, -W), (60, -B)], None, has_ddp=True
    )
    assert found is not None
    assert found.arrivals is None
    assert [(PHASES[index], end) for index, end in found.steps[0]] == [
        (OTHER, 1),
        (BACKWARD, 10),
        (OTHER, 20),
        (BACKWARD, 60),
        (OTHER, 100),
    ]
    assert EXPOSED not in found.seen


def test_only_ddp_waits_at_the_end_of_backward_without_a_stamp() -> None:
    found = rank_phases(
        [(0, 100)], [(1, B), (60, -B)], ([(20, "0:a")], 0), has_ddp=False
    )
    assert found is not None
    assert [(PHASES[index], end) for index, end in found.steps[0]] == [
        (OTHER, 1),
        (BACKWARD, 60),
        (OTHER, 100),
    ]


def test_stamps_that_are_not_nested_say_nothing() -> None:
    assert (
        rank_phases([(0, 100)], [(1, B), (10, -F)], ([], 0), has_ddp=True)
        is None
    )
    assert rank_phases([(0, 100)], [(1, B)], ([], 0), has_ddp=True) is None


def test_steps_before_the_recorder_s_oldest_entry_are_left_out() -> None:
    found = rank_phases(
        [(0, 100), (100, 200), (200, 300)],
        [],
        ([(150, "0:7")], 110),
        has_ddp=True,
    )
    assert found is not None
    assert len(found.steps) == 1


def window(
    stamps: Sequence[tuple[int, int]],
    starts: Sequence[tuple[int, str]] | None,
    steps: int,
    length: int = 100,
) -> Window:
    """A rank's window of steps that are all the same."""
    marks = [
        (number * length, number * length + length) for number in range(steps)
    ]
    repeated = [
        (begin + when, kind) for begin, _ in marks for when, kind in stamps
    ]
    arrived = (
        None
        if starts is None
        else [
            (begin + when, f"{name}:{begin}")
            for begin, _ in marks
            for when, name in starts
        ]
    )
    return Window(
        marks_ns=((0, *(end for _, end in marks)),),
        cpu_ns=None,
        examples=None,
        blocked_ns=(0,) * steps,
        counters={},
        unsettled="",
        warmup=5,
        phases=rank_phases(
            marks,
            repeated,
            None if starts is None else (arrived, 0),
            has_ddp=True,
        ),
    )


STEP = [(1, F), (10, -F), (10, B), (60, -B), (60, O), (100, -O)]


def in_ns(by_rank: Sequence[float | None]) -> list[float | None]:
    return [
        None if seconds is None else round(seconds * 1e9, 3)
        for seconds in by_rank
    ]


def test_the_critical_path_leads_along_the_rank_that_arrived_last() -> None:
    late = [(1, F), (45, -F), (45, B), (60, -B), (60, O), (100, -O)]
    first, second = (
        window(STEP, [(20, "0:a")], 8),
        window(late, [(50, "0:a")], 8),
    )
    found = step_phases([first, second])
    assert found is not None
    assert found.steps == 8
    assert in_ns(found.own[FORWARD]) == [9, 44]
    assert in_ns(found.own[EXPOSED]) == [40, 10]
    assert in_ns(found.own[RANK_WAIT]) == [30, 0]
    # From the end of the first rank's step, through its optimizer and the transfer, to the second's
    # forward pass.
    assert {phase: in_ns(ranks) for phase, ranks in found.path.items()} == {
        DATA: [0, 1],
        FORWARD: [0, 44],
        BACKWARD: [0, 5],
        EXPOSED: [10, 0],
        OPTIMIZER: [40, 0],
        OTHER: [0, 0],
    }


def test_many_small_waits_for_one_rank_add_up() -> None:
    """As under FSDP: no single lateness is large."""

    def side(begin: int) -> Window:
        """A rank that begins to wait so late in each of eight parts of its forward pass."""
        waits = [
            (12 * part + when, kind)
            for part in range(8)
            for when, kind in ((begin, W), (12, -W))
        ]
        return window(
            [(1, F), *waits, (100, -F)],
            [(12 * part + begin - 1, str(part)) for part in range(8)],
            4,
        )

    found = step_phases([side(3), side(11)])
    assert found is not None
    assert sum(map(sum, found.path.values())) == pytest.approx(100e-9)
    assert in_ns(found.path[FORWARD]) == [4, 86]


def test_clocks_of_other_nodes_are_set_to_ours() -> None:
    first, second = (
        window(STEP, [(20, "0:a")], 4),
        window(STEP, [(40, "0:a")], 4),
    )
    found = step_phases([first, on_our_clock(second, 20.0)])
    assert found is not None
    assert in_ns(found.own[RANK_WAIT]) == [0, 0]


def test_a_rank_without_phases_leaves_those_of_the_launch_unknown() -> None:
    known = window(STEP, [(20, "0:a")], 4)
    unnested = window([(1, B)], [], 4)
    assert step_phases([known, unnested]) is None
    found = step_phases([known, window(STEP, None, 4)])
    assert found is not None
    assert found.path == {}
    assert in_ns(found.own[RANK_WAIT]) == [None, None]
    assert in_ns(found.own[EXPOSED]) == [40, None]
    assert in_ns(found.own[FORWARD]) == [9, 9]
