"""The public fixtures: each returns a Result, or raises an ordinary test failure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from pytest_ddpperf.measuring.measurement import CollectiveResult, Measured, Result
from pytest_ddpperf.options import MARKER
from pytest_ddpperf.plugin.gate import (
    BenchmarkFixture,
    DistributedFixture,
    GateFailed,
    check_name,
    check_number,
    plain_failure,
)
from pytest_ddpperf.records.asked import Collective, collective, in_words
from pytest_ddpperf.records.errors import DdpPerfError, LaunchError
from pytest_ddpperf.wire import payload
from pytest_ddpperf.wire.payload import StaysInPytest


class DdpRun(DistributedFixture):
    """The `ddp_run` fixture."""

    def __init__(self, request: pytest.FixtureRequest, world_size: int) -> None:
        super().__init__(request)
        self._world_size = world_size

    def __reduce__(self) -> tuple[Any, ...]:
        return StaysInPytest, ("ddp_run",)

    def __call__(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn(ctx, *args)` on every rank of a fresh process group.

        Returns the results by rank, tensors on the CPU. A rank that raises, dies, hangs or returns nothing fails
        the test with its own traceback.
        """
        __tracebackhide__ = True
        if not payload.accepts(fn, 1 + len(args)):
            given = f"ctx and {len(args)} more" if args else "ctx"
            raise TypeError(f"ddp_run: {payload.name_of(fn)} is called with {given}, which it does not take")
        plan = self._plan(self._world_size)
        watcher = self._watcher(plan)
        try:
            return self._run.session.call(self._item.nodeid, plan, fn, args, watcher)
        except LaunchError as error:
            self._show(plan, (error.output,))
            raise plain_failure(str(error)) from None
        except DdpPerfError as error:
            raise plain_failure(str(error)) from None
        finally:
            watcher.erase()


class _WorldFixture(BenchmarkFixture):
    """Base of the fixtures that measure a process group of the test's world size."""

    def __init__(
        self, request: pytest.FixtureRequest, world_size: int, replay: Callable[[Measured], None] | None
    ) -> None:
        super().__init__(request, replay)
        self._world_size = world_size

    def _notes(self) -> tuple[str, ...]:
        ignored = (
            self._settings.sources.get("world_sizes") == MARKER
            and self._run.settings.sources.get("world_sizes") in ("command line", "ini")
            and self._run.config.getoption("verbose", 0) > 0
        )
        asked = ",".join(map(str, self._run.settings.world_sizes))
        return (f"the marker's world_size={self._world_size} is used, not {asked}",) if ignored else ()


class DdpBenchmark(_WorldFixture):
    """The `ddp_benchmark` fixture."""

    _name = "ddp_benchmark"

    def __call__(
        self,
        setup: Callable[..., Any],
        *,
        batch_size: int | None = None,
        name: str | None = None,
        gate: bool = True,
    ) -> Result:
        """Launch ranks, time the step that `setup(ctx)` returns, and compare it with the baseline.

        `batch_size` is examples per rank and step. `gate=False` measures only. A second call in one test needs a
        `name`. Raises GateFailed, an ordinary test failure, when the verdict fails the test.
        """
        __tracebackhide__ = True
        label = self._label({"setup": setup}, batch_size, name)
        plan = self._plan(self._world_size)
        return self._gated(plan, setup, label=label, batch_size=batch_size, gate=gate)


