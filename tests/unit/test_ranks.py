"""Which rank a failure names, and what it says of work and waiting: by given figures of ranks."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest

from pytest_ddpperf.records.outcome import BaselineSide, Version
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import (
    Interval,
    Measurement,
    Samples,
    Status,
    Verdict,
)
from pytest_ddpperf.records.step_phases import (
    FORWARD,
    OPTIMIZER,
    PHASES,
    RANK_WAIT,
    Finding,
    StepPhases,
)
from pytest_ddpperf.report import causes as words
from tests.unit.test_report import comparison, risen


def side(
    step: float, *, cpu: Sequence[float] | None, own: Sequence[float] = ()
) -> Measurement:
    """In ms: the group's step, and each rank's CPU time and own step; without `own` all are as long
    as the group's."""

    def launches(
        by_rank: Sequence[float],
    ) -> tuple[tuple[tuple[float, ...], ...], ...]:
        return (tuple((ms / 1000,) * 3 for ms in by_rank),) * 2

    return Measurement(
        samples=Samples(
            step_seconds=((step / 1000,) * 3,) * 2,
            rank_seconds=launches(own or [step] * len(cpu or own)),
            cpu_seconds=None if cpu is None else launches(cpu),
        )
    )


def causes(
    now: Measurement,
    *base: Measurement,
    metric: str = "p50",
    status: Status = Status.REGRESSED,
) -> tuple[str, ...]:
    """Return the causes of a verdict on `metric` between the first session and now."""
    before, after = (side.samples.step_seconds[0][0] for side in (base[0], now))
    interval = Interval(estimate=after / before - 1, low=0.0, high=9.0)
    change = comparison(
        status,
        metric,
        baseline_seconds=before,
        now_seconds=after,
        change=interval,
    )
    plan = Plan(
        world_size=len(now.samples.rank_seconds[0]),
        backend="gloo",
        device="cpu",
    )
    return words.find_causes(
        Verdict(status=status, reason="x", comparisons=(change,)),
        plan,
        now,
        base,
    )


BASE = side(11, cpu=(10, 10))


@pytest.mark.parametrize(
    ("now", "base", "found"),
    [
        (
            side(30, cpu=(10, 29)),
            [BASE],
            ("rank 1: CPU time +19.0 ms (the step: +19.0 ms)",),
        ),
        (
            side(30, cpu=(10, 29, 11, 28)),
            [side(11, cpu=(10, 10, 10, 10))],
            (
                "rank 1, rank 3: CPU time +18.0 ms to +19.0 ms (the step: +19.0 ms)",
            ),
        ),
        (
            side(30, cpu=(20, 29)),
            [BASE],
            (
                "every rank computes longer: CPU time +10.0 ms to +19.0 ms (the step: +19.0 ms)",
            ),
        ),
        # Rank 1 is late by sleeping; that rank 0's CPU time rose, too, has nothing to do with it.
        (side(31, cpu=(10.13, 10)), [BASE], None),
        (
            side(31, cpu=(19.9, 10)),
            [BASE],
            (
                "waiting more than computing: CPU time +9.90 ms (the step: +20.0 ms)",
            ),
        ),
        (
            side(31, cpu=(20.1, 10)),
            [BASE],
            ("rank 0: CPU time +10.1 ms (the step: +20.0 ms)",),
        ),
        # Its core was busy with others before, too, and a fifth of the rise is computing.
        (
            side(31, cpu=(2, 6)),
            [side(11, cpu=(2, 2))],
            ("rank 1: CPU time +4.00 ms (the step: +20.0 ms)",),
        ),
        # its steps had waited before, too
        (
            side(31, cpu=(0.1, 0.35)),
            [side(11, cpu=(0.1, 0.1))],
            ("waiting, not computing: CPU time +250 us (the step: +20.0 ms)",),
        ),
        (
            side(31, cpu=(0, 0)),
            [side(11, cpu=(0, 0))],
            ("waiting, not computing: CPU time +0 ns (the step: +20.0 ms)",),
        ),
        # the baseline has no CPU time
        (side(31, cpu=(11, 31)), [side(11, cpu=None, own=(11, 11))], ()),
        (
            side(30, cpu=(29,)),
            [side(11, cpu=(10,))],
            ("it computes longer: CPU time +19.0 ms (the step: +19.0 ms)",),
        ),
        (side(31, cpu=(10, 10)), [side(11, cpu=(10, 10, 10, 10))], ()),
    ],
    ids=[
        "one rank",
        "two ranks",
        "all ranks",
        "sleep",
        "below half",
        "above half",
        "busy core",
        "waits as before",
        "no CPU time",
        "unknown before",
        "alone",
        "other ranks",
    ],
)
def test_the_figures_of_ranks_name_the_cause(
    now: Measurement, base: list[Measurement], found: tuple[str, ...] | None
) -> None:
    if found is None:
        (line,) = causes(now, *base)
        assert line.startswith("waiting, not computing: CPU time +")
    else:
        assert causes(now, *base) == found


