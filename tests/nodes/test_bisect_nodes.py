"""`ddpperf bisect` with ranks on both of two nodes."""

from __future__ import annotations

from functools import partial

from tests.git import git
from tests.nodes.machines import Machines
from tests.nodes.test_against_nodes import TEST, WORK


def test_the_slower_commit_is_found_over_two_nodes(machines: Machines) -> None:
    folder = machines.folder
    (folder / "test_step.py").write_text(TEST)
    (folder / ".gitignore").write_text("*.log\n__pycache__\n")
    git(folder, "init", "-q")
    commits = []
    for seconds, subject in (
        (0.0, "Fast"),
        (0.05, "Load the data twice"),
        (0.0501, "Fix a typo"),
    ):
        (folder / "work.py").write_text(WORK.format(seconds=seconds))
        git(folder, "add", ".")
        git(folder, "commit", "-qm", subject)
        commits.append(git(folder, "rev-parse", "HEAD"))
    temporary = str(folder.parent / "cache")
    first, second = machines.both(
        partial(
            machines.torchrun,
            module=("pytest_ddpperf", "bisect"),
            variables={"XDG_CACHE_HOME": temporary},
        ),
        "test_step.py::test_step",
        f"--good={commits[0]}",
        "--",
        # the search sets it, too, on the first node, in its own spelling
        "--ddp-steps",
        "20",
        "--ddp-warmup=2",
        "--ddp-min-time=0",
        "--ddp-launches=4",
        "--ddp-max-launches=8",
    )
    print(first.output, second.output)
    assert (first.process.returncode, second.process.returncode) == (0, 0)
    assert f"slower at {commits[1][:12]}" in first.output
    assert "Load the data twice" in first.output
    assert "2 comparisons" in first.output
    assert machines.left() == []
    assert len(git(folder, "worktree", "list").splitlines()) == 1
