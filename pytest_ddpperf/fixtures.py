"""The callables behind the fixtures: a test's own words in, a Result or an ordinary test failure out."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_ddpperf import benchmark, options, state
from pytest_ddpperf.benchmark import Job, Measured
from pytest_ddpperf.errors import DdpPerfError, LaunchError, OptionError
from pytest_ddpperf.machine import Place, Unavailable
from pytest_ddpperf.options import Settings
from pytest_ddpperf.payload import StaysInPytest
from pytest_ddpperf.records import Plan, RankOutput, TestId
from pytest_ddpperf.report import failure, junit
from pytest_ddpperf.result import Result
from pytest_ddpperf.state import Run
from pytest_ddpperf.verdict import RUN_LEVEL
from pytest_ddpperf.watch import Watcher

if TYPE_CHECKING:
    from _pytest.outcomes import Failed
else:
    Failed = pytest.fail.Exception  # the same class by its public name, which type checkers cannot follow


# Options of a run that the command which accepts its figures does without.
_NOT_REPEATED = ("--ddp-json", "--ddp-fail-on", "--ddp-disable", "--ddp-save-baseline", "--ddp-extend-baseline")


class GateFailed(Failed):
    """A failed gate: an ordinary test failure that carries the Result."""

    def __init__(self, text: str, result: Result) -> None:
        super().__init__(text, pytrace=False)
        self.result = result


def _failure(text: str) -> Failed:
    """An ordinary test failure without a traceback of ours."""
    return Failed(text, pytrace=False)


class _Distributed:
    """What both fixtures share: the test, its settings, its place."""

    def __init__(self, request: pytest.FixtureRequest, world_size: int) -> None:
        self._item: pytest.Item = request.node
        self._run: Run = request.config.stash[state.RUN]
        self._world_size = world_size
        self._state = state.of(self._item)
        self._settings: Settings = state.settings_of(self._item)

    def _plan(self) -> Plan:
        try:
            place: Place = self._run.session.place(self._settings, self._world_size)
        except Unavailable as error:
            pytest.skip(str(error))
        except OptionError as error:
            # Without xdist it was found after collection; a worker can only fail the test and tell the controller.
            self._state.usage_error = str(error)
            raise _failure(f"usage error: {error}") from None
        except DdpPerfError as error:
            raise _failure(str(error)) from None
        return options.plan(self._settings, world_size=self._world_size, backend=place.backend, device=place.device)

    def _show(self, launches: tuple[tuple[RankOutput, ...], ...]) -> None:
        """The ranks' output as captured sections of the report; under -s it was streamed."""
        if self._run.config.getoption("capture") == "no":
            return
        for rank in range(self._world_size):
            for stream in ("stdout", "stderr"):
                parts = [getattr(outputs[rank], stream) for outputs in launches if rank < len(outputs)]
                if any(parts):
                    self._item.add_report_section("call", f"{stream} rank {rank}", "".join(parts))

    def _watcher(self, plan: Plan) -> Watcher:
        return Watcher(self._run.config, warmup=plan.warmup, steps=plan.steps)


