"""Notes on launches, how long their windows are, and both sides of a comparison, by launches that
never ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf.compare.interleaving import take_round
from pytest_ddpperf.compare.job import Job
from pytest_ddpperf.compare.result import Measured
from pytest_ddpperf.compare.rounds import (
    Round,
    are_mostly_unfit,
    baseline_launches,
    combine,
    find_error,
    find_notes,
)
from pytest_ddpperf.compare.rule import Rule
from pytest_ddpperf.compare.run import _of_changed
from pytest_ddpperf.compare.sides import CurrentSide, OtherVersion
from pytest_ddpperf.launch import Observer
from pytest_ddpperf.records.errors import BaseSideError, LaunchError
from pytest_ddpperf.records.outcome import Version
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import (
    Counters,
    Environment,
    LaunchCost,
    LaunchSamples,
    RankError,
    StackSamples,
    Status,
    TestId,
    Verdict,
)
from tests.unit.test_machine import settings

LAUNCH = LaunchSamples(
    step_seconds=(0.1, 0.1),
    rank_seconds=((0.1, 0.1),),
    stretches=(2,),
    cpu_seconds=None,
    examples=None,
    blocked_seconds=None,
    counters={},
    cost=LaunchCost(),
    facts={},
    output=(),
)
UNFIT = replace(
    LAUNCH,
    unfit="rank 0 recompiled at step 1: raise --ddp-warmup",
    notes=("rank 0's clean-up did not end",),
)
UNSETTLED = replace(LAUNCH, unsettled="compiling", warmup=25)
SILENT, TINY = (
    replace(LAUNCH, is_silent=True),
    replace(LAUNCH, step_seconds=(1e-5, 1e-5)),
)
DOUBTED = [
    replace(
        LAUNCH, doubts={"first step": f"the first timed step took {ratio}x"}
    )
    for ratio in (12, 13)
]


PLAN = Plan(world_size=1, backend="gloo", device="cpu", warmup=5)


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
            (
                "2 of 3 launches: rank 0 recompiled at step 1: raise --ddp-warmup",
            ),
            True,
        ),
        (
            (UNSETTLED,),
            (
                "after 25 warm-up steps (5 asked) ranks were still compiling: raise --ddp-warmup",
            ),
            False,
        ),
        ((LAUNCH, *DOUBTED), ("the first timed step took 12x",), False),
        ((LAUNCH, DOUBTED[0]), (), False),
        (
            (SILENT, SILENT),
            ("no collective in a step: is the model wrapped in DDP?",),
            False,
        ),
        ((SILENT, LAUNCH), (), False),
        (
            (TINY, TINY),
            (
                (
                    "a step takes less than 20 us, and the clock and the loop have a large part:"
                    " let it do more"
                ),
            ),
            False,
        ),
        ((), (), False),
    ],
    ids=[
        "fit",
        "one unfit",
        "most unfit",
        "unsettled",
        "most doubted",
        "half doubted",
        "silent",
        "not always silent",
        "tiny",
        "none",
    ],
)
def test_notes_on_launches(
    taken: tuple[LaunchSamples, ...], notes: tuple[str, ...], mostly: bool
) -> None:
    assert (find_notes(taken, PLAN), are_mostly_unfit(taken)) == (notes, mostly)


def test_a_counter_that_launches_do_not_agree_on_is_unknown_but_for_memory() -> (
    None
):
    counts: tuple[Counters, ...] = (
        {
            "rpc.calls": 4,
            "rpc.bytes": 80,
            "gradient_bytes": None,
            "peak_rss.bytes": 9,
            "peak_memory.bytes": None,
        },
        {
            "rpc.calls": 4,
            "rpc.bytes": 96,
            "gradient_bytes": 40,
            "peak_rss.bytes": 8,
            "peak_memory.bytes": None,
        },
    )
    taken = [replace(LAUNCH, counters=counters) for counters in counts]
    unknown = {
        "rpc.bytes": None,
        "gradient_bytes": None,
        "peak_memory.bytes": None,
    }
    assert combine(tuple(taken), Environment()).counters == {
        "rpc.calls": 4,
        "peak_rss.bytes": 9,
        **unknown,
    }


def test_who_compares_nothing_is_not_advised_how_to_measure() -> None:
    notes = find_notes((UNFIT, UNSETTLED), PLAN, advise=False)
    assert notes == ("rank 0's clean-up did not end",)


def job() -> Job:
    return Job(
        test=TestId(module="m", name="t"),
        nodeid="m.py::t",
        setups=(None,),
        settings=settings(),
        plan=PLAN,
        level=0.05,
        batch_size=None,
        gate=True,
        facts={},
    )


# --- both sides


class Both:
    """Rounds of both sides, and the orders that the sides got: "n pause 7", "b stretch", "b
    launch", ..."""

    def __init__(
        self,
        fails: Callable[
            [str, str, int], Exception | None
        ] = lambda side, what, alive: None,
        turns: str = "stretches",
    ) -> None:
        """`fails(side, what, alive)` is what happens to an order while so many launches are
        alive."""
        self.reported: list[str] = []
        self.alive = 0
        self._fails = fails
        self.rounds: tuple[Round, ...] = ()
        self.base: Any = SimpleNamespace(
            pause=lambda observer, steps: self.pause("b", steps),
            measure=lambda observer, steps: self.launch("b", steps),
        )
        self.launcher: Any = SimpleNamespace(
            measure=lambda plan, setup, observer, others: self.launch(
                "n", exact(plan)
            ),
            pause=lambda plan, setup, observer: self.pause("n", exact(plan)),
            alone=lambda plan, observer: nullcontext(),
        )
        self.job = replace(job(), settings=settings(turns=turns, launches=2))

    @contextmanager
    def pause(self, side: str, steps: int | None) -> Iterator[Any]:
        self._note(side, "pause", steps)
        self.alive += 1
        taken: list[int] = []

        def stretch(steps: int) -> None:
            self._note(side, "stretch")
            taken.append(steps)

        def deliver() -> LaunchSamples:
            self._note(side, "deliver")
            return replace(
                LAUNCH,
                step_seconds=(0.1,) * (steps or 7),
                stretches=tuple(taken),
            )

        try:
            yield SimpleNamespace(
                steps=steps or 7,
                step_seconds=0.01,
                helpers=0,
                stretch=stretch,
                deliver=deliver,
            )
        finally:
            self.alive -= 1

    def launch(self, side: str, steps: int | None) -> LaunchSamples:
        self._note(side, "launch", steps)
        return replace(LAUNCH, step_seconds=(0.1,) * (steps or 7))

    def _note(self, side: str, what: str, steps: int | None = None) -> None:
        order = f"{side} {what}"
        if steps is not None:
            order += f" {steps}"
        self.reported.append(order)
        if problem := self._fails(side, what, self.alive):
            raise problem

    def take(self, count: int) -> None:
        """Take rounds until there are so many."""
        while len(self.rounds) < count:
            current = CurrentSide(self.job, self.launcher, len(self.rounds))
            found = take_round(
                self.rounds, count, current, self.base, Observer(), None
            )
            self.rounds = (*self.rounds, found)

    @property
    def sizes(self) -> tuple[int, int]:
        """How many launches each side has, the current one first."""
        return len(self.rounds), len(baseline_launches(self.rounds))

    @property
    def measured(self) -> Measured:
        version = Version(ref="HEAD~1", commit="", now="")
        other = OtherVersion(version, self.job)
        measurement, before = Rule(
            job=self.job, max_seconds=1e9, other=other
        ).sides_of(self.rounds)
        return Measured(
            job=self.job,
            verdict=Verdict(status=Status.PASS, reason=""),
            fails=False,
            rounds=self.rounds,
            measurement=measurement,
            before=before,
            other=other,
        )


