"""Suspicions against a stored baseline over two nodes: the baseline's own code is measured again on
both."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.git import git
from tests.nodes.machines import MEET_IN_A_FILE, Machines
from tests.nodes.test_against_nodes import TEST, worktrees

# Of rank 1 alone, which is on node 1. The file stands for a slower machine: it is outside the
# repository, and nothing opens it.
WORK = """
import os, time

def load(ctx):
    is_slower = os.path.exists({flag!r})
    time.sleep({seconds} * (2.2 if is_slower else 1.0) * ctx.rank)
"""
SECONDS = 0.05
SLOWER = 2.2 * SECONDS
# far from both: code that is as fast, and code or a machine that is 2.2 times slower
ASKED = ("--ddp-threshold=p50:40%", "--ddp-launches=3", "--ddp-max-launches=6")
CONFIRM = ("--ddp-confirm=3600", "--ddp-json=all.json", *ASKED)


class Project:
    """A repository of two nodes, with a baseline of its only commit."""

    def __init__(self, machines: Machines) -> None:
        self.machines, self.folder = machines, machines.folder
        self.flag = self.folder.parent / "slower"
        (self.folder / "conftest.py").write_text(MEET_IN_A_FILE)
        (self.folder / "test_step.py").write_text(TEST)
        (self.folder / ".gitignore").write_text("*.log\n*.json\n__pycache__\n")
        self.write(self.folder, SECONDS)
        commit(self.folder, "fast")
        self.run("--ddp-save-baseline", *ASKED)

    def write(self, folder: Path, seconds: float) -> None:
        text = WORK.format(flag=str(self.flag), seconds=seconds)
        (folder / "work.py").write_text(text)

    def run(
        self, *arguments: str, second_folder: Path | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Return the output of the first node, and its report of the test."""
        (self.folder / "all.json").unlink(missing_ok=True)
        (self.folder.parent / "temporary/store.json").unlink(missing_ok=True)
        first = self.machines.pytest(0, *arguments)
        second = self.machines.pytest(1, *arguments, folder=second_folder)
        status = first.wait()
        assert second.wait() == status, second.output
        print(first.output, second.output)
        assert self.machines.left() == []
        if "--ddp-json=all.json" not in arguments:
            assert status == 0
            return first.output, {}
        report = json.loads((self.folder / "all.json").read_text())
        (measured,) = report["measurements"]
        assert measured["fails"] is (status == 1)
        assert measured["plan"]["nodes"] == 2
        return first.output, measured


def commit(folder: Path, message: str) -> None:
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", message)


@pytest.fixture
def project(machines: Machines) -> Project:
    return Project(machines)


def test_a_suspicion_is_confirmed_on_the_code_of_both_nodes_and_a_node_that_lacks_it_is_named(
    project: Project,
) -> None:
    other = project.folder.parent / "other"
    shutil.copytree(project.folder, other)
    shutil.rmtree(other / ".git")
    commit(other, "the same files in another repository")
    project.flag.touch()
    output, measured = project.run(*CONFIRM)
    assert measured["verdict"]["reason"] == "machine-slower"
    assert measured["stored_verdict"]["status"] == "REGRESSED"
    assert "the machine is slower" in output
    assert re.search(
        r"node 1, \S+ \(rank 1\) is slower on both sides: the others wait",
        " ".join(output.split()),
    )
    project.flag.unlink()
    project.write(project.folder, SLOWER)
    output, measured = project.run(*CONFIRM)
    assert measured["verdict"]["reason"] == "confirmed"
    assert measured["baseline_side"]["version"]["commit"] == git(
        project.folder, "rev-parse", "HEAD"
    )
    assert re.search(r"changed: work.py( \(load .+\))?$", output, re.M)
    assert len(worktrees(project.folder)) == 1

    project.write(other, SLOWER)
    output, measured = project.run(*CONFIRM, second_folder=other)
    assert measured["verdict"]["status"] == "REGRESSED"
    lacking = git(project.folder, "rev-parse", "HEAD")[:12]
    words = " ".join(output.split())
    assert re.search(
        "not confirmed with the baseline's own code: "
        rf"node 1 \(.+?\): .*{lacking}",
        words,
    )
    assert len(worktrees(project.folder)) == len(worktrees(other)) == 1
