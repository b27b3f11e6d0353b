"""Whole runs over two nodes, started by real torchrun."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time

import pytest

from tests.git import git
from tests.nodes.machines import ADDRESSES, SOON_SECONDS, Machines, Node

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


def test_a_run_over_two_nodes(machines: Machines) -> None:
    """Saved, compared, a rank of node 1 slower: and one clock for both, though they are 1,000 s apart."""
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

def test_same(ddp_benchmark):
    ddp_benchmark(training)
"""
    )
    first, second = machines.both(machines.torchrun, "--ddp-save-baseline", "--ddp-json=all.json", "-v", "test_step.py")
    print(first.output, second.output)
    assert "4 passed" in first.output
    assert "ddpperf: 2 nodes over dp" in first.output
    assert re.search(r"rank 1 \(node 1, .+\):", first.output)
    assert re.search(r"clocks of the nodes: within \d", first.output)
    assert "test session starts" not in second.output
    assert (first.process.returncode, second.process.returncode) == (0, 0)
    report = json.loads((machines.folder / "all.json").read_text())
    for outcome in report["measurements"]:
        samples = outcome["measurement"]["samples"]
        assert all(0 < apart < 0.1 for apart in samples["clock_seconds"])
        assert all(0 < step < 10 for launch in samples["step_seconds"] for step in launch)
        assert outcome["measurement"]["environment"]["key"]["nodes"] == 2
    (machines.folder / "test_step.py").write_text(
        STEP
        + """
def test_step(ddp_benchmark):
    ddp_benchmark(lambda ctx: training(ctx, 0.2), batch_size=32)

def test_same(ddp_benchmark):
    assert ddp_benchmark(training).verdict == "PASS"
"""
    )
    first, second = machines.both(machines.torchrun, "--ddp-threshold=cpu_p50:300%", "test_step.py")
    print(first.output, second.output)
    assert "REGRESSED" in first.output
    assert re.search(r"slowest rank: 1 \(node 1, .+\), its CPU time", first.output)
    assert "1 failed, 1 passed" in first.output
    assert first.process.returncode == second.process.returncode == 1, "torchrun's own, for both"
    assert machines.left() == []


def test_a_verdict_is_the_same_on_all_nodes(machines: Machines) -> None:
    """So a test may go on by it."""
    (machines.folder / "test_step.py").write_text(
        STEP
        + """
def test_step(ddp_run, ddp_benchmark):
    assert ddp_benchmark(training).verdict in ("PASS", "NOT GATED")
    assert len(ddp_run(who)) == 2

def test_slow(ddp_run, ddp_benchmark):
    import os
    def slow(ctx):
        return training(ctx, 0.2 if os.path.exists("slow") else 0.0)
    try:
        ddp_benchmark(slow)
        failed = 0
    except pytest.fail.Exception as error:
        assert error.result.verdict == "REGRESSED"
        failed = 1
    seen = ddp_run(lambda ctx, failed: failed, failed)
    assert seen == [failed, failed]
    assert failed == os.path.exists("slow")
"""
    )
    for asked in ("--ddp-save-baseline", "--ddp-threshold=cpu_p50:300%"):
        first, second = machines.both(machines.pytest, asked, "test_step.py")
        print(first.output, second.output)
        assert "2 passed" in first.output
        assert (first.process.returncode, second.process.returncode) == (0, 0)
        (machines.folder / "slow").touch()


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

def test_of_one_process():
    pass

def test_who(ddp_run):
    assert [found[2] for found in ddp_run(who)] == [0, 1]
