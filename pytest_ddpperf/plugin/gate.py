"""Base classes of the fixtures: from a test's settings and place to its verdict. Every failure is an ordinary test
failure, without a traceback of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_ddpperf import options
from pytest_ddpperf.measuring import measurement
from pytest_ddpperf.measuring.launches import Job
from pytest_ddpperf.measuring.machine import Place, Unavailable
from pytest_ddpperf.measuring.measurement import Measured, Result
from pytest_ddpperf.options import Settings
from pytest_ddpperf.plugin import state
from pytest_ddpperf.plugin.items import accept_command, module_of, name_of, nodeid_of, warning_filters, with_place
from pytest_ddpperf.plugin.running import state_of
from pytest_ddpperf.plugin.snapshot import own_options
from pytest_ddpperf.plugin.state import Run
from pytest_ddpperf.plugin.watch import Watcher
from pytest_ddpperf.records import Plan, RankOutput, TestId
from pytest_ddpperf.records.errors import DdpPerfError, LaunchError, MarkerError, OptionError
from pytest_ddpperf.report import ci, failure
from pytest_ddpperf.verdict import TEST_LEVEL
from pytest_ddpperf.wire import payload
from pytest_ddpperf.wire.payload import StaysInPytest

if TYPE_CHECKING:
    from _pytest.outcomes import Failed
else:
    Failed = pytest.fail.Exception  # the same class by its public name, which type checkers cannot follow


class GateFailed(Failed):
    """A failed gate: an ordinary test failure that carries the Result."""

    result: Result  #: of the measurement; of several sizes of a collective, of the first that failed

    def __init__(self, text: str, result: Result) -> None:
        super().__init__(text, pytrace=False)
        self.result = result


def plain_failure(text: str) -> Failed:
    """An ordinary test failure without a traceback of ours."""
    return Failed(text, pytrace=False)


class DistributedFixture:
    """Base of all fixtures: the test, its settings, its place."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._item: pytest.Item = request.node
        if request.fixturename not in self._item.fixturenames:  # which tests do so is asked before any of them runs
            name = request.fixturename
            raise plain_failure(
                f"{name}: request.getfixturevalue asks for it too late; ask for it as an argument, or with "
                f"@pytest.mark.usefixtures({name!r}), and take its value then"
            )
        self._run: Run = request.config.stash[state.RUN]
        self._state = state_of(self._item)
        self._settings: Settings = state.own_settings(self._item)

    def _placed(self, place: Callable[..., Place], settings: Settings, *counts: int) -> Place:
        """Call `place(settings, *counts)` and turn its errors into pytest's."""
        try:
            return place(settings, *counts)
        except Unavailable as error:
            pytest.skip(str(error))
        except MarkerError as error:
            raise plain_failure(with_place(self._item, error)) from None
        except OptionError as error:
            # Without xdist it was found after collection; a worker can only fail the test and tell the controller.
            self._state.usage_error = str(error)
            raise plain_failure(f"usage error: {error}") from None
        except DdpPerfError as error:
            raise plain_failure(str(error)) from None

    def _plan(self, world_size: int) -> Plan:
        place = self._placed(self._run.session.place, self._settings, world_size)
        return self._plan_at(place, world_size)

    def _plan_at(self, place: Place, world_size: int, **roles: Any) -> Plan:
        return options.plan(
            self._settings,
            world_size=world_size,
            nodes=place.nodes,
            backend=place.backend,
            device=place.device,
            warning_filters=warning_filters(self._item),
            **roles,
        )

    def _show(self, plan: Plan, launches: tuple[tuple[RankOutput, ...], ...]) -> None:
        """Add the ranks' output to the report; under -s that of this node was streamed already."""
        streamed = self._run.config.getoption("capture", "no") == "no"
        for outputs in zip(*launches, strict=True):
            if streamed and plan.node_of(outputs[0].rank) == 0:
                continue
            for stream in ("stdout", "stderr"):
                text = merge_outputs(getattr(output, stream) for output in outputs)
                if text:
                    self._item.add_report_section("call", f"{stream} {outputs[0].name}", text)

    def _watcher(self, plan: Plan) -> Watcher:
        return Watcher(self._run.config, warmup=plan.warmup)


def merge_outputs(texts: Iterable[str]) -> str:
    """Join what launches wrote, in order; a text that several launches wrote is shown once."""
    shown = ""
    for text, times in Counter(filter(None, texts)).items():
        shown += text
        if times > 1:
            shown += "\n" * (not text.endswith("\n")) + f"(the same in {times} launches)\n"
    return shown


