"""The pytest of another version or node: it collects, then runs the tests that the leader names."""

import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

import pytest
from _pytest.config import ConftestImportFailure

from pytest_ddpperf.plugin.items import is_distributed, nodeid_of
from pytest_ddpperf.plugin.judged import read_judged
from pytest_ddpperf.plugin.leader_connection import (
    LeaderConnection,
    NodeLeaderConnection,
)
from pytest_ddpperf.plugin.role import LEADER
from pytest_ddpperf.plugin.state import RUN
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.messages import (
    Collected,
    ConftestFailed,
    Hello,
    LaunchFailed,
    RunTest,
    ServerStarted,
    StartPytest,
    TestEnded,
)
from pytest_ddpperf.records.samples import Facts
from pytest_ddpperf.remote.worktree import sources_here
from pytest_ddpperf.version import __version__
from pytest_ddpperf.wire.boot import die_with_parent
from pytest_ddpperf.wire.channels import Lines
from pytest_ddpperf.wire.source_trees import install


def main(descriptor: int, fields: codec.Json) -> NoReturn:
    """Run tests for the leader until it goes; `fields` are those of a StartPytest."""
    os.set_inheritable(descriptor, False)
    # Where pytest's capture does not reach: the stacks of a side that does not answer.
    faulthandler.register(
        signal.SIGQUIT, os.fdopen(os.dup(2), "w"), all_threads=True
    )
    lines = Lines(socket.socket(fileno=descriptor))
    lines.send(Hello(__version__))
    # another version may mean something else by its messages
    if fields.get("version") != __version__:
        sys.exit()
    start = codec.decode(StartPytest, fields)
    if start.cores:
        os.sched_setaffinity(0, start.cores)
    kind = NodeLeaderConnection if start.node else LeaderConnection
    leader = kind(lines, start)
    die_with_parent(os.getppid(), signal.SIGKILL)
    sys.argv[:] = start.argv
    if leader.trees.base != leader.trees.current:
        install(leader.trees)
    plugin = WorkerPlugin(leader, start.own_tests)
    sys.exit(pytest.main(start.arguments, plugins=[plugin]))


@dataclass(eq=False)
class WorkerPlugin:
    """The plugin of a remote pytest: it runs the tests that the leader names."""

    _leader: LeaderConnection
    own_tests: bool  # a baseline's code is measured again, a test now and then
    _errors: dict[str, str] = field(default_factory=dict)
    _reports: list[pytest.TestReport] = field(default_factory=list)
    _broken: bool = False  # whether a fixture of the test failed
    _apart: bool = False  # whether one did that has to be reported

    @pytest.hookimpl(wrapper=True)
    def pytest_load_initial_conftests(self) -> Generator[None, None, None]:
        try:
            yield
        except ConftestImportFailure:
            self._leader.send(ConftestFailed())
            raise

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[LEADER] = self._leader

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._errors[report.nodeid.partition("::")[0]] = report.longreprtext

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {
            nodeid_of(item): item
            for item in session.items
            if is_distributed(item)
        }
        sources = sources_here(self._leader.trees)
        run = session.config.stash[RUN]
        self._leader.send(
            Collected(
                tuple(items),
                self._errors,
                sources,
                read_judged(run, self._leader.trees),
            )
        )
        if session.config.option.collectonly:
            return True
        facts: Facts = {}
        with suppress(DdpPerfError):  # each test will say it
            # starts the rank server while the other pytest starts its own
            facts = run.session.facts()
        try:
            run.role.await_others(run)
        except DdpPerfError as error:
            self._leader.send(LaunchFailed(str(error)))
            return True
        self._leader.send(ServerStarted(facts))
        following: pytest.Item | None = None
        while True:
            order = self._leader.order()
            if not isinstance(order, RunTest):
                continue
            item = items[order.nodeid]
            # Fixtures of wider scope were kept for another test. What fails in their teardown is
            # that test's. pytest has no public way.
            if item is not following:
                with suppress(
                    Exception, pytest.fail.Exception, pytest.skip.Exception
                ):
                    session._setupstate.teardown_exact(item)
            # Fixtures that the next test needs too are kept. What fixtures of a baseline's code
            # start must not disturb the measurements in between.
            following = None
            if not self.own_tests:
                later = session.items[session.items.index(item) + 1 :]
                following = next(filter(is_distributed, later), None)
            self._run(item, following)

    def _run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        self._reports.clear()
        self._broken = False
        self._apart = False
        self._leader.begin_test()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        why = [*map(_why, self._reports)]
        # else pytest keeps the error of the fixture for all tests that follow
        if self._broken:
            why.append(_tear_down_all(item))
        text = "\n".join(filter(None, why))
        self._leader.send(TestEnded(text, apart=text if self._apart else ""))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            # Not a failure here, or a plugin would run the test again after a delay. The leader
            # decides that.
            if report.when != "call":
                self._broken = True
                # if the leader has ended the test, that may be the reason
                self._apart = self._apart or not self._leader.over
            # comes first: some reports show one line only
            crash = getattr(report.longrepr, "reprcrash", None)
            first = f"{crash.message}\n\n" if crash is not None else ""
            report.longrepr = (str(item.path), 0, first + report.longreprtext)
            report.outcome = "skipped"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)


def _tear_down_all(item: pytest.Item) -> str:
    """End all fixtures, those of wider scope too, and return what failed. pytest has no public
    way."""
    call = pytest.CallInfo.from_call(
        lambda: item.session._setupstate.teardown_exact(None),
        "teardown",
        reraise=(KeyboardInterrupt, pytest.exit.Exception),
    )
    if call.excinfo is None:
        return ""
    return pytest.TestReport.from_item_and_call(item, call).longreprtext


def _why(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return report.longreprtext if hasattr(report, "wasxfail") else ""