"""
)


@pytest.fixture
def failing(machines: Machines) -> Machines:
    (machines.folder / "test_failing.py").write_text(FAILING)
    return machines


def test_what_fails_on_another_node_is_told_with_its_place_and_the_next_test_runs(failing: Machines) -> None:
    first, second = failing.both(failing.pytest, "test_failing.py")
    output = first.output
    print(output, second.output)
    assert re.search(r"rank 1 \(node 1, .+\) failed in the function: ValueError: bad shape", output)
    assert 'raise ValueError("bad shape")' in output
    assert re.search(r"rank 1 \(node 1, .+\) failed in the function: killed by SIGABRT", output)
    assert re.search(r"rank 1 \(node 1, .+\) failed in the function: did not end within 20 s", output)
    assert "in hangs" in output
    assert re.search(
        r"node 1 \(.+\): the test asks for a measurement there, and for a call \(who\) on the first", output
    )
    assert re.search(r"node 1 \(.+\): there is no such test: test_failing.py::test_is_not_there", output)
    assert "5 failed, 3 passed" in output
    assert (first.process.returncode, second.process.returncode) == (1, 1)
    assert failing.left() == []


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
    (machines.folder / "test_waiting.py").write_text(WAITING)
    return machines


def begun(machines: Machines) -> tuple[Node, Node]:
    nodes = machines.pytest(0, "test_waiting.py"), machines.pytest(1, "test_waiting.py")
    until_in_launch(machines, *nodes)
    return nodes


def until_in_launch(machines: Machines, first: Node, second: Node) -> None:
    until = time.monotonic() + SOON_SECONDS
    while not (machines.folder / "rank1").exists():
        assert time.monotonic() < until, first.output + second.output
        time.sleep(0.05)


FOLLOWER, LED = "pytest --ddp", "plugin.worker"  # of commands


@pytest.mark.parametrize(
    ("who", "signum", "said"),
    [
        (FOLLOWER, signal.SIGKILL, r"node 1 \(.+\) is gone: its connection ended"),
        (FOLLOWER, signal.SIGSTOP, r"node 1 \(.+\) said nothing for 1\d s"),
        (LED, signal.SIGKILL, r"pytest of node 1 died: killed by SIGKILL"),
        (LED, signal.SIGSTOP, r"pytest of node 1 was stopped by a signal"),
    ],
)
def test_a_node_that_is_gone_is_one_red_test_and_a_line_for_each_later_one(
    waiting: Machines, who: str, signum: signal.Signals, said: str
) -> None:
    first, second = begun(waiting)
    pid = waiting.find(1, who)
    os.kill(pid, signum)
    assert first.wait() == 1
    if who == FOLLOWER and signum == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    second.wait()
    output = first.output
    print(output, second.output)
    assert re.search(rf"rank 1 \(node 1, .+\) failed in the launch: {said}", output)
    assert "2 failed, 1 passed" in output
    assert len(re.findall(said, output)) >= 2
    waiting.until_empty()


def test_followers_of_a_leader_that_is_gone_end(waiting: Machines) -> None:
    first, second = begun(waiting)
    os.kill(waiting.find(0, FOLLOWER), signal.SIGKILL)
    assert second.wait() == 1
    first.wait()
    print(second.output)
    assert "the pytest of node 0 is gone" in second.output
    waiting.until_empty()


def test_ctrl_c_ends_all_nodes(waiting: Machines) -> None:
    first, second = begun(waiting)
    os.kill(waiting.find(0, FOLLOWER), signal.SIGINT)
    assert (first.wait(), second.wait()) == (2, 2)
    print(first.output, second.output)
    assert "KeyboardInterrupt" in first.output
    assert waiting.left() == []


def test_ctrl_c_on_a_node_that_follows_is_the_end_of_that_node(waiting: Machines) -> None:
    first, second = begun(waiting)
    os.kill(waiting.find(1, FOLLOWER), signal.SIGINT)
    assert second.wait() == 2
    assert first.wait() == 1
    print(first.output, second.output)
    assert "Traceback" not in second.output
    assert re.search(r"node 1 \(.+\) is gone: its connection ended", first.output)
    waiting.until_empty()


def test_a_node_that_is_unplugged_is_noticed_at_both_ends(waiting: Machines) -> None:
    first, second = begun(waiting)
    waiting.unplug(1)
    assert (first.wait(), second.wait()) == (1, 1)
    print(first.output, second.output)
    assert re.search(r"node 1 \(.+\) (said nothing for 1\d s|is gone)", first.output)
    assert "the pytest of node 0 is gone" in second.output
    waiting.until_empty()


IMPATIENT = """
from pytest_ddpperf.remote import nodes as fleet
from pytest_ddpperf.remote import node
fleet.START_SECONDS = node.START_SECONDS = 1.0  # so that --ddp-timeout says how long is waited
"""


def test_a_pytest_that_hangs_before_it_measures_is_given_up_with_its_stacks(machines: Machines) -> None:
    (machines.folder / "conftest.py").write_text(IMPATIENT)
    (machines.folder / "test_hangs.py").write_text(
        """