class BenchmarkFixture(DistributedFixture):
    """Base of the fixtures that measure: from a plan and set-up functions to a verdict."""

    _name: str  # of the fixture

    def __init__(self, request: pytest.FixtureRequest, replay: Callable[[Measured], None] | None) -> None:
        super().__init__(request)
        self._replay = replay

    def __reduce__(self) -> tuple[Any, ...]:
        return StaysInPytest, (self._name,)

    def _gated(
        self,
        plan: Plan,
        *setups: Callable[..., Any] | None,
        label: str,
        batch_size: int | None = None,
        gate: bool,
        level: float | None = None,
    ) -> Result:
        """Measure, judge and report; raises GateFailed. `level`: the error rate, if several measurements share one."""
        __tracebackhide__ = True
        line = self._item.reportinfo()[1]  # from 0
        job = Job(
            test=TestId(
                module=module_of(self._run.config, self._item),
                name=name_of(self._item, plan.world_size),
                label=label,
            ),
            nodeid=nodeid_of(self._item),
            file=self._run.session.shown(Path(self._item.path)),
            line=0 if line is None else line + 1,
            setups=setups,
            settings=self._settings,
            plan=plan,
            level=self._level(gate) if level is None else level,
            batch_size=batch_size,
            gate=gate,
            facts=self._facts(),
            notes=self._notes(),
        )
        return self._judged(self._measure(job), label)

    def _judged(self, measured: Measured, label: str) -> Result:
        __tracebackhide__ = True
        accept = accept_command(self._item, self._settings)
        outcome = measurement.build_outcome(measured, self._run.config.rootpath, accept)
        self._state.outcomes.append(outcome)
        before = ci.junit_names(label)  # of an attempt that was rerun
        kept = [each for each in self._item.user_properties if each[0] not in before]
        self._item.user_properties[:] = [*kept, *ci.junit_properties(outcome)]
        result = measured.result
        if outcome.fails:
            text = failure.gate_failure(outcome)
            self._state.failed_gates[label] = text, result
            raise GateFailed(text, result)
        if measured.verdict.reason == "saving":
            imported = sorted({file for launch in measured.launches for file in launch.files})
            self._state.candidates.append((len(self._state.outcomes) - 1, measured.candidate, imported))
        if self._replay is not None and self._run.leader is None:
            self._replay(measured)
        return result

    def _notes(self) -> tuple[str, ...]:
        return ()

    def _label(self, setups: dict[str, Any], batch_size: Any, name: Any) -> str:
        """Check the arguments of a call and return its label. Raises GateFailed in a rerun of a gate that failed."""
        __tracebackhide__ = True
        for role, setup in setups.items():
            if not callable(setup):
                raise TypeError(f"{self._name}({setup!r}): {role} must be callable: {_WHAT_SETUP_DOES[role]}")
        for role, setup in setups.items():
            self._check_call(role, setup, "ctx", *["shared"] * (role == "trainer" and "master" in setups))
        check_number("batch_size", batch_size, "examples per rank and step, ")
        check_name(name)
        label = name or ""
        if label in self._state.labels:
            taken = f"name={name!r} is taken" if name else "it was called before without a name"
            raise ValueError(f"{self._name}: {taken} in this test: give each further measurement a name of its own")
        self._state.labels.add(label)
        if label in self._state.failed_gates:
            text, result = self._state.failed_gates[label]
            raise GateFailed(f"{text}\n\nA rerun does not measure again: noise must not turn red into green.", result)
        return label

    def _check_call(self, role: str, setup: Any, *arguments: str) -> None:
        __tracebackhide__ = True
        name, given, does = payload.name_of(setup), " and ".join(arguments), _WHAT_SETUP_DOES[role]
        if payload.is_model(setup):
            raise TypeError(f"{self._name}({name}): {role} is called with {given}, and not a model: {does}")
        if not payload.accepts(setup, len(arguments)):
            guess = "was the step passed? " if role in ("setup", "trainer") else ""
            raise TypeError(
                f"{self._name}({name}): {role} is called with {given}, which {name} does not take; {guess}{does}"
            )

    def _level(self, gate: bool) -> float:
        """Return this measurement's error rate: a test's, and from its second gate on a half, a sixth, a twelfth of it,
        which add up to once more."""
        self._state.gates += gate
        further = max(self._state.gates, 1)
        return TEST_LEVEL / max(1, further * (further - 1))

    def _measure(self, job: Job) -> Measured:
        watcher = self._watcher(job.plan)
        try:
            measured = self._run.session.carry_out(job, watcher)
        except DdpPerfError as error:
            if isinstance(error, LaunchError):
                self._show(job.plan, (error.output,))
                text = failure.launch_failure(error, watcher.launch, watcher.launches)
            else:
                text = str(error)
            self._state.outcomes.append(measurement.build_failure(job, text.splitlines()[0]))
            raise plain_failure(text) from None
        finally:
            watcher.erase()
        self._show(job.plan, measured.output)
        return measured

    def _facts(self) -> dict[str, Any]:
        workers = getattr(self._run.config, "workerinput", {}).get("workercount", 0)
        return {**own_options(self._run.config), **({"xdist_workers": workers} if workers else {})}


_WHAT_SETUP_DOES = {
    "setup": "setup(ctx) returns the step to time",
    "trainer": "trainer(ctx), or trainer(ctx, shared) with a master, returns the step to time",
    "master": "master(ctx) returns what every trainer gets",
    "parameter_server": "parameter_server(ctx) prepares a server",
}


def check_number(name: str, value: Any, what: str = "") -> None:
    __tracebackhide__ = True
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name}={value!r}: {what}a whole number from 1")


def check_name(name: Any) -> None:
    __tracebackhide__ = True
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise ValueError(f"name={name!r}: a second measurement of a test needs a name that is not empty")
    if name is not None and not name.isprintable():
        raise ValueError(f"name={name!r}: it stands in reports and file names, so it is printable text")
