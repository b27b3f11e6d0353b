"""The public fixtures: from a test's call to its Result, or to an ordinary test failure without a
traceback of ours.

What may raise between a test and its failure hides its frame, so that --pdb opens in the test's.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from pytest_ddpperf import text
from pytest_ddpperf.baseline.content import file_name, module_folder
from pytest_ddpperf.compare.job import Job
from pytest_ddpperf.compare.result import CollectiveResult, Measured, Result
from pytest_ddpperf.compare.rounds import baseline_launches
from pytest_ddpperf.launch.template import read_at_import
from pytest_ddpperf.options.definitions import MARKER
from pytest_ddpperf.options.settings import Settings, make_plan, with_markers
from pytest_ddpperf.plugin import arguments
from pytest_ddpperf.plugin.arguments import Reference
from pytest_ddpperf.plugin.item_settings import own_settings, plain_failure
from pytest_ddpperf.plugin.items import (
    accept_command,
    module_of,
    moved_rootdir,
    name_of,
    nodeid_of,
    with_place,
)
from pytest_ddpperf.plugin.outcomes import (
    GateFailure,
    TestMeasurement,
    build_failure,
    build_outcome,
)
from pytest_ddpperf.plugin.place import check_limits
from pytest_ddpperf.plugin.role import Call
from pytest_ddpperf.plugin.running import state_of
from pytest_ddpperf.plugin.snapshot import own_options
from pytest_ddpperf.plugin.state import RUN, Run
from pytest_ddpperf.plugin.watch import Watcher
from pytest_ddpperf.records.errors import (
    DdpPerfError,
    LaunchError,
    MarkerError,
    OptionError,
    Unavailable,
    short_repr,
)
from pytest_ddpperf.records.figure import NamedFigures
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.plan import (
    UPDATE,
    Collective,
    Function,
    Plan,
    Setup,
    Variables,
    collective,
    in_bytes,
    in_words,
)
from pytest_ddpperf.records.reason import Reason
from pytest_ddpperf.records.samples import FoundFacts, Outputs, TestId
from pytest_ddpperf.report import sentences, summary
from pytest_ddpperf.wire import payload

if TYPE_CHECKING:
    from _pytest.outcomes import Failed

    from pytest_ddpperf.plugin.replay import StoreSamples
else:
    # the same class by its public name, which type checkers cannot follow
    Failed = pytest.fail.Exception


class GateFailed(Failed):
    """A failed gate: an ordinary test failure that carries the Result."""

    #: of the measurement; of several sizes of a collective, of the first that failed
    result: Result
    headline: str  #: one line, for pytest's short summary and JUnit

    def __init__(self, text: str, result: Result, headline: str) -> None:
        super().__init__(text, pytrace=False)
        self.result, self.headline = result, headline


class DistributedFixture:
    """Base of all fixtures: the test, its settings, its place."""

    _name: str  # of the fixture
    _least_ranks = 1

    def __init__(
        self,
        request: pytest.FixtureRequest,
        world_size: int,
        replay: "StoreSamples | None" = None,
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
        if type(world_size) is not int or world_size < self._least_ranks:
            raise plain_failure(
                f"ddp_world_size is {short_repr(world_size)}: must be a number of ranks"
            )
        self._run: Run = request.config.stash[RUN]
        self._state = state_of(self._item)
        self._settings: Settings = own_settings(self._item)
        self._world_size, self._replay = world_size, replay

    def __reduce__(self) -> tuple[Any, ...]:
        return payload.make_refusal, (self._name,)

    def _plan(self, settings: Settings, *counts: int, **roles: Any) -> Plan:
        """Return the plan of the test for so many ranks, or trainers and parameter servers; `roles`
        are further fields of it. Turns the errors of `Places.find` into pytest's."""
        __tracebackhide__ = True
        try:
            if roles.get("command"):
                place = self._run.places.find_for_command(settings)
            else:
                place = self._run.places.find(settings, *counts)
        except Unavailable as error:
            pytest.skip(str(error))
        except DdpPerfError as error:
            problem = str(error)
            if isinstance(error, MarkerError):
                problem = with_place(self._item, error)
            elif isinstance(error, OptionError):
                # Without xdist it was found after collection; a worker can only fail the test and
                # tell the controller.
                self._state.usage_error = problem
                problem = f"usage error: {problem}"
            raise plain_failure(problem) from None
        return make_plan(
            settings,
            world_size=counts[0],
            nodes=place.nodes,
            backend=place.backend,
            device=place.device,
            sees_one_device=place.sees_one_device,
            **roles,
        )

    def _show(
        self,
        plan: Plan,
        launches: tuple[Outputs, ...],
        most: int = text.MOST_LINES,
    ) -> None:
        """Add the end of the ranks' output to the report, at -v all; under -s this node's was
        streamed already."""
        asked = self._run.config.getoption
        # a worker of xdist has no terminal
        streamed = asked("capture", "no") == "no" and not self._run.worker
        for outputs in zip(*launches, strict=True):
            if streamed and plan.node_of(outputs[0].rank) == 0:
                continue
            for stream in ("stdout", "stderr"):
                texts = [getattr(output, stream) for output in outputs]
                if not any(texts):
                    continue
                # what launches wrote alike once
                shown = "\n".join(dict.fromkeys(texts))
                if asked("verbose", 0) <= 0:
                    shown = text.last_lines(texts, most)
                self._item.add_report_section(
                    "call", f"{stream} {outputs[0].name}", shown
                )

    def _show_failure(self, plan: Plan, error: DdpPerfError) -> None:
        if isinstance(error, LaunchError):
            self._show(plan, (error.output,), text.MOST_LINES_OF_FAILURE)


