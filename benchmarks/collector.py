"""What does Python's garbage collector add to the time of a step, and to how much launches differ?

    python benchmarks/collector.py [--runs 3] [--workloads gpt,...] [--results collector.jsonl]

The workloads are those of independence.py. The same code runs on both sides, interleaved; the
baseline's side switches the collector off when it is imported. Launches differ by the standard
deviation of the logarithm of their p50, around the mean of their side in that run. Each
measurement is a line of the results file, and a run goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median, variance

from _common import done, progress, table
from _same_code import WORKLOADS
from independence import PACKAGE, Project, Row

SWITCH = """
import gc
import os

if "WITHOUT_COLLECTOR" in os.environ:
    gc.disable()
"""
TITLES = [
    "workload",
    "runs",
    "p50 without",
    "with",
    "added",
    "launches differ without",
    "with",
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("collector.jsonl"),
        help="file to go on with",
    )
    options = parser.parse_args()
    rows = done(options.results)
    names = options.workloads.split(",")
    with (
        tempfile.TemporaryDirectory() as folder,
        options.results.open("a") as file,
    ):
        project = Project(Path(folder) / "project", names, None)
        for _ in range(len(rows) // len(names), options.runs):
            for found in project.compare(
                [("trained/__init__.py", PACKAGE + SWITCH)],
                "--ddp-against-env=WITHOUT_COLLECTOR=1",
            ):
                rows.append(found)
                file.write(json.dumps(found) + "\n")
            file.flush()
            progress(len(rows), options.runs * len(names), "measurements")
    print(table([TITLES, *effects(rows)]))
    return 0


def effects(rows: Sequence[Row]) -> Iterator[list[str]]:
    for name in WORKLOADS:
        # run x side x launch
        runs = [row["p50_ms"] for row in rows if row["workload"] == name]
        if not runs:
            continue
        now, before = zip(*runs, strict=True)
        ratios = [
            math.log(fmean(own) / fmean(theirs))
            for own, theirs in zip(now, before, strict=True)
        ]
        yield [
            name,
            str(len(runs)),
            f"{median(map(median, before)):.2f} ms",
            f"{median(map(median, now)):.2f} ms",
            f"{math.expm1(median(ratios)):+.1%}",
            f"{spread(before):.1%}",
            f"{spread(now):.1%}",
        ]


def spread(runs: Sequence[Sequence[float]]) -> float:
    """Return how much launches differ within a run, of one side's figures, run x launch."""
    return math.sqrt(
        fmean(variance(map(math.log, launches)) for launches in runs)
    )


if __name__ == "__main__":
    sys.exit(main())
