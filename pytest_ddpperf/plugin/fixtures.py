"""The public fixtures: from a test's call to its Result, or to an ordinary test failure without a
traceback of ours.

What may raise between a test and its failure hides its frame, so that --pdb opens in the test's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from pytest_ddpperf import text
from pytest_ddpperf.compare import measurement
from pytest_ddpperf.compare.launches import Job
from pytest_ddpperf.compare.measurement import CollectiveResult, Measured, Result
from pytest_ddpperf.options.definitions import MARKER
from pytest_ddpperf.options.settings import Settings, make_plan
from pytest_ddpperf.plugin import running
from pytest_ddpperf.plugin.items import (
    accept_command,
    module_of,
    moved_rootdir,
    name_of,
    nodeid_of,
    with_place,
)
from pytest_ddpperf.plugin.state import (
    RUN,
    Run,
    own_options,
    own_settings,
    plain_failure,
)
from pytest_ddpperf.plugin.watch import Watcher
from pytest_ddpperf.records.errors import (
    DdpPerfError,
    LaunchError,
    MarkerError,
    OptionError,
    Unavailable,
    short_repr,
)
from pytest_ddpperf.records.plan import (
    MARK,
    UPDATE,
    Plan,
    Setup,
    collective,
    in_bytes,
    in_words,
)
from pytest_ddpperf.records.samples import RankOutput, Reason, TestId
from pytest_ddpperf.report import sentences, summary
from pytest_ddpperf.verdict.times import TEST_LEVEL
from pytest_ddpperf.wire import payload
from pytest_ddpperf.wire.variables import digest

if TYPE_CHECKING:
    from _pytest.outcomes import Failed

    from pytest_ddpperf.plugin.session import Place
else:
    # the same class by its public name, which type checkers cannot follow
    Failed = pytest.fail.Exception


Replay = Callable[[Measured], None]


class GateFailed(Failed):
    """A failed gate: an ordinary test failure that carries the Result."""

    # : of the measurement; of several sizes of a collective, of the first that failed
    result: Result
    headline: str  #: one line, for pytest's short summary and JUnit

    def __init__(self, text: str, result: Result, headline: str) -> None:
        super().__init__(text, pytrace=False)
        self.result, self.headline = result, headline


class DistributedFixture:
    """Base of all fixtures: the test, its settings, its place."""

    _name: str  # of the fixture

    def __init__(
        self,
        request: pytest.FixtureRequest,
        world_size: int,
        replay: Replay | None = None,
    ) -> None:
        """`world_size`: 0 for RPC launches, which have trainers and parameter servers. `replay`
        takes what a test that did not fail has measured."""
        self._item: pytest.Item = request.node
        # which tests use it has to be known before any of them runs
        if self._name not in self._item.fixturenames:
            raise plain_failure(
                f"{self._name}: make it an argument of the test; for request.getfixturevalue also"
                f" add @pytest.mark.usefixtures({self._name!r})"
            )
        self._run: Run = request.config.stash[RUN]
        self._state = running.state_of(self._item)
        self._settings: Settings = own_settings(self._item)
        self._world_size, self._replay = world_size, replay

    def __reduce__(self) -> tuple[Any, ...]:
        return payload.make_refusal, (self._name,)

    def _plan(self) -> Plan:
        __tracebackhide__ = True
        return self._plan_at(
            self._find_place(self._settings, self._world_size), self._world_size
        )

    def _find_place(self, settings: Settings, *counts: int) -> Place:
        """Return the place of the test, as `Session.place`, and turn its errors into pytest's."""
        __tracebackhide__ = True
        try:
            return self._run.session.place(settings, *counts)
        except Unavailable as error:
            pytest.skip(str(error))
        except MarkerError as error:
            raise plain_failure(with_place(self._item, error)) from None
        except OptionError as error:
            # Without xdist it was found after collection; a worker can only fail the test and tell
            # the controller.
            self._state.usage_error = str(error)
            raise plain_failure(f"usage error: {error}") from None
        except DdpPerfError as error:
            raise plain_failure(str(error)) from None

    def _plan_at(self, place: Place, world_size: int, **roles: Any) -> Plan:
        return make_plan(
            self._settings,
            world_size=world_size,
            nodes=place.nodes,
            backend=place.backend,
            device=place.device,
            **roles,
        )

    def _show(
        self,
        plan: Plan,
        launches: tuple[tuple[RankOutput, ...], ...],
        most: int = text.MOST_LINES,
    ) -> None:
        """Add the end of the ranks' output to the report, at -v all; under -s this node's was
        streamed already."""
        asked = self._run.config.getoption
        streamed = asked("capture", "no") == "no"
        for outputs in zip(*launches, strict=True):
            if streamed and plan.node_of(outputs[0].rank) == 0:
                continue
            for stream in ("stdout", "stderr"):
                texts = [getattr(output, stream) for output in outputs]
                if any(texts):
                    # what launches wrote alike once
                    shown = "\n".join(dict.fromkeys(texts))
                    if asked("verbose", 0) <= 0:
                        shown = text.last_lines(texts, most)
                    self._item.add_report_section(
                        "call", f"{stream} {outputs[0].name}", shown
                    )