import os, time, pytest

@pytest.fixture
def hangs():
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        time.sleep(3600)

def test_hangs(ddp_run, hangs):
    ddp_run(print)

def test_next(ddp_run):
    ddp_run(print)
"""
    )
    first, second = machines.both(machines.pytest, "--ddp-timeout=30", "test_hangs.py")
    print(first.output, second.output)
    assert re.search(r"pytest of node 1 did not answer for 40 s", first.output)
    assert "in hangs" in first.output
    assert "2 failed" in first.output
    assert (first.process.returncode, second.process.returncode) == (1, 1)
    assert machines.left() == []


@pytest.mark.parametrize(("asked", "status"), [(["--collect-only"], 0), (["-k", "nothing"], 5), (["-n", "2"], 4)])
def test_a_run_in_which_nothing_is_measured_ends_all_nodes_alike(
    waiting: Machines, asked: list[str], status: int
) -> None:
    first, second = waiting.both(waiting.pytest, *asked, "test_waiting.py")
    print(first.output, second.output)
    assert (first.process.returncode, second.process.returncode) == (status, status)
    assert second.output == ""
    assert waiting.left() == []


def test_a_fixture_may_take_longer_than_a_launch(machines: Machines) -> None:
    (machines.folder / "test_slow.py").write_text(
        STEP
        + """
import os

@pytest.fixture(scope="session")
def slow():
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        time.sleep(45)

def test_slow(ddp_run, slow):
    assert len(ddp_run(who)) == 2
"""
    )
    first, second = machines.both(machines.pytest, "--ddp-timeout=30", "test_slow.py")
    print(first.output, second.output)
    assert "1 passed" in first.output
    assert (first.process.returncode, second.process.returncode) == (0, 0)


def test_what_fails_on_another_node_alone_is_run_again_by_the_first(machines: Machines) -> None:
    (machines.folder / "test_reruns.py").write_text(
        STEP
        + """
import os

@pytest.mark.flaky(reruns=2, reruns_delay=3600)
def test_marked(ddp_run):
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

def test_who(ddp_run):
    assert len(ddp_run(who)) == 2
"""
    )
    first, second = machines.both(machines.pytest, "--reruns=2", "--reruns-delay=3600", "test_reruns.py")
    print(first.output, second.output)
    assert "3 passed, 1 rerun" in first.output
    assert (first.process.returncode, second.process.returncode) == (0, 0)


def test_what_is_torn_down_badly_on_another_node_is_an_error(machines: Machines) -> None:
    (machines.folder / "test_torn.py").write_text(
        STEP
        + """
import os

@pytest.fixture
def torn():
    yield
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise RuntimeError("not removed")

@pytest.fixture
def kept():
    found = []
    yield found
    found.pop()

def test_torn(ddp_run, torn):
    assert len(ddp_run(who)) == 2

def test_kept(ddp_run, kept):
    kept.append(ddp_run(who))

def test_who(ddp_run):
    assert len(ddp_run(who)) == 2
"""
    )
    first, second = machines.both(machines.pytest, "test_torn.py")
    print(first.output, second.output)
    assert "3 passed, 1 error" in first.output
    reported = first.output.partition("ERROR at teardown of test_torn")[2]
    assert re.search(r"^node 1 \(.+\): ", reported, re.MULTILINE)
    assert "RuntimeError: not removed" in reported
    assert (first.process.returncode, second.process.returncode) == (1, 1)
    assert machines.left() == []


def test_two_nodes_on_the_same_cores_are_told_and_wait_for_nothing(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPPERF_LOCKS", "on")
    (machines.folder / "test_step.py").write_text(
        STEP
        + """
