"""Both sides in turns, stretch by stretch beside one launch after the other: what is a pair of
launches worth?

    python benchmarks/turns.py [--pairs 20] [--results turns.jsonl]
    python benchmarks/turns.py --planted [--pairs 20] [--results planted.jsonl]
    python benchmarks/turns.py --windows 150,100

The first shows how far pairs of unchanged code spread, the second whether a slowdown is seen as it
is, the third what longer windows are worth.

A pair is two launches of three small DDP models on two Gloo ranks, with windows of the default
length. In stretches both are alive and take turns; apart, one follows the other. Ways, models and
machines (quiet, and beside benchmarks/neighbour.py) take turns.

Unchanged code: the standard deviation of a pair's log-ratio, at p10 and p50, by estimator: "pooled"
takes the percentile of all steps of a window, "median" that over stretches of the log-ratio of
each. The variance says how many pairs are needed for the same certainty.

Planted: the same model, slower on one side, in several ways; the change that each estimator sees
beside the one that launches apart see, with 95 % intervals.

Windows: stretches only, of windows of exactly so many steps, which take turns.

Each pair is a line of the results file; a run goes on where the last one ended, and shows all of
it. Without --planted the file has pairs with slower code too, which benchmarks/detection.py
replays.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from _common import done, launchers_of_both_sides, progress, table
from _models import MODELS, PLANTS, planted
from neighbour import neighbour

from pytest_ddpperf.compare.interleaving import interleave
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.options.settings import make_plan
from pytest_ddpperf.records.quantiles import quantile
from pytest_ddpperf.records.samples import LaunchSamples
from pytest_ddpperf.verdict.stats import by_stretches, t_quantile

MACHINES = {"quiet": None, "neighbour": 20261121}  # seeds
KEY = ("machine", "plant", "amount", "model", "way", "number")
WAYS = ("apart", "stretches")
AMOUNTS = (0.05, 0.10, 0.20)
RECORDED = [("unchanged", 0.0), ("computing", 0.05), ("computing", 0.10)]
PLANTED_MODEL = "transformer"
Row = dict[str, Any]  # of the results file


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=int, default=20, help="of each kind")
    parser.add_argument("--planted", action="store_true")
    parser.add_argument(
        "--windows",
        type=lambda text: [
            f"stretches, {int(n)} steps" for n in text.split(",")
        ],
    )
    parser.add_argument("--results", type=Path, help="file to go on with")
    options = parser.parse_args()
    results = options.results or Path(
        "planted.jsonl" if options.planted else "turns.jsonl"
    )
    what = list(product(PLANTS, AMOUNTS)) if options.planted else RECORDED
    models, ways = (
        [PLANTED_MODEL] if options.planted else MODELS,
        options.windows or WAYS,
    )
    rows = done(results)
    wanted: list[Row] = [
        dict(zip(KEY, (machine, *plant, model, way, number), strict=True))
        for number, (machine, plant, model, way) in product(
            range(options.pairs), product(MACHINES, what, models, ways)
        )
    ]
    made = {key(row) for row in rows}
    modules = {"_models": str(Path(__file__).with_name("_models.py"))}
    with (
        launchers_of_both_sides(modules) as launchers,
        results.open("a") as file,
    ):
        for kind in wanted:
            if key(kind) in made:
                continue
            seed = MACHINES[kind["machine"]]
            with neighbour(None if seed is None else seed + kind["number"]):
                row = {**kind, **Pair(launchers, kind).taken()}
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            progress(len(rows), len(wanted), "pairs")
    (report_planted if options.planted else report)(rows, estimators(ways))
    return 0


def key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


class Pair:
    def __init__(self, launchers: Sequence[Launcher], kind: Row) -> None:
        from live import read_defaults

        self._launchers, self._kind = launchers, kind
        self._source = random.Random(repr(key(kind)))
        self._plan = make_plan(
            read_defaults(Path.cwd()),
            world_size=2,
            backend="gloo",
            device="cpu",
        )
        plant = kind["plant"] if kind["amount"] else "computing"
        self._setups = [
            planted(plant, kind["model"], amount)
            for amount in (0.0, kind["amount"])
        ]

    def taken(self) -> Row:
        way, _, window = self._kind["way"].partition(", ")
        sides = (
            self._apart()
            if way == "apart"
            else self._stretches(int(window.split()[0]) if window else None)
        )
        return {
            "seconds": sum(side.cost.total for side in sides),
            "stretches": sides[0].stretches,
            # base, now
            "microseconds": [
                [round(step * 1e6) for step in side.step_seconds]
                for side in sides
            ],
        }

    def _stretches(self, steps: int | None) -> list[LaunchSamples]:
        paused = {}
        with ExitStack() as alive:
            alive.enter_context(
                self._launchers[0].alone(self._plan, Observer())
            )
            for side in self._source.sample((0, 1), 2):
                asked = (
                    self._plan if steps is None else self._plan.exactly(steps)
                )
                paused[side] = alive.enter_context(
                    self._launchers[side].pause(
                        asked, self._setups[side], Observer()
                    )
                )
                steps = paused[side].steps
            interleave((paused[0], paused[1]), self._source)
            return [paused[side].deliver() for side in (0, 1)]

    def _apart(self) -> list[LaunchSamples]:
        steps, launched = None, {}
        for side in self._source.sample((0, 1), 2):
            asked = self._plan if steps is None else self._plan.exactly(steps)
            launched[side] = self._launchers[side].measure(
                asked, self._setups[side], Observer()
            )
            steps = len(launched[side].step_seconds)
        return [launched[side] for side in (0, 1)]


# --- what they show


def pooled(row: Row, q: float) -> float:
    base, now = row["microseconds"]
    return math.log(quantile(now, q) / quantile(base, q))


def over_stretches(row: Row, q: float) -> float:
    base, now = row["microseconds"]
    return by_stretches(now, base, row["stretches"], q)


Estimators = dict[str, tuple[str, Callable[[Row, float], float]]]


def estimators(ways: Sequence[str]) -> Estimators:
    """By name, which way's rows they are for; what the others are compared with first."""
    found: Estimators = {}
    for way in ways:
        found[f"{way}, pooled"] = way, pooled
        if way != "apart":
            found[f"{way}, median"] = way, over_stretches
    return found