class DdpRun(DistributedFixture):
    """The `ddp_run` fixture."""

    _name = "ddp_run"

    def __call__(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn(ctx, *args)` on every rank of a fresh process group.

        Returns the results by rank, tensors on the CPU. A rank that raises, dies, hangs or delivers
        no result fails the test with its own traceback.
        """
        __tracebackhide__ = True
        given = f"ctx and {len(args)} more" if args else "ctx"
        running.check_setup(self._name, "fn", fn, given, 1 + len(args))
        plan = self._plan()
        watcher = Watcher(self._run.config, warmup=plan.warmup)
        try:
            return self._run.session.call(
                nodeid_of(self._item), plan, fn, args, watcher
            )
        except Failed as error:
            # of a plugin's time limit: where we waited says nothing
            raise error.with_traceback(None)
        except DdpPerfError as error:
            if isinstance(error, LaunchError):
                self._show(plan, (error.output,), text.MOST_LINES_OF_FAILURE)
            raise plain_failure(str(error)) from None
        finally:
            watcher.erase()


class BenchmarkFixture(DistributedFixture):
    """Base of the fixtures that measure: from a plan and set-up functions to a verdict."""

    def _gated(
        self,
        plan: Plan,
        *setups: Setup,
        label: str,
        batch_size: int | None = None,
        gate: bool,
        level: float | None = None,
    ) -> Result:
        """Measure, judge and report; raises GateFailed. `level`: the error rate, if several
        measurements share one."""
        __tracebackhide__ = True
        line = self._item.reportinfo()[1]  # from 0
        module = module_of(self._run.config, self._item)
        job = Job(
            test=TestId(
                module=module, name=name_of(self._item, plan.world_size), label=label
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
            trace=running.trace_path(
                self._item, self._settings, label, is_base=self._run.leader is not None
            ),
            notes=self._notes(),
        )
        watcher = Watcher(self._run.config, warmup=job.plan.warmup)
        return self._judged(self._measure(job, watcher), label, watcher)

    def _measure(self, job: Job, watcher: Watcher) -> Measured:
        __tracebackhide__ = True
        try:
            measured = self._run.session.carry_out(job, watcher)
        except Failed as error:  # as in `DdpRun`
            raise error.with_traceback(None)
        except DdpPerfError as error:
            problem = str(error)
            if isinstance(error, LaunchError):
                self._show(job.plan, (error.output,), text.MOST_LINES_OF_FAILURE)
                problem = f"launch {watcher.launch} of {watcher.launches}: {problem}"
            self._state.outcomes.append(
                measurement.build_failure(job, problem.splitlines()[0], **watcher.took)
            )
            raise plain_failure(problem) from None
        finally:
            watcher.erase()
        self._show(job.plan, measured.output)
        return measured

    def _judged(self, measured: Measured, label: str, watcher: Watcher) -> Result:
        __tracebackhide__ = True
        accept = accept_command(self._item, self._settings)
        outcome = measurement.build_outcome(
            measured, self._run.config.rootpath, accept, **watcher.took
        )
        self._state.outcomes.append(outcome)
        before = summary.junit_names(label)  # of an attempt that was rerun
        kept = [each for each in self._item.user_properties if each[0] not in before]
        self._item.user_properties[:] = [*kept, *summary.junit_properties(outcome)]
        result = measured.result
        if outcome.fails:
            failed = (
                sentences.gate_failure(outcome, text.terminal_width()),
                result,
                sentences.headline(outcome),
            )
            self._state.failed_gates[label] = failed
            raise GateFailed(*failed)
        if measured.verdict.reason == Reason.SAVING:
            self._state.candidates.append((len(self._state.outcomes) - 1, measured))
        if self._replay is not None and self._run.leader is None:
            self._replay(measured)
        return result

    def _notes(self) -> tuple[str, ...]:
        """Return what moved pytest's rootdir and, for -v, that the marker's world size is used and
        not the one that was asked for."""
        of_run = self._run.settings
        ignored = (
            self._world_size
            and self._settings.sources.get("world_sizes") == MARKER
            and of_run.sources.get("world_sizes") in ("command line", "ini")
            and self._run.config.getoption("verbose", 0) > 0
        )
        asked = ",".join(map(str, of_run.world_sizes))
        used = (
            f"the marker's world_size={self._world_size} is used, not {asked}"
            if ignored
            else ""
        )
        return tuple(filter(None, (moved_rootdir(self._run.config), used)))

    def _facts(self) -> dict[str, Any]:
        workers = getattr(self._run.config, "workerinput", {}).get("workercount", 0)
        return {
            **own_options(self._run.config),
            **({"xdist_workers": workers} if workers else {}),
        }

    def _level(self, gate: bool) -> float:
        """Return this measurement's error rate: a test's, and from its second gate on a half, a
        sixth, a twelfth of it, which add up to once more."""
        __tracebackhide__ = True
        if not isinstance(gate, bool):
            raise ValueError(f"gate={short_repr(gate)}: must be True or False")
        self._state.gates += gate
        further = max(self._state.gates, 1)
        return TEST_LEVEL / max(1, further * (further - 1))

    def _label(self, setups: Mapping[str, Any], batch_size: Any, name: Any) -> str:
        """Check the arguments of a call and return its label. Raises GateFailed in a rerun of a
        gate that failed."""
        __tracebackhide__ = True
        for role, setup in setups.items():
            shared = (
                ("ctx and shared", 2)
                if role == "trainer" and "master" in setups
                else ()
            )
            running.check_setup(self._name, role, setup, *shared)
        running.check_number("batch_size", batch_size, "examples per rank and step, ")
        if name is not None and not (
            isinstance(name, str) and name.strip() and name.isprintable()
        ):
            what = (
                "must be printable and not empty: it is used in reports and file names"
            )
            raise ValueError(f"name={short_repr(name)}: {what}")
        label = name or ""
        if label in self._state.labels:
            taken = (
                f"name={name!r} is taken"
                if name
                else "it was called before without a name"
            )
            raise ValueError(
                f"{self._name}: {taken} in this test: give each further measurement a name of"
                " its own"
            )
        self._state.labels.add(label)
        if label in self._state.failed_gates:
            text, *rest = self._state.failed_gates[label]
            raise GateFailed(
                f"{text}\n\nA rerun does not measure again: noise must not turn red into green.",
                *rest,
            )
        return label


class DdpBenchmark(BenchmarkFixture):
    """The `ddp_benchmark` fixture."""

    _name = "ddp_benchmark"

    def __call__(
        self,
        setup: Callable[..., Any],
        *,
        batch_size: int | None = None,
        facts: Mapping[str, str | int | float | bool] | None = None,
        name: str | None = None,
        gate: bool = True,
    ) -> Result:
        """Launch ranks, time the step that `setup(ctx)` returns, and compare it with the baseline.

        `batch_size` is examples per rank and step. `facts` are recorded, and must match the
        baseline's, as `batch_size` must. `gate=False` measures only. A second call in one test
        needs a `name`. Raises GateFailed, an ordinary test failure, when the verdict fails the
        test.
        """
        __tracebackhide__ = True
        label = self._label({"setup": setup}, batch_size, name)
        plan = replace(self._plan(), facts=running.check_facts(facts))
        return self._gated(plan, setup, label=label, batch_size=batch_size, gate=gate)

    def loop(
        self,
        main: Callable[..., Any],
        *,
        batch_size: int | None = None,
        name: str | None = None,
        gate: bool = True,
        boundary: str = UPDATE,
    ) -> Result:
        """Launch ranks that call `main(ctx)`, a function that trains in a loop of its own, and time
        its steps.

        It forms the process group, as under torchrun. A step ends with an optimizer's update; with
        `boundary="mark"` where `main` calls `pytest_ddpperf.step_end()`, and with
        `boundary="module:function"` where that function returns. What follows the last timed step
        does not run. The rest is as for a step.
        """
        __tracebackhide__ = True
        label = self._label({"main": main}, batch_size, name)
        plan = self._of_program(boundary, payload.name_of(main))
        return self._gated(plan, main, label=label, batch_size=batch_size, gate=gate)

    def script(
        self,
        *program: str,
        args: Sequence[str] = (),
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        batch_size: int | None = None,
        name: str | None = None,
        gate: bool = True,
        boundary: str = UPDATE,
    ) -> Result:
        """Launch ranks that run a Python program as torchrun does, and time its steps.

        `program` is a path, or "-m" and the name of a module; `args` are its arguments, and `env`
        are further variables. `cwd` is where it runs, and where relative paths begin: by default
        pytest's rootdir. The rest is as for `loop`.
        """
        __tracebackhide__ = True
        label = self._label({}, batch_size, name)
        called = running.read_program(
            self._name, program, self._run.config.rootpath, args, cwd, env
        )
        if not called.is_module and self._run.is_kept(called.path):
            problem = (
                "is in a folder of tests, which both sides have from the working tree: move "
                "it"
            )
            raise plain_failure(f"{self._name}.script: {called.path} {problem}")
        # which may be secret
        variables = (
            f"{name}={digest(value)}" for name, value in sorted(called.env.items())
        )
        plan = self._of_program(boundary, " ".join((*variables, str(called))))
        return self._gated(plan, called, label=label, batch_size=batch_size, gate=gate)

    def _of_program(self, boundary: str, program: str) -> Plan:
        """Return the plan of a program that owns its loop."""
        __tracebackhide__ = True
        if boundary not in (UPDATE, MARK) and not re.fullmatch(
            r"[\w.]+:[\w.]+", str(boundary)
        ):
            raise ValueError(
                f'boundary={short_repr(boundary)}: must be "{UPDATE}", "{MARK}" or'
                ' "module:function"'
            )
        plan = replace(
            self._plan(), boundary=boundary, program=running.without_temporary(program)
        )
        if plan.nodes > 1:
            raise plain_failure(
                "programs that own their loop are not supported over several nodes"
            )
        return plan


class CollectiveBenchmark(BenchmarkFixture):
    """The `collective_benchmark` fixture."""

    _name = "collective_benchmark"

    def __call__(
        self,
        op: str,
        sizes: Iterable[int | str],
        *,
        dtype: Any = "float32",
        name: str | None = None,
        gate: bool = True,
    ) -> tuple[CollectiveResult, ...]:
        """Time one collective over buffers of several sizes, and compare each with its baseline.

        `op` is all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce or send_recv
        (every rank sends to the next). `sizes` are bytes of the largest buffer of a rank, as
        nccl-tests counts and writes them (1024, "8K", "1MiB"), rounded down to what divides into
        elements and blocks. `dtype` is torch's, or its name. A result that is wrong fails the test.
        Sizes share the error rate of one gate; all are measured before GateFailed is raised for
        those that failed.
        """
        __tracebackhide__ = True
        if not isinstance(sizes, Iterable) or isinstance(sizes, str):
            raise ValueError(
                f'sizes={short_repr(sizes)}: give a list: [1024, "8K", "1MiB"]'
            )
        try:
            given = tuple(map(in_bytes, sizes))
            asked = [
                collective(
                    op, size, str(dtype).removeprefix("torch."), self._world_size
                )
                for size in given
            ]
        except ValueError as error:
            raise ValueError(text.shortened(str(error))) from None
        if not asked:
            raise ValueError(f"{self._name}({op!r}): no size was given")
        plan = self._plan()
        level = self._level(gate) / len(asked)
        # All labels first: after a red size a rerun measures no other one either.
        labels = []
        # no comprehension: before Python 3.12 it has a frame, which --pdb would show
        for size in given:
            suffix = in_words(size).lower()
            labels.append(self._label({}, None, f"{name}-{suffix}" if name else suffix))
        results: list[CollectiveResult] = []
        failures: list[GateFailed] = []
        for label, of_size in zip(labels, asked, strict=True):
            try:
                result = self._gated(
                    replace(plan, collective=of_size),
                    None,
                    label=label,
                    gate=gate,
                    level=level,
                )
                results.append(cast(CollectiveResult, result))
            except GateFailed as failed:
                failures.append(failed)
            except pytest.fail.Exception as failed:
                # a launch failed: report what was found before, too
                raise plain_failure(
                    "\n\n".join(map(str, (*failures, failed)))
                ) from None
        if failures:
            first, every = failures[0], "\n\n".join(str(failed) for failed in failures)
            more = f" (and {len(failures) - 1} more sizes)" if len(failures) > 1 else ""
            raise GateFailed(every, first.result, first.headline + more)
        return tuple(results)


class RpcBenchmark(BenchmarkFixture):
    """The `rpc_benchmark` fixture."""

    _name = "rpc_benchmark"

    def __call__(
        self,
        trainer: Callable[..., Any],
        *,
        master: Callable[..., Any] | None = None,
        parameter_server: Callable[..., Any] | None = None,
        trainers: int | None = None,
        parameter_servers: int | None = None,
        batch_size: int | None = None,
        name: str | None = None,
        gate: bool = True,
    ) -> Result:
        """Launch trainers, parameter servers and, if it has a set-up, a master; time the trainers'
        step and compare it with the baseline.

        Each process runs the set-up of its role, parameter servers first, then `master(ctx)`, whose
        result reaches every `trainer(ctx, shared)` by RPC (`trainer(ctx)` without a master). The
        trainer's returns the step to time. Each may be a generator, as ddp_benchmark's. `trainers`
        and `parameter_servers` are how many there are, instead of what marker and options say; the
        rest as ddp_benchmark has it.
        """
        __tracebackhide__ = True
        setups = {
            "trainer": trainer,
            "master": master,
            "parameter_server": parameter_server,
        }
        given = {
            role: setup
            for role, setup in setups.items()
            if setup is not None or role == "trainer"
        }
        label = self._label(given, batch_size, name)
        running.check_number("trainers", trainers)
        running.check_number("parameter_servers", parameter_servers)
        settings = self._settings
        # as a marker would: what the machine lacks then skips the test
        if trainers is not None:
            settings = replace(
                settings,
                trainers=trainers,
                sources={**settings.sources, "trainers": MARKER},
            )
        counts = settings.trainers, parameter_servers or settings.parameter_servers
        place = self._find_place(settings, *counts)
        plan = self._plan_at(
            place, counts[0], parameter_servers=counts[1], master=master is not None
        )
        return self._gated(
            plan, *setups.values(), label=label, batch_size=batch_size, gate=gate
        )
