"""When to stop, as tables of verdicts: no figures, no time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_ddpperf.compare.rule import early_stop, follow, schedule
from pytest_ddpperf.records.samples import Interval, Status, Verdict
from tests.unit.test_report import comparison

PASS, REGRESSED, INCONCLUSIVE, IMPROVED = (
    Status.PASS,
    Status.REGRESSED,
    Status.INCONCLUSIVE,
    Status.IMPROVED,
)


def verdict(
    status: Status, *, settled: bool = False, metric: str = "p50"
) -> Verdict:
    compared = comparison(
        status,
        metric,
        change=Interval(estimate=0.0, low=0.0, high=0.0),
        settled=settled,
    )
    return Verdict(status=status, reason="x", comparisons=(compared,))


def course(
    looks: tuple[int, ...], said: dict[tuple[int, int], Verdict]
) -> tuple[Verdict, int]:
    """The final verdict, and after how many launches, where `said` is asked for launches
    start..stop."""
    for number, count in enumerate(looks, 1):
        judged, ended = follow(
            looks[:number],
            lambda start, stop, _: said[start, stop],
            final=number == len(looks),
        )
        if ended:
            return judged, count
    raise AssertionError("the last look did not end it")


@pytest.mark.parametrize(
    ("first", "most", "looks"),
    [
        (5, 20, (5, 10, 20)),
        (5, 39, (5, 10, 20)),
        (5, 10, (5, 10)),
        (5, 5, (5,)),
        (2, 20, (2, 4, 8, 16)),
        (1, 3, (1, 2)),
    ],
)
def test_the_looks_double_up_to_the_most(
    first: int, most: int, looks: tuple[int, ...]
) -> None:
    assert schedule(first, most) == looks


OPEN, SETTLED, SLOWER = (
    verdict(PASS),
    verdict(PASS, settled=True),
    verdict(REGRESSED),
)
FASTER, UNCLEAR = verdict(IMPROVED), verdict(INCONCLUSIVE)
HOPELESS, OTHER_METRIC = (
    verdict(INCONCLUSIVE, settled=True),
    verdict(REGRESSED, metric="p10"),
)
NOTHING = Verdict(status=Status.NO_BASELINE, reason="no-baseline")


# What is said of all launches at each look or, after the first look, of all and of the fresh ones.
COURSES: dict[str, tuple[list[Any], str, str, int]] = {
    "a settled pass ends it": ([SETTLED, OPEN], "PASS", "x", 5),
    "the last look ends an open pass": ([OPEN, OPEN, OPEN], "PASS", "x", 20),
    "nothing was compared": ([NOTHING, OPEN], "NO BASELINE", "no-baseline", 5),
    "hopelessly inconclusive": ([HOPELESS, OPEN], "INCONCLUSIVE", "x", 5),
    "fresh launches show it too": (
        [SLOWER, (SLOWER, SLOWER), OPEN],
        "REGRESSED",
        "x",
        10,
    ),
    "fresh launches pass": (
        [SLOWER, (SLOWER, OPEN), (SLOWER, OPEN)],
        "INCONCLUSIVE",
        "not-confirmed",
        20,
    ),
    "fresh launches are inconclusive": (
        [SLOWER, (SLOWER, UNCLEAR)],
        "INCONCLUSIVE",
        "not-confirmed",
        10,
    ),
    "fresh launches show another metric": (
        [SLOWER, (SLOWER, OTHER_METRIC)],
        "INCONCLUSIVE",
        "not-confirmed",
        10,
    ),
    "a suspicion of the last look": (
        [OPEN, OPEN, SLOWER],
        "INCONCLUSIVE",
        "not-confirmed",
        20,
    ),
    "what was inconclusive first is suspected": (
        [UNCLEAR, (SLOWER, SLOWER)],
        "REGRESSED",
        "x",
        10,
    ),
    "an improvement is confirmed likewise": (
        [FASTER, (FASTER, FASTER)],
        "IMPROVED",
        "x",
        10,
    ),
    "an improvement is not confirmed": (
        [FASTER, (FASTER, OPEN)],
        "PASS",
        "not-confirmed",
        10,
    ),
    "a slowdown does not confirm an improvement": (
        [SLOWER, FASTER],
        "PASS",
        "not-confirmed",
        10,
    ),
}


@pytest.mark.parametrize("name", COURSES)
def test_a_suspicion_stands_only_if_fresh_launches_show_it(name: str) -> None:
    said, status, reason, launches = COURSES[name]
    looks = (5, 10, 20)[: len(said)]
    answers: dict[tuple[int, int], Verdict] = {}
    for look, answer in zip(looks, said, strict=True):
        both = answer if isinstance(answer, tuple) else (answer,)
        answers |= {
            (start, look): each
            for start, each in zip((0, 5), both, strict=False)
        }
    found, taken = course(looks, answers)
    assert (found, found.reason, taken) == (status, reason, launches)
    if reason == "not-confirmed":
        assert {comparison.status for comparison in found.comparisons} == {
            found.status
        }


@pytest.mark.parametrize("status", [PASS, REGRESSED, IMPROVED, INCONCLUSIVE])
@pytest.mark.parametrize("settled", [False, True])
def test_between_looks_nothing_ends_it_but_what_claims_nothing(
    status: Status, settled: bool
) -> None:
    said = verdict(status, settled=settled)
    assert early_stop(7, lambda *asked: {(0, 7, 1.0): said}[asked]) == (
        said,
        status is PASS and settled,
    )


def test_what_confirms_may_err_twice_as_often_as_what_decides() -> None:
    asked: list[tuple[int, int, float]] = []

    def judge(start: int, stop: int, ease: float) -> Verdict:
        asked.append((start, stop, ease))
        return verdict(REGRESSED)

    follow((5, 10), judge, final=True)
    assert asked == [(0, 5, 1.0), (0, 10, 1.0), (5, 10, 2.0)]


def test_a_suspicion_that_time_leaves_unconfirmed_fails_nothing() -> None:
    judged, ended = follow((5,), lambda *_: verdict(REGRESSED), final=True)
    assert (judged, judged.reason, ended) == (
        "INCONCLUSIVE",
        "not-confirmed",
        True,
    )
    assert follow((5,), lambda *_: verdict(REGRESSED), final=False) == (
        verdict(REGRESSED),
        False,
    )


def test_what_got_faster_confirms_no_slowdown() -> None:
    slower, faster = (
        verdict(REGRESSED, metric="p10").comparisons[0],
        verdict(IMPROVED, metric="p50").comparisons[0],
    )
    mixed = replace(verdict(REGRESSED), comparisons=(slower, faster))
    said = {
        (0, 5): mixed,
        (0, 10): mixed,
        (5, 10): verdict(IMPROVED, metric="p50"),
    }
    assert course((5, 10), said)[0].reason == "not-confirmed"
    said[5, 10] = mixed
    assert course((5, 10), said) == (mixed, 10)
