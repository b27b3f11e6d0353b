"""The `collective_benchmark` fixture."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import pytest

from pytest_ddpperf.measuring.measurement import CollectiveResult
from pytest_ddpperf.plugin.fixtures import BenchmarkFixture, GateFailed, plain_failure
from pytest_ddpperf.records.plan import Collective, collective, in_words


class CollectiveBenchmark(BenchmarkFixture):
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
        sizes = tuple(map(operator.index, sizes))
        asked = self._collectives(op, sizes, str(dtype).removeprefix("torch."))
        if not asked:
            raise ValueError(f"{self._name}({op!r}): no size was given")
        plan = self._plan()
        level = self._level(gate) / len(asked)
        # All labels first: after a red size a rerun measures no other one either.
        labels = []
        for size in sizes:  # no comprehension: before Python 3.12 it has a frame, which --pdb would show
            labels.append(self._label({}, None, "-".join(filter(None, (name, in_words(size).lower())))))
        results: list[CollectiveResult] = []
        failures: list[GateFailed] = []
        for label, of_size in zip(labels, asked, strict=True):
            try:
                result = self._gated(replace(plan, collective=of_size), None, label=label, gate=gate, level=level)
                results.append(cast(CollectiveResult, result))
            except GateFailed as failed:
                failures.append(failed)
            except pytest.fail.Exception as failed:  # a launch failed: report what was found before, too
                raise plain_failure("\n\n".join(map(str, (*failures, failed)))) from None
        if failures:
            first, text = failures[0], "\n\n".join(str(failed) for failed in failures)
            more = f" (and {len(failures) - 1} more sizes)" if len(failures) > 1 else ""
            raise GateFailed(text, first.result, first.headline + more)
        return tuple(results)

    def _collectives(self, op: str, sizes: Iterable[int], dtype: str) -> list[Collective]:
        """Return what is measured, a collective for each size; raises ValueError without a frame of ours."""
        __tracebackhide__ = True
        try:
            return [collective(op, size, dtype, self._world_size) for size in sizes]
        except ValueError as error:
            raise ValueError(str(error)) from None
