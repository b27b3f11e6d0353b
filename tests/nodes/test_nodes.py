"""Whole runs over two nodes, one of them started by real torchrun."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time

import pytest

from tests.nodes.machines import MEET_IN_A_FILE, SOON_SECONDS, Machines, Node

STEP = """
import time, pytest

def who(ctx):
    import torch, torch.distributed
    total = torch.tensor([float(ctx.rank)])
    torch.distributed.all_reduce(total)
    return ctx.rank, ctx.local_rank, ctx.node_rank, ctx.local_world_size, int(total)

def training(ctx, seconds=0.0):
    import torch
    from torch.nn.parallel import DistributedDataParallel
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    data = torch.randn(32, 64)
    def step():
        until = time.thread_time() + seconds * ctx.rank
        while time.thread_time() < until:
            pass
        model(data).sum().backward()
    return step
"""

# Trainers in order over the nodes; parameter servers and the master on the first.
RPC = """
import os, pytest

def handled(tensor):
    return tensor + 1

def where(ctx):
    return ctx.rank, ctx.local_rank, ctx.local_world_size, ctx.node_rank, int(os.environ["LOCAL_RANK"])

def master(ctx):
    assert ctx.node_rank == 0
    return sorted(name for names in ctx.workers.values() for name in names)

def trainer(ctx, shared):
    import torch, torch.distributed.rpc as rpc
    assert shared == ["master", "ps0", "trainer0", "trainer1"]
    assert where(ctx) == (ctx.rank, 0, 1, ctx.rank, 0), where(ctx)
    data = torch.ones(10)
    def step():
        assert rpc.rpc_sync("ps0", handled, (data,)).sum() == 20
    return step

def server(ctx):
    assert (ctx.node_rank, ctx.rank, ctx.local_rank) == (0, 0, 0)

@pytest.mark.ddp(nodes=2, warmup=3)
def test_rpc(rpc_benchmark):
    result = rpc_benchmark(trainer, master=master, parameter_server=server, trainers=2, parameter_servers=1)
    assert result.counters["rpc.calls"] == 1

@pytest.mark.ddp(nodes=3)
def test_more_nodes_than_there_are(rpc_benchmark):
    rpc_benchmark(lambda ctx: trainer(ctx, None))
"""


def test_a_run_over_two_nodes(machines: Machines) -> None:
    """Saved by srun without torchrun, which is one run, and compared by torchrun, a rank of node 1
    slower: and one clock for both, though they are 1,000 s apart."""
    (machines.folder / "test_step.py").write_text(
        STEP
        + """
def test_who(ddp_run):
    assert ddp_run(who) == [(0, 0, 0, 1, 1), (1, 0, 1, 1, 1)]
    assert ddp_run(who)[0][4] == 1

@pytest.mark.ddp(world_size=1)
def test_alone(ddp_run):
    assert ddp_run(who) == [(0, 0, 0, 1, 0)]

def test_step(ddp_benchmark):
    result = ddp_benchmark(training, batch_size=32)
    assert len(result.samples[0]) == 2
    again = ddp_benchmark(training, name="again")
    assert result.p50 < 10 and again.p50 < 10

def test_same(ddp_run, ddp_benchmark):
    assert ddp_benchmark(training).verdict == "NOT GATED"
    assert len(ddp_run(who)) == 2
"""
    )
    (machines.folder / "test_rpc.py").write_text(RPC)
    asked = [
        "--ddp-save-baseline",
        "--ddp-json=all.json",
        "-v",
        "-rs",
        "test_step.py",
        "test_rpc.py",
    ]
    first, second = machines.both(machines.srun, *asked)
    print(first.output, second.output)
    assert "5 passed, 1 skipped" in first.output
    assert "nodes=...): 3: 2 there" in first.output
    assert "ddpperf: 2 nodes over dp" in first.output
    assert re.search(r"rank 1 \(node 1, .+\) ", first.output)
    assert second.output == ""
    assert (first.process.returncode, second.process.returncode) == (0, 0)
    report = json.loads((machines.folder / "all.json").read_text())
    assert len(report["measurements"]) == 4
    for outcome in report["measurements"]:
        samples = outcome["measurement"]["samples"]
        assert all(
            0 < step < 10
            for launch in samples["step_seconds"]
            for step in launch
        )
        assert outcome["measurement"]["environment"]["key"]["nodes"] == 2
    assert machines.left() == []
    (machines.folder / "test_step.py").write_text(
        STEP
        + """
