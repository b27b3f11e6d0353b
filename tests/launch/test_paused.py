"""Launches whose windows come in stretches: what is counted, that nothing runs between them, and
bad luck in each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from pytest_ddpperf.launch import paused_launch
from pytest_ddpperf.records.errors import BaseSideError, LaunchError
from pytest_ddpperf.wire.channels import readable
from tests.launch.conftest import Bench, Recorder, arrive, hang
from tests.processes import descendants, ended, gone, until
from tests.torch_version import NEEDS_RECORDER


def all_reduce() -> None:
    dist.all_reduce(torch.ones(1))


def counting(ctx: Any) -> Any:
    """Each step tells its number as the examples that it processed, from 0; the warm-up is one
    step."""
    numbers = iter(range(1000))

    def step() -> int:
        all_reduce()
        return next(numbers)

    return step


def threads_state(pid: int) -> set[str]:
    states = (
        Path(task).read_text().rpartition(")")[2].split()[0]
        for task in Path(f"/proc/{pid}/task").glob("*/stat")
    )
    return set(states)


def ranks_of(bench: Bench) -> list[int]:
    return [pid for pid in descendants(bench.server) if os.getpgid(pid) == pid]


def test_what_feeds_ranks_from_outside_of_their_launch_is_named(
    bench: Bench, tmp_path: Path
) -> None:
    """It goes on between stretches, whatever is stopped."""
    fifo = tmp_path / "batches"
    os.mkfifo(fifo)

    def setup(ctx: Any) -> Any:
        batches = os.open(fifo, os.O_RDONLY) if ctx.rank == 0 else -1

        def step() -> None:
            if ctx.rank == 0:
                os.read(batches, 1)
            all_reduce()

        return step

    feed = "import sys; [open(sys.argv[1], 'wb').write(b'x' * 10**6)]"
    with subprocess.Popen([sys.executable, "-c", feed, str(fifo)]) as producer:
        try:
            with (
                bench.paused(setup, steps=5, warmup=1) as launch,
                pytest.raises(BaseSideError) as raised,
            ):
                launch.stretch(1)
        finally:
            producer.kill()
    said = (
        " writes to a pipe that ranks read, and goes on while they are stopped"
    )
    assert str(raised.value).endswith(f" (pid {producer.pid}){said}")


def test_the_processes_that_each_rank_has_started_are_counted(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        loader = DataLoader(
            [torch.ones(1)] * 1_000,
            num_workers=3,
            multiprocessing_context="fork",
        )
        batches = iter(loader)
        return lambda: dist.all_reduce(next(batches))

    with bench.paused(setup) as launch:
        assert launch.helpers == 3
    with bench.paused(counting) as launch:
        assert launch.helpers == 0


def test_a_child_that_ranks_start_at_any_time_feeds_nobody(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        _, pipe = os.pipe()

        def start_children() -> None:
            while True:
                subprocess.run(["true"], pass_fds=[pipe], check=True)

        threading.Thread(target=start_children, daemon=True).start()
        return all_reduce

    for _ in range(6):
        with bench.paused(setup, steps=5, warmup=1) as launch:
            launch.stretch(1)


def taken(
    bench: Bench,
    setup: Any,
    *stretches: int,
    between: Callable[[], None] = lambda: None,
    **plan: Any,
) -> Any:
    """What comes of stretches of so many steps; `between` is called after each, at rest."""
    with bench.paused(setup, **plan) as paused_launch:
        for steps in stretches:
            paused_launch.stretch(steps)
            between()
        return paused_launch.deliver()


# --- what is counted


def test_the_first_step_of_a_stretch_is_not_counted(bench: Bench) -> None:
    with bench.paused(counting) as paused_launch:
        assert paused_launch.steps == 3
        assert paused_launch.step_seconds > 0
    samples = taken(bench, counting, 1, 3, 2)
    assert samples.stretches == (2, 1)
    # the warm-up is 0, then 1 | 2 3 4 | 5 6
    assert samples.examples == ((3, 4, 6),) * 2
    assert len(samples.step_seconds) == 3
    assert min(samples.step_seconds) > 0
    assert samples.cpu_seconds is not None
    assert [
        len(rank) for rank in (*samples.rank_seconds, *samples.cpu_seconds)
    ] == [3] * 4


def test_a_launch_that_is_not_paused_has_one_stretch(bench: Bench) -> None:
    samples = bench.measure(counting)
    assert samples.stretches == (3,)
    assert samples.examples == ((1, 2, 3),) * 2, "its first step is counted"


def test_a_launch_of_a_reference_is_alive_at_the_same_time_and_paused_for_itself(
    bench: Bench,
) -> None:
    reference = replace(bench.plan(), is_reference=True)
    server = bench.launcher._reference_server
    try:
        with (
            bench.paused(counting) as launch,
            bench.launcher.pause(reference, counting, bench.recorder) as other,
        ):
            for steps in (1, 4):
                launch.stretch(steps)
                other.stretch(steps)
            both = launch.deliver(), other.deliver()
        assert descendants(server.pid) == []
    finally:
        server.stop()
    for samples in both:
        assert samples.examples == ((3, 4, 5),) * 2


def test_what_lies_between_stretches_is_in_no_figure(bench: Bench) -> None:
    began = time.monotonic()
    # as others' stretches may take
    samples = taken(bench, counting, 3, 3, 3, between=lambda: time.sleep(0.5))
    left = time.monotonic() - began - 3 * 0.5
    for steps in (*samples.rank_seconds, samples.step_seconds):
        assert sum(steps) <= left, "each stretch has a zero of its own"
    assert samples.cost.total <= left, "nor has it cost this side anything"


# --- rest


def test_nothing_runs_between_stretches(bench: Bench) -> None:
    """Not a thread that spins, nor a worker of a loader."""

    def spin() -> None:
        while True:
            pass

    def setup(ctx: Any) -> Iterator[Any]:
        spinning = threading.Thread(target=spin, daemon=True)
        batches = iter(
            DataLoader(
                [torch.ones(1)] * 1000,
                num_workers=1,
                multiprocessing_context="fork",
            )
        )
        spinning.start()
        yield lambda: (all_reduce(), next(batches))

    with bench.paused(setup) as paused_launch:
        paused_launch.stretch(2)
        every = descendants(bench.server)
        assert len(every) == 4, "two ranks and their workers"
        until(lambda: set().union(*map(threads_state, every)) == {"T"})
        paused_launch.stretch(2)
        assert len(paused_launch.deliver().step_seconds) == 2
    assert gone(every)


def test_what_left_the_session_of_its_rank_does_not_run_between_stretches_either(
    bench: Bench,
) -> None:
    """A producer behind a pipe would fill it meanwhile."""
    producer = [sys.executable, "-c", "while True: print('a batch')"]
    daemon = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"

    def setup(ctx: Any) -> Any:
        subprocess.Popen(
            producer, start_new_session=True, stdout=subprocess.DEVNULL
        )
        subprocess.run(
            [sys.executable, "-c", daemon, *producer],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return all_reduce

    with bench.paused(setup) as paused_launch:
        paused_launch.stretch(2)
        every = descendants(bench.server)
        assert len(every) == 6, "two ranks, their producers and the orphans"
        until(lambda: set().union(*map(threads_state, every)) == {"T"})
        paused_launch.stretch(2)
        assert len(paused_launch.deliver().step_seconds) == 2
    assert gone(every)


@pytest.mark.parametrize("stretches", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_a_launch_that_is_left_is_over_and_was_cleaned_up(
    bench: Bench, tmp_path: Path, stretches: int, fails: bool
) -> None:
    def setup(ctx: Any) -> Any:
        yield all_reduce
        (tmp_path / str(ctx.rank)).touch()

    with suppress(ZeroDivisionError), bench.paused(setup) as paused_launch:
        for _ in range(stretches):
            paused_launch.stretch(2)
        ranks = ranks_of(bench)
        assert len(ranks) == 2
        1 / (not fails)
    assert gone(ranks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


# --- bad luck


def test_a_rank_that_dies_in_a_stretch(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        numbers = iter(range(1000))

        def step() -> None:
            all_reduce()
            if next(numbers) == 4 and ctx.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        return step

    with pytest.raises(LaunchError) as caught:
        taken(bench, setup, 2, 3)
    assert (caught.value.cause.rank, caught.value.cause.phase) == (
        1,
        "step 3 of 3",
    )
    assert "killed by SIGKILL" in caught.value.cause.summary


def test_a_rank_that_is_killed_at_rest_is_named_when_it_is_missed(
    bench: Bench,
) -> None:
    def kill() -> None:
        os.kill(ranks_of(bench)[0], signal.SIGKILL)
        # the news of its end are there
        until(lambda: readable([bench.launcher._server.socket], 0.0))

    with pytest.raises(LaunchError) as caught:
        taken(bench, counting, 2, 2, between=kill)
    assert caught.value.cause.phase == "its pause"
    assert "killed by SIGKILL" in caught.value.cause.summary


def stop() -> None:
    """As others may stop it."""
    arrive()
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)


@NEEDS_RECORDER
@pytest.mark.parametrize("halt", [hang, stop])
def test_a_rank_that_halts_in_a_stretch_shows_its_stack_at_the_deadline(
    bench: Bench, halt: Any
) -> None:
    def setup(ctx: Any) -> Any:
        numbers = iter(range(1000))

        def step() -> None:
            if next(numbers) == 4 and ctx.rank == 1:
                halt()
            all_reduce()

        return step

    with bench.over_once(arrived=1), pytest.raises(LaunchError) as caught:
        taken(bench, setup, 2, 3)
    cause = caught.value.cause
    assert cause.rank == 1
    late = "did not end within 300 s (--ddp-timeout)"
    assert cause.summary.startswith(
        f"{late}; rank 1 never entered all_reduce 5 (4 bytes)"
    )
    assert f"in {halt.__name__}" in cause.traceback


def test_a_launch_goes_on_where_pytest_itself_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For longer than the deadline of its ranks, which rest."""
    launch = object.__new__(paused_launch.PausedLaunch)
    monkeypatch.setattr(launch, "_collect", lambda until: None)
    monkeypatch.setattr(launch, "_check", lambda: None)
    monkeypatch.setattr(
        paused_launch, "time", SimpleNamespace(monotonic=lambda: 1000.0)
    )
    for deadline, left in ((640.0, 30.0), (1020.0, 20.0), (1200.0, 200.0)):
        launch._deadline = deadline
        launch._rest()
        assert launch._left_seconds == left