def test_a_few_slow_steps_compute_by_their_mean() -> None:
    def with_slow_step(cpu: float) -> Measurement:
        """Of three steps the last one takes `cpu` ms more, all of it CPU time."""
        own = side(10, cpu=(10, 10))
        launch = (0.01, 0.01, 0.01 + cpu / 1000)
        samples = replace(
            own.samples,
            step_seconds=(launch,) * 2,
            rank_seconds=((launch,) * 2,) * 2,
            cpu_seconds=((launch,) * 2,) * 2,
        )
        return replace(own, samples=samples)

    before, now = with_slow_step(3), with_slow_step(90)
    change = comparison(
        Status.REGRESSED,
        "mean",
        baseline_seconds=0.011,
        now_seconds=0.04,
        change=Interval(estimate=2.6, low=2.0, high=3.0),
    )
    found = words.find_causes(
        Verdict(status=Status.REGRESSED, reason="x", comparisons=(change,)),
        Plan(world_size=2, backend="gloo", device="cpu"),
        now,
        [before],
    )
    assert (
        "every rank computes longer: CPU time +29.0 ms (the step: +29.0 ms)"
        in found
    )


def with_page_faults(side: Measurement, *by_launch: float) -> Measurement:
    return replace(
        side,
        samples=replace(
            side.samples, page_faults=tuple((0.0, each) for each in by_launch)
        ),
    )


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        (
            (8158, 8158),
            [
                "page faults 0 -> 8,158 a step: the allocator may give memory back in each step"
            ],
        ),
        ((4000, 0), []),  # 2,000 in the median: 4 ms of 19
        (
            (5000, 0),
            [
                "page faults 0 -> 2,500 a step: the allocator may give memory back in each step"
            ],
        ),
    ],
)
def test_page_faults_that_rose_are_a_cause(
    faults: tuple[float, ...], said: list[str]
) -> None:
    found = causes(
        with_page_faults(side(30, cpu=(10, 29)), *faults),
        with_page_faults(BASE, 0, 0),
    )
    assert [each for each in found if "page faults" in each] == said


def with_collector(side: Measurement, seconds: float) -> Measurement:
    return replace(
        side,
        samples=replace(
            side.samples, collector_seconds=((0.0, seconds), (0.0, seconds))
        ),
    )


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (
            0.010,
            ["Python's garbage collector takes 1.00 ms -> 10.0 ms of a step"],
        ),
        (0.004, []),  # 3 ms of 19
    ],
)
def test_a_collector_that_takes_longer_is_a_cause(
    seconds: float, said: list[str]
) -> None:
    found = causes(
        with_collector(side(30, cpu=(10, 29)), seconds),
        with_collector(BASE, 0.001),
    )
    assert [each for each in found if "collector" in each] == said


def test_ranks_are_compared_by_as_many_steps_as_the_sides() -> None:
    now = side(30, cpu=(10, 29))
    assert BASE.samples.cpu_seconds is not None
    more = replace(
        BASE.samples,
        step_seconds=tuple(
            (*launch, *(9.0,) * 9) for launch in BASE.samples.step_seconds
        ),
        rank_seconds=tuple(
            tuple((*rank, *(9.0,) * 9) for rank in launch)
            for launch in BASE.samples.rank_seconds
        ),
        cpu_seconds=tuple(
            tuple((*rank, *(9.0,) * 9) for rank in launch)
            for launch in BASE.samples.cpu_seconds
        ),
    )
    assert causes(now, replace(BASE, samples=more)) == causes(now, BASE)