def test_step(ddp_run, ddp_benchmark):
    with pytest.raises(pytest.fail.Exception) as caught:
        ddp_benchmark(lambda ctx: training(ctx, 0.02), batch_size=32)
    assert caught.value.result.verdict == "REGRESSED"
    assert len(ddp_run(who)) == 2, "a test may go on by its verdict, which is the same on all nodes"
    raise caught.value

def test_same(ddp_benchmark):
    assert ddp_benchmark(training).verdict == "PASS"
"""
    )
    first, second = machines.both(
        machines.torchrun, "--ddp-threshold=cpu_p50:300%", "test_step.py"
    )
    print(first.output, second.output)
    assert "REGRESSED" in first.output
    assert re.search(r"why: rank 1 \(node 1, .+\): CPU time", first.output)
    assert "1 failed, 1 passed" in first.output
    assert first.process.returncode == second.process.returncode == 1, (
        "torchrun's own, for both"
    )
    assert machines.left() == []


FAILING = (
    STEP
    + """
import os, sys

if "TORCHELASTIC_RUN_ID" in os.environ:
    time.sleep(12)  # the first node collects longer than the others, which wait for it

def raises(ctx):
    if ctx.rank == 1:
        raise ValueError("bad shape")
    who(ctx)

def dies(ctx):
    if ctx.rank == 1:
        os.abort()
    who(ctx)

def hangs(ctx):
    if ctx.rank == 1:
        time.sleep(3600)
    who(ctx)

def test_raises(ddp_run):
    ddp_run(raises)

def test_dies(ddp_run):
    ddp_run(dies)

@pytest.mark.ddp(timeout=20)
def test_hangs(ddp_run):
    ddp_run(hangs)

def test_differs(ddp_run, ddp_benchmark):
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ddp_run(who)
    else:
        ddp_benchmark(training)

def test_goes_on_after_one_that_failed(ddp_run, ddp_benchmark):
    with pytest.raises(pytest.fail.Exception, match="bad shape"):
        ddp_run(raises)
    with pytest.raises(pytest.fail.Exception, match="bad shape"):
        ddp_benchmark(raises)
    assert len(ddp_run(who)) == 2

def test_is_not_there(ddp_run):
    ddp_run(who)

if "TORCHELASTIC_RUN_ID" not in os.environ:
    del test_is_not_there

@pytest.mark.flaky(reruns=2, reruns_delay=3600)
def test_is_run_again_by_the_first_node_alone(ddp_run):
    assert len(ddp_run(who)) == 2
    assert "TORCHELASTIC_RUN_ID" in os.environ, "which only the first node has"

@pytest.fixture(scope="session")
def fetched():
    if "TORCHELASTIC_RUN_ID" not in os.environ and not os.path.exists("fetched.log"):
        open("fetched.log", "w").close()
        raise OSError("at first")

@pytest.mark.flaky(reruns=1, reruns_delay=0)
def test_fetched(ddp_run, fetched):
    assert len(ddp_run(who)) == 2

@pytest.fixture
def torn():
    yield
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise RuntimeError("not removed")

def test_torn(ddp_run, torn):
    assert len(ddp_run(who)) == 2

@pytest.fixture
def kept():
    found = []
    yield found
    found.pop()

def test_kept(ddp_run, kept):
    kept.append(ddp_run(who))

def test_of_one_process():
    pass

def test_who(ddp_run):
    assert [found[2] for found in ddp_run(who)] == [0, 1]
