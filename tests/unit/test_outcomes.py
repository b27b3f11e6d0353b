"""What a test's end makes of the outcomes of its measurements."""

from __future__ import annotations

import pytest

from pytest_ddpperf.plugin.outcomes import TestMeasurement, TestState
from pytest_ddpperf.records.samples import Status
from pytest_ddpperf.verdict.times import TEST_LEVEL
from tests.unit.test_report import outcome, verdict

RED = outcome(verdict(Status.REGRESSED, "beyond-limit"))
GREEN = outcome(verdict(Status.PASS))


@pytest.mark.parametrize(
    ("measurement", "unsaved", "is_xfail", "found"),
    [
        (TestMeasurement(GREEN), "", False, (False, "", 0, ())),
        (TestMeasurement(GREEN, saved=2), "", False, (False, "", 2, ())),
        (
            TestMeasurement(GREEN),
            "disk full\nhere",
            False,
            (True, "disk full", 0, ()),
        ),
        (TestMeasurement(RED), "", False, (True, "", 0, ())),
        (TestMeasurement(RED), "", True, (False, "", 0, ("expected to fail",))),
        (TestMeasurement(GREEN), "", True, (False, "", 0, ())),
    ],
)
def test_the_end_of_a_test_decides_what_is_reported(
    measurement: TestMeasurement,
    unsaved: str,
    is_xfail: bool,
    found: tuple[bool, str, int, tuple[str, ...]],
) -> None:
    ended = measurement.outcome_at_end(unsaved, is_xfail=is_xfail)
    assert (ended.fails, ended.error, ended.saved, ended.notes) == found


def test_gates_after_the_first_share_its_error_rate_once_more() -> None:
    test = TestState()
    assert test.count_gate(False) == test.count_gate(True) == TEST_LEVEL
    further = [test.count_gate(True) / TEST_LEVEL for _ in range(3)]
    assert further == pytest.approx([1 / 2, 1 / 6, 1 / 12])


def test_a_rerun_reports_the_last_of_each_measurement() -> None:
    test = TestState()
    test.begin_attempt()
    test.labels.add("")
    test.measurements += [TestMeasurement(RED), TestMeasurement(GREEN)]
    test.begin_attempt()
    assert (test.attempt, test.labels) == (2, set())
    assert test.outcomes() == [GREEN]
