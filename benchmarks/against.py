"""Whole runs of `pytest --ddp-against` on a small package of two commits, the second a tenth slower in its step.

    python benchmarks/against.py [--runs 30] [--slower 10]

Runs against `self` are green where the gate holds what it promises: REGRESSED there is a false alarm. Runs against
`HEAD~1` have the slower commit: anything but REGRESSED is a miss. They take turns; each is a pytest process of
its own, from start to end, with limits of 5 %, and shows how long it took.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import binomial_interval, progress, quartiles, table
from neighbour import add_option, neighbour

STEP = """
import torch
import torch.distributed as dist

PRODUCTS = {products}


def setup(ctx):
    x, total = torch.randn(160, 160), torch.ones(10)

    def step():
        for _ in range(PRODUCTS):
            x @ x
        dist.all_reduce(total)

    return step
"""
TEST = """
from slowly import setup


def test_step(ddp_benchmark):
    ddp_benchmark(setup)
"""
OPTIONS = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:benchmark", "--ddp-threshold=p10:5%,p50:5%")
OPTIONS += ("--ddp-min-time=0",)  # so many steps, however short they are
# An A/A check takes all launches that it may; a regression is to be found within a minute.
LAUNCHES = {
    "self": ("--ddp-steps=15", "--ddp-launches=4", "--ddp-max-launches=16"),
    "HEAD~1": ("--ddp-launches=5", "--ddp-max-launches=40"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30, help="against the same commit")
    parser.add_argument("--slower", type=int, default=10, help="runs against the commit before")
    add_option(parser)
    options = parser.parse_args()
    kinds = ["self"] * options.runs
    for number in range(options.slower):  # spread among the others
        kinds.insert((number + 1) * len(kinds) // (options.slower + 1) + number, "HEAD~1")
    with tempfile.TemporaryDirectory() as folder, neighbour(options.neighbour):
        repository = Path(folder)
        make(repository)
        rows = []
        for number, ref in enumerate(kinds):
            rows.append((ref, *run(repository, ref)))
            progress(number + 1, len(kinds), "runs")
    print(table([("against", "runs", "REGRESSED", "95 % interval", "INCONCLUSIVE", "seconds"), *lines(rows)]))
    return 0


def make(repository: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", repository, *identity, *arguments], check=True)

    git("init", "--quiet")
    (repository / "pytest.ini").write_text("[pytest]\npythonpath = src\n")
    for name, text in (("src/slowly/__init__.py", ""), ("tests/test_step.py", TEST)):
        (repository / name).parent.mkdir(parents=True)
        (repository / name).write_text(text)
    for products in (40, 44):
        (repository / "src/slowly/__init__.py").write_text(STEP.format(products=products))
        git("add", "--all")
        git("commit", "--quiet", "--message", f"{products} products a step")


def run(repository: Path, ref: str) -> tuple[str, float]:
    """The verdict, and the seconds of the whole run."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [Path(sys.executable).with_name("pytest"), *OPTIONS, *LAUNCHES[ref], f"--ddp-json={report}"]
        command += ["--ddp-against", ref]
        result = subprocess.run(command, cwd=repository, capture_output=True, text=True)
        if not report.exists():
            raise SystemExit(result.stdout + result.stderr)
        (measurement,) = json.loads(report.read_text())["measurements"]
    return measurement["verdict"]["status"], time.monotonic() - began


def lines(rows: list[tuple[str, str, float]]) -> list[list[str]]:
    found = []
    for ref in dict.fromkeys(ref for ref, _, _ in rows):
        chosen = [row for row in rows if row[0] == ref]
        red = sum(verdict == "REGRESSED" for _, verdict, _ in chosen)
        low, high = binomial_interval(red, len(chosen))
        undecided = sum(verdict == "INCONCLUSIVE" for _, verdict, _ in chosen)
        first, median, third = quartiles([seconds for _, _, seconds in chosen])
        spread = f"{median:.0f} [{first:.0f}, {third:.0f}], at most {max(row[2] for row in chosen):.0f}"
        rate = f"{red / len(chosen):.0%}", f"{low:.0%} to {high:.0%}", f"{undecided / len(chosen):.0%}"
        found.append([ref, str(len(chosen)), *rate, spread])
    return found


if __name__ == "__main__":
    sys.exit(main())