def report(rows: Sequence[Row], of: Estimators) -> None:
    first = next(iter(of))
    lines = [
        [
            "machine",
            "model",
            "",
            "pairs",
            "steps",
            "seconds a pair",
            "p10",
            "p50",
            "pairs for one, p10",
            "p50",
        ]
    ]
    for machine, model in product(MACHINES, MODELS):
        spreads: dict[tuple[str, float], float] = {}
        for name, (way, estimate) in of.items():
            cell = machine, "unchanged", model, way
            chosen = [
                row
                for row in rows
                if tuple(
                    row[name] for name in ("machine", "plant", "model", "way")
                )
                == cell
            ]
            if len(chosen) < 2:
                continue
            for q in (10, 50):
                spreads[name, q] = statistics.stdev(
                    estimate(row, q) for row in chosen
                )
            if (first, 10) not in spreads:
                continue
            # How many pairs of this kind are worth one of the first.
            worth = [
                (spreads[name, q] / spreads[first, q]) ** 2 for q in (10, 50)
            ]
            seconds = statistics.median(row["seconds"] for row in chosen)
            steps = statistics.median(
                len(row["microseconds"][0]) for row in chosen
            )
            figures = [f"{spreads[name, q]:.3f}" for q in (10, 50)]
            lines.append(
                [
                    machine,
                    model,
                    name,
                    str(len(chosen)),
                    f"{steps:g}",
                    f"{seconds:.1f}",
                    *figures,
                ]
                + [f"{share:.2f}" for share in worth]
            )
    print(
        "\nstandard deviation of a pair's log-ratio; last, how many pairs it takes for one by"
        f" {first}\n"
    )
    print(table(lines))


def report_planted(rows: Sequence[Row], of: Estimators) -> None:
    lines = [
        [
            "machine",
            "plant",
            "slower by",
            "pairs",
            *(f"{name}, p{q}" for q in (10, 50) for name in of),
        ]
    ]
    for machine, plant, amount in product(MACHINES, PLANTS, AMOUNTS):
        chosen = [
            row
            for row in rows
            if (row["machine"], row["plant"], row["amount"])
            == (machine, plant, amount)
        ]
        if not chosen:
            continue
        cells = []
        for q, (way, estimate) in product((10, 50), of.values()):
            cells.append(
                interval(
                    [estimate(row, q) for row in chosen if row["way"] == way]
                )
            )
        lines.append(
            [
                machine,
                plant,
                f"{amount:.0%}",
                str(len({row["number"] for row in chosen})),
                *cells,
            ]
        )
    print("\nthe change seen, with its 95 % interval\n")
    print(table(lines))


def interval(values: Sequence[float]) -> str:
    """Of the mean of logarithms, as a share."""
    mean = statistics.fmean(values)
    reach = (
        t_quantile(0.975, len(values) - 1)
        * statistics.stdev(values)
        / math.sqrt(len(values))
    )
    return (
        f"{math.expm1(mean):+.1%} [{math.expm1(mean - reach):+.1%},"
        f" {math.expm1(mean + reach):+.1%}]"
    )


if __name__ == "__main__":
    sys.exit(main())
