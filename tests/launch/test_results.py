"""What arrives: results, samples, output; and what ranks may do on the way."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from pytest_ddpperf.records.errors import LaunchError
from pytest_ddpperf.wire.source_trees import Trees, file_digest
from tests.launch.conftest import Bench, hang
from tests.processes import gone
from tests.torch_version import QUIET_GLOO


def all_reduce() -> None:
    dist.all_reduce(torch.ones(1))


def test_results_come_by_rank_with_tensors(bench: Bench) -> None:
    def function(ctx: Any, factor: int) -> Any:
        return {"rank": ctx.rank, "tensor": torch.full((2,), ctx.rank * factor)}

    first, second = bench.call(function, 3)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert second["tensor"].tolist() == [3, 3]


def test_a_view_does_not_bring_its_whole_storage(bench: Bench) -> None:
    views = bench.call(lambda ctx: torch.arange(1_000_000.0)[2:4])
    assert views[0].tolist() == [2.0, 3.0]
    assert views[0].untyped_storage().nbytes() == 8


def test_samples_have_their_shapes_and_add_up(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        def step() -> int:
            all_reduce()
            time.sleep(0.01)
            return 7 + int(ctx.rank)

        return step

    samples = bench.measure(setup, steps=4, warmup=2)
    assert len(samples.step_seconds) == 4
    assert [len(rank) for rank in samples.rank_seconds] == [4, 4]
    assert samples.cpu_seconds is not None
    assert [len(rank) for rank in samples.cpu_seconds] == [4, 4]
    assert samples.examples == ((7, 7, 7, 7), (8, 8, 8, 8))
    assert min(samples.step_seconds) > 0.005
    assert samples.cost.steps >= sum(samples.step_seconds)
    assert samples.facts["torch"] == torch.__version__
    assert samples.facts["pinned"] is True


def test_a_launch_says_what_any_rank_imported_where_it_is_asked(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = Path(os.path.realpath(tmp_path)) / "top"
    for name in (
        "top/of_rank_0.py",
        "top/of_rank_1.py",
        "top/unused.py",
        "elsewhere.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (top / "late.py").write_bytes(b"late = 1\r\n")
    monkeypatch.syspath_prepend(str(top))
    monkeypatch.syspath_prepend(str(tmp_path))

    def setup(ctx: Any) -> Any:
        importlib.import_module(f"of_rank_{ctx.rank}")
        importlib.import_module("elsewhere")
        count = itertools.count()
        # the last step that is timed
        return lambda: next(count) == 3 and importlib.import_module("late")

    samples = bench.measure(setup)
    assert (samples.files, samples.others) == ({}, ())
    trees = Trees(current=str(top), base=str(top), kept=())
    monkeypatch.setattr(bench.launcher, "trees", trees)
    samples = bench.measure(setup)
    assert samples.files == trees.digests(
        ["late.py", "of_rank_0.py", "of_rank_1.py"]
    )
    (top / "late.py").write_bytes(b"late = 1\n")
    assert samples.files["late.py"] == file_digest(str(top / "late.py")), (
        "however its lines end"
    )
    assert {f"elsewhere@{top.parent}", "torch"} <= set(samples.others)
    assert not {"late", "json", "pytest_ddpperf"} & set(samples.others)


def test_a_tensor_that_is_used_again_tells_its_value_of_each_step(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        number = torch.tensor(0)
        return lambda: number.add_(1)

    assert bench.measure(setup, warmup=2).examples == ((3, 4, 5), (3, 4, 5))


@QUIET_GLOO
def test_output_goes_by_rank_and_stream(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        os.write(1, f"out {ctx.rank}\n".encode())
        os.write(2, f"err {ctx.rank}\n".encode())
        return all_reduce

    output = bench.measure(setup).output
    assert [(o.rank, o.stdout, o.stderr) for o in output] == [
        (0, "out 0\n", "err 0\n"),
        (1, "out 1\n", "err 1\n"),
    ]


@QUIET_GLOO
def test_output_is_streamed_to_who_asks(bench: Bench) -> None:
    bench.recorder.streams = True

    def function(ctx: Any) -> None:
        print(f"hello from {ctx.rank}\nunfinished", end="")

    bench.call(function)
    assert sorted(bench.recorder.lines) == [
        (f"rank {rank}", "stdout", line)
        for rank in (0, 1)
        for line in (f"hello from {rank}", "unfinished")
    ]


@QUIET_GLOO
def test_output_before_a_crash_is_kept(bench: Bench) -> None:
    def function(ctx: Any) -> None:
        print("last words")
        # else the first that exits may end the other before it has said so
        dist.barrier()
        os._exit(7)

    with pytest.raises(LaunchError) as caught:
        bench.call(function)
    assert caught.value.output[1].stdout == "last words\n"


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


def test_data_loader_workers_work(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        batches = iter(DataLoader(Numbers(), batch_size=4, num_workers=2))
        return lambda: next(batches).sum()

    assert len(bench.measure(setup).step_seconds) == 3


def test_data_loader_workers_end_with_their_rank(
    bench: Bench, tmp_path: Path
) -> None:
    def setup(ctx: Any) -> Any:
        batches = iter(DataLoader(Numbers(), batch_size=4, num_workers=2))
        for worker in multiprocessing.active_children():
            (tmp_path / str(worker.pid)).touch()

        def step() -> None:
            next(batches)
            if ctx.rank == 1:
                os._exit(7)
            hang()

        return step

    with bench.over_once(arrived=1), pytest.raises(LaunchError):
        bench.measure(setup)
    workers = [int(path.name) for path in tmp_path.iterdir()]
    assert len(workers) == 4
    assert gone(workers)


def test_a_grandchild_in_a_session_of_its_own_ends_too(bench: Bench) -> None:
    def function(ctx: Any) -> int:
        if (pid := os.fork()) == 0:
            os.setsid()
            time.sleep(3600)
        return pid

    pids = bench.call(function)
    assert all(pid > 0 for pid in pids)
    assert gone(pids)


def test_what_a_child_that_a_rank_forks_returns_or_raises_is_not_the_ranks(
    bench: Bench,
) -> None:
    def function(ctx: Any) -> Any:
        statuses = []
        for ends in ("returns", "raises", "exits"):
            pid = os.fork()
            if not pid and ends == "returns":
                return "the child's"
            if not pid and ends == "raises":
                raise ValueError("the child's")
            if not pid:
                sys.exit(5)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return statuses

    assert bench.call(function) == [[0, 1, 5]] * 2


def test_sixteen_ranks_on_few_cores(bench: Bench) -> None:
    samples = bench.measure(lambda ctx: all_reduce, ranks=16)
    assert len(samples.rank_seconds) == 16
    assert samples.facts["cores_per_rank"] == max(
        0, len(os.sched_getaffinity(0)) // 16
    )


def test_a_launch_that_is_asked_to_samples_where_its_steps_are(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python code that runs for less than Python's switch interval, too."""
    top = Path(os.path.realpath(tmp_path))
    (top / "work_of_a_step.py").write_text(
        "import time\ndef work(seconds):\n    until = time.monotonic() + seconds\n"
        "    while time.monotonic() < until:\n        pass\n"
    )
    monkeypatch.syspath_prepend(str(top))
    monkeypatch.setattr(
        bench.launcher,
        "trees",
        Trees(current=str(top), base=str(top), kept=()),
    )

    def setup(ctx: Any) -> Any:
        work = importlib.import_module("work_of_a_step").work

        def step() -> None:
            work(0.002)
            all_reduce()

        return step

    plan = replace(bench.plan(steps=100), stacks=True)
    stacks = bench.launch(plan, setup).stacks
    assert len(stacks) == 2
    for of_rank in stacks:
        seen = dict(of_rank.functions)
        assert 0 < seen["work_of_a_step.py:work",] <= of_rank.taken
    assert bench.launch(bench.plan(), setup).stacks == ()
