"""What is told of launches, and how long their windows are, by launches that never ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf.launch import Nobody
from pytest_ddpperf.measuring.baseline_side import Interleaved
from pytest_ddpperf.measuring.launches import CurrentSide, Job, Launches, measurement
from pytest_ddpperf.records import Counters, Environment, LaunchSamples, Phases, Plan, RankError, TestId
from pytest_ddpperf.records.errors import BaseSideError, LaunchError
from tests.unit.test_machine import settings

LAUNCH = LaunchSamples(
    step_seconds=(0.1, 0.1),
    rank_seconds=((0.1, 0.1),),
    stretches=(2,),
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


def launches(*taken: LaunchSamples) -> Launches:
    """The launches of one side, in their order."""
    left = iter(taken)
    every = Launches(Plan(world_size=1, backend="gloo", device="cpu", warmup=5), lambda *_: next(left))
    every.take(len(taken))
    return every


@pytest.mark.parametrize(
    ("taken", "notes", "mostly"),
    [
        ((LAUNCH,), (), False),
        (
            (UNFIT, LAUNCH),
            (
                "rank 0's clean-up did not end",
                "1 of 2 launches: rank 0 recompiled at step 1: raise --ddp-warmup",
            ),
            False,
        ),
        (
            (replace(UNFIT, notes=()), LAUNCH, replace(UNFIT, notes=())),
            ("2 of 3 launches: rank 0 recompiled at step 1: raise --ddp-warmup",),
            True,
        ),
        ((UNSETTLED,), ("after 25 warm-up steps (5 asked) ranks were still compiling",), False),
    ],
    ids=["fit", "one unfit", "most unfit", "unsettled"],
)
def test_notes_on_launches(taken: tuple[LaunchSamples, ...], notes: tuple[str, ...], mostly: bool) -> None:
    every = launches(*taken)
    assert (every.notes(), every.mostly_recompiled) == (notes, mostly)


def test_a_counter_that_launches_do_not_agree_on_is_unknown() -> None:
    counts: tuple[Counters, ...] = (
        {"rpc.calls": 4, "rpc.bytes": 80, "gradient_bytes": None},
        {"rpc.calls": 4, "rpc.bytes": 96, "gradient_bytes": 40},
    )
    taken = [replace(LAUNCH, counters=counters) for counters in counts]
    assert measurement(taken, Environment()).counters == {"rpc.calls": 4, "rpc.bytes": None, "gradient_bytes": None}


def test_who_compares_nothing_is_not_advised_how_to_measure() -> None:
    assert launches(UNFIT, UNSETTLED).notes(advise=False) == ("rank 0's clean-up did not end",)


# --- how long windows are


PLAN = Plan(world_size=1, backend="gloo", device="cpu", warmup=5)


class Windows:
    """Launches of one side: a window of its own length where none was said."""

    def __init__(self, own: int) -> None:
        self.reported: list[int | None] = []
        self._own = own

    def __call__(self, steps: int | None) -> LaunchSamples:
        self.reported.append(steps)
        return replace(LAUNCH, step_seconds=(0.1,) * (steps or self._own))

    def side(self) -> Launches:
        return Launches(PLAN, lambda launch, planned, steps: self(steps))


def test_the_first_launch_decides_how_many_steps_all_have() -> None:
    windows = Windows(7)
    every = windows.side()
    every.take(2)
    every.take(3)
    assert windows.reported == [None, 7, 7]
    assert [len(launch.step_seconds) for launch in every.taken] == [7] * 3


def job(turns: str = "launches") -> Job:
    return Job(
        test=TestId(module="m", name="t"),
        nodeid="m.py::t",
        setups=(None,),
        settings=settings(turns=turns),
        plan=PLAN,
        level=0.05,
        batch_size=None,
        gate=True,
        facts={},
    )


def interleaved(theirs: Windows, *, fails: bool = False) -> Interleaved:
    def measure(observer: object, steps: int | None) -> LaunchSamples:
        if fails:
            raise BaseSideError("gone")
        return theirs(steps)

    ready = SimpleNamespace(plan=PLAN, batch_size=None, facts={})
    base: Any = SimpleNamespace(begin=lambda nodeid, label, plan: ready, measure=measure, version="HEAD~1")
    return Interleaved(base, job(), Nobody())


@pytest.mark.parametrize("run", range(5))
def test_of_two_sides_the_one_that_launches_first_says_it_for_both(run: int) -> None:
    here, there = Windows(7), Windows(9)
    now, reference = here.side(), interleaved(there)
    reference.take(now, 2, planned=2)
    reference.take(now, 4, planned=4)
    assert len(here.reported) == len(there.reported) == 4
    first, other = (here, there) if here.reported[0] is None else (there, here)
    steps = 7 if first is here else 9
    assert first.reported == [None, *(steps,) * 3]
    assert other.reported == [steps] * 4


@pytest.mark.parametrize("run", range(3))
def test_where_it_was_said_before_the_first_launch_has_as_many_on_both_sides(run: int) -> None:
    here, there = Windows(7), Windows(9)
    now = here.side()
    now.steps = 8
    interleaved(there).take(now, 2, planned=2)
    assert here.reported == there.reported == [8, 8]


@pytest.mark.parametrize("run", range(3))
def test_a_side_alone_says_it_for_itself(run: int) -> None:
    here = Windows(7)
    interleaved(Windows(9), fails=True).take(here.side(), 3, planned=3)
    assert here.reported == [None, 7, 7]


# --- pairs whose launches are both alive


def exact(plan: Plan) -> int | None:
    return None if plan == PLAN else plan.steps


class Both:
    """Both sides' launches, and what they were told, in the order of it: "n hold 7", "b stretch", ..."""

    def __init__(self, fails: Callable[[str, str, int], Exception | None] = lambda side, what, alive: None) -> None:
        """`fails(side, what, alive)` is what happens to an order while so many launches are alive."""
        self.reported: list[str] = []
        self.alive = 0
        self._fails = fails
        ready = SimpleNamespace(plan=PLAN, batch_size=None, facts={})
        hold = partial(self.hold, "b")
        base: Any = SimpleNamespace(
            begin=lambda nodeid, label, plan: ready,
            hold=lambda observer, steps: hold(steps),
            measure=lambda observer, steps: self.launch("b", steps),
            version="HEAD~1",
            gone=False,
        )
        launcher: Any = SimpleNamespace(
            measure=lambda plan, setup, observer, others: self.launch("n", exact(plan)),
            hold=lambda plan, setup, observer: self.hold("n", exact(plan)),
            alone=lambda plan, observer: nullcontext(),
        )
        self.now = CurrentSide(job(), launcher, Nobody())
        self.interleaved = Interleaved(base, job("stretches"), Nobody())

    @contextmanager
    def hold(self, side: str, steps: int | None) -> Iterator[Any]:
        self._note(side, "hold", steps)
        self.alive += 1
        taken: list[int] = []

        def stretch(steps: int) -> None:
            self._note(side, "stretch")
            taken.append(steps)

        def deliver() -> LaunchSamples:
            self._note(side, "deliver")
            return replace(LAUNCH, step_seconds=(0.1,) * (steps or 7), stretches=tuple(taken))

        paused = {"steps": steps or 7, "step_seconds": 0.01}
        try:
            yield SimpleNamespace(**paused, stretch=stretch, deliver=deliver)
        finally:
            self.alive -= 1

    def launch(self, side: str, steps: int | None) -> LaunchSamples:
        self._note(side, "launch", steps)
        return replace(LAUNCH, step_seconds=(0.1,) * (steps or 7))

    def _note(self, side: str, what: str, steps: int | None = None) -> None:
        self.reported.append(f"{side} {what}" + f" {steps}" * (steps is not None))
        if problem := self._fails(side, what, self.alive):
            raise problem

    def take(self, count: int) -> None:
        self.interleaved.take(self.now, count, planned=count)


