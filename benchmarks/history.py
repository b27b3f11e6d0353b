"""How often is a change point found in a history where nothing changed, and how many real ones are
found? Compared with the rules of other tools.

On points of five launches a day whose spread is 5 %: independent ones, a machine that walks at
random, and recorded launches (--traces). The others are what their packages do, where they are
installed: `pip install apache-otava asv`. github-action-benchmark's rule, the last point over the
one before, is a line.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from _common import binomial_interval, progress, table

from pytest_ddpperf.history.change_points import find_change_points, weigh_runs
from pytest_ddpperf.records.quantiles import launch_quantiles
from pytest_ddpperf.verdict.stats import Part, variance

LAUNCHES = 5
SPREAD = 0.05  # between launches, of the logarithm
NOISE = SPREAD / math.sqrt(LAUNCHES)  # of a point
LEVEL = 0.01
LOOKS = (1, 2, 3, 4)  # points after a step

# the mean over launches of each point, in logarithms, and their spread
Series = list[tuple[float, Part]]
# the indexes of the change points that it finds
Rule = Callable[[Series], list[int]]
# points, place of a step, its size in logarithms
Source = Callable[[random.Random, int, int, float], Series]


def simulated(walk: float, heavy: bool = False) -> Source:
    """Points whose machine moves by `walk` launches' spreads a day; `heavy`: Student's t with 5
    degrees of freedom."""

    def series(rng: random.Random, points: int, at: int, size: float) -> Series:
        level, found = 0.0, []
        for day in range(points):
            level += rng.gauss(0, walk * SPREAD)
            session = math.sqrt(rng.gammavariate(2.5, 0.4)) if heavy else 1.0
            launches = [
                level + size * (day >= at) + rng.gauss(0, SPREAD) / session
                for _ in range(LAUNCHES)
            ]
            found.append(
                (fmean(launches), Part(variance(launches), LAUNCHES - 1))
            )
        return found

    return series


def recorded(
    folder: Path, q: float, slower: float
) -> Iterator[tuple[str, Source]]:
    """A day is five launches of a recorded session, drawn anew each day; from the step on of those
    slowed down."""
    import _traces

    for workload in _traces.read(folder):
        cells = [
            [
                [
                    math.log(each)
                    for each in launch_quantiles(
                        [group for _, group in session[slowdown]], q
                    )
                ]
                for slowdown in (0.0, slower)
            ]
            for session in workload.sessions.values()
            if {0.0, slower} <= session.keys()
        ]

        def series(
            rng: random.Random,
            points: int,
            at: int,
            size: float,
            cells: list[list[list[float]]] = cells,
        ) -> Series:
            found = []
            for day in range(points):
                launches = rng.sample(
                    rng.choice(cells)[size > 0 and day >= at], LAUNCHES
                )
                found.append(
                    (fmean(launches), Part(variance(launches), LAUNCHES - 1))
                )
            return found

        yield str(workload), series


def ours(points: Series) -> list[int]:
    return [
        point.index
        for point in find_change_points(
            weigh_runs(*zip(*points, strict=True)), LEVEL
        )
    ]


def seconds(points: Series) -> list[float]:
    return [math.exp(value) for value, _ in points]


def previous(share: float) -> Rule:
    """github-action-benchmark: an alert where a result is worse than the one before by that
    much."""

    def rule(points: Series) -> list[int]:
        values = seconds(points)
        return [
            place
            for place in range(1, len(values))
            if values[place] > share * values[place - 1]
        ]

    return rule


def others() -> Iterator[tuple[str, Rule, int]]:
    """Rules with how many of the series they are asked about, for some are slow."""
    yield "github-action-benchmark, 200 %", previous(2.0), 1
    yield "github-action-benchmark, 110 %", previous(1.1), 1
    try:
        from otava.analysis import compute_change_points

        def otava(points: Series) -> list[int]:
            found, _ = compute_change_points(seconds(points))
            return [point.index for point in found]

        yield "Apache Otava", otava, 4
    except ImportError as error:
        print(f"without Apache Otava: {error}", file=sys.stderr)
    try:
        from asv.step_detect import detect_regressions, detect_steps

        def every(points: Series) -> list[int]:
            return [left for left, *_ in detect_steps(seconds(points))][1:]

        def regressions(points: Series) -> list[int]:
            _, _, places = detect_regressions(
                detect_steps(seconds(points)), threshold=0.05, min_size=2
            )
            return [after for _, after, *_ in places or ()]

        yield "asv, steps", every, 4
        yield "asv, regressions over 5 %", regressions, 4
    except ImportError as error:
        print(f"without asv: {error}", file=sys.stderr)


class Cell(NamedTuple):
    name: str
    source: Source
    points: int  # all of them, or those before the step
    size: float  # of the step; 0 for none


def rate(rule: Rule, cell: Cell, series: int, seed: int) -> str:
    rng, hits = random.Random(seed), 0
    for _ in range(series):
        if not cell.size:
            hits += bool(rule(cell.source(rng, cell.points, cell.points, 0.0)))
            continue
        whole = cell.source(
            rng, cell.points + LOOKS[-1], cell.points, cell.size
        )
        looks = (
            rule(whole[: cell.points + after]) for after in reversed(LOOKS)
        )
        hits += any(
            any(abs(place - cell.points) <= 2 for place in found)
            for found in looks
        )
    low, high = binomial_interval(hits, series)
    return f"{100 * hits / series:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def compared(cells: Sequence[Cell], series: int, seed: int) -> None:
    rules = [("ddpperf", ours, 1), *others()]
    rows = [["", *(name for name, _, _ in rules)]]
    for number, cell in enumerate(cells):
        row = [f"{'found' if cell.size else 'false'}: {cell.name}"]
        for place, (_, rule, share) in enumerate(rules):
            row.append(
                rate(rule, cell, max(series // share, 20), seed + number)
            )
            progress(
                number * len(rules) + place + 1,
                len(cells) * len(rules),
                "cells",
            )
        rows.append(row)
    print(table([list(column) for column in zip(*rows, strict=True)]))
    print(
        f"{series} series a cell of ddpperf's and github-action-benchmark's, a quarter of the"
        " others'; 95 % intervals"
    )


def calibrate(series: int, seed: int) -> None:
    """How often the largest step of unchanged points is significant at 1 %, by their number and the
    walk's share of the noise: what the thresholds in `history/change_points.py` were set by."""
    shares = (0.0, 0.001, 0.01, 0.1, 0.25, 1.25, 10.0)
    rows = [["points", *(f"walk {share:g}" for share in shares)]]
    for points in (6, 12, 20, 40, 100, 300, 1000):
        row = [str(points)]
        for share in shares:
            cell = Cell("", simulated(math.sqrt(share / LAUNCHES)), points, 0.0)
            row.append(
                rate(ours, cell, series if points < 1000 else series // 4, seed)
            )
        rows.append(row)
        progress(len(rows) - 1, 7, "numbers of points")
    print(table(rows))


def daily(series: int, seed: int) -> None:
    """How often a change point is found on any of 300 days, looking every day, where nothing
    changed."""
    for name, walk in (
        ("independent", 0.0),
        ("walk of half the launches' spread", 0.5),
    ):
        rng, hits = random.Random(seed), 0
        for done in range(series):
            points = simulated(walk)(rng, 300, 300, 0.0)
            hits += any(ours(points[:days]) for days in range(300, 5, -1))
            progress(done + 1, series, name)
        low, high = binomial_interval(hits, series)
        print(
            f"on any of 300 days, {name}: {100 * hits / series:.1f} % ({100 * low:.1f} to"
            f" {100 * high:.1f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--series",
        type=int,
        default=1000,
        metavar="N",
        help="of a cell (default: 1000)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="DIR",
        help="recorded step times, see README.md",
    )
    parser.add_argument(
        "--percentile",
        type=float,
        default=10.0,
        metavar="Q",
        help="of recorded steps (default: 10)",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="only ours, by the number of points and the walk",
    )
    parser.add_argument(
        "--daily", action="store_true", help="only ours, looking every day"
    )
    arguments = parser.parse_args()
    if arguments.calibrate:
        calibrate(arguments.series, arguments.seed)
        return
    if arguments.daily:
        daily(arguments.series, arguments.seed)
        return
    if arguments.traces is None:
        cells = [
            Cell("independent", simulated(0.0), 300, 0.0),
            Cell(
                "drift, half the launches' spread a day",
                simulated(0.5),
                300,
                0.0,
            ),
            Cell(
                "drift, 0.045 of it",
                simulated(math.sqrt(0.01 / LAUNCHES)),
                300,
                0.0,
            ),
            Cell(
                "independent, heavy tails", simulated(0.0, heavy=True), 300, 0.0
            ),
            Cell("3 sd after 296", simulated(0.0), 296, 3 * NOISE),
            Cell("3 sd after 100", simulated(0.0), 100, 3 * NOISE),
            Cell("3 sd after 50", simulated(0.0), 50, 3 * NOISE),
            Cell("3 sd after 25", simulated(0.0), 25, 3 * NOISE),
        ]
    else:
        cells = []
        for name, source in recorded(
            arguments.traces, arguments.percentile, 0.2
        ):
            cells += [
                Cell(name, source, 300, 0.0),
                Cell(f"{name}, +20 % after 100", source, 100, 0.2),
            ]
    compared(cells, arguments.series, arguments.seed)


if __name__ == "__main__":
    main()
