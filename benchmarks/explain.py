"""Does the first line of a red test name the cause? Whole runs of pytest, with planted causes of a
slowdown.

    python benchmarks/explain.py [--runs 5] [--causes NAME,...] [--results explain.jsonl]

A project has a test for each cause (see _causes.py). A change that is not committed plants all of
them, and each test is compared with the commit ("interleaved", --ddp-against HEAD) or with a
baseline that was saved before the first run ("stored"), on this machine as it is ("quiet") and next
to benchmarks/neighbour.py. A finding counts as right if the first one is what was planted. A rank
that is late by 5 % is looked for with a limit of 2 %. Of it and of unchanged code, where both sides
are interleaved, findings are looked for whatever the verdict is, as if what was measured were
slower. All tests of a run are planted, so it has more time than usual to confirm suspicions. A
second table says how much each phase differs over pairs of launches, beside the whole step: could a
phase be judged more finely? The last line says what share of a comparison's time the samples of
stacks take. Each measurement is a line of the results file, and a run goes on where the last one
ended.
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
from statistics import fmean, stdev
from typing import Any

from _causes import CAUSES, RPC, SMALL, WITHOUT_VERDICT, is_named, modules
from _common import binomial_interval, done, progress, quartiles, table
from neighbour import neighbour

from pytest_ddpperf.explain import find
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.quantiles import percentile
from pytest_ddpperf.records.samples import Measurement
from pytest_ddpperf.records.step_phases import PHASES, StepPhases

TEST = """
import pytest
from causes import CAUSES
from planted import CHANGED

@pytest.mark.parametrize("cause", {causes!r})
def test_step(ddp_benchmark, cause):
    ddp_benchmark(lambda ctx: CAUSES[cause](ctx, CHANGED))

@pytest.mark.ddp(threshold="p50:2%", steps=12)
@pytest.mark.parametrize("cause", {small!r})
def test_small(ddp_benchmark, cause):
    ddp_benchmark(lambda ctx: CAUSES[cause](ctx, CHANGED))

@pytest.mark.parametrize("cause", {rpc!r})
def test_rpc(rpc_benchmark, cause):
    rpc_benchmark(lambda ctx: CAUSES[cause](ctx, CHANGED))
"""
# Notes how long the samples of stacks took.
CONFTEST = """
import os
import time
from pathlib import Path
from pytest_ddpperf.compare import run

sample = run.with_stacks

def timed(*arguments):
    began = time.monotonic()
    measured = sample(*arguments)
    if measured.sampled:
        nodeid = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        Path({folder!r}, nodeid.replace("/", " ")).write_text(str(time.monotonic() - began))
    return measured

