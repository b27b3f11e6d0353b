"""Are launches exchangeable? Whole runs compare the same code with itself. The time of most steps
depends on what a process draws once: its heap, its hash seed, its layout (see _same_code.py).

    python benchmarks/independence.py [--runs 10] [--kinds self,commit,slower] [--plugin DIR]
                                      [--results FILE]

A project has one test for each workload, for two Gloo ranks, at the default limits. "self" is
--ddp-against self. "commit" compares with a commit that changes no step: it adds a comment, a file,
a longer name, or a version number, in turns. "slower" compares with a commit that adds 20 % of
work. On this machine as it is ("quiet") and next to benchmarks/neighbour.py. REGRESSED and IMPROVED
of the first two are errors. `--plugin` measures another checkout of the plugin, for a comparison
with an older one.

The second table says how launches differ: by the logarithm of the ratio of the two launches of a
pair, which were interleaved. If each side has drawn something that all its launches share, the mean
of a run's pairs differs from 0 by more than its pairs explain. F compares the two (one-way analysis
of variance; R. A. Fisher, "Statistical Methods for Research Workers", 1925), with a degree of
freedom for each run.

Each measurement is a line of the results file, and a run goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from _common import binomial_interval, done, progress, quartiles, table
from _same_code import WORKLOADS
from neighbour import neighbour

from pytest_ddpperf.records.quantiles import quantile
from pytest_ddpperf.verdict.stats import _incomplete_beta

HERE = Path(__file__).parent
PACKAGE = '''"""The package under test."""
from trained.steps import WORKLOADS

VERSION = "0.1"
WORK = 1.0


def make_step(name):
    make = WORKLOADS[name]
    return make(WORK)
'''
TEST = """
import pytest
import trained


@pytest.mark.parametrize("name", {names!r})
def test_step(ddp_benchmark, name):
    ddp_benchmark(lambda ctx: trained.make_step(name))
