"""What the plugin keeps in pytest's stashes: one `Run` a pytest process, one `TestState` a test."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_ddpperf import options
from pytest_ddpperf.plugin.items import BENCHMARKS, RPC, WORLD_SIZE, is_distributed, uses, with_place, world_sizes
from pytest_ddpperf.plugin.outset import outset_of, traces_one_side

if TYPE_CHECKING:
    from pytest_ddpperf.against import BaseSide
    from pytest_ddpperf.measuring.confirm import SideOf
    from pytest_ddpperf.measuring.outcomes import RunResults
    from pytest_ddpperf.measuring.serving import Serving
    from pytest_ddpperf.measuring.session import Session
    from pytest_ddpperf.nodes.fleet import Fleet
    from pytest_ddpperf.options import Settings
    from pytest_ddpperf.records import Baseline, Outcome


SERVING: pytest.StashKey[Serving] = pytest.StashKey()


class Run:
    """The plugin's state in one pytest process. Ranks and reports are imported when a distributed test needs them:
    a run without any pays for the options alone."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.serving = config.stash.get(SERVING, None)  # the pytest that leads, where this one is led
        self.worker = self.serving is not None or hasattr(config, "workerinput")  # another process reports
        self.items: list[pytest.Item] = []
        self._gating: list[pytest.Item] = []  # of them, those that may hold a measurement against a baseline
        self.deselected: set[str] = set()  # node ids
        self._entered: dict[str, float] = {}  # node ids of distributed tests, and when the last attempt began
        self._spent: dict[str, float] = {}  # seconds, of those that ended
        self.outset = outset_of(config)
        self.fleet: Fleet | None = None  # the other nodes, where there are and this pytest leads
        self.pytest_session: pytest.Session | None = None
        self._base: BaseSide | None = None
        self._session: Session | None = None
        self._report: RunResults | None = None

    @cached_property
    def settings(self) -> Settings:
        """What was asked of the run; raises OptionError."""
        return options.read(self.config)

    def collected(self, items: Sequence[pytest.Item]) -> None:
        """The tests of this run."""
        self.items = [item for item in items if is_distributed(item)]

    @property
    def nodes(self) -> int:
        """How many there are, this one included."""
        if self.fleet is not None:
            return len(self.fleet)
        return self.serving.nodes if self.serving is not None else 1

    @property
    def session(self) -> Session:
        if self._session is None:
            from pytest_ddpperf.measuring.session import Session

            rpc = any(uses(item, {RPC}) for item in self.items)
            self._session = Session(
                self.settings,
                self.config.rootpath,
                self.modules,
                rpc=rpc,
                base=self._base,
                serving=self.serving,
                side_of=self._confirms(),
                fleet=self.fleet,
                nodes=self.nodes,
            )
        return self._session

    def _confirms(self) -> SideOf | str:
        """How suspicions against baselines are settled, or why they are not; "" where nobody asked."""
        settings = self.settings
        if not settings.confirm_seconds or settings.records or settings.beside or self.serving is not None:
            return ""
        if self.fleet is not None:
            return "not in a run over several nodes"
        if traces_one_side(self.outset):
            return "not with --cov that traces ranks: add --no-cov"
        return "not under xdist: add -n 0" if self.worker else self._side_of

    def start_others(self, items: Sequence[pytest.Item]) -> None:
        """Let the other nodes, and the other version, collect beside this pytest, if there are any; raises
        DdpPerfError."""
        if self.settings.beside and any(uses(item, BENCHMARKS) for item in self.items):
            from pytest_ddpperf.plugin import sides

            self._base = sides.another_version(self, items)
        if self.fleet is not None:
            from pytest_ddpperf.plugin import nodes

            nodes.start(self.fleet, self.config, self._base)
        if self._base is not None:
            self._base.start()

    def _side_of(self, commit: str, seconds: float) -> BaseSide:
        from pytest_ddpperf.plugin import sides

        return sides.of_commit(self, commit, seconds)

    def await_others(self) -> None:
        """Until they have collected; raises AgainstError where nothing differs from the other version, and NodesError
        where another node has other code, or another machine."""
        if self._base is not None:
            from pytest_ddpperf.led import Sources

            self._base.collect(Sources.here(self._base.trees))
            there = self._base.only_there({*self.deselected, *(item.nodeid for item in self.items)})
            self.report.messages += [f"only {self._base.version} has {nodeid}" for nodeid in there]
        if self.fleet is not None:
            from pytest_ddpperf.plugin import nodes

            nodes.collected(self.fleet, self.config, self.session.facts())

    @property
    def report(self) -> RunResults:
        if self._report is None:
            from pytest_ddpperf.measuring.outcomes import RunResults, begin

            self._report = RunResults(begin(self.config.rootpath))
        return self._report

    def place(self, item: pytest.Item) -> None:
        """Find where a test will run; raises Unavailable, MarkerError and the other errors of a place."""
        settings = settings_of(item)
        if uses(item, {RPC}):
            certain = settings.sources["trainers"] != "default"
            self.session.place_rpc(settings, settings.trainers, settings.parameter_servers, certain=certain)
        for world_size in world_sizes(item, settings) if uses(item, {WORLD_SIZE}) else ():
            self.session.place(settings, world_size)

    def end(self, failed: Collection[str], refused: str) -> None:
        """No more tests will run: node ids of what `failed`, and why pytest `refused` to run any."""
        if self._report is None:
            return
        if self._session is not None:
            self.report.messages += self._session.messages()
        if self.fleet is not None:
            self.report.messages += self.fleet.told
        self.report.end(failed, refused)

    @property
    def reported(self) -> bool:
        """Whether there is anything to report."""
        strangers = self.fleet is not None and bool(self.fleet.told)
        return self._report is not None and (strangers or not self._report.empty)

    def telling(self, item: pytest.Item, *, skipped: bool) -> dict[str, Any]:
        """What a test has to say to the report, once."""
        from pytest_ddpperf.measuring.outcomes import encode_results

        test = of(item)
        never_measured = test.passed and not test.labels and uses(item, BENCHMARKS)
        facts = self._session.machine() if self._session is not None and test.outcomes else {}
        message = encode_results(
            test.outcomes,
            skipped=skipped,
            never_measured=item.nodeid if never_measured else "",
            facts=facts,
            usage_error=test.usage_error,
        )
        if not test.failed_gates:  # else a rerun does not measure again, and tells them again
            test.outcomes = []
        return message

    def enter(self, item: pytest.Item) -> None:
        """A distributed test begins."""
        self._entered[item.nodeid] = time.monotonic()

    def left(self) -> tuple[int, int, float | None]:
        """The distributed test under way, from 1, of how many, and the seconds until the last has ended, where each
        takes as long as those before; None before one has ended."""
        number, of = len(self._entered), len(self.items)
        if not self._spent:
            return number, of, None
        under_way = time.monotonic() - max(self._entered.values())
        mean = sum(self._spent.values()) / len(self._spent)
        return number, of, max(mean - under_way, 0.0) + mean * max(of - number, 0)

    def leave(self, item: pytest.Item) -> None:
        """A test is over."""
        began = self._entered.get(item.nodeid)
        if began is not None:
            self._spent[item.nodeid] = self._spent.get(item.nodeid, 0.0) + time.monotonic() - began
        if self._session is not None:
            self._session.leave()

    def close(self) -> None:
        with ExitStack() as closing:
            if self.fleet is not None:
                status = self.pytest_session.exitstatus if self.pytest_session is not None else None
                closing.callback(self.fleet.close, int(status if status is not None else pytest.ExitCode.USAGE_ERROR))
            if self._session is not None:
                closing.callback(self._session.close)
            if self._base is not None:
                closing.callback(self._base.close)

    def modules(self) -> Mapping[str, str]:
        """Test modules, conftests and their packages, as name -> file."""
        of_tests = [getattr(item, "module", None) for item in self.items]
        modules = [module for module in of_tests if isinstance(module, ModuleType)] + self.conftests()
        # Outside packages all conftests have one name: by that the last of them is imported. A notebook has no file.
        modules.sort(key=lambda module: sys.modules.get(module.__name__) is module)
        return {module.__name__: file for module in modules if (file := getattr(module, "__file__", None))}

    def conftests(self) -> list[ModuleType]:
        """All of them, those by the same name too."""
        return [
            plugin
            for plugin in self.config.pluginmanager.get_plugins()
            if isinstance(plugin, ModuleType)
            and os.path.basename(getattr(plugin, "__file__", None) or "") == "conftest.py"
        ]