def test_step(ddp_benchmark):
    ddp_benchmark(training)

def test_again(ddp_benchmark):
    with pytest.raises(pytest.fail.Exception, match="the same machine"):
        ddp_benchmark(training)
    with pytest.raises(pytest.fail.Exception, match="the same machine"):
        ddp_benchmark(training, name="again")

def test_who(ddp_run):
    assert len(ddp_run(who)) == 2
"""
    )
    first, second = (machines.pytest(node, "test_step.py", machine=0) for node in range(2))
    assert (first.wait(), second.wait()) == (1, 1)
    print(first.output, second.output)
    said = r"node 1 \(.+\) is on the same machine and the same cores or devices as node 0: give each node its own"
    assert re.search(said, first.output)
    assert "1 failed, 2 passed" in first.output
    assert machines.left() == []


def test_a_node_that_does_not_come_is_named(waiting: Machines) -> None:
    (waiting.folder / "conftest.py").write_text(IMPATIENT)
    first = waiting.pytest(0, "--ddp-timeout=3", "test_waiting.py")
    assert first.wait() == 4
    print(first.output)
    assert "node 1 of 2 did not come within 3 s (--ddp-timeout)" in first.output
    assert waiting.left() == []


STRANGER = """
import socket, sys
port, sent = int(sys.argv[1]), sys.argv[2]
with socket.create_connection(("10.77.0.1", port), 600) as leader:
    leader.recv(1000)
    try:
        leader.sendall({"garbage": b"GET / HTTP/1.1\\r\\n\\r\\n", "endless": b"x" * 1_000_000, "silence": b""}[sent])
        leader.settimeout(30)
        assert leader.recv(1) == b""
    except ConnectionError:
        pass
"""


def test_strangers_are_dropped_and_told_of_and_do_no_harm(machines: Machines) -> None:
    """From the other node, before that one's pytest comes."""
    (machines.folder / "test_step.py").write_text("def test_a(ddp_run):\n    assert len(ddp_run(print)) == 2\n")
    first = machines.pytest(0, "--ddp-timeout=60", "test_step.py")
    port = machines.port(0)
    attacks = ("garbage", "endless", "silence")
    untrusted = [machines.start(1, [sys.executable, "-c", STRANGER, str(port), sent]) for sent in attacks]
    for process in untrusted:
        assert process.wait() == 0, process.output
    second = machines.pytest(1, "--ddp-timeout=60", "test_step.py")
    statuses = first.wait(), second.wait()
    print(first.output, second.output)
    assert statuses == (0, 0)
    assert "1 passed" in first.output
    assert "a connection from 10.77.0.2 was dropped: it is no pytest of this plugin (2 times)" in first.output
    assert "a connection from 10.77.0.2 was dropped: it gave no proof within 10 s\n" in first.output


def test_who_does_not_know_the_secret_is_not_let_in(waiting: Machines) -> None:
    (waiting.folder / "conftest.py").write_text(IMPATIENT)
    first = waiting.pytest(0, "--ddp-timeout=30", "test_waiting.py", variables={"DDPPERF_SECRET": "one"})
    second = waiting.pytest(1, "--ddp-timeout=30", "test_waiting.py", variables={"DDPPERF_SECRET": "another"})
    assert second.wait() == 4
    assert first.wait() == 4
    print(first.output, second.output)
    assert "is DDPPERF_SECRET the same on all nodes?" in second.output
    assert "node 1 of 2 did not come within 30 s (--ddp-timeout)" in first.output
    assert "a connection from 10.77.0.2 was dropped: its proof is wrong" in first.output
    assert waiting.left() == []


