"""RPC launches: roles, what reaches whom, and every way in which one of them can fail."""

from __future__ import annotations

import importlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from pytest_ddpperf.records.errors import LaunchError
from pytest_ddpperf.records.samples import LaunchSamples
from pytest_ddpperf.wire.source_trees import Trees
from tests.launch.conftest import Bench, arrive, hang, listeners
from tests.torch_version import QUIET_GLOO

paused: dict[str, Any] = {}


# --- what parameter servers are called for


def answer() -> str:
    return str(paused.get("name", "nothing was set up"))


def nothing() -> None:
    pass


def end(status: int) -> None:
    arrive()
    os._exit(status)


def kill() -> None:
    arrive()
    os.kill(os.getpid(), signal.SIGSEGV)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    arrive()
    raise KeyError("no such table")


def measure(
    bench: Bench,
    trainer: Any,
    *,
    master: Any = None,
    server: Any = None,
    trainers: int = 2,
    servers: int = 2,
) -> LaunchSamples:
    plan = replace(
        bench.plan(ranks=trainers),
        parameter_servers=servers,
        master=master is not None,
    )
    return bench.launch(plan, trainer, master, server)


def failure(
    bench: Bench, trainer: Any, *, left: int, **asked: Any
) -> LaunchError:
    """The error of a launch in which one thread at least says that it has arrived, and `left`
    processes remain."""
    with (
        bench.over_once(arrived=1, left=left),
        pytest.raises(LaunchError) as caught,
    ):
        measure(bench, trainer, **asked)
    return caught.value


def calling(act: Any, *args: Any, step: int = 2, timeout: float = 0.0) -> Any:
    """A trainer which in one step (the warm-up's is 0) makes ps1 do something."""

    def trainer(ctx: Any, shared: Any = None) -> Any:
        count = iter(range(100))

        def one_step() -> None:
            if next(count) == step and ctx.rank == 1:
                rpc.rpc_sync("ps1", act, args, timeout=timeout)
            dist.all_reduce(torch.ones(1))

        return one_step

    return trainer


# --- roles


