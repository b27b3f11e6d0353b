"""What does stopping early save, and what does it change? Interleaved measurements, judged again.

    python benchmarks/stopping.py [RESULTS ...]                        # as they were recorded
    python benchmarks/stopping.py --slower 0,0.05,modes [RESULTS ...]  # of unchanged code, slower

Takes results of benchmarks/live.py, which have the difference of each pair at each limited metric,
and judges them by looks alone, with early stops of what is within the limit and settled, and with
stops for futility as well (`compare.rule`). As recorded: a measurement cannot end later
than it did, so nothing has to be measured again. Slower: 20 pairs are drawn from those of unchanged
code of one model and machine, and all their differences are raised; with "modes" those of 30 % of
the pairs, by 25 %. Results from before there was a
limit on the mean have none; there it changes as p50 does. Seconds are in proportion to pairs.
"Undecided": those that reach the last look without these stops.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from _common import table
from _traces import Launch, measurement
from detection import SLOW_SHARE, SLOWER
from live import MODES, limits

from pytest_ddpperf.compare.rule import (
    Spending,
    ends,
    is_futile,
    schedule,
    spending,
)
from pytest_ddpperf.records.samples import Measurement, Status, Verdict
from pytest_ddpperf.verdict.decision import given_up, judge
from pytest_ddpperf.verdict.times import TEST_LEVEL, differences_of

FIRST_LOOK = 5  # the default of --ddp-launches
Row = dict[str, Any]  # of the results file


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    recorded = [Path(__file__).with_name("results") / "in-turns.jsonl"]
    parser.add_argument("results", type=Path, nargs="*", default=recorded)
    parser.add_argument(
        "--slower",
        type=lambda text: text.split(","),
        metavar="SHARE,...",
    )
    parser.add_argument(
        "--trials",
        type=int,
        default=100,
        help="of each machine, model and amount",
    )
    options = parser.parse_args()
    lines = [
        line
        for file in options.results
        for line in file.read_text().splitlines()
    ]
    rows = [row for row in map(json.loads, lines) if "differences" in row]
    if options.slower:
        rows = list(made_slower(rows, options.slower, options.trials))
    print(table([TITLES, *reported(rows)]))
    return 0


TITLES = [
    "limits",
    "machine",
    "code",
    "measured",
    "",
    "pairs",
    "undecided: pairs",
    "seconds",
    "statuses",
]
WAYS = {"looks": (), "early stops": ("early",), "futility": ("early", "futile")}
MOST_PAIRS = 20


def made_slower(
    rows: list[Row], amounts: list[str], trials: int
) -> Iterator[Row]:
    """Yield measurements of pairs drawn from unchanged code, at the limits of "in turns", slower by
    each amount."""
    source = random.Random(20261124)
    pools: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["kind"] == "unchanged" and row["mode"] == "in turns":
            pools.setdefault((row["machine"], row["model"]), []).append(row)
    for amount, ((machine, _), pool) in product(amounts, pools.items()):
        pairs = [(row, pair) for row in pool for pair in range(pairs_of(row))]
        for _ in range(trials):
            drawn = [source.choice(pairs) for _ in range(MOST_PAIRS)]
            raised = [raise_of(amount, source) for _ in drawn]
            differences = {
                metric: [
                    difference(row, metric, pair) + more
                    for (row, pair), more in zip(drawn, raised, strict=True)
                ]
                for metric in METRICS
            }
            seconds = MOST_PAIRS * statistics.fmean(
                row["seconds"] / pairs_of(row) for row in pool
            )
            cell = {
                "mode": "in turns",
                "machine": machine,
                "kind": amount
                if amount == "modes"
                else f"+{float(amount):.1%}",
                "seconds": seconds,
            }
            yield {**cell, "differences": differences}


def raise_of(amount: str, source: random.Random) -> float:
    """By how much the difference of a pair is raised."""
    if amount != "modes":
        return math.log1p(float(amount))
    return math.log(SLOWER) if source.random() < SLOW_SHARE else 0.0


def reported(rows: list[Row]) -> Iterator[list[str]]:
    """Yield a line for each cell and way."""
    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["mode"], row["machine"], row["kind"]), []).append(
            row
        )
    for names, cell in cells.items():
        by_looks = [ended(row) for row in cell]
        for way, stops in WAYS.items():
            yield [
                *names,
                str(len(cell)),
                way,
                *figures(cell, [ended(row, *stops) for row in cell], by_looks),
            ]


def figures(
    cell: list[Row],
    ends: list[tuple[str, int]],
    by_looks: list[tuple[str, int]],
) -> Iterator[str]:
    """Yield mean pairs, median pairs of the undecided ones, median seconds with quartiles, how
    often which status."""
    pairs = [pairs for _, pairs in ends]
    last = [MODES[row["mode"]].launches for row in cell]
    undecided = [
        own
        for own, (_, before), most in zip(pairs, by_looks, last, strict=True)
        if before == most
    ]
    seconds = [
        row["seconds"] * own / pairs_of(row)
        for row, own in zip(cell, pairs, strict=True)
    ]
    low, middle, high = statistics.quantiles(seconds, n=4)
    statuses = [status for status, _ in ends]
    yield f"{statistics.fmean(pairs):.1f}"
    yield (
        f"{statistics.median(undecided):.0f} ({len(undecided)})"
        if undecided
        else "-"
    )
    yield f"{middle:.1f} ({low:.1f} to {high:.1f})"
    yield ", ".join(
        f"{statuses.count(status) / len(cell):.1%} {status}"
        for status in sorted(set(statuses))
    )


def ended(row: Row, *stops: str) -> tuple[str, int]:
    """Its status, and after how many pairs."""
    looks = schedule(FIRST_LOOK, MODES[row["mode"]].launches)

    def sides(pairs: int) -> tuple[Measurement, list[Measurement]]:
        now, before = (
            measurement(launches(row, 0, pairs, side)) for side in (1, 0)
        )
        return now, [before]

    def verdict(pairs: int, spends: Spending) -> Verdict:
        return judge(
            *sides(pairs),
            limits(row["mode"]),
            level=spends.level,
            share=spends.share,
            interleaved=True,
            stretches=[(sum(STEPS),) * 2] * pairs,
        )

    def gives_up(said: Verdict, pairs: int) -> bool:
        if "futile" not in stops:
            return False
        differences = differences_of(
            said,
            *sides(pairs),
            interleaved=True,
            stretches=[(sum(STEPS),) * 2] * pairs,
        )
        return is_futile(said, pairs, looks, differences)

    for pairs in range(looks[0], looks[-1] + 1):
        at_look = pairs in looks
        if not (at_look or stops):
            continue
        said = verdict(pairs, spending(pairs, looks, TEST_LEVEL))
        if ends(said) and (at_look or said.status is Status.PASS):
            return str(said), pairs
        if gives_up(said, pairs):
            return str(given_up(said)), pairs
    return str(said), looks[-1]


METRICS = ("p10", "p50", "mean")
# of a stretch: those of its p10, those of its p50, and one that sets its mean
STEPS = 49, 50, 1


def difference(row: Row, metric: str, pair: int) -> float:
    """The difference of a pair, at p50 if the mean is not known."""
    return float(
        row["differences"].get(metric, row["differences"]["p50"])[pair]
    )


def launches(row: Row, start: int, stop: int, side: int) -> list[Launch]:
    """With windows of two equal stretches that differ from those of side 0 as the pairs did."""
    made: list[Launch] = []
    for pair in range(start, stop):
        low, middle, mean = (
            math.exp(side * difference(row, metric, pair)) for metric in METRICS
        )
        slowest = (
            sum(STEPS) * 1000 * mean - STEPS[0] * low - STEPS[1] * 100 * middle
        )
        window = (
            (low,) * STEPS[0] + (100 * middle,) * STEPS[1] + (slowest,)
        ) * 2
        made.append(((window,), window))
    return made


def pairs_of(row: Row) -> int:
    return len(row["differences"]["p10"])


if __name__ == "__main__":
    sys.exit(main())
