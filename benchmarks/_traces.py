"""Recorded step times as measurements, from a folder of traces (benchmarks/README.md has their
form)."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from pytest_ddpperf.launch.collect import completions
from pytest_ddpperf.records.samples import Measurement, Samples

# rank x step, and the group's steps, in seconds
Launch = tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]


@dataclass(frozen=True)
class Workload:
    """One workload's launches, by session and injected slowdown, in the order they were
    recorded."""

    name: str
    world_size: int
    # by file and session in it
    sessions: dict[tuple[int, int], dict[float, list[Launch]]]

    def __str__(self) -> str:
        return f"{self.name} x {self.world_size}"

    @property
    def injected(self) -> set[float]:
        return {
            slowdown
            for session in self.sessions.values()
            for slowdown in session
        }


@dataclass(frozen=True)
class Pairs:
    """Pairs of launches that took turns in one way (benchmarks/turns.py), by injected slowdown: the
    side that has it, the other, and the lengths of the stretches."""

    name: str
    way: str
    pairs: dict[float, list[tuple[Launch, Launch, tuple[int, ...]]]]
    world_size: int = 2

    def __str__(self) -> str:
        return f"{self.name} {self.way}"

    @property
    def injected(self) -> set[float]:
        return set(self.pairs)


def read_pairs(file: Path) -> list[Pairs]:
    """By model, machine and way."""
    found: dict[Any, Any] = defaultdict(lambda: defaultdict(list))
    for line in file.read_text().splitlines():
        row = json.loads(line)
        base, now = (_group(steps) for steps in row["microseconds"])
        pairs = found[f"{row['model']}, {row['machine']}", row["way"]]
        pairs[row["amount"]].append((now, base, tuple(row["stretches"])))
    return [
        Pairs(name, way, dict(pairs))
        for (name, way), pairs in sorted(found.items())
    ]


def _group(microseconds: list[float]) -> Launch:
    """Of which only the group's steps are known."""
    steps = tuple(step / 1e6 for step in microseconds)
    return (steps,), steps


def read(folder: Path, recording: str = "pinned") -> list[Workload]:
    """All workloads of all recordings below `folder`; sessions of different files are different
    sessions."""
    files = sorted([*folder.glob("*.jsonl.gz"), *folder.glob("*.jsonl")])
    if not files:
        raise SystemExit(
            f"{folder} holds no traces: neither *.jsonl.gz nor *.jsonl"
        )
    found: dict[Any, Any] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for number, file in enumerate(files):
        with (
            gzip.open(file, "rt")
            if file.suffix == ".gz"
            else open(file) as lines
        ):
            for line in lines:
                row = json.loads(line)
                if row["recording"] == recording:
                    sessions = found[row["workload"], row["world_size"]]
                    cell = sessions[number, row["session"]][
                        float(row["injected_slowdown"])
                    ]
                    cell.append(
                        (row["launch"], _launch(row["step_microseconds"]))
                    )
    return [
        Workload(
            name,
            size,
            {
                session: {
                    slowdown: [launch for _, launch in sorted(cell)]
                    for slowdown, cell in sorted(cells.items())
                }
                for session, cells in sorted(sessions.items())
            },
        )
        for (name, size), sessions in sorted(found.items())
    ]


def _launch(microseconds: list[list[float]]) -> Launch:
    own = tuple(tuple(step / 1e6 for step in rank) for rank in microseconds)
    return own, completions([(0.0, *accumulate(rank)) for rank in own])


def measurement(launches: list[Launch]) -> Measurement:
    return Measurement(
        samples=Samples(
            step_seconds=tuple(group for _, group in launches),
            rank_seconds=tuple(own for own, _ in launches),
        )
    )