def test_folders_for_temporary_files_may_have_any_name(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes a URL for a path as it is quoted."""
    folder = tmp_path / "job@tmp 1"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    samples = measure(bench, calling(nothing))
    assert samples.step_seconds


def test_every_role_has_its_set_up_its_place_and_what_the_master_shares(
    bench: Bench,
) -> None:
    bench.recorder.streams = True

    def server(ctx: Any) -> None:
        paused["name"] = f"{ctx.name} of {ctx.world_size}"
        total = torch.ones(1)
        dist.all_reduce(total)
        print(
            ctx.role,
            ctx.rank,
            ctx.world_size,
            os.environ["RANK"],
            os.environ["WORLD_SIZE"],
            int(total),
        )

    def master(ctx: Any) -> Any:
        print(
            ctx.role,
            ctx.rank,
            ctx.world_size,
            os.environ["RANK"],
            dist.is_initialized(),
        )
        return [
            rpc.remote(name, answer) for name in ctx.workers["parameter_server"]
        ]

    def trainer(ctx: Any, shared: Any) -> Any:
        total = torch.ones(1)
        dist.all_reduce(total)
        print(
            ctx.role,
            ctx.name,
            ctx.rank,
            ctx.world_size,
            os.environ["RANK"],
            int(total),
        )
        print(
            [reference.to_here() for reference in shared], ctx.workers["master"]
        )
        return lambda: rpc.rpc_sync("ps0", nothing)

    samples = measure(bench, trainer, master=master, server=server, trainers=3)
    assert (len(samples.rank_seconds), len(samples.step_seconds)) == (3, 3)
    said = {(name, line) for name, _, line in bench.recorder.lines}
    assert {
        ("ps0", "parameter_server 0 2 3 6 2"),
        ("ps1", "parameter_server 1 2 4 6 2"),
        ("master", "master 0 1 5 False"),
        ("trainer0", "trainer trainer0 0 3 0 3"),
        ("trainer2", "trainer trainer2 2 3 2 3"),
        ("trainer1", "['ps0 of 2', 'ps1 of 2'] ('master',)"),
    } <= said


def test_a_launch_says_what_any_of_its_processes_imported(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = os.path.realpath(tmp_path)
    for name in ("of_trainers", "of_master", "of_servers", "unused"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(top)
    monkeypatch.setattr(
        bench.launcher, "trees", Trees(current=top, base=top, kept=())
    )

    def trainer(ctx: Any, shared: Any) -> Any:
        importlib.import_module("of_trainers")
        return lambda: rpc.rpc_sync("ps0", nothing)

    def others(ctx: Any) -> None:
        importlib.import_module(
            "of_master" if ctx.role == "master" else "of_servers"
        )

    samples = measure(bench, trainer, master=others, server=others)
    assert list(samples.files) == [
        "of_master.py",
        "of_servers.py",
        "of_trainers.py",
    ]
    assert "torch" in samples.others


def test_what_a_trainer_waits_for_others_is_told_of_each_step(
    bench: Bench,
) -> None:
    def trainer(ctx: Any) -> Any:
        return lambda: rpc.rpc_sync("ps0", time.sleep, (0.05,))

    samples = measure(bench, trainer)
    assert samples.blocked_seconds is not None
    for waited, took in zip(
        samples.blocked_seconds, samples.rank_seconds, strict=True
    ):
        assert all(
            0 <= blocked <= step
            for blocked, step in zip(waited, took, strict=True)
        )
        assert max(waited) > 0.01, (
            "each time the server may have begun before the trainer came to wait for it"
        )


@QUIET_GLOO
def test_servers_clean_up_when_the_trainers_have_ended(bench: Bench) -> None:
    bench.recorder.streams = True

    def server(ctx: Any) -> Iterator[None]:
        yield
        print(f"{ctx.name} cleans up")

    def master(ctx: Any) -> Iterator[int]:
        yield 7
        print("master cleans up")

    def trainer(ctx: Any, shared: int) -> Iterator[Any]:
        yield nothing
        rpc.rpc_sync("ps0", nothing)  # which still serves
        print(f"trainer cleans up {shared}")

    measure(bench, trainer, master=master, server=server)
    # torch may warn of trainers that have ended
    lines = [line for _, _, line in bench.recorder.lines]
    assert sorted(line for line in lines if "cleans up" in line) == [
        "master cleans up",
        "ps0 cleans up",
        "ps1 cleans up",
        "trainer cleans up 7",
        "trainer cleans up 7",
    ]


@QUIET_GLOO
def test_everything_listens_on_loopback_only(bench: Bench) -> None:
    bench.recorder.streams = True

    def trainer(ctx: Any) -> Any:
        for address in listeners([os.getpid()]):
            print(address)
        return nothing

    measure(bench, trainer)
    addresses = {line for _, _, line in bench.recorder.lines}
    assert addresses, "TensorPipe listens"
    assert addresses <= {
        "0100007F",
        "0000000000000000FFFF00000100007F",
        "00000000000000000000000001000000",
    }


# --- bad luck


def test_a_server_that_dies_in_a_step_is_the_cause_not_the_trainers_that_lost_it(
    bench: Bench,
) -> None:
    error = failure(bench, calling(end, 7), left=1)
    assert error.cause.who == "ps1"
    assert (
        error.cause.summary
        == "exited with status 7 without delivering a result"
    )
    assert "trainer1" in [
        other.who for other in error.others if other.lost_connection
    ]
    assert "ps1 failed in serving" in str(error)


def test_a_server_killed_by_a_signal_is_named_with_it(bench: Bench) -> None:
    error = failure(bench, calling(kill), left=1)
    assert (error.cause.who, error.cause.summary) == (
        "ps1",
        "killed by SIGSEGV",
    )


def test_a_trainer_that_dies_while_others_wait_is_the_cause(
    bench: Bench,
) -> None:
    def trainer(ctx: Any) -> Any:
        count = iter(range(100))

        def step() -> None:
            if next(count) == 2 and ctx.rank == 1:
                end(3)
            rpc.rpc_sync("ps0", nothing)
            dist.all_reduce(torch.ones(1))

        return step

    error = failure(bench, trainer, left=2)
    assert error.cause.who == "trainer1"
    idle = {
        other.who: other.summary
        for other in error.others
        if other.who.startswith("ps")
    }
    assert idle == {
        "ps0": "was waiting for calls",
        "ps1": "was waiting for calls",
    }


@pytest.mark.parametrize(
    ("role", "left"), [("master", 4), ("server", 3)], ids=["master", "server"]
)
def test_a_set_up_that_raises_is_shown_with_its_own_traceback(
    bench: Bench, role: str, left: int
) -> None:
    def raising(ctx: Any) -> None:
        arrive()
        raise ValueError(f"not today, {ctx.role}")

    asked: dict[str, Any] = {
        "master": lambda ctx: None,
        "server": None,
        role: raising,
    }
    error = failure(bench, calling(nothing), left=left, **asked)
    name = {"master": "master", "server": "ps0"}[role]
    assert (error.cause.who, error.cause.phase) in (
        (name, "setup"),
        ("ps1", "setup"),
    )
    assert error.cause.summary.startswith("ValueError: not today")
    assert "in raising" in error.cause.traceback


def test_what_rpc_cannot_carry_is_said_of_the_master(bench: Bench) -> None:
    def master(ctx: Any) -> Any:
        arrive()
        return lambda: None

    error = failure(bench, calling(nothing), master=master, left=4)
    assert (error.cause.who, error.cause.phase) == ("master", "setup")
    assert "pickle" in error.cause.summary


def test_a_handler_that_raises_remotely_is_red_with_the_remote_traceback(
    bench: Bench,
) -> None:
    error = failure(bench, calling(fail), left=2)
    assert error.cause.who == "trainer1"
    assert "no such table" in error.cause.summary
    assert "On WorkerInfo(id=3, name=ps1)" in error.cause.traceback
    assert "in fail" in error.cause.traceback


def waiting_for_a_future(ctx: Any) -> Any:
    return lambda: rpc.rpc_async("ps1", hang).wait()


@pytest.mark.parametrize(
    "trainer", [calling(hang), waiting_for_a_future], ids=["rpc_sync", "future"]
)
def test_a_handler_that_hangs_is_the_cause_at_the_deadline_not_who_waits_for_it(
    bench: Bench, trainer: Any
) -> None:
    error = failure(bench, trainer, left=4)
    assert error.cause.who == "ps1"
    assert error.cause.summary == "did not end within 300 s (--ddp-timeout)"
    assert "in hang" in error.cause.traceback
    assert {other.who: other.summary for other in error.others}[
        "ps0"
    ] == "was waiting for calls"


def test_a_clean_up_of_a_trainer_that_hangs_is_green_and_told(
    bench: Bench,
) -> None:
    def trainer(ctx: Any) -> Iterator[Any]:
        yield nothing
        if ctx.rank == 1:
            # it will not answer when it is told to end
            rpc.rpc_async("ps0", stop)
            arrive()
            rpc.shutdown()  # which waits for everybody

    with bench.over_once(arrived=1):
        samples = measure(bench, trainer)
    assert samples.notes == (
        "trainer1's clean-up did not end within 300 s (--ddp-timeout); it was killed",
    )