class DdpRun(DistributedFixture):
    """The `ddp_run` fixture."""

    _name = "ddp_run"

    def __call__(self, fn: Function, *args: Any) -> list[Any]:
        """Call `fn(ctx, *args)` on every rank of a fresh process group.

        Returns the results by rank, tensors on the CPU. A rank that raises, dies, hangs or delivers
        no result fails the test with its own traceback.
        """
        __tracebackhide__ = True
        given = f"ctx and {len(args)} more" if args else "ctx"
        arguments.check_setup(self._name, "fn", fn, given, 1 + len(args))
        plan, run = self._plan(self._settings, self._world_size), self._run
        watcher = Watcher(run.config, warmup=plan.warmup)
        try:
            return run.role.call(
                Call(nodeid_of(self._item), plan, fn, args),
                run.session.launcher,
                watcher,
            )
        except Failed as error:
            # of a plugin's time limit: where we waited says nothing
            raise error.with_traceback(None)
        except DdpPerfError as error:
            self._show_failure(plan, error)
            raise plain_failure(str(error)) from None
        finally:
            watcher.erase()
            self._show(plan, (watcher.written,))


class BenchmarkFixture(DistributedFixture):
    """Base of the fixtures that measure: from a plan and set-up functions to a verdict."""

    def _begin_measurement(
        self, setups: Mapping[str, Any], batch_size: Any, name: Any, gate: Any
    ) -> str:
        """Check the arguments of a call, and register the measurement by its label, which is
        returned. Raises GateFailed in a rerun of a gate that failed."""
        __tracebackhide__ = True
        arguments.check_setups(self._name, setups)
        arguments.check_number(
            "batch_size", batch_size, "examples per rank and step, "
        )
        arguments.check_name(name)
        if not isinstance(gate, bool):
            raise ValueError(f"gate={short_repr(gate)}: must be True or False")
        label, taken = "", "it was called before without a name"
        if name is not None:
            label, taken = name, f"name={name!r} is taken"
        test = self._state
        if label in test.labels:
            raise ValueError(
                f"{self._name}: {taken} in this test: give each further measurement a name of"
                " its own"
            )
        test.labels.add(label)
        failed = test.failed_gates.get(label)
        if failed is not None:
            why = "A rerun does not measure again: noise must not turn red into green."
            raise GateFailed(
                f"{failed.text}\n\n{why}", failed.result, failed.headline
            )
        return label

    def _gated(
        self,
        plan: Plan,
        *setups: Setup,
        label: str,
        batch_size: int | None = None,
        gate: bool,
        level: float | None = None,
        reference: Reference | None = None,
    ) -> Result:
        """Measure, judge and report; raises GateFailed. `level`: the error rate, if several
        measurements share one."""
        __tracebackhide__ = True
        if level is None:
            level = self._state.count_gate(gate)
        line = self._item.reportinfo()[1]  # from 0
        module = module_of(self._run.config, self._item)
        job = Job(
            test=TestId(module=module, name=name_of(self._item), label=label),
            nodeid=nodeid_of(self._item),
            file=self._run.session.shown(Path(self._item.path)),
            line=0 if line is None else line + 1,
            setups=setups,
            settings=self._settings,
            plan=plan,
            level=level,
            batch_size=batch_size,
            gate=gate,
            facts=self._facts(),
            trace="" if plan.command else self._trace(label),
            notes=self._notes(),
        )
        if reference is not None:
            job = self._with_reference(job, reference)
        watcher = Watcher(self._run.config, warmup=plan.warmup)
        try:
            measured = self._run.role.carry_out(job, self._run.session, watcher)
        except KeyboardInterrupt:
            if not self._run.worker:
                self._run.report.messages.append(
                    f"{job.nodeid}: interrupted: {watcher.line()}"
                )
            raise
        except Failed as error:  # as in `DdpRun`
            raise error.with_traceback(None)
        except DdpPerfError as error:
            raise self._launch_failed(job, error, watcher) from None
        finally:
            watcher.erase()
        self._show(plan, measured.output)
        # of another version it is not here
        there = baseline_launches(measured.rounds)
        self._show(plan, tuple(launch.output for launch in there))
        return self._judged(measured, watcher)

    def _with_reference(self, job: Job, reference: Reference) -> Job:
        """Return a job that is compared with its reference in the same run."""
        if job.plan.nodes > 1:
            raise plain_failure(
                "reference= is not supported over several nodes: give the test"
                " @pytest.mark.ddp(nodes=1)"
            )
        notes = [*job.notes]
        if reference.setup == job.setups[0]:
            notes.append(
                "it is compared with itself, because reference= is the same. A list gives a"
                ' program other arguments: reference=["train.py", "--old"]'
            )
        if reference.settings.records:
            notes.append(
                "nothing was saved: a test with a reference has no baseline"
            )
        job = replace(job, settings=reference.settings, notes=tuple(notes))
        now, before = map(self._name_of, (*job.setups, reference.setup))
        other = replace(
            job,
            setups=(reference.setup,),
            plan=replace(job.plan, is_reference=True),
            facts={**job.facts, "runs": before},
        )
        return replace(job, facts={**job.facts, "runs": now}, reference=other)

    def _launch_failed(
        self, job: Job, error: DdpPerfError, watcher: Watcher
    ) -> "Failed":
        """Keep the outcome of a measurement that failed, and return the test's failure."""
        self._show_failure(job.plan, error)
        problem = str(error)
        if isinstance(error, LaunchError):
            problem = (
                f"launch {watcher.launch} of {watcher.launches}: {problem}"
            )
        outcome = build_failure(job, problem.splitlines()[0], watcher.took)
        self._state.measurements.append(TestMeasurement(outcome))
        return plain_failure(problem)

    def _judged(self, measured: Measured, watcher: Watcher) -> Result:
        """Keep the outcome of a measurement, and return its result; raises GateFailed."""
        __tracebackhide__ = True
        result = measured.result
        outcome = build_outcome(
            measured,
            self._run.config.rootpath,
            accept_command(self._item, self._settings),
            watcher.took,
        )
        is_saved = measured.verdict.reason == Reason.SAVING
        self._state.measurements.append(
            TestMeasurement(outcome, measured if is_saved else None)
        )
        self._add_properties(outcome)
        if outcome.fails:
            failed = GateFailure(
                sentences.gate_failure(outcome, text.terminal_width()),
                result,
                sentences.headline(outcome),
            )
            self._state.failed_gates[outcome.test.label] = failed
            raise GateFailed(*failed)
        if self._replay is not None and not self._run.role.works_for_leader:
            self._replay(measured)
        return result

    def _add_properties(self, outcome: Outcome) -> None:
        """Add what JUnit shows, in place of those of an attempt that was rerun."""
        prefix = summary.junit_prefix(outcome.test.label)
        properties = self._item.user_properties
        kept = [
            each for each in properties if each[0].rpartition(".")[0] != prefix
        ]
        properties[:] = [*kept, *summary.junit_properties(outcome)]

    def _name_of(self, program: Setup) -> str:
        run = self._run
        return arguments.name_of(program, run.config.rootpath, run.role.trees)

    def _trace(self, label: str) -> str:
        """Return the beginning of the paths of this side's traces; "" for none."""
        folder = self._settings.trace_dir
        if folder is None:
            return ""
        module, _, name = nodeid_of(self._item).partition("::")
        file = Path(file_name(TestId(module=module, name=name, label=label)))
        side = "before" if self._run.role.works_for_leader else "now"
        return str(folder / module_folder(module) / file.stem / side)

    def _notes(self) -> tuple[str, ...]:
        """Return what moved pytest's rootdir and, for -v, that the marker's world size is used and
        not the one that was asked for."""
        notes: list[str] = []
        if moved := moved_rootdir(self._run.config):
            notes.append(moved)
        of_run = self._run.settings
        if (
            # a conftest's own marker comes too late if there were several
            self._world_size in self._settings.world_sizes
            and self._settings.sources["world_sizes"] == MARKER
            and of_run.sources["world_sizes"] != "default"
            and self._run.config.getoption("verbose", 0) > 0
        ):
            asked = ",".join(map(str, of_run.world_sizes))
            notes.append(
                f"the marker's world_size={self._world_size} is used, not {asked}"
            )
        return tuple(notes)

    def _facts(self) -> FoundFacts:
        facts: FoundFacts = {**own_options(self._run.config)}
        workers = getattr(self._run.config, "workerinput", {}).get(
            "workercount", 0
        )
        if workers:
            facts["xdist_workers"] = workers
        return facts