run.with_stacks = timed
"""
WAYS = {"interleaved": ("--ddp-against", "HEAD"), "stored": ()}
MACHINES = {"quiet": None, "neighbour": 20261125}  # seeds
OPTIONS = (
    "-q",
    "-p",
    "no:randomly",
    "-p",
    "no:cacheprovider",
    "--ddp-backend=gloo",
    "--ddp-confirm=3600",
)
Row = dict[str, Any]  # of the results file


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--runs", type=int, default=5, help="of each way on each machine"
    )
    parser.add_argument("--causes", default=",".join(CAUSES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("explain.jsonl"),
        help="file to go on with",
    )
    options = parser.parse_args()
    rows = done(options.results)
    causes, ways, machines = (
        chosen.split(",")
        for chosen in (options.causes, options.ways, options.machines)
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        options.results.open("a") as file,
    ):
        project = Project(Path(folder), causes, with_baseline="stored" in ways)
        for number, machine, way in product(
            range(options.runs), machines, ways
        ):
            seed = MACHINES[machine]
            cell = [
                row
                for row in rows
                if (row["machine"], row["way"]) == (machine, way)
            ]
            missing = [
                cause
                for cause in causes
                if sum(row["cause"] == cause for row in cell) <= number
            ]
            if not missing:
                continue
            with neighbour(None if seed is None else seed + number):
                for found in project.run(way, missing):
                    rows.append({"machine": machine, "way": way, **found})
                    file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
            progress(
                len(rows),
                options.runs * len(machines) * len(ways) * len(causes),
                "measurements",
            )
    print(table([TITLES, *lines(rows)]))
    print(table([SPREAD_TITLES, *spread_lines(rows)]))
    if shares := [
        row["sampling"] / row["seconds"] for row in rows if row.get("sampling")
    ]:
        print(
            f"\nsamples of stacks: {max(shares):.0%} of a comparison's time at most, {len(shares)}"
            " comparisons"
        )
    return 0


class Project:
    """A repository with a test for each cause, and a baseline if it is wanted."""

    def __init__(
        self, folder: Path, causes: Sequence[str], *, with_baseline: bool
    ) -> None:
        self._top = folder
        (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
        (folder / ".gitignore").write_text("__pycache__/\n.sampled/\n")
        self._sampled = folder / ".sampled"
        self._sampled.mkdir()
        (folder / "conftest.py").write_text(
            CONFTEST.format(folder=str(self._sampled))
        )
        (folder / "causes.py").write_text(
            Path(__file__).with_name("_causes.py").read_text()
        )
        (folder / "test_causes.py").write_text(
            TEST.format(
                causes=[
                    cause for cause in causes if cause not in (*RPC, *SMALL)
                ],
                rpc=[*RPC],
                small=[*SMALL],
            )
        )
        self._plant(changed=False)
        self._git("init", "--quiet")
        self._commit()
        if with_baseline:
            self._pytest([], "--ddp-save-baseline")
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
            ["git", "-C", self._top, *identity, *arguments],
            check=True,
            capture_output=True,
        )

    def _commit(self) -> None:
        self._git("add", "--all")
        self._git("commit", "--quiet", "--message", "A commit")

    def _plant(self, *, changed: bool) -> None:
        for name, text in {
            "planted.py": f"CHANGED = {changed}\n",
            **modules(changed),
        }.items():
            (self._top / name).write_text(text)

    def run(self, way: str, causes: Sequence[str]) -> Iterator[Row]:
        """Yield what came of each test."""
        self._plant(changed=True)
        for measured in self._pytest(causes, *WAYS[way]):
            cause = measured["test"]["name"].partition("[")[2].rstrip("]")
            sampled = self._sampled / measured["nodeid"].replace("/", " ")
            status = (
                measured["verdict"]["status"]
                if measured["verdict"]
                else "not measured"
            )
            findings, pairs = measured["findings"], {}
            if way == "interleaved" and measured["verdict"]:
                halves = (measured, measured["baseline_side"])
                sides = [
                    codec.decode(Measurement, half["measurement"])
                    for half in halves
                ]
                pairs = pair_spread(*sides)
                if cause in WITHOUT_VERDICT:
                    findings = codec.encode(
                        found_in(*sides, level=measured["level"])
                    )
            yield {
                "cause": cause,
                "status": status,
                "findings": findings,
                "evidence": measured["evidence"],
                "error": measured["error"],
                "seconds": measured["seconds"],
                "pairs": pairs,
                "sampling": float(sampled.read_text())
                if sampled.exists()
                else None,
            }

    def _pytest(self, causes: Sequence[str], *arguments: str) -> list[Row]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            tests = [
                f"test_causes.py::{test_of(cause)}[{cause}]" for cause in causes
            ]
            for each in self._sampled.iterdir():
                each.unlink()
            command = [
                str(Path(sys.executable).with_name("pytest")),
                *OPTIONS,
                f"--ddp-json={report}",
                *arguments,
                *tests,
            ]
            environ = {
                name: value
                for name, value in os.environ.items()
                if name != "CI"
            }
            ended = subprocess.run(
                command,
                cwd=self._top,
                env=environ,
                capture_output=True,
                text=True,
            )
            if not report.exists():
                raise SystemExit(ended.stdout + ended.stderr)
            return list(json.loads(report.read_text())["measurements"])


def test_of(cause: str) -> str:
    return (
        "test_rpc"
        if cause in RPC
        else "test_small"
        if cause in SMALL
        else "test_step"
    )


def found_in(now: Measurement, before: Measurement, *, level: float) -> object:
    """Return the findings of a comparison, whatever its verdict is."""
    rise = percentile(now.samples.step_seconds, 50) - percentile(
        before.samples.step_seconds, 50
    )
    return find(now, before, rise, is_paired=True, level=level)


def pair_spread(
    now: Measurement, before: Measurement
) -> dict[str, tuple[float, float]]:
    """Return of the step and of each phase the standard deviation of the difference over pairs of
    launches, and the mean before, in seconds; {} without phases."""
    pairs = [*zip(now.phases, before.phases, strict=False)]
    if len(pairs) < 2:
        return {}
    found = {}
    for name in (*PHASES, "step"):
        taken = [[_taken(launch, name) for launch in pair] for pair in pairs]
        found[name] = (
            stdev(later - earlier for later, earlier in taken),
            fmean(earlier for _, earlier in taken),
        )
    return found


def _taken(launch: StepPhases, name: str) -> float:
    """Return what a phase takes, on the critical path where that is known, else in the mean over
    ranks."""
    if name == "step":
        return sum(_taken(launch, phase) for phase in PHASES)
    return (
        sum(launch.path[name])
        if launch.path
        else fmean(seconds or 0.0 for seconds in launch.own[name])
    )


TITLES = [
    "planted",
    "named",
    "95 % interval",
    "quiet",
    "neighbour",
    "interleaved",
    "stored",
    "red",
    "seconds",
]


def lines(rows: Sequence[Row]) -> list[list[str]]:
    found = []
    for cause in CAUSES:
        chosen = [row for row in rows if row["cause"] == cause]
        if not chosen:
            continue
        named = [row for row in chosen if is_named(cause, row["findings"])]
        low, high = binomial_interval(len(named), len(chosen))
        by = [
            f"{sum(row[key] == value for row in named)} of"
            f" {sum(row[key] == value for row in chosen)}"
            for key, value in (
                *product(["machine"], MACHINES),
                *product(["way"], WAYS),
            )
        ]
        red = f"{sum(row['status'] == 'REGRESSED' for row in chosen)} of {len(chosen)}"
        seconds = f"{quartiles([row['seconds'] for row in chosen]).median:.0f}"
        found.append(
            [
                cause,
                f"{len(named)} of {len(chosen)}",
                f"{low:.0%} to {high:.0%}",
                *by,
                red,
                seconds,
            ]
        )
    return found


SPREAD_TITLES = [
    "spread over pairs",
    "share of the step",
    "of the step's spread",
    "comparisons",
]


def spread_lines(rows: Sequence[Row]) -> list[list[str]]:
    """Return how much the time of a phase differs over pairs of launches, beside that of the whole
    step."""
    found = []
    for phase in PHASES:
        # Of phases with at least a hundredth of the step.
        chosen = [
            pairs
            for row in rows
            if (pairs := row.get("pairs"))
            and pairs[phase][1] > 0.01 * pairs["step"][1]
        ]
        if chosen:
            share = quartiles(
                [pairs[phase][1] / pairs["step"][1] for pairs in chosen]
            )
            ratio = quartiles(
                [pairs[phase][0] / pairs["step"][0] for pairs in chosen]
            )
            of_step = f"{ratio.first:.0%} to {ratio.third:.0%}, median {ratio.median:.0%}"
            found.append(
                [phase, f"{share.median:.0%}", of_step, str(len(chosen))]
            )
    return found


if __name__ == "__main__":
    sys.exit(main())