def test_a_limit_on_cpu_time_is_explained_by_cpu_time_alone() -> None:
    found = causes(side(31, cpu=(30, 29), own=(31, 11)), BASE, metric="cpu_p90")
    assert found == (
        # by how much the step takes longer is another figure
        "every rank computes longer: CPU time +19.0 ms to +20.0 ms",
    )


def test_what_got_better_has_no_cause() -> None:
    assert (
        causes(
            side(11, cpu=(10, 10)),
            side(31, cpu=(10, 30)),
            status=Status.IMPROVED,
        )
        == ()
    )


def test_a_cause_is_about_the_metric_of_the_headline() -> None:
    p10 = comparison(
        Status.REGRESSED,
        "p10",
        change=Interval(estimate=2.0, low=1.0, high=3.0),
    )
    p50 = comparison(
        Status.REGRESSED, "p50", baseline_seconds=0.011, now_seconds=0.03
    )
    verdict = Verdict(
        status=Status.REGRESSED, reason="x", comparisons=(p10, p50)
    )
    plan = Plan(world_size=2, backend="gloo", device="cpu")
    (cause,) = words.find_causes(verdict, plan, side(30, cpu=(20, 29)), [BASE])
    assert cause.endswith("(the step: +19.0 ms)")


def in_phases(forward: float, seed: int) -> Measurement:
    """Two ranks with six launches, whose forward pass takes so many milliseconds."""
    source, found = random.Random(seed), []
    for _ in range(6):
        own = {phase: (source.gauss(0.001, 1e-5),) * 2 for phase in PHASES}
        own[FORWARD] = (forward / 1e3 + source.gauss(0, 1e-5),) * 2
        path = {phase: (seconds[0], 0.0) for phase, seconds in own.items()}
        found.append(
            StepPhases(steps=9, own={**own, RANK_WAIT: (0.0, 0.0)}, path=path)
        )
    samples = side(forward + 5, cpu=(9, 9)).samples
    return Measurement(
        samples=samples, phases=tuple(found), counters={"buckets": seed}
    )


INTERLEAVED = BaselineSide(
    version=Version(ref="self", commit="", now=""), order="bn" * 6
)


@pytest.mark.parametrize(
    ("status", "interleaved", "now", "found"),
    [
        (
            Status.REGRESSED,
            None,
            5,
            ("forward +2.00 ms (the step: +2.00 ms)", "buckets 1 -> 2"),
        ),
        (
            Status.REGRESSED,
            INTERLEAVED,
            5,
            ("forward +2.00 ms (the step: +2.00 ms)", "buckets 1 -> 2"),
        ),
        # By a slower machine all phases of a stored baseline may take longer.
        (Status.INCONCLUSIVE, None, 5, ("buckets 1 -> 2",)),
        (
            Status.INCONCLUSIVE,
            INTERLEAVED,
            5,
            ("forward +2.00 ms (the step: +2.00 ms)", "buckets 1 -> 2"),
        ),
        (Status.PASS, INTERLEAVED, 5, ()),
        (
            Status.REGRESSED,
            INTERLEAVED,
            6.5,
            (
                "forward +3.50 ms (the step: +2.00 ms)",
                "buckets 1 -> 2",
                "all else: -1.50 ms",
            ),
        ),
    ],
)
def test_phases_are_words_of_a_failure(
    status: Status,
    interleaved: BaselineSide | None,
    now: float,
    found: tuple[str, ...],
) -> None:
    interval = Interval(estimate=0.2, low=0.0, high=9.0)
    change = comparison(
        status, "p50", baseline_seconds=0.01, now_seconds=0.012, change=interval
    )
    verdict = Verdict(status=status, reason="x", comparisons=(change,))
    plan = Plan(world_size=2, backend="gloo", device="cpu")
    _, said = words.explain(
        verdict, plan, in_phases(now, 2), [in_phases(3, 1)], 0.015, interleaved
    )
    assert [
        re.sub(r"[+-](\d\.\d)\d ms( of|$)", r"\1 ms\2", line) for line in said
    ] == [
        re.sub(r"[+-](\d\.\d)\d ms( of|$)", r"\1 ms\2", line) for line in found
    ]


