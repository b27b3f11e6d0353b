"""Steps that hand their work to a thread, as a training loop does that is paused in a callback."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from tests.launch.conftest import Bench

# far more than from the end of a step to the first collective after it
LATE_SECONDS = 0.2
BUSY_NS = 20_000_000


def in_a_thread(
    work: Callable[[], None], after: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Return a step whose `work` a thread does, which goes on with `after` once it has handed the
    step over."""
    go, done = threading.Semaphore(0), threading.Semaphore(0)

    def loop() -> None:
        while go.acquire():
            work()
            done.release()
            after()

    threading.Thread(target=loop, daemon=True).start()

    def step() -> None:
        go.release()
        done.acquire()

    return step


@pytest.mark.parametrize("servers", [0, 1], ids=["ranks", "trainers"])
def test_a_thread_may_use_the_default_group_when_the_step_is_over(
    bench: Bench, servers: int
) -> None:
    """On one rank late, so that on the default group a collective of the plugin's would come before
    it there only."""

    def setup(ctx: Any) -> Any:
        total = torch.zeros(1)

        def work() -> None:
            dist.all_reduce(total.fill_(1))
            assert total.item() == ctx.world_size

        def log() -> None:
            time.sleep(LATE_SECONDS * ctx.rank)
            dist.all_reduce(torch.ones(3))

        return in_a_thread(work, log)

    plan = replace(
        bench.plan(warmup=3), parameter_servers=servers, timeout_seconds=30.0
    )
    samples = bench.launch(plan, setup, *[None] * (2 * servers))
    assert len(samples.step_seconds) == 3
    # the dispatcher sees those of the main thread only
    assert samples.counters["all_reduce.count"] is None


def openmp_threads() -> int:
    """Return how many threads an operation of this thread would use. torch.get_num_threads() would
    set the number."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    (library,) = {
        line.split()[-1]
        for line in mappings
        if "libgomp" in line or "libiomp" in line
    }
    return int(ctypes.CDLL(library).omp_get_max_threads())


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core has no smaller share"
)
def test_a_thread_has_as_many_threads_for_its_operations_as_its_rank(
    bench: Bench,
) -> None:
    def function(ctx: Any) -> list[int]:
        with ThreadPoolExecutor() as pool:
            first = pool.submit(openmp_threads).result()
        torch.set_num_threads(3)
        with ThreadPoolExecutor() as pool:
            return [first, pool.submit(openmp_threads).result()]

    assert (
        bench.call(function)
        == [[max(1, len(os.sched_getaffinity(0)) // 2), 3]] * 2
    )


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core has no smaller share"
)
def test_a_thread_that_answers_a_call_has_as_many_threads_for_its_operations_too(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        return lambda: ctx.record(
            "threads",
            float(rpc.rpc_sync("ps0", openmp_threads)),
            better=None,
        )

    plan = replace(
        bench.plan(ranks=1), parameter_servers=1, timeout_seconds=60.0
    )
    samples = bench.launch(plan, setup, None, None)
    assert set(samples.recorded["threads"][0]) == {
        max(1, len(os.sched_getaffinity(0)) // 2)
    }


def test_cpu_time_is_that_of_all_python_threads(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        taken: list[int] = []

        def work() -> None:
            began = time.thread_time_ns()
            while time.thread_time_ns() < began + BUSY_NS:
                pass
            taken.append(time.thread_time_ns() - began)

        step = in_a_thread(work)

        def timed() -> None:
            step()
            ctx.record("cpu", taken[-1] / 1e9, better=None)

        return timed

    samples = bench.measure(setup)
    assert samples.cpu_seconds is not None
    for measured, taken in zip(
        samples.cpu_seconds, samples.recorded["cpu"], strict=True
    ):
        assert all(
            cpu >= own
            for cpu, own in zip(measured, taken, strict=True)
            if own is not None
        )


def test_threads_that_end_in_the_window_keep_the_cpu_time_that_they_had(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        left = [in_a_thread(lambda: None, after=sys.exit) for _ in range(4)]

        def step() -> None:
            others = threading.active_count()
            left.pop()()
            while threading.active_count() == others:
                time.sleep(0.001)

        return step

    samples = bench.measure(setup)
    assert samples.cpu_seconds is not None
    assert all(seconds > 0 for rank in samples.cpu_seconds for seconds in rank)
