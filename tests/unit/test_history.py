"""A history: the entry of a run, its file, and the meaning of change points."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf import Figure
from pytest_ddpperf.baseline.content import environment
from pytest_ddpperf.history.entries import (
    METRICS,
    AcceptedChange,
    HistoryEntry,
    HistoryFigure,
    HistoryMeasurement,
    add_entry,
    make_entry,
    read_entries,
)
from pytest_ddpperf.history.series import (
    ChangeStatus,
    HistoryAnalysis,
    HistoryChange,
    analyze,
    build_series,
    make_acceptance,
)
from pytest_ddpperf.records.errors import FileError
from pytest_ddpperf.records.figure import FigureValues
from pytest_ddpperf.records.outcome import (
    BaselineSide,
    Outcome,
    RunInfo,
    Version,
)
from pytest_ddpperf.records.plan import Limit, Plan
from pytest_ddpperf.records.samples import (
    Environment,
    Measurement,
    Samples,
    Status,
    TestId,
)
from pytest_ddpperf.report.history_report import change_lines
from tests.unit.test_change_points import gaussian
from tests.unit.test_report import FAILED, outcome, verdict

FIRST = datetime(2026, 1, 1, tzinfo=timezone.utc)
TEST = TestId(module="tests/perf/test_step", name="test_train")
P50 = (Limit(metric="p50", value=0.0, unit="%"),)


def commit_of(day: int) -> str:
    """A hash whose first 12 digits show the day."""
    return f"{day:08x}" * 5


def run(day: int = 0, **kwargs: Any) -> RunInfo:
    when = (FIRST + timedelta(days=day)).isoformat()
    usual = {
        "id": f"{day:x}",
        "created": when,
        "version": "0.1",
        "commit": commit_of(day),
        "committed": when,
    }
    return RunInfo(**{**usual, **kwargs})


def kept(
    level: float = 0.01, test: TestId = TEST, **kwargs: Any
) -> HistoryMeasurement:
    launches = tuple(level * factor for factor in (0.99, 1.0, 1.01))
    usual = {
        "test": test,
        "environment": "cpu-gloo-ws2",
        "must_match": {"batch_size": 32},
        "recorded": {"torch": "2.12"},
        "launch_seconds": dict.fromkeys(METRICS, launches),
        "counters": {"all_reduce.count": 5},
    }
    return HistoryMeasurement(**{**usual, **kwargs})


def one(
    day: int, *measurements: HistoryMeasurement, **kwargs: Any
) -> HistoryEntry:
    ran = run(day)
    usual = {
        "commit": ran.commit,
        "committed": ran.committed,
        "created": ran.created,
    }
    return HistoryEntry(**{**usual, "measurements": measurements, **kwargs})


def history(logs: Sequence[float], **facts: Any) -> list[HistoryEntry]:
    """One run per day; its level is 10 ms times a hundredth of the value as a logarithm."""
    return [
        one(day, kept(0.01 * math.exp(log / 100), **facts))
        for day, log in enumerate(logs)
    ]


def of_two_launches(*milliseconds: float) -> list[HistoryEntry]:
    """One run per day of two launches, which differ by 2 %."""
    launches = [
        tuple(0.001 * each * factor for factor in (0.99, 1.01))
        for each in milliseconds
    ]
    return [
        one(day, kept(launch_seconds=dict.fromkeys(METRICS, each)))
        for day, each in enumerate(launches)
    ]


def stepped(*jumps: tuple[int, float], points: int = 60) -> list[float]:
    return [
        value + sum(by for place, by in jumps if day >= place)
        for day, value in enumerate(gaussian(points))
    ]


def judged(
    entries: Iterable[HistoryEntry],
    limits: Sequence[Limit] = P50,
    accepted: Sequence[AcceptedChange] = (),
) -> HistoryAnalysis:
    return analyze(build_series(list(entries)), limits, accepted)


def found(entries: Iterable[HistoryEntry], **kwargs: Any) -> HistoryChange:
    (change,) = judged(entries, **kwargs).changes
    return change


# --- entries


def measured(**kwargs: Any) -> Outcome:
    """Two windows of 100 steps, of which 50 were asked for."""
    steps = tuple(0.001 * (1 + number) for number in range(100))
    launches = (steps, tuple(2 * step for step in steps))
    samples = Samples(
        step_seconds=launches,
        rank_seconds=tuple((each, each) for each in launches),
    )
    environment = Environment(
        key={"device_type": "cpu", "backend": "gloo", "world_size": 2},
        must_match={"batch_size": 32, "timing": "step"},
        recorded={
            "torch": "2.13.0",
            "host": "h",
            "kernel": "6.1",
            "env:NCCL_ALGO": "Ring",
        },
    )
    counters = {"all_reduce.count": 5, "rpc.bytes": None}
    now = Measurement(
        samples=samples, environment=environment, counters=counters
    )
    plan = Plan(
        world_size=2,
        backend="gloo",
        device="cpu",
        steps=50,
        min_seconds=1.0,
        most_steps=1000,
    )
    return outcome(
        verdict(Status.PASS), measurement=now, **{"plan": plan, **kwargs}
    )


BESIDE = BaselineSide(
    version=Version(ref="main", commit="a", now="b"), order="bn"
)


@pytest.mark.parametrize(
    ("measurement", "number"),
    [
        (FAILED, 0),
        (outcome(None, measurement=None), 0),
        (outcome(verdict(Status.NOT_GATED, "disabled")), 0),
        (outcome(verdict(Status.NOT_GATED, "debugging-variable")), 0),
        (outcome(verdict(Status.PASS), baseline_side=BESIDE), 0),
        (
            outcome(
                verdict(Status.REGRESSED),
                baseline_side=BESIDE,
                stored_verdict=verdict(Status.REGRESSED),
            ),
            1,
        ),
    ],
    ids=[
        "failed",
        "not measured",
        "disabled",
        "debugging",
        "another version",
        "confirmed suspicion",
    ],
)
def test_only_measurements_that_describe_their_commit_are_kept(
    measurement: Outcome, number: int
) -> None:
    assert len(make_entry([measurement], run()).measurements) == number


# --- files


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("", "is not a valid file of a history: Expecting value"),
        ("[1]", "is not a file of a history with schema 1"),
        ({"schema": 2}, "is not a file of a history with schema 1"),
        (
            {"commit": 1},
            "is not a valid file of a history: commit: expected `str`",
        ),
        (
            {"commit": "../evil"},
            "commit: '../evil' is not the hash of a commit",
        ),
        (
            {"committed": "then"},
            "committed: 'then' is not a time in UTC in ISO 8601",
        ),
        (
            {"measurements": [{"test": {"module": "m"}}]},
            "is not a valid file of a history: measurements[0]",
        ),
        *(
            (
                {"p50": seconds},
                (
                    "tests/perf/test_step::test_train: launch_seconds.p50 are not durations:"
                    f" {seconds}"
                ),
            )
            for seconds in ([0.0, 0.1], [0.1, -0.1], [])
        ),
        (
            {"p50": [math.inf]},
            "is not a valid file of a history: Infinity is not a number",
        ),
    ],
)
def test_an_invalid_file_is_named(
    tmp_path: Path, change: Any, problem: str
) -> None:
    path = add_entry(tmp_path, one(1, kept()))
    data = json.loads(path.read_text())
    if "p50" in change:
        data["measurements"][0]["launch_seconds"] |= change
        change = {}
    path.write_text(
        change if isinstance(change, str) else json.dumps({**data, **change})
    )
    with pytest.raises(FileError) as raised:
        read_entries(tmp_path)
    assert str(raised.value).startswith(f"{path}: {problem}")
    with pytest.raises(
        FileError, match=r"cannot be written: (Not a directory|File exists)"
    ):
        add_entry(path, one(1, kept()))


# --- change points


def test_a_change_point_has_its_commits_and_its_size() -> None:
    later = {
        "recorded": {"torch": "2.13", "env:NCCL_ALGO": "Ring"},
        "counters": {"all_reduce.count": 6, "buckets": 2},
    }
    logs = stepped((40, 9.0))
    change = found(history(logs)[:40] + history(logs, **later)[40:])
    assert [*change.differences()] == [
        "NCCL_ALGO unset -> Ring",
        "torch 2.12 -> 2.13",
        "all_reduce.count 5 -> 6",
    ]
    assert (change.status, change.index, change.runs_since) == (
        ChangeStatus.REGRESSED,
        40,
        20,
    )
    assert (change.before.commit, change.after.commit) == (
        commit_of(39),
        commit_of(40),
    )
    assert change.change.estimate == pytest.approx(math.expm1(0.09), abs=0.01)
    assert change.change.low < math.expm1(0.09) < change.change.high
    assert change.seconds[1] / change.seconds[0] == pytest.approx(
        1 + change.change.estimate
    )
    assert found(history(stepped((40, -9.0)))).status is ChangeStatus.IMPROVED


def test_a_change_point_begins_at_the_level_after_the_one_before() -> None:
    changes = judged(history(stepped((40, 20.0), (43, -20.0)))).changes
    slower, faster = sorted(changes, key=lambda change: change.index)
    assert (slower.index, faster.index) == (40, 43)
    level = 0.01 * math.exp(0.2)
    assert slower.seconds[1] == pytest.approx(level, rel=0.03)
    assert faster.seconds[0] == pytest.approx(level, rel=0.03)


@pytest.mark.parametrize(
    ("after", "line"),
    [
        ({"forward": 0.0048, "backward": 0.005}, "mostly forward: +800 us"),
        # neither makes up half of it
        ({"forward": 0.0043, "backward": 0.0053}, None),
        ({}, None),
        ({"exposed_communication": 0.009}, None),  # it was unknown before
    ],
)
def test_a_change_point_names_the_phase_that_makes_it_up(
    after: dict[str, float], line: str | None
) -> None:
    logs, before = stepped((40, 9.0)), {"forward": 0.004, "backward": 0.005}
    change = found(
        history(logs, phases=before)[:40] + history(logs, phases=after)[40:]
    )
    assert [
        each for each in change_lines(change) if each.startswith("mostly")
    ] == ([line] if line else [])


@pytest.mark.parametrize(
    ("jumps", "value", "unit", "statuses"),
    [
        (((40, 9.0),), 0.15, "%", [ChangeStatus.WITHIN_LIMIT]),
        (((40, 9.0),), 0.05, "%", [ChangeStatus.REGRESSED]),
        (((40, 9.0),), 0.002, "ms", [ChangeStatus.WITHIN_LIMIT]),
        (((40, 9.0),), 0.0005, "ms", [ChangeStatus.REGRESSED]),
        (
            ((25, 9.0), (40, -9.0)),
            0.0,
            "%",
            [ChangeStatus.IMPROVED, ChangeStatus.UNDONE],
        ),
    ],
)
def test_the_status_depends_on_the_limit_and_later_changes(
    jumps: tuple[tuple[int, float], ...],
    value: float,
    unit: Any,
    statuses: list[ChangeStatus],
) -> None:
    changes = judged(
        history(stepped(*jumps)),
        limits=[Limit(metric="p50", value=value, unit=unit)],
    ).changes
    assert [change.status for change in changes] == statuses


def test_runs_with_other_must_match_facts_are_another_series() -> None:
    logs = stepped((30, 9.0))
    entries = (
        history(logs)[:30] + history(logs, must_match={"batch_size": 64})[30:]
    )
    assert judged(entries).changes == []
    assert [each.distinction for each in judged(entries).series] == [
        "batch_size 32",
        "batch_size 64",
    ]


def test_a_series_without_a_change_point_has_a_smallest_detectable_change() -> (
    None
):
    """A noisier series has a larger one, and the more series are searched the larger it is."""
    quiet, noisy = (
        history(stepped()),
        history([4 * log for log in stepped()], environment="cpu-gloo-ws4"),
    )
    alone, (one_of_two, four_times) = (
        judged(quiet).unchanged,
        judged(quiet + noisy).unchanged,
    )
    assert [(series.environment, metric) for series, metric, _ in alone] == [
        ("cpu-gloo-ws2", "p50")
    ]
    assert 0.02 < alone[0][2] < one_of_two[2] < four_times[2] / 3
    assert judged(history(stepped((40, 9.0)))).unchanged == []


# --- accepted


@pytest.mark.parametrize(
    ("accepted", "size", "is_accepted"),
    [
        (9.0, 14.0, False),
        (9.0, -9.0, False),
        (9.0, 8.0, True),
        (-9.0, -9.0, True),
        (-9.0, -14.0, False),
    ],
)
def test_a_larger_or_opposite_change_is_not_accepted(
    accepted: float, size: float, is_accepted: bool
) -> None:
    record = make_acceptance(found(history(stepped((40, accepted)))), "meant")
    change = found(history(stepped((40, size))), accepted=[record])
    assert (change.status is ChangeStatus.ACCEPTED) == is_accepted


def test_a_run_keeps_the_means_of_figures_of_ones_own() -> None:
    figure = Figure(better="higher", constant=True)
    found = FigureValues(
        figure=figure, values=(((1.0, 3.0), (4.0,)), ((0.0, 6.0), ()))
    )
    zero = FigureValues(figure=figure, values=(((0.0,), ()), ((1.0,), ())))
    one = measured()
    samples = replace(
        one.measured.samples, figures={"tps": found, "idle": zero}
    )
    now = replace(one.measured, samples=samples)
    (kept_now,) = make_entry(
        [replace(one, measurement=now)], run()
    ).measurements
    assert kept_now.figures == {
        "tps": HistoryFigure(better="higher", launches=(3.0, 3.0))
    }
    assert kept_now.launches("tps") == (1 / 3.0, 1 / 3.0)
    assert kept_now.launches("idle") == ()
    assert kept_now.launches("p50") == kept_now.launch_seconds["p50"]


def test_an_entry_has_the_facts_that_find_its_commit_again() -> None:
    """`ddpperf history` writes a command with the ranks and the backend."""
    one = measured()
    plan = replace(one.plan, world_size=8, backend="nccl")
    now = replace(
        one.measured, environment=environment({}, plan, batch_size=None)
    )
    (kept_now,) = make_entry(
        [replace(one, measurement=now)], run()
    ).measurements
    assert kept_now.key["world_size"] == 8
    assert kept_now.key["backend"] == "nccl"