def test_the_rise_of_the_step_stands_once() -> None:
    interval = Interval(estimate=0.2, low=0.1, high=0.3)
    change = comparison(
        Status.REGRESSED,
        "p50",
        baseline_seconds=0.01,
        now_seconds=0.012,
        change=interval,
    )
    verdict = Verdict(
        status=Status.REGRESSED, reason="x", comparisons=(change,)
    )
    found = [
        Finding(phases=(phase,), seconds=0.001, share=0.5)
        for phase in (FORWARD, OPTIMIZER)
    ]
    plan = Plan(world_size=2, backend="gloo", device="cpu")
    said = words.find_causes(
        verdict, plan, in_phases(4, 2), [in_phases(3, 1)], found
    )
    assert said == (
        "forward +1.00 ms (the step: +2.00 ms)",
        "optimizer +1.00 ms",
    )


def test_what_takes_longer_is_named_also_where_a_counter_decides() -> None:
    """The counter ends the measurement, so of the time there may be evidence, and no verdict."""

    def said(p_value: float) -> tuple[str, ...]:
        change = comparison(
            Status.INCONCLUSIVE,
            "p50",
            baseline_seconds=0.01,
            now_seconds=0.012,
            change=Interval(estimate=0.2, low=0.1, high=0.3),
            p_value=p_value,
        )
        verdict = Verdict(
            status=Status.REGRESSED,
            reason="counter-rose",
            comparisons=(change,),
            counters=(risen("all_gather.count", 9, 25),),
        )
        found = [Finding(phases=(FORWARD,), seconds=0.002, share=1.0)]
        plan = Plan(world_size=2, backend="gloo", device="cpu")
        sides = in_phases(4, 2), [in_phases(3, 1)]
        return words.find_causes(verdict, plan, *sides, found)

    assert said(0.001) == ("forward +2.00 ms (the step: +2.00 ms)",)
    assert said(0.2) != said(0.001)


def with_slow_steps(*launches: Sequence[int]) -> Measurement:
    """Two ranks whose steps take 10 ms, but for those of these numbers, which take 150 ms."""
    seconds = tuple(
        tuple(0.15 if step in slow else 0.01 for step in range(30))
        for slow in launches
    )
    return Measurement(
        samples=Samples(
            step_seconds=seconds,
            rank_seconds=tuple((each, each) for each in seconds),
        )
    )


@pytest.mark.parametrize(
    ("slow", "cause"),
    [
        (((3, 7, 21), (11, 12, 28)), "about 1 of 10 steps takes 150 ms"),
        (((0,), (17,)), "about 1 of 30 steps takes 150 ms"),
        ((range(0, 30, 3), range(0, 30, 3)), "about 1 of 3 steps takes 150 ms"),
    ],
)
def test_few_slow_steps_are_named_with_their_share(
    slow: tuple[Sequence[int], ...], cause: str
) -> None:
    now, base = with_slow_steps(*slow), with_slow_steps((), ())
    mean = fmean(step for launch in now.samples.step_seconds for step in launch)
    rise = Interval(estimate=mean / 0.01 - 1, low=0.1, high=2.0)
    change = comparison(
        Status.REGRESSED,
        "mean",
        baseline_seconds=0.01,
        now_seconds=mean,
        change=rise,
    )
    verdict = Verdict(
        status=Status.REGRESSED, reason="x", comparisons=(change,)
    )
    plan = Plan(world_size=2, backend="gloo", device="cpu")
    assert words.find_causes(verdict, plan, now, [base])[0] == cause


def test_slow_steps_are_no_cause_where_all_steps_became_slower() -> None:
    assert not [
        cause
        for cause in causes(side(30, cpu=(10, 29)), BASE, metric="mean")
        if "step takes" in cause
    ]
