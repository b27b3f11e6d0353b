"""pytest's hooks around each test, and the arguments of its fixtures.

Imported and registered only when a run has distributed tests.
"""

from __future__ import annotations

import inspect
import os
import re
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.baseline import file_name, module_folder
from pytest_ddpperf.compare.result import Measured
from pytest_ddpperf.options.settings import Settings
from pytest_ddpperf.plugin.items import (
    has_benchmark,
    is_distributed,
    measures,
    nodeid_of,
)
from pytest_ddpperf.plugin.state import Run, plain_failure
from pytest_ddpperf.plugin.watch import mark_with_timer
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import DdpPerfError, short_repr
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.plan import Program
from pytest_ddpperf.records.samples import TestId
from pytest_ddpperf.wire import payload


class TestState:
    """What is known of one test, over its phases and over reruns of it."""

    __test__ = False

    def __init__(self) -> None:
        self.attempt = 0
        # label -> what GateFailed takes; kept over reruns
        self.failed_gates: dict[str, tuple[str, Any, str]] = {}
        # label -> why its baseline could not be written; kept over reruns
        self.unsaved: dict[str, str] = {}
        self.usage_error = ""
        self.outcomes: list[Outcome] = []  # of this attempt, after those before
        self._clear()

    def _clear(self) -> None:
        # its function runs: a report made meanwhile is one of a part of it, a subtest
        self.calling = False
        self.part_failed = False  # in this attempt
        self.passed = False  # the call phase of this attempt, all parts included
        self.labels: set[str] = set()  # measured in this attempt
        self.gates = 0  # of them, those that are compared with a baseline
        # index in outcomes, and what to save
        self.candidates: list[tuple[int, Measured]] = []

    def begin_attempt(self) -> None:
        """Forget the last attempt, if this is a rerun, but for its outcomes."""
        self.attempt += 1
        self._clear()
        # Reported again: pytest-rerunfailures before 16.6.1 drops the report of a teardown that a
        # rerun follows.
        self.outcomes = list(
            {outcome.test.label: outcome for outcome in self.outcomes}.values()
        )


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
        # Asked again: CodSpeed unregisters pytest-benchmark, and its own reading of the marker
        # knows no timer.
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
    def pytest_runtest_teardown(
        self, item: pytest.Item
    ) -> Generator[None, object, object]:
        try:
            result = yield
        except BaseException:
            for error in self._end(item):
                item.add_report_section("teardown", "of another node", error)
            raise
        if errors := self._end(item):
            raise plain_failure("\n\n".join(errors))
        if is_distributed(item):
            self._save(state_of(item))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if is_distributed(item):
            headline = (
                getattr(call.excinfo.value, "headline", "")
                if call.excinfo is not None
                else ""
            )
            crash = getattr(report.longrepr, "reprcrash", None)
            if headline and crash is not None:
                crash.message = headline  # without the exception's class
            self._complete(report, item)
        return report

    def _end(self, item: pytest.Item) -> list[str]:
        """End the test on all nodes. Returns what failed on other nodes in its setup or
        teardown."""
        if not is_distributed(item):
            return []
        self._run.end_test()
        return (
            self._run.other_nodes.failed() if self._run.other_nodes is not None else []
        )

    def _save(self, test: TestState) -> None:
        """Write the baselines of a test that passed as a whole, in its first attempt. If one could
        not be written, the test fails, and its reruns too."""
        for index, measured in (
            test.candidates if test.passed and test.attempt == 1 else ()
        ):
            outcome = test.outcomes[index]
            try:
                test.outcomes[index] = replace(
                    outcome, saved=self._run.session.save(measured)
                )
            except DdpPerfError as error:
                test.unsaved[outcome.test.label] = str(error)
        for index, outcome in enumerate(test.outcomes):
            if problem := test.unsaved.get(outcome.test.label):
                test.outcomes[index] = replace(
                    outcome, fails=True, error=problem.splitlines()[0]
                )
        if test.unsaved:
            raise plain_failure("\n".join(test.unsaved.values()))

    def _complete(self, report: pytest.TestReport, item: pytest.Item) -> None:
        """Note how the test ended, and add its results to its last report, which xdist sends to the
        controller."""
        test = state_of(item)
        if test.calling:
            test.part_failed |= report.failed
            return
        is_xfail = hasattr(report, "wasxfail")
        if report.when == "call":
            test.passed = report.passed and not test.part_failed and not is_xfail
        if is_xfail and report.when != "teardown" and not report.failed:
            test.outcomes = [
                _as_expected(outcome) if outcome.fails else outcome
                for outcome in test.outcomes
            ]
        skipped = report.skipped and not is_xfail
        if report.when == "teardown" or skipped:
            report.ddpperf = self._results(item, test, skipped=skipped)  # type: ignore[attr-defined]

    def _results(
        self, item: pytest.Item, test: TestState, *, skipped: bool
    ) -> dict[str, Any]:
        """Return what `RunResults.take` adds to the run, in plain values that may cross a
        process."""
        never_measured = test.passed and not test.labels and measures(item)
        results = {
            "outcomes": [codec.encode(outcome) for outcome in test.outcomes],
            "skipped": skipped,
            "never_measured": nodeid_of(item) if never_measured else "",
            "facts": self._run.session.machine() if test.outcomes else {},
            "usage_error": test.usage_error,
        }
        # else a rerun does not measure again, and reports them again
        if not test.failed_gates:
            test.outcomes = []
        return results


