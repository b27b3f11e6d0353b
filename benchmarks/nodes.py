"""Is the comparison of two versions right over several nodes? Whole runs by torchrun, on nodes that
are namespaces of this machine.

    python benchmarks/nodes.py [--nodes 2,4] [--kinds unchanged,...] [--runs 20] [--results FILE]

Needs Linux, root and two cores. Each node has a core, or shares one if there are more nodes than
cores, and a clock 1,000 s ahead of the one before. A repository has two commits: the second changes
a comment ("unchanged"), or its step computes 20 % more ("slower"). Both are compared by
--ddp-against HEAD~1, as a step of DDP (the kinds "unchanged" and "slower"), and as a script that
owns its loop ("program"). "stored": the first commit is saved as a baseline over all nodes, and the
second is compared with that; suspicions are confirmed on the first one's code. "bisect": of eight
commits, one has the slower step, and `ddpperf bisect` searches for it.

Unchanged code must not fail, slower code must be REGRESSED, and the slower commit found. Each
measurement is a line of the results file, and a run goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _common import (
    binomial_interval,
    done,
    progress,
    spread,
    table,
    verdict,
)
from _nodes import Ended, Nodes, missing, nodes

# by which way what change of the code is compared
KINDS = {
    "unchanged": (("against", "unchanged"),),
    "slower": (("against", "slower"),),
    "program": (("program", "unchanged"), ("program", "slower")),
    "stored": (("stored", "unchanged"), ("stored", "slower")),
    "bisect": (("bisect", "slower"),),
}
# Most of a step is these rounds, so that 20 % more of them are nearly 20 % of a step.
WORK = "ROUNDS = {rounds}  # {comment}\n"
ROUNDS, SLOWER_ROUNDS = 50, 60
COMMITS, SLOWER_FROM = 8, 4  # of a search
TRAINING = """
import torch
from torch.nn.parallel import DistributedDataParallel
from work import ROUNDS

def training():
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    layer, inputs = torch.nn.Linear(256, 256), torch.randn(64, 256)

    def step():
        hidden = inputs
        with torch.no_grad():
            for _ in range(ROUNDS):
                hidden = torch.tanh(layer(hidden))
        optimizer.zero_grad()
        model(hidden).square().mean().backward()
        optimizer.step()

    return step
"""
SCRIPT = """
import torch.distributed as dist
from training import training

dist.init_process_group("gloo")
step = training()
while True:
    step()
"""
TESTS = """
def setup(ctx):
    from training import training
    return training()

def test_step(ddp_benchmark):
    ddp_benchmark(setup)

def test_program(ddp_benchmark):
    ddp_benchmark.script("train.py")
"""
FILES = {
    "pytest.ini": "[pytest]\npythonpath = .\n",
    ".gitignore": "__pycache__\nbaselines\n",
    "training.py": TRAINING,
    "train.py": SCRIPT,
    "tests/test_nodes.py": TESTS,
}
NO_VERDICT = "NO VERDICT"
SHOWN = 4000  # characters of the output of a node
Row = dict[str, Any]  # of the results file


class Cell(NamedTuple):
    """What is measured in each round."""

    way: str
    code: str
    nodes: int


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", default="2,4")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("nodes.jsonl"),
        help="file to go on with",
    )
    options = parser.parse_args()
    if why := missing():
        sys.exit(why)
    # ended like Ctrl-C, with nothing left
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cells = [
        Cell(way, code, int(count))
        for count in options.nodes.split(",")
        for kind in options.kinds.split(",")
        for way, code in KINDS[kind]
    ]
    rows = done(options.results)
    measure(cells, options.runs, rows, options.results)
    return report(rows)


def measure(
    cells: Sequence[Cell], runs: int, rows: list[Row], results: Path
) -> None:
    """Add the rows that are missing, each cell in turn."""
    measured = {(row["run"], cell_of(row)) for row in rows}
    wanted = [
        (number, cell)
        for number in range(runs)
        for cell in cells
        if (number, cell) not in measured
    ]
    with results.open("a") as file:
        for count, (number, cell) in enumerate(wanted, 1):
            row = {"run": number, **cell._asdict(), **outcome(cell)}
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            progress(count, len(wanted), "runs")


def cell_of(row: Row) -> Cell:
    return Cell(row["way"], row["code"], row["nodes"])


def outcome(cell: Cell) -> Row:
    """Compare both commits once, in a repository of its own."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        project = Project(Path(folder))
        project.commit(ROUNDS, "a comment")
        with nodes(project.folder, cell.nodes) as over:
            how = searched if cell.way == "bisect" else compared
            row = how(project, over, cell)
        left = project.left()
    return {**row, "left": left, "seconds": round(time.monotonic() - began, 1)}