def test_ctrl_c_while_ranks_are_stopped_leaves_nothing(bench: Bench) -> None:
    ranks: list[int] = []

    def interrupt() -> None:
        ranks.extend(ranks_of(bench))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        taken(bench, counting, 2, between=interrupt)
    assert len(ranks) == 2
    assert gone(ranks)


# --- pytest's own end, and others'

HOLDS = """
import sys
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.records.plan import Plan

class Prints(Observer):
    def waiting(self, resource):
        print("waits", flush=True)

def setup(ctx):
    import torch, torch.distributed as dist
    return lambda: dist.all_reduce(torch.ones(1))

plan = Plan(world_size=2, backend="gloo", device="cpu", warmup=1, steps=3)
sides = Launcher(dict), Launcher(dict)
while sys.stdin.readline():
    with sides[0].alone(plan, Prints()):
        with sides[0].pause(plan, setup, Prints()) as one, sides[1].pause(plan, setup, Prints()) as other:
            for side in (one, other) * 2:
                side.stretch(2)
            print("paused", flush=True)
            sys.stdin.readline()
            one.deliver(), other.deliver()
"""


def send_line(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def wait_for_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    # reads as far as that line
    assert f"{line}\n" in process.stdout, "it ended before"


def test_two_runs_take_turns_pair_by_pair_and_nobody_stays_stopped_when_one_is_killed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPPERF_LOCKS", "on")
    command, pipe = [sys.executable, "-c", HOLDS], subprocess.PIPE
    with ended(
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    ) as other:

        class ReleasesOther(Recorder):
            def waiting(self, resource: Path) -> None:
                if not self.waited:
                    send_line(other)  # to the end of its pair
                super().waiting(resource)

        observer = ReleasesOther()
        send_line(other)
        wait_for_line(other, "paused")
        with bench.launcher.alone(bench.plan(), observer):
            assert observer.waited, "for the other run's first pair"
            send_line(other)
            wait_for_line(other, "waits")  # with its second pair, for this run
            assert taken(bench, counting, 2, 2).stretches == (1, 1)
        wait_for_line(other, "paused")
        every = descendants(other.pid)
        until(lambda: sum(threads_state(pid) == {"T"} for pid in every) == 4)
        other.kill()
        other.wait(120)
    until(lambda: gone(every))
