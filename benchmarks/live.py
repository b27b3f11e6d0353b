"""Error rates of the gate, live, in all its modes: real launches of the same code, and of code that
is slower.

    python benchmarks/live.py [--stored 20] [--turns 20] [--fine 20] [--results live.jsonl]

Each cell of the table is a mode, a machine (quiet, or beside benchmarks/neighbour.py), a model
(three small DDP models on two Gloo ranks) and a kind: unchanged code, where REGRESSED is a false
alarm, or slower code, where anything else is a miss. So many measurements are made of each cell, in
turns. Options are the default ones, but for limits where both sides take turns.

"stored": every measurement of unchanged code is a session, too. A measurement is compared with one
that ended ten minutes before, and against the last three that did; limit 10 %, slower by 20 %. All
rules judge the same launches, of which there are as many as the one that wants most of them takes.

"in turns": both sides in turns, as --ddp-against has them; limit 5 %, slower by 10 %. "fine": the
same with a limit of 3 %, slower by 5 %, at most 40 launches a side.

Nothing is left out: each finished measurement is a line of the results file (benchmarks/results has
those of the docs); a run goes on where the last one ended, and shows all of it. A session that no
measurement could be compared with (the first ten minutes, and those after a break) counts in no
rate.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from _common import (
    binomial_interval,
    done,
    launchers_of_both_sides,
    progress,
    quartiles,
    table,
)
from _models import MODELS, training
from neighbour import neighbour

from pytest_ddpperf.baseline import Store
from pytest_ddpperf.compare.job import Job
from pytest_ddpperf.compare.result import Measured
from pytest_ddpperf.compare.rule import ends, schedule, spending
from pytest_ddpperf.compare.run import carry_out
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.options.settings import make_plan, read_settings
from pytest_ddpperf.records.messages import ReadyToMeasure
from pytest_ddpperf.records.metric import MEAN
from pytest_ddpperf.records.outcome import Version
from pytest_ddpperf.records.plan import TIME_LIMITS, Limit, Plan
from pytest_ddpperf.records.samples import (
    LaunchSamples,
    Measurement,
    Samples,
    TestId,
    Verdict,
)
from pytest_ddpperf.remote.worktree import one_tree
from pytest_ddpperf.verdict import observed as observations
from pytest_ddpperf.verdict.stats import Drift
from pytest_ddpperf.verdict.times import (
    ASSUMED_DRIFT,
    TEST_LEVEL,
    coarse,
    judge_times,
)

# seeds; the second's moves on from cycle to cycle
MACHINES = {"quiet": None, "neighbour": 20261121}
KINDS = ("unchanged", "slower")
SESSION_AGE = 600.0  # seconds
TOO_OLD = 1800.0  # then the machine may have become another
LOOKS = schedule(5, 20)  # the default


@dataclass(frozen=True)
class Mode:
    limit: float
    slower: float
    launches: int = 20  # at most, of a side


STORED = "stored"
MODES = {
    STORED: Mode(limit=0.10, slower=0.20),
    "in turns": Mode(limit=0.05, slower=0.10),
    "fine": Mode(limit=0.03, slower=0.05, launches=40),
}


@dataclass(frozen=True)
class Rule:
    """What a stored baseline is held to."""

    drift: Drift
    steps: int | None  # of each launch, those that it sees; None for all


RULES = {
    "": Rule(ASSUMED_DRIFT, None),
    # the rule before
    "30 steps, drift of 5 % assumed": Rule(
        Drift(floor=0.05, share=0.5, freedom=8), 30
    ),
}
SESSIONS = (1, 3)
Row = dict[str, Any]  # of the results file
Steps = Sequence[Sequence[float]]  # launch x step, the group's, in seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--stored",
        type=int,
        default=20,
        help="measurements of each cell against stored baselines",
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=20,
        help="of each cell with both sides in turns",
    )
    parser.add_argument(
        "--fine", type=int, default=20, help="of each cell in turns, finer"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("live.jsonl"),
        help="file to go on with",
    )
    options = parser.parse_args()
    wanted = dict(
        zip(MODES, (options.stored, options.turns, options.fine), strict=True)
    )
    rows = done(options.results)
    modules, trees = (
        {"_models": str(Path(__file__).with_name("_models.py"))},
        one_tree(Path(__file__).parent),
    )
    with ExitStack() as opened:
        launchers = opened.enter_context(
            launchers_of_both_sides(modules, trees)
        )
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        file = opened.enter_context(options.results.open("a"))
        for row in measurements(Live(launchers, Path(folder)), rows, wanted):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            progress(*so_far(rows, wanted), "measurements")
    report(rows)
    return 0


# --- what is measured when


def measurements(
    live: Live, rows: Sequence[Row], wanted: dict[str, int]
) -> Iterator[Row]:
    """Those that are missing, cycle after cycle over all cells."""
    cycle = 0
    while missing(rows, wanted):
        for machine, seed in MACHINES.items():
            with neighbour(None if seed is None else seed + cycle):
                for model, kind in product(MODELS, KINDS):
                    yield from live.measured(rows, machine, model, kind, wanted)
        cycle += 1


def missing(rows: Sequence[Row], wanted: dict[str, int]) -> bool:
    made, of = so_far(rows, wanted)
    return made < of


def so_far(rows: Sequence[Row], wanted: dict[str, int]) -> tuple[int, int]:
    """How many of the measurements are made, and of how many."""
    cells = list(product(MACHINES, MODELS, KINDS))
    made = sum(
        min(count(rows, mode, *cell), most)
        for mode, most in wanted.items()
        for cell in cells
    )
    return made, sum(wanted.values()) * len(cells)


def count(rows: Sequence[Row], *cell: str) -> int:
    return sum(row["held"] for row in rows if cell_of(row) == cell)


def cell_of(row: Row) -> tuple[str, ...]:
    return row["mode"], row["machine"], row["model"], row["kind"]


def sessions(
    rows: Sequence[Row], machine: str, model: str, now: float
) -> list[Row]:
    """The sessions that a measurement which begins `now` is compared with, the latest last."""
    cell = STORED, machine, model, "unchanged"
    known = [
        row
        for row in rows
        if cell_of(row) == cell and row["ended"] <= now - SESSION_AGE
    ]
    return known if known and known[-1]["ended"] > now - TOO_OLD else []


class Live:
    """Measures on this machine."""

    def __init__(self, launchers: Sequence[Launcher], folder: Path) -> None:
        """The second is the other side's."""
        (self._launcher, self._other), self._folder = launchers, folder
        self._settings = read_defaults(folder)
        self._plan = make_plan(
            self._settings, world_size=2, backend="gloo", device="cpu"
        )

    def measured(
        self,
        rows: Sequence[Row],
        machine: str,
        model: str,
        kind: str,
        wanted: dict[str, int],
    ) -> Iterator[Row]:
        """The cell's next measurements, one a mode at most."""
        began = time.time()
        before = sessions(rows, machine, model, began)
        stored = count(rows, STORED, machine, model, kind)
        cell = {
            "machine": machine,
            "model": model,
            "kind": kind,
            "began": began,
        }
        if (kind == "unchanged" or before) and stored < wanted[STORED]:
            yield {
                **self._stored(model, kind, [steps_of(row) for row in before]),
                "held": bool(before),
                **cell,
            }
        for mode, most in wanted.items():
            made = count(rows, mode, machine, model, kind)
            # As evenly over the run as the others, but for the first ten minutes, which are theirs.
            due = not before or made * wanted[STORED] <= stored * most
            if mode != STORED and made < most and due:
                yield {
                    **cell,
                    **self._in_turns(mode, model, kind),
                    "held": True,
                }

    def _stored(self, model: str, kind: str, before: Sequence[Steps]) -> Row:
        """As many launches as the rule that wants most, and as a baseline of this code takes."""
        setup = training(
            model, MODES[STORED].slower if kind == "slower" else 0.0
        )
        launches: list[LaunchSamples] = []
        for number, many in enumerate(LOOKS, 1):
            while len(launches) < many:
                asked = len(launches[-1].step_seconds) if launches else None
                launches.append(self._launch(setup, asked))
            steps = [launch.step_seconds for launch in launches]
            ended = [
                judged(steps, before[-kept:], rule, LOOKS[:number])[1]
                for rule in RULES.values()
                for kept in SESSIONS
                if len(before) >= kept
            ]
            if kind == "unchanged":
                ended.append(not coarse(measurement(steps), limits(STORED)))
            if all(ended):
                break
        return {
            "mode": STORED,
            "ended": time.time(),
            "seconds": [round(launch.cost.total, 3) for launch in launches],
            "step_microseconds": [
                [round(step * 1e6) for step in launch.step_seconds]
                for launch in launches
            ],
        }

    def _launch(self, setup: Any, steps: int | None) -> LaunchSamples:
        return self._launcher.measure(
            self._plan if steps is None else self._plan.exactly(steps),
            setup,
            Observer(),
        )

    def _in_turns(self, mode: str, model: str, kind: str) -> Row:
        slower = training(
            model, MODES[mode].slower if kind == "slower" else 0.0
        )
        began = time.time()
        job = Job(
            test=TestId(module="live", name=model),
            nodeid=f"live::{model}",
            setups=(slower,),
            settings=replace(
                self._settings,
                limits=limits(mode),
                max_launches=MODES[mode].launches,
            ),
            plan=self._plan,
            level=TEST_LEVEL,
            batch_size=None,
            gate=True,
            facts={},
        )
        base: Any = Other(self._other, self._plan, training(model, 0.0))
        measured = carry_out(
            job, self._launcher, Store(self._folder), Observer(), base
        )
        verdict = measured.verdict
        return {
            "mode": mode,
            "began": began,
            "ended": (ended := time.time()),
            "seconds": round(ended - began, 1),
            "status": str(verdict),
            "resolution": round(verdict.comparisons[0].resolution, 4),
            "differences": {
                limit.metric: differences(limit, measured)
                for limit in limits(mode)
            },
        }