class CollectiveBenchmark(_WorldFixture):
    """The `collective_benchmark` fixture."""

    _name = "collective_benchmark"

    def __call__(
        self,
        op: str,
        sizes: Iterable[int],
        *,
        dtype: Any = "float32",
        name: str | None = None,
        gate: bool = True,
    ) -> tuple[CollectiveResult, ...]:
        """Time one collective over buffers of several sizes, and compare each with its baseline.

        `op` is all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce or send_recv (every rank sends to
        the next). `sizes` are bytes of the largest buffer of a rank, as nccl-tests counts them, rounded down to what
        divides into elements and blocks. `dtype` is torch's, or its name. A result that is wrong fails the test. Sizes
        share the error rate of one gate; all are measured before GateFailed is raised for those that failed.
        """
        __tracebackhide__ = True
        if not isinstance(sizes, Iterable):
            raise TypeError(f"{self._name}({op!r}, {sizes!r}): sizes are several, as in ({sizes!r},)")
        asked = self._asked(op, tuple(sizes), dtype)
        check_name(name)
        plan = self._plan(self._world_size)
        level = self._level(gate) / len(asked)
        labels = {words: "-".join(filter(None, (name, words.lower()))) for words in asked}
        self._check_labels(labels)
        results: list[CollectiveResult] = []
        failures: list[GateFailed] = []
        for words, one in asked.items():
            try:
                label = self._label({}, None, labels[words])
                of_size = replace(plan, collective=one)
                result = self._gated(of_size, None, label=label, gate=gate, level=level)
                results.append(cast(CollectiveResult, result))
            except GateFailed as failed:
                failures.append(failed)
            except pytest.fail.Exception as failed:  # a launch failed: report what was found before, too
                raise plain_failure("\n\n".join(map(str, (*failures, failed)))) from None
        if failures:
            raise GateFailed("\n\n".join(str(failed) for failed in failures), failures[0].result)
        return tuple(results)

    def _check_labels(self, labels: Mapping[str, str]) -> None:
        __tracebackhide__ = True
        for words, label in labels.items():
            if label in self._state.labels:
                raise ValueError(
                    f"{self._name}: a collective over {words} was measured before in this test"
                    f"{' by that name' if label != words.lower() else ''}: give each further call a name of its own"
                )
        for label in labels.values():
            if label in self._state.failed_gates:  # in a rerun: the others are not asked for again either
                self._label({}, None, label)

    def _asked(self, op: Any, sizes: tuple[Any, ...], dtype: Any) -> dict[str, Collective]:
        """Return the collectives by size in words; raises TypeError or ValueError."""
        __tracebackhide__ = True
        if not sizes:
            raise ValueError(f"{self._name}({op!r}): no size was given")
        asked = {}
        for size in sizes:
            whole = hasattr(type(size), "__index__") and not isinstance(size, bool)
            if not whole or size < 1:
                raise ValueError(f"{self._name}: a size of {size!r}: bytes, a whole number from 1")
            size = operator.index(size)
            if in_words(size) in asked:
                raise ValueError(f"{self._name}: {in_words(size)} is among the sizes twice")
            try:
                named = str(dtype).removeprefix("torch.")
                asked[in_words(size)] = collective(str(op).replace("-", "_"), size, named, self._world_size)
            except ValueError as error:
                raise ValueError(f"{self._name}: {error}") from None
        return asked


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
        """Launch trainers, parameter servers and, if it has a set-up, a master; time the trainers' step and compare it
        with the baseline.

        Each process runs the set-up of its role, parameter servers first, then `master(ctx)`, whose result reaches
        every `trainer(ctx, shared)` by RPC (`trainer(ctx)` without a master). The trainer's returns the step to
        time. Each may be a generator, as ddp_benchmark's. `trainers` and `parameter_servers` are how many there are,
        instead of what marker and options say; the rest as ddp_benchmark has it.
        """
        __tracebackhide__ = True
        setups = {"trainer": trainer, "master": master, "parameter_server": parameter_server}
        given = {role: setup for role, setup in setups.items() if setup is not None or role == "trainer"}
        label = self._label(given, batch_size, name)
        check_number("trainers", trainers)
        check_number("parameter_servers", parameter_servers)
        settings = self._settings
        if trainers is not None:  # as a marker would: what the machine lacks then skips the test
            sources = {**settings.sources, "trainers": MARKER}
            settings = replace(settings, trainers=trainers, sources=sources)
        counts = settings.trainers, parameter_servers or settings.parameter_servers
        place = self._placed(self._run.session.place_rpc, settings, *counts)
        plan = self._plan_at(place, counts[0], parameter_servers=counts[1], master=master is not None)
        return self._gated(plan, trainer, master, parameter_server, label=label, batch_size=batch_size, gate=gate)
