"""What is told of launches, and how long their windows are, by launches that never ran."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf.measuring.launches import Launches
from pytest_ddpperf.measuring.turns import Turns
from pytest_ddpperf.records import LaunchSamples, Phases, Plan, TestId
from pytest_ddpperf.records.errors import BaseSideError

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


# --- how long windows are


PLAN = Plan(world_size=1, backend="gloo", device="cpu", warmup=5)


class Windows:
    """Launches of one side: a window of its own length where none was said."""

    def __init__(self, own: int, *, unfit: int = 0) -> None:
        self.told: list[int | None] = []
        self._own, self._unfit = own, unfit

    def __call__(self, steps: int | None) -> LaunchSamples:
        self.told.append(steps)
        unfit = "rank 0 recompiled at step 1" * (len(self.told) <= self._unfit)
        return replace(LAUNCH, step_seconds=(0.1,) * (steps or self._own), unfit=unfit)

    def side(self) -> Launches:
        return Launches(PLAN, lambda launch, of, steps: self(steps), most_again=1)


@pytest.mark.parametrize("unfit", [0, 1])
def test_the_first_launch_says_how_many_steps_all_have(unfit: int) -> None:
    windows = Windows(7, unfit=unfit)
    every = windows.side()
    every.take(2)
    every.take(3)
    assert windows.told == [None, *(7,) * (2 + unfit)]
    assert [len(launch.step_seconds) for launch in every.kept] == [7] * 3


def turns(theirs: Windows, *, fails: bool = False) -> Turns:
    def measure(observer: object, steps: int | None) -> LaunchSamples:
        if fails:
            raise BaseSideError("gone")
        return theirs(steps)

    ready = SimpleNamespace(plan=PLAN, batch_size=None, facts={})
    base: Any = SimpleNamespace(begin=lambda nodeid, label: ready, measure=measure)
    test = TestId(module="m", name="t")
    return Turns(base, "m.py::t", test, most_again=1, begin=lambda launch, of: PROGRESS)


PROGRESS: Any = None


@pytest.mark.parametrize("run", range(5))
def test_of_two_sides_the_one_that_launches_first_says_it_for_both(run: int) -> None:
    here, there = Windows(7), Windows(9)
    now, reference = here.side(), turns(there)
    reference.take(now, 2)
    reference.take(now, 4)
    assert len(here.told) == len(there.told) == 4
    first, other = (here, there) if here.told[0] is None else (there, here)
    steps = 7 if first is here else 9
    assert first.told == [None, *(steps,) * 3]
    assert other.told == [steps] * 4


@pytest.mark.parametrize("run", range(3))
def test_a_side_alone_says_it_for_itself(run: int) -> None:
    here = Windows(7)
    turns(Windows(9), fails=True).take(here.side(), 3)
    assert here.told == [None, 7, 7]