def read_defaults(folder: Path) -> Any:
    """The settings of a run that is given none."""
    import pytest

    return read_settings(
        pytest.Config.fromdictargs(
            {}, ["-c", "/dev/null", f"--rootdir={folder}"]
        )
    )


class Other:
    """The other side of a pair, launched from here too: what `against.BaseSide` is where that is
    another process."""

    version = Version(ref="unchanged", commit="", now="")

    def __init__(self, launcher: Launcher, asked: Plan, setup: Any) -> None:
        self._launcher, self._plan, self._setup = launcher, asked, setup

    def begin(self, nodeid: str, label: str, plan: Plan) -> ReadyToMeasure:
        return ReadyToMeasure(label, self._plan)

    def measure(self, observer: Any, steps: int | None) -> LaunchSamples:
        return self._launcher.measure(
            self._plan if steps is None else self._plan.exactly(steps),
            self._setup,
            observer,
        )

    def pause(
        self, observer: Any, steps: int | None
    ) -> AbstractContextManager[Any]:
        return self._launcher.pause(
            self._plan if steps is None else self._plan.exactly(steps),
            self._setup,
            observer,
        )

    def changed(self) -> Sequence[str]:
        return ()

    def lacking(self, files: Any, there: Any) -> str:
        return ""

    def end_measurement(self) -> None:
        pass


