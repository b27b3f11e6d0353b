"""pytest's hooks around each test. Imported and registered only when a run has distributed tests."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_ddpperf.plugin.items import has_benchmark, is_distributed, measures, nodeid_of
from pytest_ddpperf.plugin.state import Run
from pytest_ddpperf.plugin.watch import mark_with_timer
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.outcome import Outcome

if TYPE_CHECKING:
    from pytest_ddpperf.measuring.measurement import Measured


class TestState:
    """What is known of one test, over its phases and over reruns of it."""

    __test__ = False

    def __init__(self) -> None:
        self.attempt = 0
        self.failed_gates: dict[str, tuple[str, Any, str]] = {}  # label -> what GateFailed takes; kept over reruns
        self.unsaved: dict[str, str] = {}  # label -> why its baseline could not be written; kept over reruns
        self.usage_error = ""
        self.outcomes: list[Outcome] = []  # of this attempt, after those before
        self._clear()

    def _clear(self) -> None:
        self.calling = False  # its function runs: a report made meanwhile is one of a part of it, a subtest
        self.part_failed = False  # in this attempt
        self.passed = False  # the call phase of this attempt, all parts included
        self.labels: set[str] = set()  # measured in this attempt
        self.gates = 0  # of them, those that are compared with a baseline
        self.candidates: list[tuple[int, Measured]] = []  # index in outcomes, and what to save

    def begin_attempt(self) -> None:
        """Forget the last attempt, if this is a rerun, but for its outcomes."""
        self.attempt += 1
        self._clear()
        # Reported again: pytest-rerunfailures before 16.6.1 drops the report of a teardown that a rerun follows.
        self.outcomes = list({outcome.test.label: outcome for outcome in self.outcomes}.values())


TEST = pytest.StashKey[TestState]()


def state_of(item: pytest.Item) -> TestState:
    return item.stash.setdefault(TEST, TestState())


class RunningTests:
    """The hooks around each test of a run that has distributed ones."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if not is_distributed(item):
            return
        self._run.begun.add(item.nodeid)
        state_of(item).begin_attempt()
        # Asked again: CodSpeed unregisters pytest-benchmark, and its own reading of the marker knows no timer.
        if has_benchmark(item.config.pluginmanager) and measures(item):
            mark_with_timer(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        state_of(item).calling = True
        try:
            return (yield)
        finally:
            state_of(item).calling = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            result = yield
        except BaseException:
            for error in self._end(item):
                item.add_report_section("teardown", "of another node", error)
            raise
        if errors := self._end(item):
            pytest.fail("\n\n".join(errors), pytrace=False)
        if is_distributed(item):
            self._save(state_of(item))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if is_distributed(item):
            headline = getattr(call.excinfo.value, "headline", "") if call.excinfo is not None else ""
            crash = getattr(report.longrepr, "reprcrash", None)
            if headline and crash is not None:
                crash.message = headline  # without the exception's class
            self._complete(report, item)
        return report

    def _end(self, item: pytest.Item) -> list[str]:
        """End the test on all nodes. Returns what failed on other nodes in its setup or teardown."""
        if not is_distributed(item):
            return []
        self._run.end_test()
        return self._run.other_nodes.failed() if self._run.other_nodes is not None else []

    def _save(self, test: TestState) -> None:
        """Write the baselines of a test that passed as a whole, in its first attempt. If one could not be written, the
        test fails, and its reruns too."""
        for index, measured in test.candidates if test.passed and test.attempt == 1 else ():
            outcome = test.outcomes[index]
            try:
                test.outcomes[index] = replace(outcome, saved=self._run.session.save(measured))
            except DdpPerfError as error:
                test.unsaved[outcome.test.label] = str(error)
        for index, outcome in enumerate(test.outcomes):
            if problem := test.unsaved.get(outcome.test.label):
                test.outcomes[index] = replace(outcome, fails=True, error=problem.splitlines()[0])
        if test.unsaved:
            pytest.fail("\n".join(test.unsaved.values()), pytrace=False)

    def _complete(self, report: pytest.TestReport, item: pytest.Item) -> None:
        """Note how the test ended, and add its results to its last report, which xdist sends to the controller."""
        test = state_of(item)
        if test.calling:
            test.part_failed |= report.failed
            return
        is_xfail = hasattr(report, "wasxfail")
        if report.when == "call":
            test.passed = report.passed and not test.part_failed and not is_xfail
        if is_xfail and report.when != "teardown" and not report.failed:
            test.outcomes = [_as_expected(outcome) if outcome.fails else outcome for outcome in test.outcomes]
        skipped = report.skipped and not is_xfail
        if report.when == "teardown" or skipped:
            report.ddpperf = self._results(item, test, skipped=skipped)  # type: ignore[attr-defined]

    def _results(self, item: pytest.Item, test: TestState, *, skipped: bool) -> dict[str, Any]:
        """Return what `RunResults.take` adds to the run, in plain values that may cross a process."""
        never_measured = test.passed and not test.labels and measures(item)
        results = {
            "outcomes": [codec.encode(outcome) for outcome in test.outcomes],
            "skipped": skipped,
            "never_measured": nodeid_of(item) if never_measured else "",
            "facts": self._run.session.machine() if test.outcomes else {},
            "usage_error": test.usage_error,
        }
        if not test.failed_gates:  # else a rerun does not measure again, and reports them again
            test.outcomes = []
        return results


def _as_expected(outcome: Outcome) -> Outcome:
    """Mark the outcome of an xfail test that failed as expected."""
    return replace(outcome, fails=False, notes=(*outcome.notes, "expected to fail"))