def exact(plan: Plan) -> int | None:
    return None if plan.most_steps != plan.steps else plan.steps


def test_both_sides_of_a_pair_are_alive_and_run_the_same_stretches() -> None:
    both = Both()
    both.take(2)
    current, baseline = both.rounds[0].now, both.rounds[0].before
    assert baseline is not None
    assert current.stretches == baseline.stretches
    assert current.stretches[0] == 1, "nothing of the first counts"
    assert sum(current.stretches) - len(current.stretches) == 7
    assert both.alive == 0


def test_which_side_delivers_first_is_drawn() -> None:
    """On a device its work is profiled then, while the other side is paused or has ended."""
    both = Both()
    both.take(40)
    delivered = [each for each in both.reported if "deliver" in each]
    assert {*delivered[::2]} == {"n deliver", "b deliver"}


def test_windows_of_a_device_keep_as_many_steps_on_both_sides() -> None:
    """A window is longer than what is kept of it. A side that is asked for all steps of the other
    one keeps more."""
    both = Both()
    plan = replace(
        PLAN, device="cuda", timing="free", min_seconds=1.0, most_steps=7
    )
    both.job = replace(both.job, plan=plan)
    both.take(2)
    assert sorted(each for each in both.reported if "pause" in each) == [
        "b pause",
        "b pause 7",
        "n pause",
        "n pause 7",
    ]


