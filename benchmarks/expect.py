"""What may a user expect? Whole runs of pytest at the default limits, of code that is slower by a
known amount.

    python benchmarks/expect.py [--runs 5] [--changes 0,0.05,0.1,0.2,every10,modes,modes20]
                                [--results expect.jsonl]

A project of one test, whose step (a DDP model on two Gloo ranks) has a change that is not
committed: it is slower by a share of each step, or every tenth step takes fifteen times as long
("every10", 2.4 times less throughput). Or it sleeps for 10 ms, and for 12.5 ms in 30 % of the
launches: "modes" at a limit of 5 %, only interleaved, and "modes20" with 20 launches before the
first look. "interleaved" is --ddp-against HEAD. "stored" is compared with a baseline that was saved
before the first run, and measured again next to the baseline's code if it is suspected. On this
machine as it is ("quiet"), and next to benchmarks/neighbour.py. Cells take turns; each run is a
line of the results file, and a run goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from _common import binomial_interval, done, progress, quartiles, table
from neighbour import neighbour

STEP = """
import os
import random
import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

SLOWER, EVERY, SLEEP, SHARE = {slower}, {every}, {sleep}, {share}


def make_step():
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, steps = torch.randn(64, 256), 0
    sleep = SLEEP
    # the other rank waits for this one
    if os.environ["RANK"] == "0" and random.SystemRandom().random() < SHARE:
        sleep *= 1.25

    def step():
        nonlocal steps
        began = time.perf_counter()
        time.sleep(sleep)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        steps += 1
        if steps % EVERY == 0:
            until = time.perf_counter() + SLOWER * (time.perf_counter() - began)
            while time.perf_counter() < until:
                pass

    return step
"""
TEST = """
from mypackage.train import make_step


def test_step(ddp_benchmark):
    ddp_benchmark(lambda ctx: make_step())