"""
# What the current code has that the commit has not, and that no step runs.
CHANGES = {
    "a comment": [
        ("trained/__init__.py", PACKAGE + "\n# No step reads this line.\n")
    ],
    "a file": [("trained/further.py", "VALUES = tuple(range(100))\n")],
    "a longer name": [
        (
            "trained/__init__.py",
            PACKAGE.replace("make =", "function_that_makes_it =").replace(
                "make(", "function_that_makes_it("
            ),
        )
    ],
    "a version number": [
        ("trained/__init__.py", PACKAGE.replace("0.1", "0.2.0.dev1"))
    ],
}
SLOWER = [("trained/__init__.py", PACKAGE.replace("WORK = 1.0", "WORK = 1.2"))]
MACHINES = {"quiet": None, "neighbour": 20261127}  # seeds
OPTIONS = (
    "-p",
    "no:randomly",
    "-p",
    "no:cacheprovider",
    "-q",
    "--ddp-backend=gloo",
    "--ddp-world-size=2",
    "--ddp-min-time=0.25",
)
ERRORS = ("REGRESSED", "IMPROVED")
Row = dict[str, Any]  # of the results file


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--runs", type=int, default=10, help="of each kind on each machine"
    )
    parser.add_argument("--kinds", default="self,commit,slower")
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument(
        "--plugin", type=Path, help="another checkout of the plugin"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("independence.jsonl"),
        help="file to go on with",
    )
    options = parser.parse_args()
    rows = done(options.results)
    kinds, machines = options.kinds.split(","), options.machines.split(",")
    names = options.workloads.split(",")
    with (
        tempfile.TemporaryDirectory() as folder,
        options.results.open("a") as file,
    ):
        project = Project(Path(folder) / "project", names, options.plugin)
        for number, machine, kind in product(
            range(options.runs), machines, kinds
        ):
            if sum(
                (row["machine"], row["kind"]) == (machine, kind) for row in rows
            ) > number * len(names):
                continue
            seed = MACHINES[machine]
            with neighbour(None if seed is None else seed + number):
                for found in project.run(kind, number):
                    rows.append(
                        {
                            "machine": machine,
                            "kind": kind,
                            "run": number,
                            **found,
                        }
                    )
                    file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
            progress(
                len(rows),
                options.runs * len(machines) * len(kinds) * len(names),
                "measurements",
            )
    print(table([TITLES, *rates(rows)]))
    print(
        "\nthe same code: how much the pairs of a run differ, and its sides beyond that\n"
    )
    print(table([SPREAD_TITLES, *spreads(rows)]))
    return 0


class Project:
    """A repository with a test for each workload, and a commit for each kind of run."""

    def __init__(
        self, folder: Path, names: Sequence[str], plugin: Path | None
    ) -> None:
        self._folder, self._plugin = folder, plugin
        (folder / "trained").mkdir(parents=True)
        (folder / "tests").mkdir()
        (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
        (folder / ".gitignore").write_text("__pycache__/\n")
        (folder / "tests/test_step.py").write_text(
            TEST.format(names=list(names))
        )
        shutil.copy(HERE / "_same_code.py", folder / "trained/steps.py")
        (folder / "trained/__init__.py").write_text(PACKAGE)
        self._git("init", "--quiet")
        self._commit()

    def _git(self, *arguments: str) -> None:
        identity = (
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "-c",
            "commit.gpgsign=false",
        )
        subprocess.run(
            ["git", "-C", self._folder, *identity, *arguments],
            check=True,
            capture_output=True,
        )

    def _commit(self) -> None:
        self._git("add", "--all")
        self._git("commit", "--quiet", "--message", "Change something")

    def run(self, kind: str, number: int) -> Iterator[Row]:
        """Yield what was measured of each workload in one run of pytest."""
        changes = list(CHANGES)
        change = changes[number % len(changes)] if kind == "commit" else ""
        files = SLOWER if kind == "slower" else CHANGES.get(change, ())
        against = "self" if kind == "self" else "HEAD"
        for found in self.compare(files, f"--ddp-against={against}"):
            yield {"change": change, **found}

    def compare(
        self, files: Sequence[tuple[str, str]], *arguments: str
    ) -> Iterator[Row]:
        """Yield what was measured of each workload in one run of pytest, with `files` written."""
        for path, text in files:
            (self._folder / path).write_text(text)
        began = time.monotonic()
        try:
            report = self._pytest(*arguments)
        finally:
            self._git("checkout", "--quiet", ".")
            self._git("clean", "--quiet", "--force", "trained")
        seconds = time.monotonic() - began
        for measured in report["measurements"]:
            comparisons = measured["verdict"]["comparisons"]
            sides = (
                measured["measurement"],
                measured["baseline_side"]["measurement"],
            )
            yield {
                "workload": measured["test"]["name"]
                .partition("[")[2]
                .rstrip("]"),
                "status": measured["verdict"]["status"],
                "reason": measured["verdict"]["reason"],
                "notes": measured["notes"],
                "changes": {
                    each["limit"]["metric"]: [each["status"], each["change"]]
                    for each in comparisons
                },
                "p10_ms": [
                    [
                        of_launch(launch, 10)
                        for launch in side["samples"]["step_seconds"]
                    ]
                    for side in sides
                ],
                "p50_ms": [
                    [
                        of_launch(launch, 50)
                        for launch in side["samples"]["step_seconds"]
                    ]
                    for side in sides
                ],
                "run_seconds": round(seconds, 1),
            }

    def _pytest(self, *arguments: str) -> Row:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            command = [
                sys.executable,
                "-m",
                "pytest",
                *OPTIONS,
                f"--ddp-json={report}",
                *arguments,
            ]
            environ = {
                name: value
                for name, value in os.environ.items()
                if name != "CI"
            }
            if self._plugin is not None:
                environ["PYTHONPATH"] = str(self._plugin)
            ended = subprocess.run(
                command,
                cwd=self._folder,
                env=environ,
                capture_output=True,
                text=True,
            )
            if not report.exists():
                raise SystemExit(ended.stdout + ended.stderr)
            return dict(json.loads(report.read_text()))


def of_launch(steps: Sequence[float], q: float) -> float:
    """Return a percentile of a launch's steps in milliseconds."""
    return round(quantile(steps, q) * 1e3, 4)


