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
    from pytest_ddpperf.records.outcome import BaselineSide as BaselineSide
    from pytest_ddpperf.records.outcome import Outcome as Outcome
    from pytest_ddpperf.records.outcome import RunInfo as RunInfo
    from pytest_ddpperf.records.outcome import StoredSession as StoredSession
    from pytest_ddpperf.records.outcome import Version as Version
    from pytest_ddpperf.records.plan import COUNTER_LIMITS as COUNTER_LIMITS
    from pytest_ddpperf.records.plan import COUNTERS as COUNTERS
    from pytest_ddpperf.records.plan import Limit as Limit
    from pytest_ddpperf.records.plan import Plan as Plan
    from pytest_ddpperf.records.samples import SESSIONS_KEPT as SESSIONS_KEPT
    from pytest_ddpperf.records.samples import Baseline as Baseline
    from pytest_ddpperf.records.samples import Comparison as Comparison
    from pytest_ddpperf.records.samples import CounterChange as CounterChange
    from pytest_ddpperf.records.samples import Counters as Counters
    from pytest_ddpperf.records.samples import Distribution as Distribution
    from pytest_ddpperf.records.samples import Environment as Environment
    from pytest_ddpperf.records.samples import Imported as Imported
    from pytest_ddpperf.records.samples import Interval as Interval
    from pytest_ddpperf.records.samples import LaunchRankSteps as LaunchRankSteps
    from pytest_ddpperf.records.samples import LaunchSamples as LaunchSamples
    from pytest_ddpperf.records.samples import LaunchSteps as LaunchSteps
    from pytest_ddpperf.records.samples import Measurement as Measurement
    from pytest_ddpperf.records.samples import Phases as Phases
    from pytest_ddpperf.records.samples import RankError as RankError
    from pytest_ddpperf.records.samples import RankFigures as RankFigures
    from pytest_ddpperf.records.samples import RankOutput as RankOutput
    from pytest_ddpperf.records.samples import Recorded as Recorded
    from pytest_ddpperf.records.samples import Recording as Recording
    from pytest_ddpperf.records.samples import Samples as Samples
    from pytest_ddpperf.records.samples import Scalar as Scalar
    from pytest_ddpperf.records.samples import Status as Status
    from pytest_ddpperf.records.samples import TestId as TestId
    from pytest_ddpperf.records.samples import Verdict as Verdict
    from pytest_ddpperf.records.samples import Window as Window

_SUBMODULES = ("codec", "errors", "messages", "outcome", "plan", "samples")
_HOMES = {
    **dict.fromkeys(("BaselineSide", "Outcome", "RunInfo", "StoredSession", "Version"), "outcome"),
    **dict.fromkeys(("COUNTERS", "COUNTER_LIMITS", "Limit", "Plan"), "plan"),
}


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name in _SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'samples')}")
    value = globals()[name] = getattr(home, name)
    return value