def compared(project: Project, over: Nodes, cell: Cell) -> Row:
    if cell.way == "stored":
        saving = project.pytest(over, cell, "--ddp-save-baseline")
        if any(node.status != 0 for node in saving):
            return failed(saving)
    if cell.code == "unchanged":
        project.commit(ROUNDS, "another comment")
    else:
        project.commit(SLOWER_ROUNDS, "a comment")
    against = [] if cell.way == "stored" else ["--ddp-against=HEAD~1"]
    ended = project.pytest(
        over, cell, *against, f"--ddp-json={project.reported}"
    )
    if not project.reported.exists():
        return failed(ended)
    (measured,) = json.loads(project.reported.read_text())["measurements"]
    if measured["verdict"] is None:
        return failed(ended)
    assert measured["plan"]["nodes"] == cell.nodes
    return {
        "red": any(node.status != 0 for node in ended),
        **judged("", measured["verdict"]),
        **judged("stored_", measured["stored_verdict"]),
        "differing": (measured["baseline_side"] or {}).get("differing"),
        "launches": len(measured["costs"]),
        "p50_seconds": measured["percentile_seconds"]["p50"],
        "notes": measured["notes"],
        "output": "",
    }


def searched(project: Project, over: Nodes, cell: Cell) -> Row:
    """Search for the slower one of several commits."""
    for number in range(1, COMMITS):
        is_slower = number >= SLOWER_FROM
        rounds = SLOWER_ROUNDS if is_slower else ROUNDS
        project.commit(rounds, f"commit {number}")
    ended = project.bisect(over, cell, COMMITS - 1)
    if not project.reported.exists():
        return failed(ended)
    answer = json.loads(project.reported.read_text())
    found = [each["subject"] for each in answer["found"]]
    row = failed(ended)
    if found == [f"commit {SLOWER_FROM}"]:
        row.update(status="REGRESSED", output="")
    row["red"] = any(node.status != 0 for node in ended)
    return row


def failed(ended: Sequence[Ended]) -> Row:
    """The row of a run without a verdict: what the nodes wrote, and which had to be killed."""
    return {
        "red": True,
        **judged("", None),
        **judged("stored_", None),
        "status": NO_VERDICT,
        "notes": [],
        "output": [(node.status, node.output[-SHOWN:]) for node in ended],
    }


def judged(prefix: str, found: Any) -> Row:
    """Return status, reason and the change of the first limit, None where nothing was compared."""
    comparisons = found["comparisons"] if found else []
    change = comparisons[0]["change"]["estimate"] if comparisons else None
    return {
        f"{prefix}status": found and found["status"],
        f"{prefix}reason": found and found["reason"],
        f"{prefix}change": change,
    }