TITLES = [
    "workload",
    "machine",
    "same code",
    "REGRESSED",
    "IMPROVED",
    "INCONCLUSIVE",
    "slower",
    "REGRESSED",
    "INCONCLUSIVE",
]


def rates(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield a line for each workload and machine, and for all."""
    cells = [(name, machine) for name in WORKLOADS for machine in MACHINES]
    for name, machine in [*cells, ("all", "all")]:
        chosen = [
            row
            for row in rows
            if name == "all"
            or (row["workload"], row["machine"]) == (name, machine)
        ]
        same = [row["status"] for row in chosen if row["kind"] != "slower"]
        slower = [row["status"] for row in chosen if row["kind"] == "slower"]
        if same or slower:
            counts = [
                same.count(status)
                for status in ("REGRESSED", "IMPROVED", "INCONCLUSIVE")
            ]
            found = [
                slower.count(status) for status in ("REGRESSED", "INCONCLUSIVE")
            ]
            yield [
                name,
                machine,
                str(len(same)),
                *map(str, counts),
                str(len(slower)),
                *map(str, found),
            ]
    same = [row["status"] for row in rows if row["kind"] != "slower"]
    if same:
        low, high = binomial_interval(
            sum(status in ERRORS for status in same), len(same)
        )
        yield [
            f"errors: 95 % interval {low:.1%} to {high:.1%}",
            *[""] * (len(TITLES) - 1),
        ]


SPREAD_TITLES = [
    "workload",
    "machine",
    "runs",
    "p10: pairs",
    "sides",
    "F",
    "p",
    "p50: pairs",
    "sides",
    "F",
    "p",
    "seconds",
]


def spreads(rows: Sequence[Row]) -> Iterator[list[str]]:
    for name, machine in product(WORKLOADS, MACHINES):
        chosen = [
            row
            for row in rows
            if (row["workload"], row["machine"]) == (name, machine)
            and row["kind"] != "slower"
        ]
        if len(chosen) > 1:
            seconds = quartiles([row["run_seconds"] for row in chosen]).median
            cells = [
                cell
                for figure in ("p10_ms", "p50_ms")
                for cell in components([row[figure] for row in chosen])
            ]
            yield [name, machine, str(len(chosen)), *cells, f"{seconds:.0f}"]


def components(runs: Sequence[Sequence[Sequence[float]]]) -> list[str]:
    """Return the spread of the pairs of a run, that of the sides beyond it, F and its p-value; run
    x side x launch."""
    pairs = [
        [math.log(now / before) for now, before in zip(*sides, strict=True)]
        for sides in runs
    ]
    freedom = sum(len(own) - 1 for own in pairs)
    within = sum(variance(own) * (len(own) - 1) for own in pairs) / freedom
    # one degree of freedom a run: without an effect, 0
    between = fmean(len(own) * fmean(own) ** 2 for own in pairs)
    beyond = math.sqrt(max(0.0, between - within) / fmean(map(len, pairs)))
    f = between / within
    return [
        f"{math.sqrt(within):.1%}",
        f"{beyond:.1%}",
        f"{f:.1f}",
        f"{f_beyond(f, len(pairs), freedom):.2g}",
    ]


def f_beyond(f: float, numerator: int, denominator: int) -> float:
    """Return the probability of an F at least so large, if nothing differs."""
    return _incomplete_beta(
        denominator / (denominator + numerator * f),
        denominator / 2,
        numerator / 2,
    )


if __name__ == "__main__":
    sys.exit(main())