class DdpRun(_Distributed):
    """The `ddp_run` fixture."""

    def __reduce__(self) -> tuple[Any, ...]:
        return StaysInPytest, ("ddp_run",)

    def __call__(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn(ctx, *args)` on every rank of a fresh process group.

        Returns the results by rank, tensors on the CPU. A rank that raises, dies, hangs or returns nothing fails
        the test with its own traceback.
        """
        __tracebackhide__ = True
        plan = self._plan()
        watcher = self._watcher(plan)
        try:
            return self._run.session.launcher.call(plan, fn, args, watcher)
        except LaunchError as error:
            self._show((error.output,))
            raise _failure(str(error)) from None
        except DdpPerfError as error:
            raise _failure(str(error)) from None
        finally:
            watcher.erase()


class DdpBenchmark(_Distributed):
    """The `ddp_benchmark` fixture."""

    def __init__(
        self, request: pytest.FixtureRequest, world_size: int, replay: Callable[[Measured], None] | None
    ) -> None:
        super().__init__(request, world_size)
        self._replay = replay

    def __reduce__(self) -> tuple[Any, ...]:
        return StaysInPytest, ("ddp_benchmark",)

    def __call__(
        self,
        setup: Callable[..., Any],
        *,
        batch_size: int | None = None,
        name: str | None = None,
        gate: bool = True,
    ) -> Result:
        """Launch ranks, time the step that `setup(ctx)` returns, and hold it against the baseline.

        `batch_size` is examples per rank and step. `gate=False` measures only. A second call in one test needs a
        `name`. Raises GateFailed, an ordinary test failure, when the verdict fails the test.
        """
        __tracebackhide__ = True
        label = self._label(setup, batch_size, name)
        if label in self._state.failed_gates:
            text, result = self._state.failed_gates[label]
            raise GateFailed(f"{text}\n\nA rerun does not measure again: noise must not turn red into green.", result)
        plan = self._plan()
        job = Job(
            test=TestId(
                module=state.module_of(self._run.config, self._item),
                name=state.name_of(self._item, self._world_size),
                label=label,
            ),
            nodeid=self._item.nodeid,
            setup=setup,
            settings=self._settings,
            plan=plan,
            launches=options.launches(self._settings),
            level=self._level(gate),
            batch_size=batch_size,
            gate=gate,
            facts=self._facts(),
            notes=self._notes(),
        )
        measured = self._measure(job)
        self._state.outcomes.append(measured.outcome)
        self._item.user_properties.extend(junit.properties(measured.outcome))
        if measured.outcome.fails:
            text = failure.gate_failure(
                measured.outcome,
                baseline=measured.baseline,
                accept_command=self._accept_command(),
            )
            self._state.failed_gates[label] = text, measured.result
            raise GateFailed(text, measured.result)
        if measured.result.verdict.reason == "saving":
            self._state.candidates.append((len(self._state.outcomes) - 1, measured.candidate))
        if self._replay is not None:
            self._replay(measured)
        return measured.result

    def _label(self, setup: Any, batch_size: Any, name: Any) -> str:
        __tracebackhide__ = True
        if not callable(setup):
            raise TypeError(f"ddp_benchmark({setup!r}): setup must be callable: setup(ctx) returns the step to time")
        if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
            raise ValueError(f"batch_size={batch_size!r}: examples per rank and step, a whole number from 1")
        if name is not None and (not isinstance(name, str) or not name.strip()):
            raise ValueError(f"name={name!r}: a second measurement of a test needs a name that is not empty")
        label = name or ""
        if label in self._state.labels:
            taken = f"name={name!r} is taken" if name else "it was called before without a name"
            raise ValueError(f"ddp_benchmark: {taken} in this test: give each further measurement a name of its own")
        self._state.labels.add(label)
        return label

    def _level(self, gate: bool) -> float:
        """This measurement's share of the run's error rate: a test's share, and from its second gate on a half, a
        sixth, a twelfth of one, which add up to one more."""
        self._state.gates += gate
        further = max(self._state.gates, 1)
        return RUN_LEVEL / self._run.gates / max(1, further * (further - 1))

    def _measure(self, job: Job) -> Measured:
        watcher = self._watcher(job.plan)
        try:
            measured = self._run.session.carry_out(job, watcher)
        except DdpPerfError as error:
            if isinstance(error, LaunchError):
                self._show((error.output,))
                text = failure.launch_failure(error, watcher.launch, watcher.launches)
            else:
                text = str(error)
            self._state.outcomes.append(benchmark.failed(job, text.splitlines()[0]))
            raise _failure(text) from None
        finally:
            watcher.erase()
        self._show(measured.output)
        return measured

    def _facts(self) -> dict[str, Any]:
        workers = getattr(self._run.config, "workerinput", {}).get("workercount", 0)
        return {"xdist_workers": workers} if workers else {}

    def _notes(self) -> tuple[str, ...]:
        ignored = (
            self._settings.sources.get("world_sizes") == "marker"
            and self._run.settings.sources.get("world_sizes") in ("command line", "ini")
            and self._run.config.getoption("verbose") > 0
        )
        asked = ",".join(map(str, self._run.settings.world_sizes))
        return (f"the marker's world_size={self._world_size} holds, not {asked}",) if ignored else ()

    def _accept_command(self) -> str:
        """The command of this run, for this test alone, that would store the new figures."""
        config = self._run.config
        words = iter([str(argument) for argument in config.invocation_params.args])
        kept = []
        for word in words:
            if word.startswith("--ddp-") and not word.startswith(_NOT_REPEATED):
                kept.append(word)
                if "=" not in word:
                    kept.append(next(words, ""))
        path = state.invocation_path(config, self._item)
        return shlex.join(["pytest", path, *kept, "--ddp-save-baseline"])
