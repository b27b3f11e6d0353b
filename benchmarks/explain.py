"""Does the first line of a red test name the cause? Whole runs of pytest, with planted causes of a slowdown.

    python benchmarks/explain.py [--runs 5] [--causes NAME,...] [--results explain.jsonl]

A project has a test for each cause (see _causes.py). A change that is not committed plants all of them, and each test
is compared with the commit ("interleaved", --ddp-against HEAD) or with a baseline that was saved before the first run
("stored"), on this machine as it is ("quiet") and next to benchmarks/neighbour.py. A finding counts as right if the
first one is what was planted. Of unchanged code, and of a rank that is late by 5 %, findings are looked for whatever
the verdict is, as if it had been called slower by what was measured. Each measurement is a line of the results file,
and a run goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from _causes import CAUSES, RPC, WITHOUT_VERDICT, is_named, modules
from _common import binomial_interval, done, progress, quartiles, table
from neighbour import neighbour

from pytest_ddpperf.explain import find
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.samples import Measurement
from pytest_ddpperf.verdict.stats import percentile

TEST = """
import pytest
from causes import CAUSES
from planted import CHANGED

@pytest.mark.parametrize("cause", {causes!r})
def test_step(ddp_benchmark, cause):
    ddp_benchmark(lambda ctx: CAUSES[cause](ctx, CHANGED))

@pytest.mark.parametrize("cause", {rpc!r})
def test_rpc(rpc_benchmark, cause):
    rpc_benchmark(lambda ctx: CAUSES[cause](ctx, CHANGED))
"""
WAYS = {"interleaved": ("--ddp-against", "HEAD"), "stored": ()}
MACHINES = {"quiet": None, "neighbour": 20261125}  # seeds
OPTIONS = ("-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--ddp-backend=gloo")
Row = dict[str, Any]  # of the results file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each way on each machine")
    parser.add_argument("--causes", default=",".join(CAUSES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--results", type=Path, default=Path("explain.jsonl"), help="file to go on with")
    options = parser.parse_args()
    rows = done(options.results)
    causes, ways = options.causes.split(","), options.ways.split(",")
    with tempfile.TemporaryDirectory() as folder, options.results.open("a") as file:
        project = Project(Path(folder), causes, with_baseline="stored" in ways)
        for number, (machine, seed), way in product(range(options.runs), MACHINES.items(), ways):
            cell = [row for row in rows if (row["machine"], row["way"]) == (machine, way)]
            missing = [cause for cause in causes if sum(row["cause"] == cause for row in cell) <= number]
            if not missing:
                continue
            with neighbour(None if seed is None else seed + number):
                for found in project.run(way, missing):
                    rows.append({"machine": machine, "way": way, **found})
                    file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
            progress(len(rows), options.runs * len(MACHINES) * len(ways) * len(causes), "measurements")
    print(table([TITLES, *lines(rows)]))
    return 0


class Project:
    """A repository with a test for each cause, and a baseline if it is wanted."""

    def __init__(self, folder: Path, causes: Sequence[str], *, with_baseline: bool) -> None:
        self._top = folder
        (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
        (folder / ".gitignore").write_text("__pycache__/\n")
        (folder / "causes.py").write_text(Path(__file__).with_name("_causes.py").read_text())
        (folder / "test_causes.py").write_text(
            TEST.format(causes=[cause for cause in causes if cause not in RPC], rpc=[*RPC])
        )
        self._plant(changed=False)
        self._git("init", "--quiet")
        self._commit()
        if with_baseline:
            self._pytest([], "--ddp-save-baseline")
            self._commit()

    def _git(self, *arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", self._top, *identity, *arguments], check=True, capture_output=True)

    def _commit(self) -> None:
        self._git("add", "--all")
        self._git("commit", "--quiet", "--message", "A commit")

    def _plant(self, *, changed: bool) -> None:
        for name, text in {"planted.py": f"CHANGED = {changed}\n", **modules(changed)}.items():
            (self._top / name).write_text(text)

    def run(self, way: str, causes: Sequence[str]) -> Iterator[Row]:
        """Yield what came of each test."""
        self._plant(changed=True)
        for measured in self._pytest(causes, *WAYS[way]):
            cause = measured["test"]["name"].partition("[")[2].rstrip("]")
            status = measured["verdict"]["status"] if measured["verdict"] else "not measured"
            findings = measured["findings"]
            if cause in WITHOUT_VERDICT and way == "interleaved":
                findings = codec.encode(found_in(measured))
            yield {
                "cause": cause,
                "status": status,
                "findings": findings,
                "evidence": measured["evidence"],
                "error": measured["error"],
                "seconds": measured["seconds"],
            }

    def _pytest(self, causes: Sequence[str], *arguments: str) -> list[Row]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            tests = [f"test_causes.py::test_{'rpc' if cause in RPC else 'step'}[{cause}]" for cause in causes]
            command = [Path(sys.executable).with_name("pytest"), *OPTIONS, f"--ddp-json={report}", *arguments, *tests]
            environ = {name: value for name, value in os.environ.items() if name != "CI"}
            ended = subprocess.run(command, cwd=self._top, env=environ, capture_output=True, text=True)
            if not report.exists():
                raise SystemExit(ended.stdout + ended.stderr)
            return list(json.loads(report.read_text())["measurements"])


def found_in(measured: Row) -> object:
    """Return the findings of a comparison, whatever its verdict is."""
    now, before = (codec.decode(Measurement, side["measurement"]) for side in (measured, measured["baseline_side"]))
    rise = percentile(now.samples.step_seconds, 50) - percentile(before.samples.step_seconds, 50)
    return find(now, before, rise, is_paired=True, level=measured["level"])


TITLES = ["planted", "named", "95 % interval", "quiet", "neighbour", "interleaved", "stored", "red", "seconds"]


def lines(rows: Sequence[Row]) -> list[list[str]]:
    found = []
    for cause in CAUSES:
        chosen = [row for row in rows if row["cause"] == cause]
        if not chosen:
            continue
        named = [row for row in chosen if is_named(cause, row["findings"])]
        low, high = binomial_interval(len(named), len(chosen))
        by = [
            f"{sum(row[key] == value for row in named)} of {sum(row[key] == value for row in chosen)}"
            for key, value in (*product(["machine"], MACHINES), *product(["way"], WAYS))
        ]
        red = f"{sum(row['status'] == 'REGRESSED' for row in chosen)} of {len(chosen)}"
        seconds = f"{quartiles([row['seconds'] for row in chosen]).median:.0f}"
        found.append([cause, f"{len(named)} of {len(chosen)}", f"{low:.0%} to {high:.0%}", *by, red, seconds])
    return found


if __name__ == "__main__":
    sys.exit(main())
