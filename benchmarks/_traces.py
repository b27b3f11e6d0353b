"""Recorded step times as measurements, from a folder of traces (benchmarks/README.md has their form)."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from pytest_ddpperf.launch.collect import completions
from pytest_ddpperf.records import Measurement, Samples

Launch = tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]  # rank x step, and the group's steps, in seconds


@dataclass(frozen=True)
class Workload:
    """One workload's launches, by session and injected slowdown, in the order they were recorded."""

    name: str
    world_size: int
    sessions: dict[tuple[int, int], dict[float, list[Launch]]]  # by file and session in it

    def __str__(self) -> str:
        return f"{self.name} x {self.world_size}"


def read(folder: Path, recording: str = "pinned") -> list[Workload]:
    """All workloads of all recordings below `folder`; sessions of different files are different sessions."""
    files = sorted([*folder.glob("*.jsonl.gz"), *folder.glob("*.jsonl")])
    if not files:
        raise SystemExit(f"{folder} holds no traces: neither *.jsonl.gz nor *.jsonl")
    found: dict[Any, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for number, file in enumerate(files):
        with gzip.open(file, "rt") if file.suffix == ".gz" else open(file) as lines:
            for line in lines:
                row = json.loads(line)
                if row["recording"] == recording:
                    sessions = found[row["workload"], row["world_size"]]
                    cell = sessions[number, row["session"]][float(row["injected_slowdown"])]
                    cell.append((row["launch"], _launch(row["step_microseconds"])))
    return [
        Workload(
            name,
            size,
            {
                session: {slowdown: [launch for _, launch in sorted(cell)] for slowdown, cell in sorted(cells.items())}
                for session, cells in sorted(sessions.items())
            },
        )
        for (name, size), sessions in sorted(found.items())
    ]


def _launch(microseconds: list[list[float]]) -> Launch:
    own = tuple(tuple(step / 1e6 for step in rank) for rank in microseconds)
    return own, completions([0.0] * len(own), [tuple(accumulate(rank)) for rank in own])


def measurement(launches: list[Launch]) -> Measurement:
    return Measurement(
        samples=Samples(
            step_seconds=tuple(group for _, group in launches), rank_seconds=tuple(own for own, _ in launches)
        )
    )
