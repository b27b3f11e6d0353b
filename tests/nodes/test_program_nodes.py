"""Programs that own their loop, with ranks on both of two nodes."""

from __future__ import annotations

import json
import re

import pytest

from tests.nodes.machines import MEET_IN_A_FILE, Machines

# `load` is in each step of rank 1, which is on node 1.
TRAINING = """
import os, sys, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def begin():
    dist.init_process_group("gloo")
    names = "GROUP_RANK LOCAL_RANK LOCAL_WORLD_SIZE RANK WORLD_SIZE GROUP_WORLD_SIZE"
    node, index, share, *others = (int(os.environ[name]) for name in names.split())
    assert others == [dist.get_rank(), dist.get_world_size(), 2]
    assert (node, index, share) == (*divmod(dist.get_rank(), share), dist.get_world_size() // 2)
    assert os.environ["MASTER_ADDR"] == "10.77.0.1"
    return DDP(torch.nn.Linear(64, 64))

def load(seconds):
    until = time.thread_time() + seconds * int(os.environ["RANK"])
    while time.thread_time() < until:
        pass

def train(seconds=0.0):
    model = begin()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(32, 64)
    while True:
        load(seconds)
        model(data).sum().backward()
        optimizer.step()
"""

TESTS = """
import pytest
from training import train

def test_script(ddp_benchmark):
    ddp_benchmark.script("slow.py", batch_size=32)

def test_same(ddp_benchmark):
    ddp_benchmark.script("-m", "same")

@pytest.mark.ddp(world_size=4)
def test_loop(ddp_benchmark):
    result = ddp_benchmark.loop(lambda ctx: train(), batch_size=32)
    assert len(result.samples[0]) == 4
"""

SCRIPT = "import training; training.train({seconds})\n"

NEARLY_ANY = "--ddp-threshold=cpu_p50:300%"


@pytest.fixture
def programs(machines: Machines) -> Machines:
    """Two nodes with one project."""
    folder = machines.folder
    (folder / "conftest.py").write_text(MEET_IN_A_FILE)
    (folder / "training.py").write_text(TRAINING)
    (folder / "slow.py").write_text(SCRIPT.format(seconds=0.0))
    (folder / "same.py").write_text(SCRIPT.format(seconds=0.0))
    (folder / "test_programs.py").write_text(TESTS)
    return machines


def test_programs_are_compared_with_their_baselines(programs: Machines) -> None:
    folder = programs.folder
    first, second = programs.both(
        programs.pytest, "--ddp-save-baseline", "--ddp-json=all.json"
    )
    print(first.output, second.output)
    assert "3 passed" in first.output
    assert (first.process.returncode, second.process.returncode) == (0, 0)
    report = json.loads((folder / "all.json").read_text())
    assert len(report["measurements"]) == 3
    for outcome in report["measurements"]:
        assert outcome["plan"]["nodes"] == 2
        samples = outcome["measurement"]["samples"]
        assert {len(launch) for launch in samples["step_seconds"]} == {10}
        # by one clock, though those of the nodes are 1,000 s apart
        assert 0 < max(map(max, samples["step_seconds"])) < 10
    (folder / "slow.py").write_text(SCRIPT.format(seconds=0.02))
    # torchrun's own store from here on
    (folder / "conftest.py").unlink()
    first, second = programs.both(programs.torchrun, "-rA", NEARLY_ANY)
    print(first.output, second.output)
    assert "1 failed, 2 passed" in first.output
    assert re.search("FAILED .*::test_script - .*REGRESSED", first.output)
    assert re.search(r"why: rank 1 \(node 1, .+\): CPU time", first.output)
    assert programs.left() == []


# Each is a program that fails on node 1.
FAILING = """
import os, subprocess, sys, pytest
from training import begin, torch, dist

def training(model, updates):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(updates):
        model(torch.randn(32, 64)).sum().backward()
        optimizer.step()

def raises(ctx):
    model = begin()
    training(model, 4)
    if ctx.rank == 1:
        print("the learning rate is odd", file=sys.stderr)
        raise ValueError("bad batch")
    training(model, 10**9)

def ends(ctx):
    model = begin()
    training(model, 8 if ctx.rank == 1 else 10**9)

def starts_ranks(ctx):
    model = begin()
    training(model, 4)
    if ctx.rank == 1:
        group = "import torch.distributed as dist; dist.init_process_group('gloo', world_size=2)"
        subprocess.run([sys.executable, "-c", group])
    training(model, 10**9)

def joins(ctx):
    model = begin()
    while True:
        with model.join():
            training(model, 8 - ctx.rank)

def runs_ahead(ctx):
    dist.init_process_group("gloo")
    model = torch.nn.Linear(64, 64)
    while True:
        training(model, 50)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)

def test_raises(ddp_benchmark):
    ddp_benchmark.loop(raises)

def test_ends(ddp_benchmark):
    ddp_benchmark.loop(ends)

def test_starts_ranks(ddp_benchmark):
    ddp_benchmark.loop(starts_ranks)

def test_joins(ddp_benchmark):
    ddp_benchmark.loop(joins)

@pytest.mark.ddp(steps=120)
def test_runs_ahead(ddp_benchmark):
    ddp_benchmark.loop(runs_ahead)
"""


def test_programs_that_fail_on_another_node_are_named_with_their_output(
    programs: Machines,
) -> None:
    (programs.folder / "test_programs.py").write_text(FAILING)
    first, second = programs.both(programs.pytest)
    print(first.output, second.output)
    assert (first.process.returncode, second.process.returncode) == (1, 1)
    assert "4 failed, 1 passed" in first.output
    assert 'raise ValueError("bad batch")' in first.output
    assert "the learning rate is odd" in first.output
    output = " ".join(first.output.split())
    for said in (
        "ValueError: bad batch",
        "the program ended after .+ while other ranks went on; rank 1 never entered all_reduce",
        "ranks take different numbers of updates: rank 0 took .+; rank 0 never entered",
        "the program starts ranks itself, 2 processes",
    ):
        assert re.search(
            rf"rank 1 \(node 1, \S+\) failed in [\w -]+(?: \(2 asked\))?: {said}",
            output,
        )
    assert programs.left() == []