PROBLEM = LaunchError(
    RankError(
        rank=1, when=0.0, phase="setup", summary="OSError: address in use"
    ),
    (),
    (),
)


@pytest.mark.parametrize("side", ["n", "b"])
@pytest.mark.parametrize("what", ["pause", "stretch", "deliver"])
def test_what_fails_only_with_both_sides_alive_is_measured_one_after_the_other(
    side: str, what: str
) -> None:
    def fails(who: str, order: str, alive: int) -> Exception | None:
        problem = PROBLEM if who == "n" else BaseSideError(str(PROBLEM))
        # whichever is drawn to start first
        second = alive == 1 if what == "pause" else alive == 2 and who == side
        return problem if order == what and second else None

    both = Both(fails)
    both.take(5)
    assert (find_error(both.rounds), both.sizes) == ("", (5, 5))
    assert {"n launch 7", "b launch 7"} <= {*both.reported}
    (note,) = both.measured.notes(Path("/"))
    assert note.endswith(
        "with both sides alive, rank 1 failed in setup: OSError: address in use"
    )
    assert both.alive == 0


@pytest.mark.parametrize("side", ["n", "b"])
def test_a_later_pair_that_fails_is_an_error(side: str) -> None:
    both = Both()
    both.take(1)
    both._fails = lambda who, order, alive: (
        (PROBLEM if side == "n" else BaseSideError("gone"))
        if who == side
        else None
    )
    if side == "n":
        with pytest.raises(LaunchError, match="address in use"):
            both.take(2)
    else:
        both.take(2)
        assert (find_error(both.rounds), both.sizes) == ("gone", (2, 1))


@pytest.mark.parametrize("what", ["stretch", "deliver", "launch"])
def test_what_fails_on_the_baseline_side_leaves_the_current_side_alone(
    what: str,
) -> None:
    turns = "launches" if what == "launch" else "stretches"
    both = Both(
        lambda who, order, alive: (
            BaseSideError("gone") if who == "b" and order != "pause" else None
        ),
        turns,
    )
    both.take(2)
    assert (both.measured.error, both.sizes) == ("gone", (2, 0))
    assert both.measured.before == ()
    assert both.reported.count("b launch") <= 1, "it is not tried once more"


def test_the_time_of_a_function_that_is_the_same_is_its_callers() -> None:
    stack = (
        "net.py:Block.forward",
        "net.py:Net.forward.<locals>.call",
        "loader.py:load",
        "train.py:step",
        "train.py:<module>",
    )
    launch = replace(
        LAUNCH,
        stacks=(StackSamples(taken=9, functions=((stack, 7), (stack[2:], 1))),),
    )
    for changed, left in (
        ({"net.py": set(), "train.py": {"step"}}, [stack[3:]] * 2),
        ({"net.py": {"Net"}, "train.py": {"step"}}, [stack[1:], stack[3:]]),
        ({"net.py": {"<module>"}}, [stack, ()]),
        ({"train.py": {"more"}}, [(), ()]),
    ):
        (found,) = _of_changed(launch, changed).stacks
        assert [names for names, _ in found.functions] == left
        assert [count for _, count in found.functions] == [7, 1]
