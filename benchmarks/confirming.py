"""Error rates of suspicions that are settled on the baseline's own code, live: whole pytest runs in
a small repository.

    python benchmarks/confirming.py [--measurements 20] [--results confirming.jsonl]

A session of three small DDP models is saved while the machine is quiet, or beside
benchmarks/neighbour.py. At least ten minutes later, under the other load, the same code is compared
with it, where REGRESSED is a false alarm, and code that is slower by 20 %, where anything else is a
miss. Options are the default ones: limits of 10 %, and what lies beyond half of that is measured
beside the baseline's own commit. So many measurements are made of each model, kind and direction,
in turns, the oldest session that is younger than half an hour first.

Nothing is left out: each measurement is a line of the results file; a run goes on where the last
one ended, and shows all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from _common import binomial_interval, done, progress, quartiles, table
from _models import MODELS
from neighbour import neighbour

# seeds; the second's moves on from cycle to cycle
LOADS = {"quiet": None, "neighbour": 20261122}
OTHER = {"quiet": "neighbour", "neighbour": "quiet"}
KINDS = {"unchanged": 0.0, "slower": 0.2}
SESSION_AGE = 600.0  # seconds
TOO_OLD = 1800.0  # then the machine may have become another

TEST = """
import pytest
from models import MODELS, training
from speed import SLOWER

@pytest.mark.parametrize("model", MODELS)
def test_training(ddp_benchmark, model):
    ddp_benchmark(training(model, SLOWER))
"""

Row = dict[str, Any]  # of the results file


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--measurements",
        type=int,
        default=20,
        help="of each model, kind and direction",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("confirming.jsonl"),
        help="file to go on with",
    )
    options = parser.parse_args()
    rows = done(options.results)
    with (
        tempfile.TemporaryDirectory() as folder,
        options.results.open("a") as file,
    ):
        for row in measurements(
            Project(Path(folder)), rows, options.measurements
        ):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            progress(
                len(rows),
                options.measurements * len(MODELS) * len(KINDS) * len(LOADS),
                "measurements",
            )
    report(rows)
    return 0


def measurements(
    project: Project, rows: Sequence[Row], wanted: int
) -> Iterator[Row]:
    """Those that are missing, cycle after cycle over both loads; what was saved in one is compared
    in a later one."""
    # by the load beside which they were saved
    waiting: dict[str, list[Saved]] = {load: [] for load in LOADS}
    cycle = 0
    while missing := [
        cell
        for cell in product(LOADS, KINDS, MODELS)
        if count(rows, *cell) < wanted
    ]:
        for load, seed in LOADS.items():
            kinds = dict.fromkeys(
                kind for there, kind, _ in missing if there == load
            )
            old = [
                each
                for each in waiting[OTHER[load]]
                if SESSION_AGE <= each.age <= TOO_OLD
            ]
            asked = any(there == OTHER[load] for there, *_ in missing)
            due = asked and (
                not waiting[load] or waiting[load][-1].age > SESSION_AGE / 4
            )
            if not (old and kinds) and not due:
                time.sleep(1.0)
                continue
            with neighbour(None if seed is None else seed + cycle):
                for kind in kinds if old else ():
                    yield from (
                        {"load": load, "kind": kind, **row}
                        for row in project.compared(old[0], kind)
                    )
                if due:
                    waiting[load].append(project.saved())
            waiting[OTHER[load]] = [
                each
                for each in waiting[OTHER[load]]
                if each not in old[:1] and each.age <= TOO_OLD
            ]
        cycle += 1


def count(rows: Sequence[Row], load: str, kind: str, model: str) -> int:
    return sum(
        (row["load"], row["kind"], row["model"]) == (load, kind, model)
        for row in rows
    )


@dataclass(frozen=True)
class Saved:
    """A session of all models."""

    folder: Path
    ended: float

    @property
    def age(self) -> float:
        """In seconds."""
        return time.time() - self.ended


class Project:
    """A repository with one commit, whose tests are run by this interpreter's pytest."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._top = folder, folder / "project"
        self._sessions = 0
        self._top.mkdir()
        self._write("pytest.ini", "[pytest]\npythonpath = .\n")
        self._write(
            "models.py", Path(__file__).with_name("_models.py").read_text()
        )
        self._write("test_models.py", TEST)
        self._slower("unchanged")
        identity = [
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "-c",
            "commit.gpgsign=false",
        ]
        for command in (
            ["init", "--quiet"],
            ["add", "."],
            [*identity, "commit", "--quiet", "-m", "the code"],
        ):
            subprocess.run(["git", "-C", str(self._top), *command], check=True)

    def _write(self, name: str, text: str) -> None:
        (self._top / name).write_text(text)

    def _slower(self, kind: str) -> None:
        self._write("speed.py", f"SLOWER = {KINDS[kind]}\n")

    def saved(self) -> Saved:
        self._sessions += 1
        folder = self._folder / f"session-{self._sessions}"
        self._slower("unchanged")
        self._pytest(
            f"--ddp-baseline-dir={folder}", "--ddp-save-baseline", status=0
        )
        return Saved(folder, time.time())

    def compared(self, session: Saved, kind: str) -> Iterator[Row]:
        """What came of each model."""
        self._slower(kind)
        reported, times = self._folder / "run.json", self._folder / "run.xml"
        age = session.age
        self._pytest(
            f"--ddp-baseline-dir={session.folder}",
            f"--ddp-json={reported}",
            f"--junitxml={times}",
        )
        seconds = {
            case.get("name"): float(case.get("time", "nan"))
            for case in ElementTree.parse(times).iter("testcase")
        }
        for measured in json.loads(reported.read_text())["measurements"]:
            name, verdict, stored = (
                measured["test"]["name"],
                measured["verdict"],
                measured["stored_verdict"],
            )
            yield {
                "model": name.partition("[")[2].rstrip("]"),
                "session_age": round(age),
                "status": verdict["status"] if verdict else "not measured",
                "reason": verdict["reason"] if verdict else measured["error"],
                "change": change_of(verdict),
                "stored": stored
                and {"status": stored["status"], "change": change_of(stored)},
                "seconds": round(seconds[name], 1),
                "notes": measured["notes"],
            }

    def _pytest(self, *options: str, status: int | None = None) -> None:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:randomly",
            "-p",
            "no:benchmark",
            "--ddp-backend=gloo",
        ]
        environ = {
            name: value for name, value in os.environ.items() if name != "CI"
        }
        ended = subprocess.run(
            [*command, *options],
            cwd=self._top,
            env=environ,
            capture_output=True,
            text=True,
        )
        if ended.returncode not in ((0, 1) if status is None else (status,)):
            raise RuntimeError(
                f"pytest ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}"
            )