"""
WAYS = ("interleaved", "stored")
# only interleaved, beside the branch whose step sleeps
MODES = {
    "modes": ["--ddp-threshold=p10:5%,p50:5%"],
    "modes20": ["--ddp-threshold=p10:5%,p50:5%", "--ddp-launches=20"],
}
MACHINES = {"quiet": None, "neighbour": 20261124}  # seeds
OPTIONS = ("-p", "no:randomly", "-p", "no:cacheprovider", "-q")
Row = dict[str, Any]  # of the results file


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=5, help="of each cell")
    parser.add_argument(
        "--changes", default="0,0.05,0.1,0.2,every10,modes,modes20"
    )
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("expect.jsonl"),
        help="file to go on with",
    )
    options = parser.parse_args()
    rows = done(options.results)
    cells = [
        (way, change)
        for way, change in product(
            options.ways.split(","), options.changes.split(",")
        )
        if way == "interleaved" or change not in MODES
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        options.results.open("a") as file,
    ):
        project = Path(folder)
        make(project)
        for number, (machine, seed) in product(
            range(options.runs), MACHINES.items()
        ):
            with neighbour(None if seed is None else seed + number):
                for way, change in cells:
                    # An unchanged tree has nothing to compare with itself: git sees another
                    # docstring.
                    if (
                        sum(
                            cell_of(row) == (machine, way, change)
                            for row in rows
                        )
                        > number
                    ):
                        continue
                    row = {
                        "machine": machine,
                        "way": way,
                        "change": change,
                        **run(project, way, change),
                    }
                    rows.append(row)
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    progress(
                        len(rows),
                        options.runs * len(MACHINES) * len(cells),
                        "runs",
                    )
    print(table([TITLES, *lines(rows)]))
    return 0


def cell_of(row: Row) -> tuple[str, ...]:
    return row["machine"], row["way"], row["change"]


def write_step(project: Path, change: str) -> None:
    values = {"slower": 0.0, "every": 1, "sleep": 0.0, "share": 0.0}
    if change.startswith("every"):
        values |= {"slower": 14.0, "every": int(change[5:])}
    elif change in MODES:
        values |= {"sleep": 0.01, "share": 0.3}
    elif change == "asleep":
        values |= {"sleep": 0.01}
    else:
        values["slower"] = float(change)
    text = STEP.format(**values)
    (project / "mypackage/train.py").write_text(text)


def make(project: Path) -> None:
    """A repository with a baseline."""

    def git(*arguments: str) -> None:
        identity = (
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "-c",
            "commit.gpgsign=false",
        )
        subprocess.run(
            ["git", "-C", project, *identity, *arguments],
            check=True,
            capture_output=True,
        )

    (project / "mypackage").mkdir()
    (project / "tests").mkdir()
    (project / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (project / ".gitignore").write_text("__pycache__/\n")
    (project / "tests/test_step.py").write_text(TEST)
    write_step(project, "0")
    git("init", "--quiet")
    git("add", "--all")
    git("commit", "--quiet", "--message", "Add a step")
    pytest(project, "--ddp-save-baseline")
    git("add", "--all")
    git("commit", "--quiet", "--message", "Add its baseline")
    git("switch", "--quiet", "--create", "asleep")
    write_step(project, "asleep")
    git("commit", "--quiet", "--all", "--message", "Sleep in the step")
    git("switch", "--quiet", "-")


def run(project: Path, way: str, change: str) -> Row:
    """The verdict, the seconds of the whole run, and the first cause that is named."""
    write_step(project, change)
    # --ddp-against refuses to compare two trees that are the same
    if change == "0":
        with (project / "mypackage/train.py").open("a") as file:
            file.write(f"# {time.time()}\n")
    began = time.monotonic()
    against = []
    if way == "interleaved":
        against = ["--ddp-against", "asleep" if change in MODES else "HEAD"]
    measured = pytest(project, *against, *MODES.get(change, []))
    return {
        "status": measured["verdict"]["status"],
        "reason": measured["verdict"]["reason"],
        "metrics": [
            c["limit"]["metric"]
            for c in measured["verdict"]["comparisons"]
            if c["status"] == "REGRESSED"
        ],
        "cause": next(iter(measured["evidence"]), ""),
        "speeds": [
            c["speeds"]
            for c in measured["verdict"]["comparisons"]
            if c["speeds"] is not None
        ],
        "launches": len(measured["costs"]),
        "seconds": round(time.monotonic() - began, 1),
    }


def pytest(project: Path, *arguments: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            str(Path(sys.executable).with_name("pytest")),
            *OPTIONS,
            f"--ddp-json={report}",
            *arguments,
        ]
        environ = {
            name: value for name, value in os.environ.items() if name != "CI"
        }
        ended = subprocess.run(
            command, cwd=project, env=environ, capture_output=True, text=True
        )
        if not report.exists():
            raise SystemExit(ended.stdout + ended.stderr)
        (measured,) = json.loads(report.read_text())["measurements"]
    return dict(measured)


TITLES = [
    "machine",
    "way",
    "change",
    "runs",
    "REGRESSED",
    "95 % interval",
    "PASS",
    "INCONCLUSIVE",
    "launches",
    "seconds",
]


def lines(rows: Sequence[Row]) -> list[list[str]]:
    found = []
    for cell in dict.fromkeys(
        map(
            cell_of,
            sorted(rows, key=lambda row: list(MACHINES).index(row["machine"])),
        )
    ):
        chosen = [row for row in rows if cell_of(row) == cell]
        statuses = [row["status"] for row in chosen]
        low, high = binomial_interval(statuses.count("REGRESSED"), len(chosen))
        first, median, third = quartiles([row["seconds"] for row in chosen])
        counts = (
            f"{statuses.count(status)}" for status in ("PASS", "INCONCLUSIVE")
        )
        launches = (
            f"{quartiles([row['launches'] for row in chosen]).median:.0f}"
        )
        red = f"{statuses.count('REGRESSED')}", f"{low:.0%} to {high:.0%}"
        found.append(
            [
                *cell,
                str(len(chosen)),
                *red,
                *counts,
                launches,
                f"{median:.0f} [{first:.0f}, {third:.0f}]",
            ]
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
