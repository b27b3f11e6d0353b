"""The frozen types that cross a process or reach a disk.

Knows nothing of pytest, torch, files or processes. Every time is in seconds unless the name says otherwise;
every nested tuple says its axes in its comment, outermost first.

What a name stands for is imported when it is asked for: every pytest run imports this package, and making some twenty
dataclasses takes ten milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_ddpperf.records.asked import COUNTER_LIMITS as COUNTER_LIMITS
    from pytest_ddpperf.records.asked import COUNTERS as COUNTERS
    from pytest_ddpperf.records.asked import Limit as Limit
    from pytest_ddpperf.records.asked import Plan as Plan
    from pytest_ddpperf.records.measured import SESSIONS_KEPT as SESSIONS_KEPT
    from pytest_ddpperf.records.measured import Baseline as Baseline
    from pytest_ddpperf.records.measured import Comparison as Comparison
    from pytest_ddpperf.records.measured import CounterChange as CounterChange
    from pytest_ddpperf.records.measured import Counters as Counters
    from pytest_ddpperf.records.measured import Distribution as Distribution
    from pytest_ddpperf.records.measured import Environment as Environment
    from pytest_ddpperf.records.measured import Imported as Imported
    from pytest_ddpperf.records.measured import Interval as Interval
    from pytest_ddpperf.records.measured import LaunchRankSteps as LaunchRankSteps
    from pytest_ddpperf.records.measured import LaunchSamples as LaunchSamples
    from pytest_ddpperf.records.measured import LaunchSteps as LaunchSteps
    from pytest_ddpperf.records.measured import Measurement as Measurement
    from pytest_ddpperf.records.measured import Phases as Phases
    from pytest_ddpperf.records.measured import RankError as RankError
    from pytest_ddpperf.records.measured import RankFigures as RankFigures
    from pytest_ddpperf.records.measured import RankOutput as RankOutput
    from pytest_ddpperf.records.measured import Recorded as Recorded
    from pytest_ddpperf.records.measured import Recording as Recording
    from pytest_ddpperf.records.measured import Samples as Samples
    from pytest_ddpperf.records.measured import Scalar as Scalar
    from pytest_ddpperf.records.measured import Status as Status
    from pytest_ddpperf.records.measured import TestId as TestId
    from pytest_ddpperf.records.measured import Verdict as Verdict
    from pytest_ddpperf.records.measured import Window as Window
    from pytest_ddpperf.records.outcome import BaselineSide as BaselineSide
    from pytest_ddpperf.records.outcome import Outcome as Outcome
    from pytest_ddpperf.records.outcome import RunInfo as RunInfo
    from pytest_ddpperf.records.outcome import StoredSession as StoredSession
    from pytest_ddpperf.records.outcome import Version as Version

_SUBMODULES = ("asked", "codec", "errors", "measured", "messages", "outcome")
_HOMES = {
    **dict.fromkeys(("BaselineSide", "Outcome", "RunInfo", "StoredSession", "Version"), "outcome"),
    **dict.fromkeys(("COUNTERS", "COUNTER_LIMITS", "Limit", "Plan"), "asked"),
}


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name in _SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'measured')}")
    value = globals()[name] = getattr(home, name)
    return value