# --- what the rules say of it


def judged(
    now: Steps, before: Sequence[Steps], rule: Rule, looks: Sequence[int]
) -> tuple[Verdict, bool]:
    """The verdict after `looks`, and whether the measurement ends with it."""
    stored = [measurement(cut(session, rule.steps)) for session in before]
    spends = spending(looks[-1], LOOKS, TEST_LEVEL)
    verdict = judge_times(
        measurement(cut(now[: looks[-1]], rule.steps)),
        stored,
        limits(STORED),
        level=spends.level,
        share=spends.share,
        assumed=rule.drift,
    )
    return verdict, ends(verdict) or looks[-1] == LOOKS[-1]


def reported(
    now: Steps, before: Sequence[Steps], rule: Rule
) -> tuple[Verdict, int]:
    """The verdict, and after how many launches it was there."""
    for number in range(1, len(LOOKS) + 1):
        verdict, ended = judged(now, before, rule, LOOKS[:number])
        if ended:
            break
    return verdict, LOOKS[number - 1]


def cut(launches: Steps, steps: int | None) -> Steps:
    return [launch[:steps] for launch in launches]


def measurement(launches: Steps) -> Measurement:
    groups = tuple(map(tuple, launches))
    return Measurement(
        samples=Samples(
            step_seconds=groups,
            rank_seconds=tuple((group,) for group in groups),
        )
    )


def steps_of(row: Row) -> Steps:
    return [
        [step / 1e6 for step in launch] for launch in row["step_microseconds"]
    ]


