"""What recorded noise is like: how far launches and sessions of the same code lie apart, and what a
slowdown does.

    python benchmarks/noise.py --traces DIR

For each workload and percentile, all as differences of logarithms (0.05 is about 5 %): the spread
of launches within a session and of session means, each a standard deviation; the correlation of a
launch with the next; the rise at an injected slowdown of 20 %, mean over sessions with its least;
and the rise over both spreads, as one session of 20 launches against ten others sees it. Then the
spread of launches again, at p10 of their first steps only: what longer launches would be worth; and
where the recordings have ranks that were free to move, theirs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from itertools import pairwise
from pathlib import Path

from _common import table
from _traces import Launch, Workload, read

from pytest_ddpperf.records.quantiles import launch_quantiles

PERCENTILES = (0, 5, 10, 25, 50, 75, 90, 95)
SLOWDOWN = 0.2
STEPS = (10, 15, 20, 30)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    traces = parser.parse_args().traces
    workloads = read(traces)
    lines = [
        [
            "workload",
            "",
            "launches",
            "sessions",
            "next",
            f"+{SLOWDOWN:.0%} (least)",
            "rise / spread",
        ]
    ]
    for workload in workloads:
        for number, q in enumerate(PERCENTILES):
            lines.append(
                [
                    str(workload) if number == 0 else "",
                    f"p{q}",
                    *row(workload, q),
                ]
            )
    print(table(lines))
    lines = [["p10 of the first", *(f"{steps} steps" for steps in STEPS)]]
    for workload in workloads:
        same = [session[0.0] for session in workload.sessions.values()]
        spreads = [
            spread([logs(launches, 10, steps) for launches in same])
            for steps in STEPS
        ]
        lines.append([str(workload), *(f"{value:.3f}" for value in spreads)])
    print("\n" + table(lines))
    free = {str(workload): workload for workload in read(traces, "unpinned")}
    lines = [["", "p10 pinned", "free to move", "p50 pinned", "free to move"]]
    for workload in workloads:
        if str(workload) in free:
            both = [
                list(side.sessions.values())
                for side in (workload, free[str(workload)])
            ]
            spreads = [
                spread([logs(session[0.0], q) for session in side])
                for q in (10, 50)
                for side in both
            ]
            lines.append(
                [str(workload), *(f"{value:.3f}" for value in spreads)]
            )
    if len(lines) > 1:
        print("\n" + table(lines))
    return 0


def row(workload: Workload, q: float) -> list[str]:
    same = [logs(session[0.0], q) for session in workload.sessions.values()]
    slower = [
        logs(session[SLOWDOWN], q) for session in workload.sessions.values()
    ]
    sessions = statistics.stdev(statistics.fmean(session) for session in same)
    rises = [
        statistics.fmean(now) - statistics.fmean(base)
        for now, base in zip(slower, same, strict=True)
    ]
    rise = statistics.fmean(rises)
    seen = rise / (sessions * math.sqrt(1 + 1 / (len(same) - 1)))
    return [
        f"{spread(same):.3f}",
        f"{sessions:.3f}",
        f"{successive(same):.2f}",
        f"{rise:.3f} ({min(rises):.3f})",
        f"{seen:.1f}",
    ]


def spread(sessions: list[list[float]]) -> float:
    """Of launches within a session."""
    return math.sqrt(
        statistics.fmean(statistics.variance(session) for session in sessions)
    )


def successive(sessions: list[list[float]]) -> float:
    """How far a launch's deviation from its session's mean carries over to the next launch."""
    apart = [
        [value - statistics.fmean(session) for value in session]
        for session in sessions
    ]
    products = math.fsum(
        one * other for session in apart for one, other in pairwise(session)
    )
    return products / math.fsum(
        value * value for session in apart for value in session
    )


def logs(
    launches: list[Launch], q: float, steps: int | None = None
) -> list[float]:
    return [
        math.log(value)
        for value in launch_quantiles(
            [group[:steps] for _, group in launches], q
        )
    ]


if __name__ == "__main__":
    sys.exit(main())
