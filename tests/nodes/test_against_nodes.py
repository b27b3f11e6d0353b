"""Two versions of the code, each with ranks on both of two nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.git import git
from tests.nodes.machines import MEET_IN_A_FILE, SOON_SECONDS, Machines
from tests.nodes.test_program_nodes import SCRIPT, TRAINING

TEST = """
def training(ctx):
    import torch, work
    from torch.nn.parallel import DistributedDataParallel
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    data = torch.randn(32, 64)
    def step():
        work.load(ctx)
        model(data).sum().backward()
    return step

def test_step(ddp_benchmark):
    ddp_benchmark(training)
"""

# Of rank 1 alone, which is on node 1: what that node runs decides.
WORK = """
import time

def load(ctx):
    until = time.thread_time() + {seconds} * ctx.rank
    while time.thread_time() < until:
        pass
"""


@pytest.fixture
def repository(machines: Machines) -> Machines:
    """Two nodes with one repository, whose version v1 is faster than the working tree."""
    folder = machines.folder
    (folder / "conftest.py").write_text(MEET_IN_A_FILE)
    (folder / "test_step.py").write_text(TEST)
    (folder / "work.py").write_text(WORK.format(seconds=0.0))
    (folder / ".gitignore").write_text("*.log\n*.json\n__pycache__\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "fast")
    git(folder, "tag", "v1")
    (folder / "work.py").write_text(WORK.format(seconds=0.02))
    return machines


def worktrees(folder: Path) -> list[str]:
    return git(folder, "worktree", "list").splitlines()


SCRIPT_TEST = """
def test_script(ddp_benchmark):
    ddp_benchmark.script("slow.py", batch_size=32)
"""


def test_versions_of_a_step_and_of_a_script_are_compared_over_two_nodes(
    repository: Machines,
) -> None:
    folder = repository.folder
    (folder / "tests").mkdir()
    (folder / "tests/test_script.py").write_text(SCRIPT_TEST)
    (folder / "training.py").write_text(TRAINING)
    (folder / "slow.py").write_text(SCRIPT.format(seconds=0.0))
    git(folder, "add", "tests", "training.py", "slow.py")
    git(folder, "commit", "-qm", "a script")
    git(folder, "tag", "-f", "v1")
    (folder / "slow.py").write_text(SCRIPT.format(seconds=0.02))
    first, second = repository.both(
        repository.pytest,
        "--ddp-against=v1",
        "--ddp-json=all.json",
        "--ddp-threshold=cpu_p50:300%",
    )
    print(first.output, second.output)
    assert (first.process.returncode, second.process.returncode) == (1, 1)
    assert re.search(r"changed: work.py( \(load .+\))?$", first.output, re.M)
    assert re.search(r"changed: slow.py", first.output)
    assert "the ranks are on several nodes" in first.output
    report = json.loads((folder / "all.json").read_text())
    assert {
        outcome["test"]["name"]: outcome["verdict"]["status"]
        for outcome in report["measurements"]
    } == {"test_step": "REGRESSED", "test_script": "REGRESSED"}
    for outcome in report["measurements"]:
        assert outcome["plan"]["nodes"] == 2
    assert first.output.count("REGRESSED: ") == 2
    assert repository.left() == []
    assert len(worktrees(folder)) == 1


def test_a_node_that_lacks_the_version_is_named(repository: Machines) -> None:
    """Each node has a repository of its own, and that of the second was not fetched."""
    other = repository.folder.parent / "other"
    shutil.copytree(repository.folder, other)
    (repository.folder / "work.py").write_text(WORK.format(seconds=0.01))
    git(repository.folder, "commit", "-qam", "slower")
    git(repository.folder, "tag", "v2")
    for folder in (repository.folder, other):
        (folder / "work.py").write_text(WORK.format(seconds=0.02))
    first = repository.pytest(0, "--ddp-against=v2")
    second = repository.pytest(1, "--ddp-against=v2", folder=other)
    assert (first.wait(), second.wait()) == (4, 4)
    print(first.output, second.output)
    assert re.search(
        r"ERROR: --ddp-against: node 1 \(.+\): .*[0-9a-f]{12}", first.output
    )
    assert "git fetch may bring it" in first.output
    assert repository.left() == []
    assert len(worktrees(repository.folder)) == len(worktrees(other)) == 1


def test_other_code_that_only_ranks_import_is_named(
    repository: Machines,
) -> None:
    """When the tests are collected, no node has imported it."""
    other = repository.folder.parent / "other"
    shutil.copytree(repository.folder, other)
    (other / "work.py").write_text(WORK.format(seconds=0.0) + "# another\n")
    first = repository.pytest(0, "--ddp-against=v1")
    second = repository.pytest(1, "--ddp-against=v1", folder=other)
    assert (first.wait(), second.wait()) == (1, 1)
    print(first.output, second.output)
    assert re.search(
        r"node 1 \(.+\) has other files than the first node: work.py",
        first.output,
    )
    assert repository.left() == []


HASTY = """
from pytest_ddpperf.remote import node_pytests
node_pytests._END_SECONDS = 1.0
"""


def test_a_node_that_goes_while_it_checks_out_is_named_and_leaves_nothing(
    repository: Machines,
) -> None:
    (repository.folder / "conftest.py").write_text(MEET_IN_A_FILE + HASTY)
    asked = (
        "--ddp-against=v1",
        "--ddp-against-setup=test -z $HANGS || exec sleep 3600",
    )
    first = repository.pytest(0, *asked)
    second = repository.pytest(1, *asked, variables={"HANGS": "1"})
    until = time.monotonic() + SOON_SECONDS
    while "sleep 3600 " not in repository.left():
        assert time.monotonic() < until, first.output + second.output
        time.sleep(0.1)
    os.kill(repository.find(1, "pytest --ddp"), signal.SIGINT)
    assert (first.wait(), second.wait()) == (4, 2)
    print(first.output, second.output)
    assert re.search(
        r"ERROR: node 1 \(.+\) is gone: its connection ended", first.output
    )
    assert repository.left() == []
    assert len(worktrees(repository.folder)) == 1


def test_a_node_whose_version_is_gone_has_no_baseline(
    repository: Machines,
) -> None:
    """The version's pytest on node 1 ends in the middle of a launch. The current code is measured
    there all the same."""
    base = """
