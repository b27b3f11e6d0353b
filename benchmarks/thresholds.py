"""Which figure of a session tells slower code from unchanged code best, without the baseline's
code?

    python benchmarks/thresholds.py --traces DIR [--files NAME,NAME]

Of each session's launches there is one figure: the mean over launches of p10, p50 or the mean of
the group's steps, the same of the fastest launch alone, or the mean of p10 or p50 of the CPU time
of a step (the sum over ranks). Every two sessions are compared in both orders: code as fast as it
is with code that is slower by 20 % (and with itself), by a threshold that 1 % of the unchanged
pairs of the other three workloads exceed, and at least 10 %. Shown are, for 5 and for 20 launches
of each session, how far sessions lie apart (standard deviation of logarithms), how often unchanged
code is beyond the threshold, and how often slower code is; with intervals of 95 %, by resampling
sessions. It is a bound for what a rule may find, for no rule of a product learns from other tests.

`--files` chooses recordings by name; all need CPU times, as benchmarks/sessions.py records them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import operator
import random
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from _common import table

from pytest_ddpperf.launch.collect import completions
from pytest_ddpperf.records.quantiles import quantile

SLOWER = 0.2
LIMIT = math.log(1.1)
LAUNCHES = (5, 20)
DRAWS = 1_000


class Figures(NamedTuple):
    """Of one launch, in microseconds."""

    p10: float
    p50: float
    mean: float
    cpu_p10: float
    cpu_p50: float


# by workload and injected slowdown, then by session: its launches
Recorded = dict[tuple[str, float], dict[str, list[Figures]]]
Figure = Callable[[Sequence[Figures]], float]


class Cell(NamedTuple):
    """Two sessions, and what was beyond the threshold."""

    before: str
    now: str
    unchanged: bool
    slower: bool


def mean_of(name: str) -> Figure:
    """Return the logarithm of a figure, the mean over launches."""
    return lambda launches: statistics.fmean(
        math.log(getattr(launch, name)) for launch in launches
    )


def fastest(name: str) -> Figure:
    """Return the logarithm of a figure of the fastest launch."""
    return lambda launches: math.log(
        min(getattr(launch, name) for launch in launches)
    )


FIGURES = {
    "p10": mean_of("p10"),
    "p10, fastest launch": fastest("p10"),
    "p50": mean_of("p50"),
    "p50, fastest launch": fastest("p50"),
    "mean": mean_of("mean"),
    "CPU p10": mean_of("cpu_p10"),
    "CPU p50": mean_of("cpu_p50"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--files", default="", metavar="NAME,NAME")
    options = parser.parse_args()
    names = options.files.split(",") if options.files else ()
    recorded = read(options.traces, names)
    titles = ["launches", "figure", "sessions", "unchanged", "slower"]
    lines = [titles]
    for launches in LAUNCHES:
        for name, figure in FIGURES.items():
            lines.append(
                [str(launches), name, *row(recorded, figure, launches)]
            )
    print(table(lines))
    return 0


def read(folder: Path, names: Sequence[str]) -> Recorded:
    """Return what the recordings in a folder have, or those of these names."""
    recorded: Recorded = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("*.jsonl.gz")):
        if names and path.name.partition(".")[0] not in names:
            continue
        with gzip.open(path, "rt") as file:
            for line in file:
                row = json.loads(line)
                key = f"{row['workload']} x {row['world_size']}"
                found = recorded[key, row["injected_slowdown"]]
                found[path.name].append(figures_of(row))
    return recorded


def figures_of(row: dict[str, list[list[float]]]) -> Figures:
    marks = [
        [*accumulate(steps, initial=0)] for steps in row["step_microseconds"]
    ]
    steps = completions(marks)
    cpu = [sum(ranks) for ranks in zip(*row["cpu_microseconds"], strict=True)]
    return Figures(
        quantile(steps, 10),
        quantile(steps, 50),
        statistics.fmean(steps),
        quantile(cpu, 10),
        quantile(cpu, 50),
    )


def row(recorded: Recorded, figure: Figure, launches: int) -> list[str]:
    """Return the spread of sessions, and the shares beyond the threshold."""
    found = {
        key: {
            session: figure(taken[:launches])
            for session, taken in sessions.items()
        }
        for key, sessions in recorded.items()
    }
    spreads = [
        statistics.stdev(sessions.values())
        for (_, slowdown), sessions in found.items()
        if slowdown == 0
    ]
    cells = compare(found)
    return [
        f"{min(spreads):.3f} to {max(spreads):.3f}",
        share(cells, [cell.unchanged for cell in cells]),
        share(cells, [cell.slower for cell in cells]),
    ]


def compare(found: dict[tuple[str, float], dict[str, float]]) -> list[Cell]:
    """Compare all ordered pairs of sessions, in each workload."""
    workloads = sorted({workload for workload, _ in found})
    changes = {
        workload: unchanged(found[workload, 0.0]) for workload in workloads
    }
    cells = []
    for workload in workloads:
        others = [
            change
            for other in workloads
            if other != workload
            for change in changes[other].values()
        ]
        threshold = max(quantile(others, 99), LIMIT)
        slower = found[workload, SLOWER]
        same = found[workload, 0.0]
        for (before, now), change in changes[workload].items():
            rise = slower[now] - same[before]
            cells.append(
                Cell(before, now, change > threshold, rise > threshold)
            )
    return cells


def unchanged(sessions: dict[str, float]) -> dict[tuple[str, str], float]:
    """Return the change from each session to each other one."""
    return {
        (before, now): sessions[now] - sessions[before]
        for before in sessions
        for now in sessions
        if before != now
    }


def share(cells: Sequence[Cell], are_beyond: Sequence[bool]) -> str:
    """Return the share of cells that were beyond, with its interval."""
    source = random.Random(1)
    sessions = sorted({cell.before for cell in cells})
    drawn = []
    for _ in range(DRAWS):
        times = Counter(source.choices(sessions, k=len(sessions)))
        weights = [times[cell.before] * times[cell.now] for cell in cells]
        if any(weights):
            beyond = sum(map(operator.mul, weights, are_beyond))
            drawn.append(100 * beyond / sum(weights))
    low, high = quantile(drawn, 2.5), quantile(drawn, 97.5)
    return f"{100 * statistics.fmean(are_beyond):.1f} [{low:.0f}, {high:.0f}]"


if __name__ == "__main__":
    sys.exit(main())