"""
)


WAITING = (
    STEP
    + """
def waits(ctx):
    open(f"rank{ctx.rank}", "w").close()
    time.sleep(3600 if ctx.rank else 0)
    who(ctx)

def test_waits(ddp_run):
    ddp_run(waits)

def test_who(ddp_run):
    ddp_run(who)

def test_of_one_process():
    pass
"""
)


@pytest.fixture
def waiting(machines: Machines) -> Machines:
    """Two runs that are in a launch which lasts for an hour."""
    (machines.folder / "conftest.py").write_text(MEET_IN_A_FILE)
    (machines.folder / "test_waiting.py").write_text(WAITING)
    return machines


def begun(machines: Machines, *further: str) -> tuple[Node, Node]:
    first, second = [
        machines.pytest(node, *further, "test_waiting.py") for node in (0, 1)
    ]
    until = time.monotonic() + SOON_SECONDS
    while not (machines.folder / "rank1").exists():
        assert time.monotonic() < until, first.output + second.output
        assert first.process.poll() is None, first.output + second.output
        time.sleep(0.05)
    return first, second


PYTEST, WORKER = "pytest --ddp", "plugin.remote_worker"  # of commands


def test_a_node_that_is_gone_is_one_red_test_and_a_line_for_each_later_one(
    waiting: Machines,
) -> None:
    said = "pytest of node 1 died: killed by SIGKILL"
    first, second = begun(waiting)
    os.kill(waiting.find(1, WORKER), signal.SIGKILL)
    assert first.wait() == 1
    second.wait()
    output = first.output
    print(output, second.output)
    assert re.search(
        rf"rank 1 \(node 1, .+\) failed in the launch: {said}", output
    )
    assert "2 failed, 1 passed" in output
    assert len(re.findall(said, output)) >= 2


def test_followers_of_a_leader_that_is_gone_end(waiting: Machines) -> None:
    # with torchrun's store, whose processes have to end, too
    (waiting.folder / "conftest.py").unlink()
    first, second = begun(waiting)
    os.kill(waiting.find(0, PYTEST), signal.SIGKILL)
    assert second.wait() == 1
    first.wait()
    print(second.output)
    assert "the pytest of node 0 is gone" in second.output


SUITE = (
    "--pyargs",
    *(f"pytest_ddpperf.suite.test_{name}" for name in ("ddp_sweep", "traffic")),
)


def test_what_fails_on_another_node_is_reported_and_the_next_tests_run_until_ctrl_c_ends_all_nodes(
    waiting: Machines,
) -> None:
    """The next ones are of the suite: its sweep, with a row over two machines, and what goes over
    the wire."""
    (waiting.folder / "test_failing.py").write_text(FAILING)
    waiting.own_pids = True
    asked = (
        "--ddp-suite-size=tiny",
        "--ddp-disable",
        "-k",
        "test_failing or resnet50 or test_wire or test_waits",
    )
    first, second = begun(waiting, "test_failing.py", *SUITE, *asked)
    os.kill(waiting.find(0, PYTEST), signal.SIGINT)
    assert (first.wait(), second.wait()) == (2, 2)
    output = first.output
    print(output, second.output)
    assert re.search(
        r"rank 1 \(node 1, .+\) failed in the function: ValueError: bad shape",
        output,
    )
    assert 'raise ValueError("bad shape")' in output
    assert re.search(
        r"rank 1 \(node 1, .+\) failed in the function: killed by SIGABRT",
        output,
    )
    assert re.search(
        r"rank 1 \(node 1, .+\) failed in the function: did not end within 20 s",
        output,
    )
    assert "in hangs" in output
    assert (
        "rank 1 never entered all_reduce 1 (4 bytes); rank 0 waits for it"
        in " ".join(output.split())
    )
    assert re.search(
        r"node 1 \(.+\): the test asks for a measurement there, and for a call \(who\) on the"
        r" first",
        output,
    )
    assert re.search(
        r"node 1 \(.+\): there is no such test: test_failing.py::test_is_not_there",
        output,
    )
    reported = output.partition("ERROR at teardown of test_torn")[2]
    assert re.search(r"^node 1 \(.+\): ", reported, re.MULTILINE)
    assert "RuntimeError: not removed" in reported
    assert re.search(r"5 failed, 16 passed, .*1 error, 1 rerun", output)
    rows = re.findall(r"^ +(\d) CPUs -- +(.+?):", output, re.MULTILINE)
    assert rows == [("1", "no ddp"), ("1", "1M/1G"), ("2", "2M/1G")]
    assert re.search(
        r"^machine 2, .+:\n\(there is no nvidia-smi\)", output, re.M
    )
    assert "Bytes that all ranks send between 2 nodes" in output
    assert re.search(
        r"Bytes that an RPC .+ between 2 nodes\n.+\n.+\n\| 1,000,000 \| 2,0\d\d,\d\d\d ",
        output,
    )
    assert "KeyboardInterrupt" in output
    assert waiting.left() == []


def test_ctrl_c_on_a_node_that_follows_is_the_end_of_that_node(
    waiting: Machines,
) -> None:
    first, second = begun(waiting)
    os.kill(waiting.find(1, PYTEST), signal.SIGINT)
    assert second.wait() == 2
    assert first.wait() == 1
    print(first.output, second.output)
    assert "Traceback" not in second.output
    assert re.search(
        r"node 1 \(.+\) is gone: its connection ended", first.output
    )


def test_a_node_that_is_unplugged_is_noticed_at_both_ends(
    waiting: Machines,
) -> None:
    first, second = begun(waiting)
    waiting.unplug(1)
    assert (first.wait(), second.wait()) == (1, 1)
    print(first.output, second.output)
    assert re.search(
        r"node 1 \(.+\) (said nothing for 1\d s|is gone)", first.output
    )
    assert "the pytest of node 0 is gone" in second.output


IMPATIENT = """
from pytest_ddpperf.remote import nodes as fleet
from pytest_ddpperf.remote import node
fleet.START_SECONDS = node.START_SECONDS = 1.0  # so that --ddp-timeout says how long is waited
"""


def test_who_does_not_know_the_secret_is_not_let_in_and_a_node_that_did_not_come_is_named(
    waiting: Machines,
) -> None:
    (waiting.folder / "conftest.py").write_text(MEET_IN_A_FILE + IMPATIENT)
    first = waiting.pytest(
        0,
        "--ddp-timeout=15",
        "test_waiting.py",
        variables={"DDPPERF_SECRET": "one"},
    )
    second = waiting.pytest(
        1,
        "--ddp-timeout=15",
        "test_waiting.py",
        variables={"DDPPERF_SECRET": "another"},
    )
    assert second.wait() == 4
    assert first.wait() == 4
    print(first.output, second.output)
    assert "is DDPPERF_SECRET the same on all nodes?" in second.output
    assert (
        "node 1 of 2 did not come within 15 s (--ddp-timeout)" in first.output
    )
    assert (
        "a connection from 10.77.0.2 was dropped: its proof is wrong"
        in first.output
    )
    assert waiting.left() == []


def test_other_code_on_a_node_is_refused(machines: Machines) -> None:
    (machines.folder / "conftest.py").write_text(MEET_IN_A_FILE)
    (machines.folder / "test_step.py").write_text(
        "def test_a(ddp_run):\n    ddp_run(print)\n"
    )
    other = machines.folder.parent / "other"
    shutil.copytree(machines.folder, other)
    (other / "test_step.py").write_text(
        "def test_a(ddp_run):\n    ddp_run(repr)\n"
    )
    first, second = (
        machines.pytest(0, "test_step.py"),
        machines.pytest(1, "test_step.py", folder=other),
    )
    assert (first.wait(), second.wait()) == (4, 4)
    print(first.output, second.output)
    assert re.search(
        r"node 1 \(.+\) has other files than the first node: test_step.py",
        first.output,
    )
    assert second.output == ""
