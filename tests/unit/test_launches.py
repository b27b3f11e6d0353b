"""What is told of launches, by launches that never ran."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_ddpperf.measuring.launches import Launches
from pytest_ddpperf.records import LaunchSamples, Phases, Plan

LAUNCH = LaunchSamples(
    step_seconds=(0.1, 0.1),
    rank_seconds=((0.1, 0.1),),
    cpu_seconds=None,
    examples=None,
    blocked_seconds=None,
    counters={},
    phases=Phases(),
    facts={},
    output=(),
)
UNFIT = replace(LAUNCH, unfit="rank 0 recompiled at step 1", notes=("rank 0's clean-up did not end",))
UNSETTLED = replace(LAUNCH, unsettled="compiling", warmup=25)


def launches(*taken: LaunchSamples, most_again: int) -> Launches:
    """As many as `taken` allows, in their order."""
    left = iter(taken)
    every = Launches(
        Plan(world_size=1, backend="gloo", device="cpu", warmup=5), lambda *_: next(left), most_again=most_again
    )
    every.take(len(taken) - most_again)
    return every


@pytest.mark.parametrize(
    ("taken", "most_again", "told"),
    [
        ((LAUNCH,), 0, ()),
        ((replace(UNFIT, notes=()), LAUNCH), 1, ("1 unfit launch measured again: rank 0 recompiled at step 1",)),
        (
            (replace(UNFIT, notes=()), LAUNCH, replace(UNFIT, notes=()), LAUNCH),
            2,
            ("2 unfit launches measured again: rank 0 recompiled at step 1",),
        ),
        (
            (UNFIT, LAUNCH),
            0,
            (
                "rank 0's clean-up did not end",
                "1 of 2 launches stayed unfit: rank 0 recompiled at step 1: raise --ddp-warmup",
            ),
        ),
        ((UNSETTLED,), 0, ("after 25 warm-up steps (5 asked) ranks were still compiling",)),
    ],
    ids=["fit", "one again", "two again", "unfit", "unsettled"],
)
def test_what_is_told_of_launches(taken: tuple[LaunchSamples, ...], most_again: int, told: tuple[str, ...]) -> None:
    assert launches(*taken, most_again=most_again).notes() == told


def test_who_compares_nothing_is_not_advised_how_to_measure() -> None:
    assert launches(UNFIT, UNSETTLED, most_again=0).notes(advise=False) == ("rank 0's clean-up did not end",)