class TestState:
    """What is known of one test, over its phases and over reruns of it."""

    __test__ = False

    def __init__(self) -> None:
        self.attempt = 0
        self.failed_gates: dict[str, tuple[str, Any]] = {}  # label -> text and result; kept over reruns
        self.unsaved: dict[str, str] = {}  # label -> why its baseline could not be written; kept over reruns
        self.usage_error = ""
        self.outcomes: list[Outcome] = []  # of this attempt, behind those before
        self._clear()

    def _clear(self) -> None:
        self.calling = False  # its function runs: what is reported then is of a part of it, a subtest
        self.part_failed = False  # in this attempt
        self.passed = False  # the call phase of this attempt, all parts included
        self.labels: set[str] = set()  # measured in this attempt
        self.gates = 0  # of them, those that are held against a baseline
        # Index in outcomes, what to save, and the files of the repository that ranks imported.
        self.candidates: list[tuple[int, Baseline, list[str]]] = []

    def begin(self) -> None:
        """A new attempt: the first, or a rerun."""
        self.attempt += 1
        self._clear()
        # Told again: pytest-rerunfailures before 16.6.1 drops the report of a teardown that a rerun follows.
        self.outcomes = list({outcome.test.label: outcome for outcome in self.outcomes}.values())


RUN = pytest.StashKey[Run]()
TEST = pytest.StashKey[TestState]()


def node_count(config: pytest.Config) -> int:
    """Over how many nodes torchrun started the run, this one included: the same on all of them, so that a conftest may
    make tests by it."""
    return config.stash[RUN].nodes


def of(item: pytest.Item) -> TestState:
    return item.stash.setdefault(TEST, TestState())


def settings_of(item: pytest.Item) -> Settings:
    """Return the settings of one test, its markers included; those of its parameters are the closest. Raises
    MarkerError."""
    callspec = getattr(item, "callspec", None)
    closest = [mark for mark in callspec.marks if mark.name == "ddp"] if callspec is not None else []
    if callspec is not None and WORLD_SIZE in callspec.params:
        _refuse_world_size(closest)
    return options.with_markers(item.config.stash[RUN].settings, [*closest, *item.iter_markers("ddp")])


def _refuse_world_size(marks: Sequence[pytest.Mark]) -> None:
    from pytest_ddpperf.records.errors import MarkerError

    for mark in marks:
        if "world_size" in mark.kwargs:
            where, allowed = "a parameter's @pytest.mark.ddp(world_size=...)", "the test itself runs with several"
            raise MarkerError(where, mark.kwargs["world_size"], f"{allowed}: give the test one list")


def own_settings(item: pytest.Item) -> Settings:
    """The same of a test that runs: a mistake that its marker has a part in fails it."""
    from pytest_ddpperf.records.errors import MarkerError

    try:
        return settings_of(item)
    except MarkerError as error:
        problem = with_place(item, error)
    pytest.fail(problem, pytrace=False)