@pytest.mark.parametrize("run", range(5))
def test_both_sides_of_a_pair_are_alive_and_run_the_same_stretches(run: int) -> None:
    both = Both()
    both.take(2)
    orders = [reported for reported in both.reported if "hold" in reported]
    assert sorted(orders[:2]) in (["b hold", "n hold 7"], ["b hold 7", "n hold"]), "whoever comes first says how long"
    assert sorted(orders[2:]) == ["b hold 7", "n hold 7"]
    now, theirs = both.now.taken[0], both.interleaved._launches.taken[0]
    assert now.stretches == theirs.stretches
    assert now.stretches[0] == 1, "nothing of the first counts"
    assert sum(now.stretches) - len(now.stretches) == 7
    assert both.alive == 0
    assert not any("launch" in reported for reported in both.reported)


HINT = "--ddp-turns launches measures one launch after the other"


@pytest.mark.parametrize("side", ["n", "b"])
@pytest.mark.parametrize(
    ("what", "needs_room"), [("hold", True), ("stretch", True), ("deliver", True), ("hold", False), ("stretch", False)]
)
def test_what_needs_the_room_of_the_other_side_says_how_to_measure_it(side: str, what: str, needs_room: bool) -> None:
    cause = RankError(rank=1, when=0.0, phase="setup", summary="OSError: address in use", needs_room=needs_room)
    problem = LaunchError(cause, (), ())
    gone = BaseSideError(str(problem), needs_room)

    def fails(who: str, order: str, alive: int) -> Exception | None:
        return (problem if who == "n" else gone) if order == what and alive and who == side else None

    both = Both(fails)
    if side == "n":
        with pytest.raises(LaunchError, match="address in use") as raised:
            both.take(20)
        text = str(raised.value)
    else:
        both.take(20)
        text = both.interleaved.error
    assert ("it was interleaved with " in text, text.endswith(HINT)) == (needs_room, needs_room)
    assert both.alive == 0


def test_a_side_that_cannot_be_set_up_alone_has_no_such_advice() -> None:
    cause = RankError(rank=1, when=0.0, phase="setup", summary="broken", needs_room=True)
    problem = LaunchError(cause, (), ())
    both = Both(lambda who, order, alive: problem if order == "hold" and not alive else None)
    with pytest.raises(LaunchError, match=r"broken$"):
        both.take(1)


@pytest.mark.parametrize("what", ["stretch", "deliver"])
def test_what_fails_once_in_a_stretch_there_leaves_the_side_at_hand_alone(what: str) -> None:
    both = Both(lambda who, order, alive: BaseSideError("gone") if who == "b" and order == what else None)
    both.take(2)
    assert both.interleaved.error == "gone"
    assert len(both.now.taken) == 2
    assert both.interleaved.measurements() == ()
    assert not any(reported.startswith("b launch") for reported in both.reported), "it is not tried once more"