def change_of(verdict: Any) -> float | None:
    """Of the first limit; None where nothing was compared."""
    comparisons = verdict["comparisons"] if verdict else []
    return (
        round(comparisons[0]["change"]["estimate"], 4) if comparisons else None
    )


# --- the table


def report(rows: Sequence[Row]) -> None:
    titles = [
        "saved -> compared",
        "kind",
        "model",
        "measured",
        "REGRESSED",
        "95 % interval",
        "INCONCLUSIVE",
        "looked at",
    ]
    lines = [[*titles, "seconds, looked at", "seconds, others"]]
    for load, kind, model in product(LOADS, KINDS, ("all", *MODELS)):
        chosen = [
            row
            for row in rows
            if (row["load"], row["kind"]) == (load, kind)
            and model in ("all", row["model"])
        ]
        if chosen:
            head = (
                [f"{OTHER[load]} -> {load}", kind]
                if model == "all"
                else ["", ""]
            )
            lines.append([*head, model, *rates(chosen)])
    print(
        "\nfalse alarms are REGRESSED of unchanged code, detections of slower code; median"
        " [quartiles]\n"
    )
    print(table(lines))


def rates(chosen: Sequence[Row]) -> list[str]:
    red, open_ = (
        sum(row["status"] == status for row in chosen)
        for status in ("REGRESSED", "INCONCLUSIVE")
    )
    looked_at = [
        row
        for row in chosen
        if row["stored"] or any(map(tells_of_it, row["notes"]))
    ]
    low, high = binomial_interval(red, len(chosen))
    return [
        str(len(chosen)),
        f"{red / len(chosen):.1%}",
        f"{low:.1%} to {high:.1%}",
        f"{open_ / len(chosen):.1%}",
        f"{len(looked_at) / len(chosen):.1%}",
        *(
            seconds([row for row in chosen if (row in looked_at) is wanted])
            for wanted in (True, False)
        ),
    ]


def tells_of_it(note: str) -> bool:
    """Whether a note is of a suspicion that was not settled."""
    return note.startswith("not confirmed with the baseline's own code")


def seconds(rows: Sequence[Row]) -> str:
    if not rows:
        return "-"
    spread = quartiles([row["seconds"] for row in rows])
    return f"{spread.median:.1f} [{spread.first:.1f}, {spread.third:.1f}]"


if __name__ == "__main__":
    sys.exit(main())
