"""A rank that raises, dies or delivers nothing: red, with that rank's own words."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pytest_ddpperf.records.errors import DdpPerfError, LaunchError
from tests.launch.conftest import Bench, arrivals, hang
from tests.processes import gone, until


def all_reduce() -> None:
    dist.all_reduce(torch.ones(1))


def failure(bench: Bench, setup: Any, **plan: Any) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        bench.measure(setup, **plan)
    return caught.value


def in_step(act: Any, *, rank: int = 1, step: int = 2) -> Any:
    """A setup whose step does something odd on one rank, in one step (the warm-up's is step 0)."""

    def setup(ctx: Any) -> Any:
        count = iter(range(100))

        def one_step() -> None:
            if next(count) == step and ctx.rank == rank:
                act()
            all_reduce()

        return one_step

    return setup


def raise_value_error() -> None:
    raise ValueError("bad shape")


def raise_in_backward() -> None:
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda _: raise_value_error())
    leaf.sum().backward()


def test_a_traceback_through_what_is_timed_has_no_frames_of_ours(
    bench: Bench,
) -> None:
    error = failure(bench, in_step(raise_in_backward))
    assert "in raise_in_backward" in error.cause.traceback
    assert "in raise_value_error" in error.cause.traceback
    assert "pytest_ddpperf/rank" not in error.cause.traceback


def raise_long() -> None:
    raise ValueError("z" * 100_000)


def test_of_a_long_error_its_beginning_and_end_are_shown(bench: Bench) -> None:
    error = failure(bench, in_step(raise_long))
    assert "in raise_long" in error.cause.traceback
    assert len(error.cause.traceback) < 11_000
    assert len(error.cause.summary) < 11_000
    assert "characters) ..." in error.cause.summary


def test_a_step_that_raises_is_shown_with_its_place_and_its_own_traceback(
    bench: Bench,
) -> None:
    error = failure(bench, in_step(raise_value_error))
    assert (error.cause.rank, error.cause.phase) == (1, "step 2 of 3")
    assert error.cause.summary == "ValueError: bad shape"
    assert "in raise_value_error" in error.cause.traceback
    assert "pytest_ddpperf/rank" not in error.cause.traceback
    assert [other.rank for other in error.others] == [0]
    assert error.others[0].lost_connection


def test_warm_up_that_raises_names_its_step(bench: Bench) -> None:
    assert (
        failure(bench, in_step(raise_value_error, step=0)).cause.phase
        == "warm-up step 1 of 1"
    )