def differences(limit: Limit, measured: Measured) -> list[float]:
    """The log-ratio of each pair, as the rule has it."""
    other = measured.baseline_side
    assert other is not None
    assert other.measurement is not None
    sides = measured.measurement, other.measurement
    now, base = (observations.logs(limit, side) for side in sides)
    if limit.kind.is_in_stretches:
        base = observations.in_stretches(
            limit, now, base, *sides, other.stretches
        )
    return [
        round(after - before, 4)
        for after, before in zip(now, base, strict=True)
    ]


def limits(mode: str) -> tuple[Limit, ...]:
    """Those of a user who wants the mode's limit at p10 and p50, and the default one on the
    mean."""
    named = tuple(
        Limit(metric=metric, value=MODES[mode].limit, unit="%")
        for metric in ("p10", "p50")
    )
    return (*named, *(limit for limit in TIME_LIMITS if limit.metric == MEAN))


# --- the table


@dataclass(frozen=True)
class Judged:
    """What came of one measurement."""

    cell: tuple[str, ...]  # of the table: mode, machine, kind, model
    status: str
    seconds: float
    resolution: float  # at p10


def outcomes(rows: Sequence[Row]) -> Iterator[Judged]:
    """Of every measurement that something was compared with, under each of the rules."""
    for row in rows:
        if not row["held"]:
            continue
        where = row["machine"], row["kind"], row["model"]
        if row["mode"] != STORED:
            mode = f"{row['mode']}, limit {MODES[row['mode']].limit:.0%}"
            yield Judged(
                (mode, *where), row["status"], row["seconds"], row["resolution"]
            )
            continue
        before = [
            steps_of(other)
            for other in sessions(
                rows, row["machine"], row["model"], row["began"]
            )
        ]
        for kept, (name, rule) in product(SESSIONS, RULES.items()):
            if len(before) < kept:
                continue
            verdict, launches = reported(steps_of(row), before[-kept:], rule)
            seconds = sum(row["seconds"][:launches])
            mode = ", ".join(
                filter(
                    None,
                    ("stored", f"{kept} session{'s' * (kept > 1)}", name),
                )
            )
            yield Judged(
                (mode, *where),
                str(verdict),
                seconds,
                verdict.comparisons[0].resolution,
            )


def report(rows: Sequence[Row]) -> None:
    titles = [
        "mode",
        "machine",
        "kind",
        "model",
        "measured",
        "REGRESSED",
        "95 % interval",
        "INCONCLUSIVE",
    ]
    lines = [[*titles, "resolves at p10", "seconds"]]
    every = list(outcomes(rows))
    for mode, machine, kind in dict.fromkeys(
        found.cell[:3] for found in sorted(every, key=order)
    ):
        for model in ("all", *MODELS):
            cell = mode, machine, kind, model
            chosen = [
                found
                for found in every
                if found.cell
                in {cell, *((*cell[:3], m) for m in MODELS if model == "all")}
            ]
            if chosen:
                lines.append(
                    [
                        *(cell if model == "all" else ("", "", "", model)),
                        *rates(chosen),
                    ]
                )
    uncompared = sum(not row["held"] for row in rows)
    print(
        "\nfalse alarms are REGRESSED of unchanged code, detections of slower code; median"
        " [quartiles]\n"
    )
    print(table(lines))
    print(
        f"\n{len(rows) - uncompared} measurements; {uncompared} further sessions had nothing to be"
        " compared with"
    )


def order(found: Judged) -> tuple[Any, ...]:
    mode, machine, kind, _ = found.cell
    return mode, list(MACHINES).index(machine), KINDS.index(kind)


def rates(chosen: Sequence[Judged]) -> list[str]:
    red = sum(found.status == "REGRESSED" for found in chosen)
    open_ = sum(found.status == "INCONCLUSIVE" for found in chosen)
    low, high = binomial_interval(red, len(chosen))
    resolution = quartiles([found.resolution for found in chosen])
    seconds = quartiles([found.seconds for found in chosen])
    return [
        str(len(chosen)),
        f"{red / len(chosen):.1%}",
        f"{low:.1%} to {high:.1%}",
        f"{open_ / len(chosen):.1%}",
        f"{resolution.median:.0%} [{resolution.first:.0%}, {resolution.third:.0%}]",
        f"{seconds.median:.1f} [{seconds.first:.1f}, {seconds.third:.1f}]",
    ]


if __name__ == "__main__":
    sys.exit(main())
