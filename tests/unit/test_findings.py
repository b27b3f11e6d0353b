"""What explains a change: by given phases and counters of both sides."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from pytest_ddpperf.explain import find, find_slower_file
from pytest_ddpperf.records.samples import Measurement, Samples, StackSamples
from pytest_ddpperf.records.step_phases import (
    BACKWARD,
    DATA,
    EXPOSED,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PHASES,
    RANK_WAIT,
    Finding,
    StepPhases,
)

# milliseconds
USUAL = {
    DATA: 1.0,
    FORWARD: 5.0,
    BACKWARD: 10.0,
    EXPOSED: 4.0,
    OPTIMIZER: 1.0,
    OTHER: 0.5,
}


def side(
    *more: Mapping[str, float],
    seed: int = 0,
    launches: int = 8,
    turns: bool = False,
    with_path: bool = True,
    counters: Mapping[str, int | None] | None = None,
) -> Measurement:
    """Two ranks in noise of 1 %; `more` of a phase for each of them. The way goes along the rank
    that has more of it, or along both in `turns`."""
    source, found = random.Random(seed), []
    for _ in range(launches):
        added = [dict(rank) for rank in (more or ({}, {}))]
        own = {
            phase: tuple(
                (USUAL[phase] * source.gauss(1, 0.01) + rank.get(phase, 0.0))
                / 1e3
                for rank in added
            )
            for phase in PHASES
        }
        late = 1 if sum(added[1].values()) > sum(added[0].values()) else 0
        share = (0.5, 0.5) if turns else (1.0 - late, float(late))
        path = {
            phase: tuple(max(own[phase]) * each for each in share)
            for phase in PHASES
        }
        steps = StepPhases(
            steps=100,
            own={**own, RANK_WAIT: (0.0, 0.0)},
            path=path if with_path else {},
        )
        found.append(steps)
    samples = Samples(
        step_seconds=((0.02,),), rank_seconds=(((0.02,), (0.02,)),)
    )
    return Measurement(
        samples=samples, counters=counters or {}, phases=tuple(found)
    )


BEFORE = side(seed=1)


def named(
    now: Measurement,
    rise: float,
    before: Measurement = BEFORE,
    *,
    is_paired: bool = True,
) -> list[object]:
    """Return what is found in a rise of so many milliseconds, without amounts."""
    found = find(now, before, rise / 1e3, is_paired=is_paired, level=0.015)
    return [(each.phases, each.rank, each.counters) for each in found]


@pytest.mark.parametrize("is_paired", [True, False])
@pytest.mark.parametrize("phase", PHASES)
def test_the_phase_that_took_longer_is_named(
    phase: str, is_paired: bool
) -> None:
    assert named(side({phase: 2}, {phase: 2}), 2, is_paired=is_paired) == [
        ((phase,), None, ())
    ]


def test_it_has_its_amount_its_range_and_its_share() -> None:
    (found,) = find(
        side({FORWARD: 2}, {FORWARD: 2}),
        BEFORE,
        2e-3,
        is_paired=True,
        level=0.015,
    )
    assert found.seconds == pytest.approx(2e-3, rel=0.1)
    assert abs(found.seconds - 2e-3) < found.reach
    assert found.share == pytest.approx(1, rel=0.1)


def test_a_rank_is_named_if_its_phase_alone_took_longer() -> None:
    assert named(side({}, {FORWARD: 2}), 2) == [((FORWARD,), 1, ())]


def test_noise_that_grows_with_the_time_hides_no_rank() -> None:
    launches = [
        side({}, {FORWARD: more}, seed=seed, launches=1).phases[0]
        for seed, more in enumerate((172, 162, 160, 195, 370))
    ]
    now = replace(BEFORE, phases=tuple(launches))
    before = side(seed=1, launches=5)
    assert named(now, 190, before) == [((FORWARD,), 1, ())]
    (found,) = find(now, before, 0.19, is_paired=True, level=0.015)
    assert found.seconds == found.reach == pytest.approx(0.2, rel=0.1)


def test_no_rank_is_named_by_one_slow_launch_of_two_ranks_that_rose_alike() -> (
    None
):
    source = random.Random(1)
    launches = []
    for seed in range(8):
        # the last launch of rank 1 is twenty times as slow as usual
        more = [20 * source.lognormvariate(0, 0.3) for _ in range(2)]
        if seed == 7:
            more[1] *= 20
        both = ({FORWARD: each} for each in more)
        (launch,) = side(*both, seed=seed, launches=1).phases
        # on the way of all steps
        way = {**launch.path, FORWARD: (0.0, 0.02 + seed / 100)}
        launches.append(replace(launch, path=way))
    now = replace(BEFORE, phases=tuple(launches))
    assert named(now, 50) == [((FORWARD,), None, ())]


def test_a_wait_is_named_where_no_pass_is_known() -> None:
    """A loop of collectives, without a model."""

    def without_passes(measured: Measurement) -> Measurement:
        unknown = dict.fromkeys((FORWARD, BACKWARD), (None, None))
        launches = [
            replace(launch, own={**launch.own, **unknown})
            for launch in measured.phases
        ]
        return replace(measured, phases=tuple(launches))

    before = without_passes(BEFORE)
    now = without_passes(side({EXPOSED: 2}, {EXPOSED: 2}))
    assert named(now, 2, before) == [((EXPOSED,), None, ())]
    # what CPU time says of it is more than that it is the step
    assert named(without_passes(side({}, {OTHER: 2})), 2, before) == []


def test_no_rank_is_named_where_both_are_slower_or_take_turns() -> None:
    assert named(side({FORWARD: 2}, {FORWARD: 1.9}), 2) == [
        ((FORWARD,), None, ())
    ]
    assert named(side({}, {FORWARD: 2}, turns=True), 2) == [
        ((FORWARD,), None, ())
    ]


def test_nothing_is_named_of_a_change_that_no_phase_shows() -> None:
    assert named(side(seed=2), 1) == []


def test_what_is_left_of_a_change_is_unexplained() -> None:
    now = side({FORWARD: 2}, {FORWARD: 2})
    found = find(now, BEFORE, 4e-3, is_paired=True, level=0.015)
    assert [each.phases for each in found] == [(FORWARD,), ()]
    assert found[1].seconds == pytest.approx(2e-3, rel=0.1)
    assert named(now, 2.2) == [((FORWARD,), None, ())]  # little is left
    # something else became faster
    more = find(now, BEFORE, 1e-3, is_paired=True, level=0.015)[-1]
    assert more.phases == ()
    assert more.seconds == pytest.approx(-1e-3, rel=0.2)


def test_what_became_faster_is_named_too() -> None:
    (found,) = find(
        BEFORE,
        side({BACKWARD: 3}, {BACKWARD: 3}),
        -3e-3,
        is_paired=True,
        level=0.015,
    )
    assert found.phases == (BACKWARD,)
    assert found.seconds == pytest.approx(-3e-3, rel=0.1)
    assert abs(found.seconds + 3e-3) < found.reach


@pytest.mark.parametrize(
    ("before", "now", "joined", "others"),
    [
        (
            {"buckets": 3},
            {"buckets": 24},
            (BACKWARD, EXPOSED),
            [(FORWARD,), (OPTIMIZER,)],
        ),
        (
            {"broadcast.count": 0},
            {"broadcast.count": 2},
            (FORWARD, BACKWARD, EXPOSED),
            [(OPTIMIZER,)],
        ),
        (
            {"recompilations": 0},
            {"recompilations": 1},
            (FORWARD, BACKWARD, OPTIMIZER),
            [(EXPOSED,)],
        ),
        # an added `.item()`
        (
            {"host_syncs": 0},
            {"host_syncs": 1},
            (FORWARD, BACKWARD, EXPOSED, OPTIMIZER),
            [],
        ),
        (
            {"all_reduce.bytes": 4, "parameters.bytes": 4},
            {"all_reduce.bytes": 8, "parameters.bytes": 8},
            (FORWARD, BACKWARD, EXPOSED, OPTIMIZER),
            [],
        ),
    ],
)
def test_counters_that_changed_come_first_with_the_phases_that_they_explain(
    before: Mapping[str, int],
    now: Mapping[str, int],
    joined: tuple[str, ...],
    others: list[tuple[str, ...]],
) -> None:
    more = {FORWARD: 5.0, BACKWARD: 3.0, EXPOSED: 4.0, OPTIMIZER: 2.0}
    after = side(
        more,
        more,
        counters={
            **now,
            "gradient_bytes": None,
            "peak_rss.bytes": 7,
            "send.count": 1,
        },
    )
    earlier = side(
        seed=1, counters={**before, "gradient_bytes": 9, "peak_rss.bytes": 6}
    )
    found = find(after, earlier, 14e-3, is_paired=True, level=0.015)
    assert [each.phases for each in found] == [joined, *others]
    assert [name for name, *_ in found[0].counters] == sorted(now, reverse=True)
    assert found[0].seconds == pytest.approx(
        sum(more[phase] for phase in joined) / 1e3, rel=0.1
    )


@pytest.mark.parametrize(
    ("before", "now"),
    [
        # one scalar more is no 6 ms
        ({"parameters.bytes": 4_000_000}, {"parameters.bytes": 4_000_004}),
        ({"buckets": 24}, {"buckets": 3}),  # fewer make nothing slower
    ],
)
def test_counters_that_cannot_explain_a_change_come_after_its_phases(
    before: Mapping[str, int], now: Mapping[str, int]
) -> None:
    after, earlier = (
        side({BACKWARD: 6}, {BACKWARD: 6}, counters=now),
        side(seed=1, counters=before),
    )
    changed = tuple((name, before[name], now[name]) for name in now)
    assert named(after, 6, earlier) == [
        ((BACKWARD,), None, ()),
        ((), None, changed),
    ]


@pytest.mark.parametrize(
    ("operators", "explains"), [(2_000, True), (1_040, False), (900, False)]
)
def test_more_operators_explain_a_change_if_there_are_enough(
    operators: int, explains: bool
) -> None:
    """The optimizer takes 2 ms of 20 ms more. A rise of 4 % is not enough of it, and no finding."""
    counted = replace(BEFORE, counters={"operators.count": 1_000})
    now = side(
        {OPTIMIZER: 2}, {OPTIMIZER: 2}, counters={"operators.count": operators}
    )
    changed = (("operators.count", 1_000, operators),) if explains else ()
    assert named(now, 2, counted) == [((OPTIMIZER,), None, changed)]


def test_a_late_rank_is_not_explained_by_counters_of_all_ranks() -> None:
    now = side({}, {BACKWARD: 2}, counters={"buckets": 4})
    found = named(now, 2, side(seed=1, counters={"buckets": 3}))
    assert found == [((BACKWARD,), 1, ()), ((), None, (("buckets", 3, 4),))]


def test_the_totals_of_collectives_are_named_if_no_other_counter_changed() -> (
    None
):
    now, before = (
        side(counters={"collectives.count": 2}),
        side(counters={"collectives.count": 1}),
    )
    assert named(now, 1, before) == [((), None, (("collectives.count", 1, 2),))]


@pytest.mark.parametrize("phase", [FORWARD, EXPOSED])
def test_sides_that_know_different_phases_are_not_compared(phase: str) -> None:
    """A step that is compiled as a whole, and one side without arrivals: their time is in another
    phase."""
    unknown = [
        replace(each, own={**each.own, phase: (None, None)})
        for each in BEFORE.phases
    ]
    now = side({FORWARD: 2}, {FORWARD: 2})
    assert named(now, 2, replace(BEFORE, phases=tuple(unknown))) == []
    one = replace(BEFORE, phases=(unknown[0], *BEFORE.phases[1:]))
    assert named(now, 2, one) == []


def test_an_optimizer_that_appears_is_found() -> None:
    without = [
        replace(each, own={**each.own, OPTIMIZER: (None, None)})
        for each in BEFORE.phases
    ]
    before = [
        replace(each, path={**each.path, OPTIMIZER: (0.0, 0.0)})
        for each in without
    ]
    assert named(side(), 1, replace(BEFORE, phases=tuple(before))) == [
        ((OPTIMIZER,), None, ())
    ]


def test_counters_are_named_without_phases_too() -> None:
    now, before = (
        side(seed=2, counters={"buckets": 24}),
        side(seed=1, counters={"buckets": 3}),
    )
    assert named(now, 1, before) == [((), None, (("buckets", 3, 24),))]
    unknown = Measurement(samples=now.samples, counters=now.counters)
    assert named(unknown, 1, before) == [((), None, (("buckets", 3, 24),))]


def test_without_the_way_back_each_rank_s_own_phases_say_it() -> None:
    now = side({FORWARD: 2}, {FORWARD: 2}, with_path=False)
    assert named(now, 2) == [((FORWARD,), None, ())]


def test_launches_of_different_ranks_are_not_compared() -> None:
    assert named(side({}, {FORWARD: 2}, {}), 2) == []


def test_unchanged_code_is_explained_in_no_way() -> None:
    """Whatever is called a rise: 1.5 % of pairs may have a finding, and a phase must make up a
    tenth of it."""
    found = sum(
        bool(named(side(seed=2 * k), 0.1, side(seed=2 * k + 1)))
        for k in range(400)
    )
    assert found <= 0.03 * 400


# --- which file

FILES = ("net.py", "train.py")
STEPS = (0.012, 0.010)  # seconds, now and before
Functions = Mapping[tuple[str, str, str], int]


def stacks(*ranks: Functions, taken: int = 800) -> list[StackSamples]:
    """Return the stacks of each rank: how often a function was seen, by its file, its name and its
    caller."""
    return [
        StackSamples(
            taken=taken,
            functions=tuple(
                ((f"{file}:{function}", caller), count)
                for (file, function, caller), count in functions.items()
            ),
        )
        for functions in ranks
    ]


def slower(
    now: Sequence[StackSamples],
    before: Sequence[StackSamples],
    *findings: Finding,
) -> Finding | None:
    return find_slower_file(
        (now, before),
        STEPS,
        findings,
        rise=STEPS[0] - STEPS[1],
        files=FILES,
        level=0.015,
    )


NET, STEP = ("net.py", "Net.forward", "train.py:step"), ("train.py", "step", "")
BEFORE_IT = {NET: 264, STEP: 192}


def test_the_file_whose_functions_take_longer_is_named_with_the_function() -> (
    None
):
    """Of 12 ms it has 360 of 800 samples, 5.4 ms; of 10 ms it had 264, 3.3 ms."""
    found = slower(stacks({NET: 360, STEP: 160}), stacks(BEFORE_IT))
    assert found is not None
    assert (found.file, found.function, found.phases, found.rank) == (
        "net.py",
        "Net.forward",
        (),
        None,
    )
    assert found.seconds == pytest.approx(0.0021)
    assert found.share == pytest.approx(1.05)
    assert 0 < found.reach < found.seconds


def test_as_many_samples_as_chance_brings_name_no_file() -> None:
    assert slower(stacks({NET: 280, STEP: 160}), stacks(BEFORE_IT)) is None
    assert slower(stacks({}), stacks({})) is None
    assert slower([], []) is None


def test_a_function_that_only_moved_to_another_file_is_not_named() -> None:
    moved, renamed = (
        ("train.py", "Net.forward", "train.py:step"),
        ("train.py", "work", "train.py:step"),
    )
    for now in (moved, renamed):
        assert (
            slower(stacks({now: 240, STEP: 160}), stacks({NET: 288, STEP: 192}))
            is None
        )
    # of a file that does not differ
    loader = ("data.py", "load", "train.py:step")
    assert (
        slower(
            stacks({moved: 240, STEP: 160, loader: 200}),
            stacks({NET: 288, STEP: 192}),
        )
        is None
    )
    found = slower(
        stacks({moved: 440, STEP: 160}), stacks({NET: 288, STEP: 192})
    )
    assert found is not None
    assert (found.file, found.function) == ("train.py", "Net.forward")
    assert found.seconds == pytest.approx(0.003), "what it takes more, not all"


def test_what_another_file_does_for_a_function_since_is_no_gain() -> None:
    helper = ("net.py", "helper", "train.py:step")
    assert slower(stacks({STEP: 200, helper: 200}), stacks({STEP: 480})) is None


def test_of_a_late_rank_only_its_own_stacks_count() -> None:
    """The other waits for it within a step of another file."""
    now = stacks({NET: 280, STEP: 400}, {NET: 440, STEP: 160})
    before = stacks({NET: 288, STEP: 192}, {NET: 288, STEP: 192})
    late = Finding(phases=(FORWARD,), seconds=0.002, share=1.0, rank=1)
    found = slower(now, before, late)
    assert found is not None
    assert (found.file, found.rank) == ("net.py", 1)
    found = slower(now, before, replace(late, rank=0))
    assert found is not None
    assert found.file == "train.py"