def test_setup_that_raises(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        if ctx.rank == 1:
            raise KeyError("weights")
        return all_reduce

    error = failure(bench, setup)
    assert (error.cause.rank, error.cause.phase, error.cause.summary) == (
        1,
        "setup",
        "KeyError: 'weights'",
    )


def test_clean_up_that_raises_is_red(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        yield all_reduce
        if ctx.rank == 0:
            raise OSError("disk full")

    error = failure(bench, setup)
    assert (error.cause.rank, error.cause.phase, error.cause.summary) == (
        0,
        "clean-up",
        "OSError: disk full",
    )


def test_a_clean_up_that_ends_the_rank_is_red(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        yield all_reduce
        if ctx.rank == 0:
            os._exit(0)

    error = failure(bench, setup)
    assert error.cause.rank == 0
    assert error.cause.summary == "exited with status 0 in its clean-up"


@pytest.mark.parametrize(
    ("act", "summary"),
    [
        (lambda: sys.exit(0), "sys.exit(0) was called"),
        (
            lambda: os._exit(7),
            "exited with status 7 without delivering a result",
        ),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "killed by SIGKILL (the kernel's out-of-memory killer sends it too)",
        ),
    ],
    ids=["exit0", "_exit7", "SIGKILL"],
)
def test_an_end_without_a_result_is_named(
    bench: Bench, act: Any, summary: str
) -> None:
    error = failure(bench, in_step(act))
    assert error.cause.rank == 1
    assert error.cause.summary.startswith(summary)
    assert error.cause.phase == "step 2 of 3"


def test_a_rank_that_its_watchdog_ends_says_what_the_device_reported(
    bench: Bench,
) -> None:
    """CUDA's and NCCL's threads end a process before Python can raise."""
    words = (
        "[Rank 1] Process group watchdog thread terminated with exception: CUDA error: device-side"
        " assert triggered"
    )

    follows = (
        "CUDA kernel errors might be asynchronously reported at some other API call\nCompile with"
        " TORCH_USE_CUDA_DSA"
    )

    def abort() -> None:
        os.write(
            2, f"terminate called\n  what():  {words}\n{follows}\n".encode()
        )
        os.abort()

    error = failure(bench, in_step(abort))
    assert (error.cause.rank, error.cause.summary) == (
        1,
        f"killed by SIGABRT: {words}",
    )


@pytest.mark.skipif(
    not hasattr(resource, "prlimit")
    or resource.getrlimit(resource.RLIMIT_CORE)[1] == 0,
    reason="a server cannot be allowed to leave core files",
)
def test_a_crash_leaves_no_core_file(bench: Bench) -> None:
    """Though the server of the ranks, whose limits they inherit, might leave one."""
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    before = resource.prlimit(bench.server, resource.RLIMIT_CORE, (most, most))
    try:
        limits = bench.call(
            lambda ctx: resource.getrlimit(resource.RLIMIT_CORE)[0]
        )
    finally:
        resource.prlimit(bench.server, resource.RLIMIT_CORE, before)
    assert limits == [0, 0]


def test_a_crash_in_c_leaves_its_python_stack(bench: Bench) -> None:
    def crash() -> None:
        ctypes.string_at(0)

    error = failure(bench, in_step(crash))
    assert (error.cause.rank, error.cause.summary) == (1, "killed by SIGSEGV")
    assert "in crash" in error.cause.traceback


def test_keyboard_interrupt_in_a_rank_is_that_ranks_error(bench: Bench) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(3600)

    error = failure(bench, in_step(interrupt))
    assert (error.cause.rank, error.cause.summary) == (1, "KeyboardInterrupt")


def test_the_cause_is_shown_first_though_it_unwinds_slowly(
    bench: Bench, tmp_path: Path
) -> None:
    def setup(ctx: Any) -> Any:
        (tmp_path / str(ctx.rank)).write_text(str(os.getpid()))
        all_reduce()
        return in_step(slowly)(ctx)

    def slowly() -> None:
        try:
            raise ValueError("the cause")
        finally:
            dist.destroy_process_group()
            until(lambda: gone([int((tmp_path / "0").read_text())]))

    error = failure(bench, setup)
    assert (error.cause.rank, error.cause.summary) == (
        1,
        "ValueError: the cause",
    )
    assert [(other.rank, other.lost_connection) for other in error.others] == [
        (0, True)
    ]


def test_a_sibling_that_goes_on_is_not_asked_to_end(
    bench: Bench, tmp_path: Path
) -> None:
    def setup(ctx: Any) -> Any:
        signal.signal(signal.SIGTERM, lambda *_: (tmp_path / "asked").touch())

        def step() -> None:
            if ctx.rank == 1:
                # else it is a lost connection of who is still on the way
                until(arrivals)
                raise ValueError("bad")
            hang()

        return step

    with bench.over_once(arrived=1, left=1):
        error = failure(bench, setup)
    assert (error.cause.rank, error.cause.summary) == (1, "ValueError: bad")
    assert (
        error.others[0].summary
        == "was still running when the launch was stopped"
    )
    assert list(tmp_path.iterdir()) == []


def refuse_connection() -> None:
    raise ConnectionRefusedError("connection refused: no dataset server")


def test_a_lost_connection_is_the_cause_if_all_other_ranks_went_on(
    bench: Bench,
) -> None:
    """It may be to a server of the user's."""

    def setup(ctx: Any) -> Any:
        def step() -> None:
            if ctx.rank == 1:
                until(arrivals)
                refuse_connection()
            hang()

        return step

    with bench.over_once(arrived=1, left=1):
        error = failure(bench, setup)
    assert error.cause.rank == 1
    assert error.cause.summary.endswith("no dataset server")
    assert "in refuse_connection" in error.cause.traceback
    (other,) = error.others
    assert other.summary == "was still running when the launch was stopped"


def test_a_result_that_cannot_be_pickled_names_the_rank(bench: Bench) -> None:
    with pytest.raises(LaunchError) as caught:
        bench.call(lambda ctx: threading.Lock() if ctx.rank == 1 else 0)
    assert caught.value.cause.rank == 1
    assert "the result cannot be pickled" in caught.value.cause.summary
    assert "cannot pickle '_thread.lock' object" in caught.value.cause.summary


def generates(ctx: Any) -> Any:
    yield 1


def test_a_function_that_never_ran_is_no_result(bench: Bench) -> None:
    with pytest.raises(LaunchError) as caught:
        bench.call(generates)
    said = (
        "the function returned a value of type generator, which did not run: it must be one without"
        " yield or async"
    )
    assert caught.value.cause.summary == said


class FailsToLoad:
    """Pickles, but raises when it is put together again outside of pytest."""

    home = os.getpid()

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return load, (self.where, os.getpid())


def load(where: str, home: int) -> FailsToLoad:
    if os.getpid() != home:
        raise RuntimeError(f"cannot be loaded in {where}")
    return FailsToLoad(where)


def test_an_argument_that_fails_to_load_has_the_ranks_traceback(
    bench: Bench,
) -> None:
    with pytest.raises(LaunchError) as caught:
        bench.call(lambda ctx, value: value, FailsToLoad("a rank"))
    assert caught.value.cause.phase == "the start"
    assert (
        caught.value.cause.summary == "RuntimeError: cannot be loaded in a rank"
    )
    assert "in load" in caught.value.cause.traceback


def test_a_result_that_fails_to_load_names_the_rank(bench: Bench) -> None:
    with pytest.raises(
        DdpPerfError,
        match=r"the result of rank 0 .* cannot be loaded in pytest",
    ):
        bench.call(lambda ctx: FailsToLoad("pytest"))


def test_a_closure_that_cannot_be_pickled_names_the_variable(
    bench: Bench,
) -> None:
    guard = threading.Lock()
    with pytest.raises(
        DdpPerfError,
        match=r"variable 'guard', which <lambda> uses, cannot be pickled",
    ):
        bench.call(lambda ctx: guard)
    with pytest.raises(
        DdpPerfError, match=r"argument 2 of <lambda> cannot be pickled"
    ):
        bench.call(lambda ctx, a, b: None, 1, guard)