class DdpBenchmark(BenchmarkFixture):
    """The `ddp_benchmark` fixture."""

    _name = "ddp_benchmark"

    def __call__(
        self,
        setup: Function,
        *,
        batch_size: int | None = None,
        facts: Mapping[str, str | int | float | bool] | None = None,
        name: str | None = None,
        gate: bool = True,
        reference: Function | None = None,
        threshold: str | None = None,
    ) -> Result:
        """Launch ranks, time the step that `setup(ctx)` returns, and compare it with the baseline.

        `batch_size` is examples per rank and step. `facts` are recorded, and must match the
        baseline's, as `batch_size` must. `gate=False` measures only. A second call in one test
        needs a `name`. With `reference`, a second set-up, the step is compared with that one's
        instead: both are interleaved in this run, and there is no baseline. `threshold` says how
        much slower it may be ("p50:2%"), in place of the marker. Raises GateFailed, an ordinary
        test failure, when the verdict fails the test.
        """
        __tracebackhide__ = True
        setups = {"setup": setup, "reference": reference}
        label = self._begin_measurement(setups, batch_size, name, gate)
        given = arguments.check_facts(facts)
        compared = self._reference(reference, threshold)
        plan = self._plan(self._settings, self._world_size, facts=given)
        return self._gated(
            plan,
            setup,
            label=label,
            batch_size=batch_size,
            gate=gate,
            reference=compared,
        )

    def loop(
        self,
        main: Function,
        *,
        batch_size: int | None = None,
        name: str | None = None,
        gate: bool = True,
        boundary: str = UPDATE,
        figures: NamedFigures | None = None,
        reference: Function | None = None,
        threshold: str | None = None,
    ) -> Result:
        """Launch ranks that call `main(ctx)`, a function that trains in a loop of its own, and time
        its steps.

        It forms the process group, as under torchrun. A step ends with an optimizer's update; with
        `boundary="mark"` where `main` calls `pytest_ddpperf.step_end()`, and with
        `boundary="module:function"` where that function returns. What follows the last timed step
        does not run. `figures` are what it writes in its timed steps, by name: they are judged,
        too. The rest is as for a step.
        """
        __tracebackhide__ = True
        setups = {"main": main, "reference": reference}
        label = self._begin_measurement(setups, batch_size, name, gate)
        given = arguments.check_figures(f"{self._name}.loop", figures)
        compared = self._reference(reference, threshold)
        plan = self._plan_of_program(boundary, main, compared, given)
        return self._gated(
            plan,
            main,
            label=label,
            batch_size=batch_size,
            gate=gate,
            reference=compared,
        )

    def script(
        self,
        *program: str,
        args: Sequence[str] = (),
        cwd: str | Path | None = None,
        env: Variables | None = None,
        batch_size: int | None = None,
        name: str | None = None,
        gate: bool = True,
        boundary: str = UPDATE,
        figures: NamedFigures | None = None,
        reference: str | Path | Sequence[str] | None = None,
        threshold: str | None = None,
    ) -> Result:
        """Launch ranks that run a Python program as torchrun does, and time its steps.

        `program` is a path, or "-m" and the name of a module; `args` are its arguments, and `env`
        are further variables. `cwd` is where it runs, and where relative paths begin: by default
        pytest's rootdir. `reference` is the path of another program, which gets the same arguments,
        or a list of all its words: `["train.py", "--eager"]`. The rest is as for `loop`.
        """
        __tracebackhide__ = True
        label = self._begin_measurement({}, batch_size, name, gate)
        asked = self._run.config.rootpath, args, cwd, env
        called = arguments.read_program(self._name, program, *asked)
        other = arguments.read_reference(self._name, reference, *asked)
        if other is None and not called.is_module:
            self._refuse_tests(f"{self._name}.script", called.path)
        given = arguments.check_figures(f"{self._name}.script", figures)
        compared = self._reference(other, threshold)
        with pytest.MonkeyPatch.context() as patch:
            # libraries read these when they are imported, which is before the program begins
            for variable, value in read_at_import(called.env).items():
                patch.setenv(variable, value)
            plan = self._plan_of_program(boundary, called, compared, given)
            return self._gated(
                plan,
                called,
                label=label,
                batch_size=batch_size,
                gate=gate,
                reference=compared,
            )

    def command(
        self,
        words: Sequence[str | Path],
        *,
        cwd: str | Path | None = None,
        env: Variables | None = None,
        name: str | None = None,
        gate: bool = True,
        figures: NamedFigures | None = None,
    ) -> Result:
        """Run a command that starts its ranks itself, and judge its wall time and its figures.

        `words` are the command and its arguments, `["torchrun", "--nproc-per-node=2", "train.py"]`.
        A launch is one run of it. `figures` are what it writes, by name. The times of the result
        are wall times of launches, in seconds: its ranks and steps are not seen. The rest is as for
        `script`.
        """
        __tracebackhide__ = True
        call, root = f"{self._name}.command", self._run.config.rootpath
        label = self._begin_measurement({}, None, name, gate)
        command = arguments.read_command(call, words, root, cwd, env)
        given = arguments.check_figures(call, figures)
        for word in command.words:
            self._refuse_tests(call, os.path.join(command.cwd, word))
        settings = self._settings
        if self._world_size in settings.world_sizes[1:]:
            pytest.skip(
                f"a command starts its own ranks: measured as ws{settings.world_sizes[0]} only"
            )
        if self._run.role.nodes > 1:
            raise plain_failure(
                f"{call} is not supported over several nodes: start one pytest, and let the"
                " command start the nodes"
            )
        plan = replace(
            self._plan(
                settings,
                1,
                command=True,
                program=self._name_of(command),
                figures=given,
            ),
            warmup=0,
            steps=1,
            min_seconds=0.0,
            most_steps=1,
            timing="step",
        )
        if settings.sources["limits"] == MARKER:
            arguments.check_limits_of_command(settings.limits, plan)
        return self._gated(plan, command, label=label, gate=gate)

    def _refuse_tests(self, call: str, path: str) -> None:
        """Fail if a file that is to run would be the same on both sides of a comparison."""
        __tracebackhide__ = True
        trees = self._run.role.trees
        is_test = trees is not None and trees.keeps(os.path.realpath(path))
        if is_test and os.path.isfile(path):
            raise plain_failure(
                f"{call}: {path} is in a folder of tests, which both sides have from the working"
                " tree: move it"
            )

    def _reference(self, setup: Setup, threshold: Any) -> Reference | None:
        """Return what a call is compared with, and its limits; None if `setup` is none. Raises
        ValueError."""
        __tracebackhide__ = True
        settings = self._settings
        if setup is None:
            if threshold is not None:
                raise ValueError(
                    f"threshold={short_repr(threshold)}: goes with reference=; without one, write"
                    " @pytest.mark.ddp(threshold=...)"
                )
            return None
        if threshold is not None:
            mark = pytest.mark.ddp(threshold=threshold).mark
            try:
                settings = with_markers(settings, [mark])
                check_limits(settings)
            except MarkerError as error:
                raise ValueError(
                    f"threshold={short_repr(error.value)}: {error.allowed}"
                ) from None
        return Reference(setup, settings)

    def _plan_of_program(
        self,
        boundary: str,
        program: Setup,
        reference: Reference | None,
        figures: NamedFigures,
    ) -> Plan:
        """Return the plan of a program that owns its loop. A reference may be another one, so then
        it need not match."""
        __tracebackhide__ = True
        arguments.check_boundary(boundary)
        return self._plan(
            self._settings,
            self._world_size,
            boundary=boundary,
            program=self._name_of(program) if reference is None else "",
            figures=figures,
        )


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
        arguments.check_name(name)
        asked = self._collectives(op, sizes, str(dtype), name)
        plan = self._plan(self._settings, self._world_size)
        level = self._state.count_gate(gate) / len(asked)
        # All labels first: after a red size a rerun measures no other one either.
        for label, _ in asked:
            self._begin_measurement({}, None, label, gate)
        results: list[CollectiveResult] = []
        failures: list[GateFailed] = []
        for label, of_size in asked:
            of_one = replace(plan, collective=of_size)
            try:
                result = self._gated(
                    of_one, None, label=label, gate=gate, level=level
                )
                results.append(cast(CollectiveResult, result))
            except GateFailed as failed:
                failures.append(failed)
            except Failed as failed:
                # a launch failed: report what was found before, too
                every = map(str, (*failures, failed))
                raise plain_failure("\n\n".join(every)) from None
        if failures:
            first, *others = failures
            headline = first.headline
            if others:
                headline += f" (and {text.several(len(others), 'more size')})"
            every = map(str, failures)
            raise GateFailed("\n\n".join(every), first.result, headline)
        return tuple(results)

    def _collectives(
        self, op: str, sizes: Iterable[int | str], dtype: str, name: str | None
    ) -> list[tuple[str, Collective]]:
        """Return the collective of each size, with its label; raises ValueError."""
        __tracebackhide__ = True
        if not isinstance(sizes, Iterable) or isinstance(sizes, str | bytes):
            raise ValueError(
                f'sizes={short_repr(sizes)}: give a list: [1024, "8K", "1MiB"]'
            )
        element, ranks = dtype.removeprefix("torch."), self._world_size
        asked = []
        try:
            for size in map(in_bytes, sizes):
                suffix = in_words(size).lower()
                label = f"{name}-{suffix}" if name else suffix
                asked.append((label, collective(op, size, element, ranks)))
        except ValueError as error:
            raise ValueError(text.shortened(str(error))) from None
        if not asked:
            raise ValueError(f"{self._name}({op!r}): no size was given")
        return asked


class RpcBenchmark(BenchmarkFixture):
    """The `rpc_benchmark` fixture."""

    _name = "rpc_benchmark"
    _least_ranks = 0

    def __call__(
        self,
        trainer: Function,
        *,
        master: Function | None = None,
        parameter_server: Function | None = None,
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
        label = self._begin_measurement(setups, batch_size, name, gate)
        arguments.check_number("trainers", trainers)
        arguments.check_number("parameter_servers", parameter_servers)
        settings = self._settings
        # as a marker would: what the machine lacks then skips the test
        if trainers is not None:
            sources = {**settings.sources, "trainers": MARKER}
            settings = replace(settings, trainers=trainers, sources=sources)
        servers = parameter_servers or settings.parameter_servers
        plan = self._plan(
            settings,
            settings.trainers,
            servers,
            parameter_servers=servers,
            master=master is not None,
        )
        return self._gated(
            plan,
            *setups.values(),
            label=label,
            batch_size=batch_size,
            gate=gate,
        )
