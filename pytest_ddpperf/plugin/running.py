"""pytest's hooks around each test. Imported and registered if a run has distributed tests."""

from collections.abc import Generator

import pytest

from pytest_ddpperf.plugin.item_settings import check_place, plain_failure
from pytest_ddpperf.plugin.items import (
    PYTEST_BENCHMARK,
    has_any,
    is_distributed,
    measures,
    nodeid_of,
)
from pytest_ddpperf.plugin.outcomes import TestState
from pytest_ddpperf.plugin.replay import mark_with_timer
from pytest_ddpperf.plugin.results import TestResults
from pytest_ddpperf.plugin.state import Run
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import DdpPerfError, OptionError, Unavailable

TEST = pytest.StashKey[TestState]()


def state_of(item: pytest.Item) -> TestState:
    return item.stash.setdefault(TEST, TestState())


class RunningTests:
    """The hooks around each test of a run that has distributed ones."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @pytest.hookimpl(tryfirst=True)  # before other plugins write their reports
    def pytest_sessionfinish(self) -> None:
        if self._run.ran:
            self._run.report.note_files(
                self._run.config.rootpath, self._run.settings.baseline_dir
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if not is_distributed(item):
            return
        self._run.begun.add(nodeid_of(item))
        state_of(item).begin_attempt()
        if not item.config.getoption("setuponly", False):
            # before its fixtures, and what else it does, run into what is missing here
            try:
                check_place(item)
            except Unavailable as error:
                raise pytest.skip.Exception(
                    str(error), _use_item_location=True
                ) from None
            except DdpPerfError as error:
                # The call of its fixture reports it. A worker of xdist reports one of the run to
                # the controller, too.
                if type(error) is OptionError:
                    state_of(item).usage_error = str(error)
        # Asked again: CodSpeed unregisters pytest-benchmark, and its own reading of the marker
        # knows no timer.
        if has_any(item.config.pluginmanager, PYTEST_BENCHMARK) and measures(
            item
        ):
            mark_with_timer(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(
        self, item: pytest.Item
    ) -> Generator[None, object, object]:
        state_of(item).calling = True
        try:
            return (yield)
        finally:
            state_of(item).calling = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item
    ) -> Generator[None, object, object]:
        if not is_distributed(item):
            return (yield)
        try:
            result = yield
        except BaseException:
            for error in self._run.role.end_test():
                item.add_report_section("teardown", "of another node", error)
            raise
        if errors := self._run.role.end_test():
            raise plain_failure("\n\n".join(errors))
        self._save(state_of(item))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if is_distributed(item):
            error = call.excinfo.value if call.excinfo is not None else None
            headline = getattr(error, "headline", "")
            crash = getattr(report.longrepr, "reprcrash", None)
            if headline and crash is not None:
                crash.message = headline  # without the exception's class
            self._complete(report, item)
        return report

    def _save(self, test: TestState) -> None:
        """Write the baselines of a test that passed as a whole, in its first attempt. If one could
        not be written, the test fails, and its reruns too."""
        may_save = test.passed and test.attempt == 1
        for each in test.measurements:
            if not may_save or each.to_save is None:
                continue
            try:
                each.saved = self._run.session.save(each.to_save)
            except DdpPerfError as error:
                test.unsaved[each.label] = str(error)
        if test.unsaved:
            raise plain_failure("\n".join(test.unsaved.values()))

    def _complete(self, report: pytest.TestReport, item: pytest.Item) -> None:
        """Note how the test ended, and add its results to its last report, which xdist sends to the
        controller."""
        test = state_of(item)
        # a fixture may have subtests, too
        test.part_failed |= report.failed
        if test.calling:
            return
        is_xfail = hasattr(report, "wasxfail")
        if report.when == "call":
            test.passed = (
                report.passed and not test.part_failed and not is_xfail
            )
        if is_xfail:
            test.is_xfail |= report.when != "teardown" and not report.failed
        else:
            test.skipped |= report.skipped
        if report.when == "teardown":
            report.ddpperf = codec.encode(self._results(item, test))  # type: ignore[attr-defined]
            # else a rerun does not measure again, and reports them again
            if not test.failed_gates:
                test.measurements.clear()

    def _results(self, item: pytest.Item, test: TestState) -> TestResults:
        never_measured = test.passed and not test.labels and measures(item)
        outcomes = test.outcomes()
        return TestResults(
            outcomes=tuple(outcomes),
            skipped=test.skipped,
            never_measured=nodeid_of(item) if never_measured else "",
            facts=self._run.machine() if outcomes else {},
            usage_error=test.usage_error,
        )