import os, signal

def load(ctx):
    if ctx.rank:
        # its rank server's parent is the template: the pytest is found by its worktree
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                command = open(f"/proc/{pid}/cmdline").read()
                cwd = os.readlink(f"/proc/{pid}/cwd")
                same = os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
            except OSError:
                continue
            if same and "plugin.remote_worker" in command and cwd == os.getcwd():
                os.kill(int(pid), signal.SIGKILL)
"""
    (repository.folder / "work.py").write_text(base)
    git(repository.folder, "commit", "-qam", "ends")
    git(repository.folder, "tag", "ends")
    (repository.folder / "work.py").write_text(WORK.format(seconds=0.0))
    first, second = repository.both(repository.pytest, "--ddp-against=ends")
    print(first.output, second.output)
    assert (first.process.returncode, second.process.returncode) == (0, 0)
    assert "NO BASELINE" in first.output
    assert re.search(
        r"rank 1 \(node 1, .+\) failed in the launch: pytest of .+ died: killed by SIGKILL",
        first.output,
    )
    assert repository.left() == []
    assert len(worktrees(repository.folder)) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 2 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_node_without_room_for_the_version_is_named(
    repository: Machines, small_disk: Path
) -> None:
    folder = repository.folder
    (folder / "data.bin").write_bytes(os.urandom(4_000_000))
    git(folder, "add", "data.bin")
    git(folder, "commit", "-qm", "data")
    meet = MEET_IN_A_FILE.replace("tempfile.gettempdir()", repr(str(folder)))
    (folder / "conftest.py").write_text(meet)
    first = repository.pytest(0, "--ddp-against=HEAD")
    second = repository.pytest(
        1, "--ddp-against=HEAD", variables={"TMPDIR": str(small_disk)}
    )
    assert (first.wait(), second.wait()) == (4, 4)
    print(first.output, second.output)
    assert re.search(
        r"ERROR: --ddp-against: node 1 \(.+\): .+ cannot be checked out: "
        "error: unable to write file data.bin",
        first.output,
    )
    assert list(small_disk.glob("ddpperf-*")) == []
    assert len(worktrees(repository.folder)) == 1
