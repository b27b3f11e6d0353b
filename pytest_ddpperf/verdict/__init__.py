"""The decision: is the current measurement worse than the baseline, and does that fail the test?

The only place that decides. Knows records and statistics; nothing of files, pytest or reports. The choices
made here, with the figures they rest on, are in docs/statistics.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pytest_ddpperf.records import Limit, Measurement, Status, Verdict
from pytest_ddpperf.verdict.counters import refused, with_counters
from pytest_ddpperf.verdict.suspicion import MACHINE_SLOWER, confirm, is_suspected
from pytest_ddpperf.verdict.times import (
    ASSUMED_DRIFT,
    TEST_LEVEL,
    coarse,
    fact_changes,
    in_percentiles,
    judge_times,
    of_one_length,
    resolutions,
    shift,
    unsupported,
)

__all__ = [
    "ASSUMED_DRIFT",
    "MACHINE_SLOWER",
    "TEST_LEVEL",
    "coarse",
    "confirm",
    "fact_changes",
    "fails",
    "in_percentiles",
    "is_suspected",
    "judge",
    "judge_times",
    "of_one_length",
    "refused",
    "resolutions",
    "shift",
    "unsupported",
    "with_counters",
    "without_steady_windows",
]


def judge(current: Measurement, baseline: Sequence[Measurement], limits: Sequence[Limit], **how: Any) -> Verdict:
    """Hold `current` against the sessions of a baseline: its times, as `judge_times`, and its counters."""
    return with_counters(judge_times(current, baseline, limits, **how), current, baseline, limits)


def without_steady_windows(verdict: Verdict) -> Verdict:
    """Return the verdict on launches of which most recompiled within their window: they say little of steady training,
    so nothing is claimed to be within a limit. A slowdown stays one: recompiling takes time, too."""
    if verdict.status in (Status.PASS, Status.IMPROVED):
        return replace(verdict, status=Status.INCONCLUSIVE, reason="recompiled")
    return verdict


def fails(verdict: Verdict, *, fail_on: frozenset[str] | None, baseline_missing: Literal["warn", "fail"]) -> bool:
    """Whether a verdict fails its test; `fail_on`, when given, names exactly those that do. Never one that is saved: a
    project whose ini file names what is not gated could not record a baseline."""
    if fail_on is not None:
        if verdict.reason == "saving":
            return False
        return verdict.status.value.lower().replace(" ", "-") in fail_on
    if verdict.status in (Status.NO_BASELINE, Status.INCOMPARABLE) or verdict.reason == "debugging-variable":
        return baseline_missing == "fail"
    return verdict.status is Status.REGRESSED
