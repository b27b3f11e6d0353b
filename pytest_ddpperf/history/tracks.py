"""From the entries of a history to series that may be compared: one a test, environment and set of facts that must
match. Knows records and points, and nothing of steps being good or bad."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from statistics import median

from pytest_ddpperf.history.entry import Entry, Kept
from pytest_ddpperf.history.steps import Point
from pytest_ddpperf.records import Run, Scalar, TestId
from pytest_ddpperf.records.errors import HistoryError


@dataclass(frozen=True, slots=True)
class Mark:
    """One run in a series."""

    entry: Entry
    kept: Kept

    @property
    def run(self) -> Run:
        return self.entry.run


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """A series: runs in the order of their commits."""

    environment: str  # the folder's name
    key: Mapping[str, Scalar]
    test: TestId
    must_match: Mapping[str, Scalar]
    marks: tuple[Mark, ...]
    told: str = ""  # the facts that set it apart from other series of its test and environment

    def points(self, metric: str) -> list[Point]:
        """Of the runs' launches."""
        moved = _moved([mark.run for mark in self.marks])
        return [_point(mark, metric, moves) for mark, moves in zip(self.marks, moved, strict=True)]

    def last_seconds(self, metric: str) -> float:
        """Of the last run, over its launches."""
        return math.exp(_point(self.marks[-1], metric, 1.0).value)


def _point(mark: Mark, metric: str, moved: float) -> Point:
    logs = list(map(math.log, mark.kept.launch_seconds[metric]))
    mean = sum(logs) / len(logs)
    spread = sum([(each - mean) ** 2 for each in logs]) / (len(logs) - 1) if len(logs) > 1 else 0.0
    return Point(mean, len(logs), spread, moved)


def _moved(runs: Sequence[Run]) -> list[float]:
    """The time between runs, in usual ones and at least one: a machine may drift from run to run, and further in a
    longer time."""
    times = [_seconds(run.created) for run in runs]
    gaps = [abs(after - before) for before, after in pairwise(times)]
    usual = median(gaps) if gaps else 0.0
    return [1.0, *(max(1.0, gap / usual) if usual > 0 else 1.0 for gap in gaps)]


@lru_cache(maxsize=100_000)
def _seconds(created: str) -> float:
    """Of a run, which is in many series."""
    return datetime.fromisoformat(created).timestamp()


def tracks(entries: Sequence[Entry]) -> list[Track]:
    """By test and environment; those that facts set apart stand together, the one with the latest run last. Raises
    HistoryError for facts that are none."""
    found: dict[tuple[str, TestId], dict[frozenset[tuple[str, Scalar]], list[Mark]]] = {}
    for entry in entries:
        for kept in entry.measurements:
            of_test = found.setdefault((entry.environment, kept.test), {})
            of_test.setdefault(_facts(entry, kept), []).append(Mark(entry, kept))
    made: list[Track] = []
    for (environment, test), groups in sorted(found.items(), key=lambda item: (str(item[0][1]), item[0][0])):
        common = frozenset.intersection(*groups)
        for facts, marks in sorted(groups.items(), key=_latest):
            apart = ", ".join(f"{name} {value}" for name, value in sorted(facts - common, key=str))
            made.append(
                Track(
                    environment=environment,
                    key=marks[-1].entry.key,
                    test=test,
                    must_match=marks[-1].kept.must_match,
                    marks=tuple(marks),
                    told=apart,
                )
            )
    return made


def _facts(entry: Entry, kept: Kept) -> frozenset[tuple[str, Scalar]]:
    try:
        return frozenset(kept.must_match.items())
    except TypeError as error:
        raise HistoryError(entry.file, f"{kept.test}: must_match: {error}") from error


def _latest(group: tuple[object, list[Mark]]) -> tuple[str, str]:
    run = group[1][-1].run
    return run.committed, run.created


def differing(then: Mapping[str, Scalar], now: Mapping[str, Scalar]) -> Iterator[str]:
    """Facts of two runs: "torch 2.12 -> 2.13"."""
    for name in sorted({*then, *now}):
        if then.get(name) != now.get(name):
            yield f"{name.removeprefix('env:')} {then.get(name, 'unset')} -> {now.get(name, 'unset')}"