def test_rpc_over_two_nodes(machines: Machines) -> None:
    """Trainers in order over the nodes; parameter servers and the master on the first."""
    (machines.folder / "test_rpc.py").write_text(
        """
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
    )
    first, second = machines.both(machines.pytest, "-rs", "test_rpc.py")
    print(first.output, second.output)
    assert "1 passed, 1 skipped" in first.output
    assert "nodes=...): 3: 2 there" in first.output
    assert (first.process.returncode, second.process.returncode) == (0, 0)


def test_other_code_on_a_node_is_refused(machines: Machines) -> None:
    (machines.folder / "test_step.py").write_text("def test_a(ddp_run):\n    ddp_run(print)\n")
    other = machines.folder.parent / "other"
    shutil.copytree(machines.folder, other)
    (other / "test_step.py").write_text("def test_a(ddp_run):\n    ddp_run(repr)\n")
    first, second = machines.pytest(0, "test_step.py"), machines.pytest(1, "test_step.py", folder=other)
    assert (first.wait(), second.wait()) == (4, 4)
    print(first.output, second.output)
    assert re.search(r"node 1 \(.+\) has other files than the first node: test_step.py", first.output)
    assert second.output == ""


def test_several_processes_a_node_and_a_rendezvous_of_torchruns_own(machines: Machines) -> None:
    """As a training job is started. The first process of each node is its pytest."""
    (machines.folder / "test_step.py").write_text(
        """
def says(ctx):
    import torch.distributed
    print("said by", ctx.rank)
    torch.distributed.barrier()  # else the first to raise may end another before it has said so
    raise ValueError

def test_a(ddp_run):
    assert len(ddp_run(print)) == 2

def test_fails(ddp_run):
    ddp_run(says)
"""
    )
    c10d = ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29501", "--rdzv-id=7"]
    first, second = (
        machines.torchrun(
            node,
            "-s",
            "test_step.py",
            processes=2,
            rendezvous=[*c10d, f"--rdzv-conf=is_host={'true' * (node == 0) or 'false'}", f"--local-addr={address}"],
        )
        for node, address in enumerate(ADDRESSES)
    )
    assert (first.wait(), second.wait()) == (1, 1)
    print(first.output, second.output)
    assert first.output.count("test session starts") == 1
    assert first.output.count("[rank 0] said by 0") == 1, "streamed"
    assert first.output.count("said by 1") == 1, "shown, for those of other nodes are not streamed"
    assert "1 failed, 1 passed" in first.output
    assert "test session starts" not in second.output
    assert machines.left() == []


def test_torchrun_that_is_killed_takes_all_along(waiting: Machines) -> None:
    first, second = (waiting.torchrun(node, "test_waiting.py") for node in range(2))
    until_in_launch(waiting, first, second)
    os.kill(waiting.find(1, "torch.distributed.run"), signal.SIGKILL)
    second.wait()
    assert first.wait() == 1
    print(first.output, second.output)
    assert re.search(r"node 1 \(.+\) is gone: its connection ended", first.output)
    waiting.until_empty()


def test_another_commit_is_measured_beside_the_code_at_hand_on_every_node(machines: Machines) -> None:
    package = machines.folder / "speed.py"
    package.write_text("SECONDS = 0.01\n")
    (machines.folder / "conftest.py").write_text("")
    (machines.folder / "tests").mkdir()
    (machines.folder / "tests/test_step.py").write_text(
        STEP
        + """
import speed

def test_step(ddp_benchmark):
    ddp_benchmark(lambda ctx: training(ctx, speed.SECONDS), batch_size=32)

def test_quick(ddp_run, ddp_benchmark):
    assert [found[2] for found in ddp_run(who)] == [0, 1]
    before = ddp_benchmark(training, name="before", gate=False)
    result = ddp_benchmark(training)
    with pytest.raises(pytest.fail.Exception, match="ZeroDivisionError"):
        ddp_run(lambda ctx: 1 / 0)
    ddp_benchmark(training, name="between", gate=False)
    ddp_benchmark(training, name="again")
    assert before.p50 < 10 and result.p50 < 10
"""
    )
    (machines.folder / ".gitignore").write_text("*.log\n__pycache__\n*.json\n")
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "before"]):
        git(machines.folder, *command)
    package.write_text("SECONDS = 0.1\n")
    asked = ["--ddp-against=HEAD", "--ddp-threshold=cpu_p50:200%", "--ddp-json=all.json", "tests"]
    first, second = machines.both(machines.pytest, *asked)
    print(first.output, second.output)
    assert "1 failed, 1 passed" in first.output
    assert re.search(r"slowest rank: 1 \(node 1, .+\), its CPU time", first.output)
    assert (first.process.returncode, second.process.returncode) == (1, 1)
    slow, _, quick, _, again = json.loads((machines.folder / "all.json").read_text())["measurements"]
    assert slow["verdict"]["status"] == "REGRESSED"
    assert slow["baseline_side"]["differing"] == ["speed.py"]
    assert quick["baseline_side"]["error"] == again["baseline_side"]["error"] == ""
    assert sorted(slow["baseline_side"]["order"][:2]) == ["b", "n"]
    assert len(git(machines.folder, "worktree", "list").splitlines()) == 1
    assert machines.left() == []


def test_a_ref_is_the_first_nodes_commit_on_every_node(machines: Machines) -> None:
    """Without what the code at hand sets as conftests are imported; and refused by name where a clone lacks it."""
    (machines.folder / "speed.py").write_text("import os\nassert 'SET' not in os.environ\nSECONDS = 0.01\n")
    (machines.folder / "tests").mkdir()
    (machines.folder / "tests/test_step.py").write_text(
        STEP
        + """
import speed

def test_step(ddp_benchmark):
    ddp_benchmark(lambda ctx: training(ctx, speed.SECONDS))
"""
    )
    (machines.folder / "conftest.py").write_text("import speed\n")
    (machines.folder / ".gitignore").write_text("*.log\n__pycache__\n*.json\n")
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "one"], ["branch", "other"]):
        git(machines.folder, *command)
    (machines.folder / "speed.py").write_text("import os\nos.environ['SET'] = '1'\nSECONDS = 0.011\n")
    git(machines.folder, "commit", "-qam", "two")
    clone, shallow = machines.folder.parent / "clone", machines.folder.parent / "shallow"
    git(machines.folder, "clone", "-q", machines.folder, clone)
    git(clone, "branch", "other", "HEAD")
    git(machines.folder, "clone", "-q", "--depth=1", machines.folder.as_uri(), shallow)
    asked = ["--ddp-against=other", "--ddp-threshold=cpu_p50:300%", "--ddp-json=all.json", "tests"]
    first, second = machines.pytest(0, *asked), machines.pytest(1, *asked, folder=clone)
    assert (first.wait(), second.wait()) == (0, 0), first.output + second.output
    (step,) = json.loads((machines.folder / "all.json").read_text())["measurements"]
    assert step["baseline_side"]["error"] == ""
    assert step["baseline_side"]["differing"] == ["speed.py"]

    first, second = machines.pytest(0, *asked), machines.pytest(1, *asked, folder=shallow)
    assert (first.wait(), second.wait()) == (4, 4)
    print(first.output, second.output)
    commit = git(machines.folder, "rev-parse", "other")
    assert re.search(rf"node 1 \(.+\): .+shallow lacks {commit}, which other is on the first node", first.output)
    assert f"git fetch origin {commit} brings it" in first.output
    assert machines.left() == []


def test_the_sweep_has_a_row_over_two_machines_beside_that_of_as_many_ranks_on_one(machines: Machines) -> None:
    asked = [
        "--pyargs",
        "pytest_ddpperf.suite.test_ddp_sweep",
        "--ddp-suite-size=tiny",
        "--ddp-disable",
        "-k",
        "resnet50",
    ]
    first, second = machines.both(machines.pytest, *asked)
    print(first.output, second.output)
    rows = re.findall(r"^ +(\d) CPUs -- +(.+?):", first.output, re.MULTILINE)
    assert rows == [("1", "no ddp"), ("1", "1M/1G"), ("2", "1M/2G"), ("2", "2M/1G")]
    assert (first.process.returncode, second.process.returncode) == (0, 0)
