"""Does a pull request that touches one of twenty workloads take the time of one?

    python benchmarks/unreached.py [--tests 20] [--rounds 5]

A project has as many tests as asked, each with a module of its own, and a commit that changes one
of these modules. The whole project is compared with the commit before ("all"), and so is the test
that the change reaches, alone ("one"), in turns. What the others cost is the difference.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from _common import progress, spread, table, verdict

WORKLOAD = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def setup(ctx):
    model = DDP(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 256)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step
"""
TEST = """
from workload_{number:02} import setup

def test_{number:02}(ddp_benchmark):
    ddp_benchmark(setup)
"""
MOST_SECONDS = 3.0  # asked of each test that a change cannot reach


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tests", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    changed = args.tests // 2
    seconds: dict[str, list[float]] = {"all": [], "one": []}
    others: list[float] = []
    unreached: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        _commit_project(project, args.tests, changed)
        for number in range(args.rounds):
            names = ("all", "one") if number % 2 else ("one", "all")
            for name in names:
                files = [f"test_{changed:02}.py"] if name == "one" else []
                taken, reasons = _compare(project, files)
                seconds[name].append(taken)
                if name == "all":
                    unreached.append(reasons.count("unreached"))
            difference = seconds["all"][-1] - seconds["one"][-1]
            others.append(difference / (args.tests - 1))
            progress(number + 1, args.rounds, "comparisons")
    print(
        f"{args.tests} tests, a change reaches one; median [quartiles] of {args.rounds} rounds\n"
    )
    rows = [["", "seconds"]]
    rows.append(["all tests", spread(seconds["all"], "s")])
    rows.append(["the one that is reached, alone", spread(seconds["one"], "s")])
    rows.append(["each of the others", spread(others, "s")])
    print(table(rows))
    return verdict(
        [
            (
                f"at most {MOST_SECONDS:g} s for each test that is not reached",
                median(others) <= MOST_SECONDS,
            ),
            (
                "all tests but one were not reached",
                set(unreached) == {args.tests - 1},
            ),
        ]
    )


def _commit_project(project: Path, tests: int, changed: int) -> None:
    """A repository with a commit of `tests` tests, and one that changes what a test measures."""
    for number in range(tests):
        (project / f"workload_{number:02}.py").write_text(WORKLOAD)
        test = TEST.format(number=number)
        (project / f"test_{number:02}.py").write_text(test)
    _git(project, "init", "--quiet")
    _git(project, "add", "--all")
    _git(project, "commit", "--quiet", "--message", "Train")
    with (project / f"workload_{changed:02}.py").open("a") as file:
        file.write("\n# Another comment.\n")
    _git(project, "commit", "--quiet", "--all", "--message", "Explain")


def _git(project: Path, *arguments: str) -> None:
    who = ["-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost"]
    subprocess.run(["git", *who, *arguments], cwd=project, check=True)


def _compare(project: Path, files: list[str]) -> tuple[float, list[str]]:
    """Seconds of a run that compares `files`, or all, with the commit before, and why each test
    passed or did not."""
    report = project.parent / f"{project.name}.json"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("--ddp-against", "HEAD~1", "--ddp-world-size", "2"),
        *("--ddp-json", str(report)),
        *files,
    ]
    environ = {
        name: value for name, value in os.environ.items() if name != "CI"
    }
    began = time.perf_counter()
    ran = subprocess.run(
        command,
        cwd=project,
        env=environ,
        capture_output=True,
        text=True,
    )
    taken = time.perf_counter() - began
    if ran.returncode:
        raise RuntimeError(ran.stdout + ran.stderr)
    measurements = json.loads(report.read_text())["measurements"]
    report.unlink()
    return taken, [measured["verdict"]["reason"] for measured in measurements]


if __name__ == "__main__":
    sys.exit(main())
