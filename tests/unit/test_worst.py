"""Which measurements are to be looked at, and which first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.reason import Reason
from pytest_ddpperf.records.samples import CounterChange, Interval, Status
from pytest_ddpperf.report import summary
from pytest_ddpperf.report.summary import Concern
from tests.unit.test_report import FAILED, comparison, outcome, risen, verdict


@pytest.mark.parametrize(
    ("measured", "concern"),
    [
        (outcome(verdict(Status.REGRESSED)), Concern.FAILS),
        (FAILED, Concern.FAILS),
        (outcome(verdict(Status.NO_BASELINE), fails=True), Concern.FAILS),
        (outcome(verdict(Status.IMPROVED), fails=True), Concern.FAILS),
        (
            outcome(
                verdict(Status.NOT_GATED, "saving"),
                fails=True,
                error="baseline x: no space left",
            ),
            Concern.FAILS,
        ),
        (outcome(verdict(Status.REGRESSED), fails=False), Concern.DOUBTFUL),
        (replace(FAILED, fails=False), Concern.DOUBTFUL),
        (outcome(verdict(Status.INCONCLUSIVE)), Concern.DOUBTFUL),
        (outcome(verdict(Status.NO_BASELINE)), Concern.DOUBTFUL),
        (outcome(verdict(Status.INCOMPARABLE)), Concern.DOUBTFUL),
        (
            outcome(verdict(Status.NOT_GATED, "debugging-variable")),
            Concern.DOUBTFUL,
        ),
        (
            outcome(verdict(Status.NOT_GATED, "no-supported-limit")),
            Concern.DOUBTFUL,
        ),
        (outcome(verdict(Status.IMPROVED)), Concern.IMPROVED),
        (outcome(verdict(Status.PASS)), Concern.NONE),
        (outcome(verdict(Status.NOT_GATED, "gate-off")), Concern.NONE),
        (outcome(verdict(Status.NOT_GATED, "saving")), Concern.NONE),
    ],
)
def test_what_is_to_be_looked_at(measured: Outcome, concern: Concern) -> None:
    assert summary.concern(measured) is concern


COUNTED = {
    Status.REGRESSED: Reason.COUNTER_ROSE,
    Status.IMPROVED: Reason.COUNTER_FELL,
}


def by(
    status: Status, change: float, name: str, *counters: CounterChange
) -> Outcome:
    changed = replace(
        comparison(status),
        change=Interval(estimate=change, low=change, high=change),
    )
    reason = Reason.WITHIN_LIMIT
    if counters:
        reason = COUNTED[status]
    judged = verdict(status, reason, comparisons=(changed,), counters=counters)
    return outcome(judged, nodeid=name)


def test_the_worst_is_first_by_concern_verdict_and_size() -> None:
    limit = Limit(metric="rpc.bytes", value=0.0, unit="%")
    fell = CounterChange(
        limit=limit, status=Status.IMPROVED, baseline=100, now=10
    )
    ordered = [
        by(Status.REGRESSED, 0.1, "counted", risen(before=0, now=1)),
        by(Status.REGRESSED, 0.5, "half"),
        by(Status.REGRESSED, 0.2, "fifth"),
        FAILED,
        by(Status.INCONCLUSIVE, 0.9, "doubt"),
        outcome(verdict(Status.INCOMPARABLE), nodeid="other"),
        outcome(verdict(Status.NO_BASELINE), nodeid="new"),
        by(Status.IMPROVED, -0.1, "sends less", fell),
        by(Status.IMPROVED, -0.5, "better"),
        by(Status.PASS, 0.02, "slower"),
        by(Status.PASS, -0.9, "faster"),
        outcome(verdict(Status.NOT_GATED, "gate-off"), nodeid="free"),
    ]
    assert summary.worst_first(ordered[::-1]) == ordered
    alike = [by(Status.PASS, 0.0, name) for name in "cab"]
    assert summary.worst_first(alike) == alike
