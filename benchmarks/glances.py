"""What do glances between looks change? Live measurements in turns, judged again as they were recorded.

    python benchmarks/glances.py [benchmarks/results/in-turns.jsonl]

Takes the results of benchmarks/live.py, which have the difference of each pair at each limited percentile, and judges
them by looks alone, as they were, and with a glance after each pair between two looks (`measuring.stopping_rule`). A
measurement cannot end later than it did, so nothing has to be measured again; its seconds are in proportion to its
pairs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

from _common import table
from _traces import Launch, measurement
from live import MODES, limits

from pytest_ddpperf.measuring.stopping_rule import early_stop, follow, schedule
from pytest_ddpperf.records.samples import Verdict
from pytest_ddpperf.verdict.decision import judge
from pytest_ddpperf.verdict.times import TEST_LEVEL

FIRST_LOOK = 5  # the default of --ddp-launches
Row = dict[str, Any]  # of the results file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=Path(__file__).with_name("results") / "in-turns.jsonl")
    options = parser.parse_args()
    rows = [row for row in map(json.loads, options.results.read_text().splitlines()) if "differences" in row]
    lines = [["limits", "machine", "code", "measured", "", "pairs", "seconds", "statuses"]]
    for mode in dict.fromkeys(row["mode"] for row in rows):
        for machine, kind in product(("quiet", "neighbour"), ("unchanged", "slower")):
            cell = [row for row in rows if (row["mode"], row["machine"], row["kind"]) == (mode, machine, kind)]
            for glances in (False, True) if cell else ():
                lines.append([mode, machine, kind, str(len(cell)), *reported(cell, glances=glances)])
        cell = [row for row in rows if row["mode"] == mode]
        for glances in (False, True):
            lines.append([mode, "both", "both", str(len(cell)), *reported(cell, glances=glances)])
    print(table(lines))
    return 0


def reported(cell: list[Row], *, glances: bool) -> list[str]:
    """Mean pairs, median seconds with quartiles, and how often which status."""
    ends = [ended(row, glances=glances) for row in cell]
    pairs = [pairs for _, pairs in ends]
    seconds = [row["seconds"] * pairs / pairs_of(row) for row, (_, pairs) in zip(cell, ends, strict=True)]
    low, middle, high = statistics.quantiles(seconds, n=4)
    statuses = [status for status, _ in ends]
    return [
        "glances" if glances else "looks",
        f"{statistics.fmean(pairs):.1f}",
        f"{middle:.1f} ({low:.1f} to {high:.1f})",
        ", ".join(f"{statuses.count(status)} {status}" for status in sorted(set(statuses))),
    ]


def ended(row: Row, *, glances: bool) -> tuple[str, int]:
    """Its status, and after how many pairs."""
    looks = schedule(FIRST_LOOK, MODES[row["mode"]].launches)

    def verdict(start: int, stop: int, ease: float) -> Verdict:
        both = [launches(row, start, stop, side) for side in (1, 0)]
        return judge(
            measurement(both[0]),
            [measurement(both[1])],
            limits(row["mode"]),
            level=TEST_LEVEL * ease,
            interleaved=True,
            stretches=[(sum(STEPS),) * 2] * (stop - start),
        )

    for number, look in enumerate(looks, 1):
        for pairs in range(looks[number - 2] + 1, look) if glances and number > 1 else ():
            said, ends = early_stop(pairs, verdict)
            if ends:
                return str(said), pairs
        said, ends = follow(looks[:number], verdict, final=number == len(looks))
        if ends:
            return str(said), look
    raise AssertionError("the last look ends it")


STEPS = 49, 51  # of a stretch: those of its p10, then those of its p50


def launches(row: Row, start: int, stop: int, side: int) -> list[Launch]:
    """With windows of two equal stretches that differ from those of side 0 as the pairs did."""
    made = []
    for pair in range(start, stop):
        low, middle = (math.exp(side * row["differences"][metric][pair]) for metric in ("p10", "p50"))
        window = ((low,) * STEPS[0] + (100 * middle,) * STEPS[1]) * 2
        made.append(((window,), window))
    return made


def pairs_of(row: Row) -> int:
    return len(row["differences"]["p10"])


if __name__ == "__main__":
    sys.exit(main())