def _as_expected(outcome: Outcome) -> Outcome:
    """Mark the outcome of an xfail test that failed as expected."""
    return replace(outcome, fails=False, notes=(*outcome.notes, "expected to fail"))


_WHAT_SETUP_DOES = {
    "setup": "setup(ctx) returns the step to time",
    "main": "main(ctx) trains in a loop of its own",
    "trainer": "trainer(ctx), or trainer(ctx, shared) with a master, returns the step to time",
    "master": "master(ctx) returns what every trainer gets",
    "parameter_server": "parameter_server(ctx) prepares a server",
    "fn": "fn(ctx, ...) runs on every rank",
}


def check_setup(
    fixture: str, role: str, setup: Any, given: str = "ctx", count: int = 1
) -> None:
    """Raise TypeError if a function for ranks cannot be called with what is `given`, so many
    arguments."""
    __tracebackhide__ = True
    name, problem = payload.name_of(setup), ""
    if not callable(setup) or payload.is_model(setup):
        problem = f"must be a function, not {name}"
    elif not payload.accepts(setup, count):
        problem = f"is called with {given}, which {name} does not take"
    elif inspect.iscoroutinefunction(setup):
        problem = f"must be a function without async, which {name} is not"
    if problem:
        called = f"{fixture}.loop" if role == "main" else fixture
        raise TypeError(f"{called}({name}): {role} {problem}: {_WHAT_SETUP_DOES[role]}")


def check_number(name: str, value: Any, what: str = "") -> None:
    """Raise ValueError if a value is given that is no whole number from 1, or one that no machine
    could have."""
    __tracebackhide__ = True
    if value is not None and (
        type(value) is not int or not 1 <= value <= 1_000_000_000
    ):
        raise ValueError(
            f"{name}={short_repr(value)}: {what}a whole number from 1 to 1,000,000,000"
        )


def check_facts(facts: Any) -> dict[str, str | int | float | bool]:
    """Return the facts that a test gives; raises ValueError unless they are text, numbers or truth
    values by name."""
    __tracebackhide__ = True
    what = "a fact has a name, and is text, a number, True or False"
    if not isinstance(facts or {}, Mapping):
        raise ValueError(f"facts={short_repr(facts)}: give a dict: {what}")
    given = dict(facts or {})
    for name, value in given.items():
        is_name = isinstance(name, str) and name.isprintable() and name.strip()
        if not is_name or type(value) not in (str, int, float, bool):
            raise ValueError(f"facts={short_repr({name: value})}: {what}")
    return given


def trace_path(
    item: pytest.Item, settings: Settings, label: str, *, is_base: bool
) -> str:
    """Return the beginning of the paths of a side's traces; "" for none."""
    if settings.trace_dir is None:
        return ""
    module, _, name = nodeid_of(item).partition("::")
    test = file_name(TestId(module=module, name=name, label=label)).removesuffix(
        ".json"
    )
    return str(
        settings.trace_dir
        / module_folder(module)
        / test
        / ("before" if is_base else "now")
    )


# Modules and console scripts.
_LAUNCHERS = re.compile(
    r"torch\.distributed\.(run|launch|elastic\..+)|accelerate\.commands\..+|deepspeed\.launcher\..+|horovod\.runner.*"
    r"|torchrun|accelerate(-launch)?|deepspeed|horovodrun"
)
_PATH = (str, os.PathLike)


def read_program(
    fixture: str, words: tuple[Any, ...], root: Path, args: Any, cwd: Any, env: Any
) -> Program:
    """Return the program that `script` is called with; raises ValueError."""
    __tracebackhide__ = True
    is_module = words[:1] == ("-m",)
    if len(words) != 1 + is_module or not isinstance(
        words[-1], str if is_module else _PATH
    ):
        how = 'give a path, or "-m" and the name of a module; its arguments are args=[...]'
        raise ValueError(f"{fixture}.script{short_repr(words)}: {how}")
    if not isinstance(cwd or "", _PATH) or not (root / (cwd or "")).is_dir():
        raise ValueError(
            f"{fixture}.script(cwd={short_repr(cwd)}): give the path of a folder, from rootdir"
        )
    folder = root / (cwd or "")
    path = str(words[-1] if is_module else folder / words[-1])
    if not is_module and not Path(path).is_file():
        missing = f"there is no file {path}: paths begin at cwd= or rootdir"
        raise ValueError(f"{fixture}.script({short_repr(words[-1])}): {missing}")
    if _LAUNCHERS.fullmatch(path if is_module else Path(path).name):
        raise ValueError(
            f"{fixture}.script: {words[-1]} starts ranks itself: give the program that it starts"
        )
    if not isinstance(args, list | tuple) or not all(
        isinstance(each, (*_PATH, int, float)) for each in args
    ):
        raise ValueError(
            f"{fixture}.script(args={short_repr(args)}): give a list, each argument for itself"
        )
    variables = env or {}
    if not isinstance(variables, Mapping) or not all(
        isinstance(each, str) for each in chain(*variables.items())
    ):
        # which may be secret
        raise ValueError(f"{fixture}.script(env=...): give a dict of texts")
    return Program(
        path=path,
        is_module=is_module,
        args=tuple(map(str, args)),
        cwd=str(folder),
        env=dict(variables),
    )


def without_temporary(words: str) -> str:
    """Return a command line without paths of temporary files: a folder of a test's own is another
    one in each run."""
    return re.sub(rf"{re.escape(tempfile.gettempdir())}{os.sep}\S*", "TEMPORARY", words)
