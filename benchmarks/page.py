"""What does the page of a run take, and that of a history: seconds and bytes, by how much was
measured?

    python benchmarks/page.py [--measurements 50] [--rounds 5]
    python benchmarks/page.py --history [--series 100] [--points 1000] [--rounds 5]

Each run is `ddpperf html`, or `ddpperf history --html`, in a process of its own, from reading the
JSON and importing matplotlib to the file. It works on one core and waits for nothing, so CPU time
is what it takes on an idle machine. Samples are drawn, not measured; verdicts are the judge's.
"""

from __future__ import annotations

import argparse
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from statistics import median

from _common import progress, spread, table, verdict

ROOT = Path(__file__).parents[1]
MOST_SECONDS, MOST_BYTES = 10.0, 3e6

# In another process, which must not pay for the drawing of samples: what is timed is what the
# command does.
COMMAND = """
import contextlib, io, sys, time
began = time.perf_counter(), time.process_time()
from pytest_ddpperf.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    status = main.main(sys.argv[1:])
print(time.perf_counter() - began[0], time.process_time() - began[1])
sys.exit(status)
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--measurements", type=int, default=50)
    parser.add_argument(
        "--history", action="store_true", help="only the page of a history"
    )
    parser.add_argument("--series", type=int, default=100)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    rows = [("of", "it reads", "CPU time", "wall", "page", "each")]
    promises = []
    with tempfile.TemporaryDirectory() as name:
        page = Path(name, "page.html")
        for what, number, read, command in _commands(Path(name), asked):
            wall, cpu = zip(
                *_timed([*command, str(page)], asked.rounds, what), strict=True
            )
            taken = page.stat().st_size
            size = f"{taken / 1e6:.2f} MB"
            rows.append(
                (
                    what,
                    f"{read / 1e6:.1f} MB",
                    spread(cpu, "s"),
                    spread(wall, "s"),
                    size,
                    f"{taken / 1e3 / number:.0f} kB",
                )
            )
            if not asked.history:
                promises.append(
                    (
                        f"{what}: at most {MOST_SECONDS:g} s of CPU time",
                        median(cpu) <= MOST_SECONDS,
                    )
                )
            promises.append(
                (
                    f"{what}: at most {MOST_BYTES / 1e6:g} MB",
                    taken <= MOST_BYTES,
                )
            )
    print(table(rows))
    return verdict(promises)


def _commands(
    place: Path, asked: argparse.Namespace
) -> Iterator[tuple[str, int, int, list[str]]]:
    """What is drawn and how many of it, the bytes that are read, and the command that lacks the
    page's path."""
    if asked.history:
        root = place / "history"
        _fill(root, asked.series, asked.points)
        size = sum(file.stat().st_size for file in root.rglob("*.json"))
        # change points are no failure here
        command = ["history", str(root), "--threshold=p10:1000%", "--html"]
        yield (
            f"{asked.series} series of {asked.points} points",
            asked.series,
            size,
            command,
        )
        return
    for name, each in SIZES.items():
        report = place / "report.json"
        report.write_text(_report(asked.measurements, each))
        yield (
            name,
            asked.measurements,
            report.stat().st_size,
            ["html", str(report), "-o"],
        )


def _timed(
    command: Sequence[str], rounds: int, what: str
) -> list[tuple[float, float]]:
    """Seconds of a wall's clock and of a CPU's, a round each."""
    taken = []
    for number in range(rounds):
        reported = subprocess.run(
            [sys.executable, "-c", COMMAND, *command],
            capture_output=True,
            text=True,
            check=True,
        )
        wall, cpu = map(float, reported.stdout.split())
        taken.append((wall, cpu))
        progress(number + 1, rounds, what)
    return taken


def _fill(root: Path, series: int, points: int) -> None:
    """Points of five launches, in ten environments; every third series has a step, every second
    walks."""
    rng = random.Random(1)
    levels = [0.01 * (1 + number) for number in range(series)]
    for day in range(points):
        when = (
            datetime(2023, 1, 1, tzinfo=timezone.utc) + timedelta(days=day)
        ).isoformat()
        rows: list[HistoryMeasurement] = []
        for number in range(series):
            jump = 0.08 if number % 3 == 0 and day == points // 2 else 0.0
            levels[number] *= math.exp(
                jump + rng.gauss(0, 0.003) * (number % 2)
            )
            now = levels[number] * math.exp(rng.gauss(0, 0.01))
            launches = [
                float(f"{now * math.exp(rng.gauss(0, 0.02)):.5g}")
                for _ in range(5)
            ]
            kept = HistoryMeasurement(
                environment=f"cpu-gloo-ws{1 + number * 10 // series}",
                test=TestId(
                    module="tests/perf/test_step", name=f"test_train[{number}]"
                ),
                must_match={"batch_size": 32},
                recorded={"torch": f"2.{day // 200}", "host": "node1"},
                launch_seconds=dict.fromkeys(METRICS, tuple(launches)),
                counters={"all_reduce.count": 5},
            )
            rows.append(kept)
        add_entry(
            root,
            HistoryEntry(
                commit=f"{day:040x}",
                committed=when,
                created=when,
                measurements=tuple(rows),
            ),
        )


def _report(measurements: int, size: reports.Drawn) -> str:
    """Every third is red or open; half are compared with a baseline of five sessions, half in
    turns."""
    found = []
    for number in range(measurements):
        step = size.step * (1.2 if number % 3 == 0 else 1.0)
        now, base = (
            replace(size, seed=number, step=step),
            replace(size, seed=1000 + 10 * number),
        )
        name = f"test_train[{number}]"
        if number % 2:
            found.append(reports.in_turns(name, now, base))
        else:
            found.append(reports.against_baseline(name, now, base, sessions=5))
    return codec.dumps(json_report.report(found, reports.RUN))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from pytest_ddpperf.history.entries import (
        METRICS,
        HistoryEntry,
        HistoryMeasurement,
        add_entry,
    )
    from pytest_ddpperf.records import codec
    from pytest_ddpperf.records.samples import TestId
    from pytest_ddpperf.report import json_report
    from tests import reports

    SIZES = {
        "2 ranks, 5 launches of 60 steps": reports.Drawn(),
        "8 ranks, 20 launches of 100 steps": reports.Drawn(
            ranks=8, launches=20, steps=100
        ),
    }
    sys.exit(main())
