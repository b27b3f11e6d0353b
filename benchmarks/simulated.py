"""Error rates of stored baselines on simulated machines, from one without noise to one that others
use.

    python benchmarks/simulated.py [--runs 1000] [--assume FLOOR,SHARE,FREEDOM,USUAL,STEEP]
                                   [--level 0.05]

A machine is two numbers: how far the launches of a session differ, and how far sessions do, as
standard deviations of logarithms, both normal. A baseline of one session or three, five launches
each, is compared with five launches of another session, and against further ones while the verdict
is open, by the plugin's own rule and looks, with both default metrics. Seeds are fixed: the same
runs give the same table.

The second table is of runs of many tests: what each resolves beside what it resolves alone, and how
many false reds a run of unchanged code has beside how many the plugin's summary says to expect.
There the two sides may also take turns.

The third table is of launches of two speeds: 30 % of those of neither side, of both, or of the
current one are 25 % slower, or 95 % of both, at a limit of 5 %. Stored sessions have twenty
launches there.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

from _common import table

from pytest_ddpperf.compare.rule import (
    Spending,
    ends,
    schedule,
    spending,
)
from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.samples import Measurement, Samples, Verdict
from pytest_ddpperf.verdict.decision import judge
from pytest_ddpperf.verdict.stats import Drift
from pytest_ddpperf.verdict.times import ASSUMED_DRIFT, TEST_LEVEL

FIRST, MOST = 5, 20  # the defaults of --ddp-launches and --ddp-max-launches
STEPS = 6  # alike within a launch: with five launches enough for p10
# launches, sessions
MACHINES = (
    (0.003, 0.003),
    (0.005, 0.005),
    (0.01, 0.01),
    (0.003, 0.02),
    (0.03, 0.05),
)
MANY = 200  # tests of a run
SLOWDOWNS = (0.0, 0.15, 0.20)
LIMITS = (0.10, 0.05, 0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    launches: float
    sessions: float
    stored: int  # sessions of the baseline; 0: both sides in turns
    limit: float
    slowdown: float
    slow: float = 0.0  # the share of launches that are slower by SLOWER
    slow_before: float = 0.0
    stored_launches: int = 5


SLOWER = 1.25
# The shares of slow launches, before and now, by column: nearly all slow is a few fast ones.
COLUMNS = {
    "neither": (0.0, 0.0),
    "both": (0.3, 0.3),
    "95% of both": (0.95, 0.95),
    "now": (0.0, 0.3),
}
SPEEDS = [
    Cell(
        launches=launches,
        sessions=0.01,
        stored=stored,
        limit=0.05,
        slowdown=0.0,
        slow=slow,
        slow_before=before,
        stored_launches=20,
    )
    for stored in (0, 1, 2)
    for launches in (0.003, 0.01, 0.02)
    for before, slow in COLUMNS.values()
]
CELLS = [
    Cell(
        launches=launches,
        sessions=sessions,
        stored=stored,
        limit=limit,
        slowdown=slowdown,
    )
    for launches, sessions in MACHINES
    for stored in (1, 3)
    for limit in LIMITS
    for slowdown in SLOWDOWNS
    if slowdown == 0 or limit == LIMITS[0]
]
SUITES = [
    Cell(
        launches=launches,
        sessions=sessions,
        stored=stored,
        limit=LIMITS[0],
        slowdown=0.0,
    )
    for launches, sessions in (MACHINES[0], MACHINES[2], MACHINES[4])
    for stored in (1, 3, 0)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    regressed: float
    inconclusive: float
    resolution: float  # median
    expected: float  # mean, of false reds a test


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=1000, help="of each cell")
    parser.add_argument(
        "--assume",
        metavar="FLOOR,SHARE,FREEDOM[,USUAL,STEEP]",
        help="another assumption about drift",
    )
    parser.add_argument(
        "--level",
        type=float,
        default=TEST_LEVEL,
        help="the error rate of the test",
    )
    options = parser.parse_args()
    drift = (
        Drift(*map(float, options.assume.split(",")))
        if options.assume
        else ASSUMED_DRIFT
    )
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        each = partial(rates, runs=options.runs, drift=drift)
        print(f"{options.runs} runs a cell; REGRESSED (INCONCLUSIVE)\n")
        print(
            table(
                machines(
                    dict(
                        zip(
                            CELLS,
                            pool.map(partial(each, level=options.level), CELLS),
                            strict=True,
                        )
                    )
                )
            )
        )
        many = dict(
            zip(
                SUITES,
                pool.map(partial(each, level=TEST_LEVEL), SUITES),
                strict=True,
            )
        )
        speeds = dict(
            zip(
                SPEEDS,
                pool.map(partial(each, level=options.level), SPEEDS),
                strict=True,
            )
        )
    print("\nlaunches of two speeds, limit 5 %\n")
    print(table(by_speeds(speeds)))
    print(f"\na run of {MANY} tests, limit {LIMITS[0]:.0%}\n")
    print(table(suites(many)))
    return 0


def machines(found: dict[Cell, Rates]) -> list[list[str]]:
    titles = ["launches", "sessions", "stored", "resolves"]
    titles += [f"limit {limit:.0%}: false alarms" for limit in LIMITS]
    titles += [
        f"limit {LIMITS[0]:.0%}: +{slowdown:.0%}" for slowdown in SLOWDOWNS[1:]
    ]
    rows = [titles]
    for launches, sessions in MACHINES:
        for stored in (1, 3):
            own = {
                (cell.limit, cell.slowdown): rate
                for cell, rate in found.items()
                if (cell.launches, cell.sessions, cell.stored)
                == (launches, sessions, stored)
            }
            row = [
                f"{launches:.1%}",
                f"{sessions:.1%}",
                str(stored),
                f"{own[LIMITS[0], 0.0].resolution:.1%}",
            ]
            row += [shown(own[limit, 0.0]) for limit in LIMITS]
            row += [
                shown(own[LIMITS[0], slowdown]) for slowdown in SLOWDOWNS[1:]
            ]
            rows.append(row)
    return rows


def by_speeds(found: dict[Cell, Rates]) -> list[list[str]]:
    rows = [["launches", "against", *COLUMNS]]
    rates = list(found.items())
    for start in range(0, len(rates), len(COLUMNS)):
        cell = rates[start][0]
        against = f"{cell.stored} stored" if cell.stored else "interleaved"
        own = [shown(rate) for _, rate in rates[start : start + len(COLUMNS)]]
        rows.append([f"{cell.launches:.1%}", against, *own])
    return rows


def suites(many: dict[Cell, Rates]) -> list[list[str]]:
    rows = [
        [
            "launches",
            "sessions",
            "against",
            "smallest detectable change",
            "false alarms a run",
            "expected",
        ]
    ]
    for cell, found in many.items():
        against = f"{cell.stored} stored" if cell.stored else "interleaved"
        row = [
            f"{cell.launches:.1%}",
            f"{cell.sessions:.1%}",
            against,
            f"{found.resolution:.1%}",
        ]
        rows.append(
            [
                *row,
                f"{found.regressed * MANY:.2g}",
                f"{found.expected * MANY:.2g}",
            ]
        )
    return rows


def shown(rate: Rates) -> str:
    return f"{rate.regressed:.1%}" + (
        f" ({rate.inconclusive:.0%})" if rate.inconclusive else ""
    )


def rates(cell: Cell, runs: int, drift: Drift, level: float) -> Rates:
    source = random.Random(repr(cell))
    said = [one(cell, source, drift, level) for _ in range(runs)]
    statuses = [str(verdict) for verdict in said]
    return Rates(
        regressed=statuses.count("REGRESSED") / runs,
        inconclusive=statuses.count("INCONCLUSIVE") / runs,
        resolution=median(
            max(c.resolution for c in verdict.comparisons) for verdict in said
        ),
        expected=fmean(
            sum(c.alarm_rate for c in verdict.comparisons) for verdict in said
        ),
    )


def one(
    cell: Cell, source: random.Random, drift: Drift, level: float
) -> Verdict:
    stored = [
        session(cell, source, cell.stored_launches, 0.0, cell.slow_before)
        for _ in range(cell.stored)
    ]
    turns = session(cell, source, MOST, 0.0, cell.slow_before)
    now = session(cell, source, MOST, cell.slowdown, cell.slow)
    limits = tuple(
        Limit(metric=metric, value=cell.limit, unit="%")
        for metric in ("p10", "p50")
    )

    def verdict(launches: int, spends: Spending) -> Verdict:
        base = stored or [part(turns, 0, launches)]
        return judge(
            part(now, 0, launches),
            base,
            limits,
            level=spends.level,
            share=spends.share,
            assumed=drift,
            interleaved=not stored,
        )

    looks = schedule(FIRST, MOST)
    for look in looks:
        said = verdict(look, spending(look, looks, level))
        if ends(said):
            break
    return said


def session(
    cell: Cell,
    source: random.Random,
    launches: int,
    slowdown: float,
    slow: float,
) -> Measurement:
    """In turns both sides are of one session, whose own level does not matter."""
    mean = source.gauss(
        math.log1p(slowdown), cell.sessions if cell.stored else 0.0
    )
    levels = [
        math.exp(source.gauss(mean, cell.launches)) for _ in range(launches)
    ]
    if slow:
        levels = [
            SLOWER * level if source.random() < slow else level
            for level in levels
        ]
    steps = tuple((level,) * STEPS for level in levels)
    return Measurement(
        samples=Samples(
            step_seconds=steps,
            rank_seconds=tuple((launch,) for launch in steps),
        )
    )


def part(now: Measurement, start: int, stop: int) -> Measurement:
    samples = now.samples
    return Measurement(
        samples=Samples(
            step_seconds=samples.step_seconds[start:stop],
            rank_seconds=samples.rank_seconds[start:stop],
        )
    )


if __name__ == "__main__":
    sys.exit(main())