class Project:
    """A repository with both tests."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._top = folder, folder / "project"
        self.reported = folder / "report.json"
        (self._top / "tests").mkdir(parents=True)
        for name, text in FILES.items():
            (self._top / name).write_text(text)
        self._git("init", "--quiet")

    def commit(self, rounds: int, comment: str) -> None:
        text = WORK.format(rounds=rounds, comment=comment)
        (self._top / "work.py").write_text(text)
        self._git("add", ".")
        self._git("commit", "--quiet", "--message", comment)

    def pytest(self, over: Nodes, cell: Cell, *options: str) -> list[Ended]:
        name = "test_program" if cell.way == "program" else "test_step"
        ranks = _ranks(cell)
        return over.pytest(*ranks, *options, _test(name), cwd=self._top)

    def bisect(self, over: Nodes, cell: Cell, commits: int) -> list[Ended]:
        """Search the last commits."""
        return over.run(
            *("pytest_ddpperf", "bisect", _test("test_step")),
            f"--good=HEAD~{commits}",
            f"--json={self.reported}",
            *("--", "-pno:randomly", "-pno:benchmark", *_ranks(cell)),
            cwd=self._top,
        )

    def left(self) -> list[str]:
        """Return what the runs left behind: worktrees and temporary folders."""
        _, *trees = self._git("worktree", "list").splitlines()
        folders = self.folder.glob("temporary*/ddpperf-*")
        return [*trees, *map(str, folders)]

    def _git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        # else git goes on in the background and writes there
        alone = ("-c", "commit.gpgsign=false", "-c", "gc.auto=0")
        command = ["git", "-C", str(self._top), *identity, *alone, *arguments]
        ended = subprocess.run(
            command, check=True, capture_output=True, text=True
        )
        return ended.stdout


def _ranks(cell: Cell) -> list[str]:
    return ["--ddp-backend=gloo", f"--ddp-world-size={cell.nodes}"]


def _test(name: str) -> str:
    return f"tests/test_nodes.py::{name}"


# --- the table

TITLES = (
    "compared",
    "code",
    "nodes",
    "runs",
    "red",
    "REGRESSED",
    "95 % interval",
    "INCONCLUSIVE",
    "no verdict",
    "re-measured",
    "change",
    "launches",
    "step",
    "seconds a run",
)


def report(rows: Sequence[Row]) -> int:
    cells = sorted({cell_of(row) for row in rows})
    lines = [
        line(cell, [row for row in rows if cell_of(row) == cell])
        for cell in cells
    ]
    print(table([TITLES, *lines]))
    print("change: of p10, median [quartiles]; step: p50 of the second commit")
    for row in rows:
        if row["status"] == NO_VERDICT:
            print(cell_of(row), f"run {row['run']}: no verdict", row["output"])
    unchanged, slower = (
        [row for row in rows if row["code"] == code]
        for code in ("unchanged", "slower")
    )
    promises = [
        (
            "unchanged code is never red",
            not any(row["red"] for row in unchanged),
        ),
        (
            "code that is 20 % slower is always found",
            all(row["status"] == "REGRESSED" for row in slower),
        ),
        ("nothing is left behind", not any(row["left"] for row in rows)),
    ]
    return verdict(promises)


def line(cell: Cell, chosen: Sequence[Row]) -> list[str]:
    of = len(chosen)
    statuses = [row["status"] for row in chosen]
    found = statuses.count("REGRESSED")
    low, high = binomial_interval(found, of)
    judged_rows = [row for row in chosen if row["change"] is not None]
    shown = ["-", "-", "-"]
    if judged_rows:
        shown = [
            spread([row["change"] for row in judged_rows], "%", 100),
            f"{statistics.median(row['launches'] for row in judged_rows):g}",
            spread([row["p50_seconds"] for row in judged_rows], "ms", 1e3),
        ]
    return [
        cell.way,
        cell.code,
        str(cell.nodes),
        str(of),
        str(sum(row["red"] for row in chosen)),
        str(found),
        f"{low:.0%} to {high:.0%}",
        str(statuses.count("INCONCLUSIVE")),
        str(statuses.count(NO_VERDICT)),
        str(sum(map(is_re_measured, chosen))),
        *shown,
        spread([row["seconds"] for row in chosen], "s"),
    ]


def is_re_measured(row: Row) -> bool:
    """Whether a suspicion was measured again, or a note says why that settled nothing."""
    return row["stored_status"] is not None or any(
        note.startswith("not confirmed with the baseline's own code")
        for note in row["notes"]
    )


if __name__ == "__main__":
    sys.exit(main())
