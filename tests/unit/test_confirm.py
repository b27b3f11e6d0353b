"""What becomes of a suspicion when the baseline's own code was measured next to today's: a value,
whichever way it goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.compare.confirm import (
    Confirmation,
    weigh,
)
from pytest_ddpperf.compare.result import Measured
from pytest_ddpperf.compare.rounds import Round
from pytest_ddpperf.compare.sides import StoredBaseline
from pytest_ddpperf.records.errors import AgainstError
from pytest_ddpperf.records.samples import (
    Measurement,
    Recording,
    Status,
    Verdict,
)
from tests.unit.test_codec import MEASUREMENT
from tests.unit.test_launches import LAUNCH, job
from tests.unit.test_suspicion import NOT_SLOWER, verdict

COMMIT = "1a2b3c4d5e6f" + "0" * 28
SLOWER = verdict(Status.REGRESSED, 0.3)


def measured(found: Verdict, before: Measurement = MEASUREMENT) -> Measured:
    return Measured(
        job=job(),
        verdict=found,
        fails=False,
        rounds=(Round(LAUNCH),) * 5,
        measurement=MEASUREMENT,
        before=(before,),
        stored=StoredBaseline(
            path="a.json", sessions=(Recording(measurement=MEASUREMENT),)
        ),
    )


SUSPECTED = measured(SLOWER)


@pytest.mark.parametrize(
    ("interleaved", "reason", "fails"),
    [
        (verdict(Status.REGRESSED, 0.2), "confirmed", True),
        (NOT_SLOWER, "machine-slower", False),
    ],
)
def test_a_comparison_that_decides_brings_its_launches_and_keeps_the_stored_baseline(
    interleaved: Verdict, reason: str, fails: bool
) -> None:
    other = replace(measured(interleaved), stored=StoredBaseline())
    found = weigh(SUSPECTED, other, [], COMMIT)
    assert isinstance(found, Measured)
    final = found
    assert (final.verdict.reason, final.fails) == (reason, fails)
    assert (final.rounds, final.stored) == (other.rounds, SUSPECTED.stored)
    assert final.suspected == SUSPECTED


def test_a_comparison_that_decides_nothing_says_what_it_found_and_what_else_differs() -> (
    None
):
    causes = ["torch 2.12 -> 2.13", "host a -> b"]
    found = weigh(SUSPECTED, measured(NOT_SLOWER), causes, COMMIT)
    assert isinstance(found, str)
    assert found.startswith("interleaved with 1a2b3c4d5e6f: p50 ")
    assert found.endswith(
        "; what else differs: torch 2.12 -> 2.13, host a -> b"
    )


def at_speed(times: float) -> Measurement:
    """The baseline's code when it takes so many times as long as it did."""
    steps = tuple(
        tuple(times * step for step in launch)
        for launch in MEASUREMENT.samples.step_seconds
    )
    samples = replace(MEASUREMENT.samples, step_seconds=steps)
    return replace(MEASUREMENT, samples=samples)


@pytest.mark.parametrize(
    ("interleaved", "times"), [(NOT_SLOWER, 10), (SLOWER, 0.1)]
)
def test_a_time_that_no_drift_explains_decides_nothing(
    interleaved: Verdict, times: float
) -> None:
    other = measured(interleaved, at_speed(times))
    found = weigh(SUSPECTED, other, [], COMMIT)
    why = f"it now takes {times:g}x its recorded time, which is more than machines usually drift"
    assert found == why


def test_slower_than_the_baselines_code_on_a_slow_day_is_confirmed() -> None:
    """Whatever makes the machine slow, it does so to both sides."""
    found = weigh(SUSPECTED, measured(SLOWER, at_speed(10)), [], COMMIT)
    assert isinstance(found, Measured)
    assert found.verdict.reason == "confirmed"


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing is measured")


def confirmation(seconds: float, side_of: Any) -> Confirmation:
    return Confirmation(seconds, Path("/"), Path("/baselines"), side_of)


@pytest.mark.parametrize(
    ("side_of", "found"),
    [
        ("", SUSPECTED),
        (never, measured(verdict(Status.PASS, 0.01))),
        (never, replace(SUSPECTED, stored=StoredBaseline(path="a.json"))),
    ],
    ids=["nobody asked", "no suspicion", "no baseline"],
)
def test_what_is_not_to_be_confirmed_stays_as_it_is(
    side_of: Any, found: Measured
) -> None:
    assert confirmation(60.0, side_of).confirm(found, never) is found


@pytest.mark.parametrize(
    ("seconds", "side_of", "why"),
    [
        (
            60.0,
            "--ddp-against compares already",
            "--ddp-against compares already",
        ),
        (
            60.0,
            never,
            "the baseline does not identify its code: git had no tree of it",
        ),
        (
            -1.0,
            never,
            "it takes about 0 s, and 0 of the -1 s of --ddp-confirm are left: raise it",
        ),
    ],
    ids=["not here", "unknown code", "no time"],
)
def test_a_suspicion_that_cannot_be_confirmed_is_reported_with_the_reason(
    seconds: float, side_of: Any, why: str
) -> None:
    found = confirmation(seconds, side_of).confirm(SUSPECTED, never)
    note = f"not confirmed with the baseline's own code: {why}"
    assert found == replace(SUSPECTED, further_notes=(note,))
    passed = measured(verdict(Status.PASS, 0.08))
    assert confirmation(seconds, side_of).confirm(passed, never) is passed


def test_a_commit_that_cannot_be_started_is_tried_once() -> None:
    tried: list[str] = []

    def side_of(commit: str, seconds: float) -> Any:
        tried.append(commit)
        raise AgainstError("--ddp-confirm", "its conftest fails\nin line 3")

    own = confirmation(60.0, side_of)
    for _ in range(2):
        assert own._open_side(side_of, COMMIT, 0.0) is None
    assert (tried, own._failed) == ([COMMIT], {COMMIT: "its conftest fails"})
