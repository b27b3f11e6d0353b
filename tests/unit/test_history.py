"""A history: what is kept of a run, how it is read again, and what its steps come to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.history import accepted, entry, folder, judging, tracks
from pytest_ddpperf.history.accepted import Accepted
from pytest_ddpperf.history.entry import Entry, Kept
from pytest_ddpperf.history.judging import Found, Judged
from pytest_ddpperf.records import (
    Beside,
    Environment,
    Limit,
    Measurement,
    Outcome,
    Run,
    Samples,
    Status,
    TestId,
    Version,
)
from pytest_ddpperf.records.errors import HistoryError
from tests.unit.test_report import FAILED, outcome, verdict
from tests.unit.test_steps import gaussian

FIRST = datetime(2026, 1, 1, tzinfo=timezone.utc)
TEST = TestId(module="tests/perf/test_step", name="test_train")
P50 = (Limit(metric="p50", value=0.0, unit="%"),)


def run(day: int = 0, **kwargs: Any) -> Run:
    when = (FIRST + timedelta(days=day)).isoformat()
    return Run(
        **{"id": f"{day:x}", "created": when, "version": "0.1", "commit": f"{day:040x}", "committed": when, **kwargs}
    )


def kept(level: float = 0.01, test: TestId = TEST, **kwargs: Any) -> Kept:
    launches = tuple(level * factor for factor in (0.99, 1.0, 1.01))
    return Kept(
        **{
            "test": test,
            "must_match": {"batch_size": 32},
            "recorded": {"torch": "2.12"},
            "launch_seconds": dict.fromkeys(entry.METRICS, launches),
            "counters": {"all_reduce.count": 5},
            **kwargs,
        }
    )


def one(day: int, *measurements: Kept, environment: str = "cpu-gloo-ws2", **kwargs: Any) -> Entry:
    return Entry(
        run=run(day, **kwargs),
        key={"device_type": "cpu", "backend": "gloo", "world_size": 2},
        measurements=measurements,
        environment=environment,
    )


def history(logs: Sequence[float], **by_day: Mapping[str, Any]) -> list[Entry]:
    """A day a point; its level is 10 ms times a hundredth of it in logarithms."""
    return [one(day, kept(0.01 * math.exp(log / 100))) for day, log in enumerate(logs)]


def stepped(*jumps: tuple[int, float], points: int = 60) -> list[float]:
    return [value + sum(by for place, by in jumps if day >= place) for day, value in enumerate(gaussian(points))]


def judged(entries: Iterable[Entry], limits: Sequence[Limit] = P50, told: Sequence[Accepted] = ()) -> Judged:
    return judging.judge(tracks.tracks(list(entries)), limits, told)


def found(entries: Iterable[Entry], **kwargs: Any) -> Found:
    (step,) = judged(entries, **kwargs).found
    return step


# --- what is kept


def measured(**kwargs: Any) -> Outcome:
    steps = tuple(0.001 * (1 + number) for number in range(100))
    launches = (steps, tuple(2 * step for step in steps))
    samples = Samples(step_seconds=launches, rank_seconds=tuple((each, each) for each in launches))
    environment = Environment(
        key={"device_type": "cpu", "backend": "gloo", "world_size": 2},
        must_match={"batch_size": 32, "timing": "step"},
        recorded={"torch": "2.13.0", "host": "h", "kernel": "6.1", "env:NCCL_ALGO": "Ring"},
    )
    counters = {"all_reduce.count": 5, "rpc.bytes": None}
    now = Measurement(samples=samples, environment=environment, counters=counters)
    return outcome(verdict(Status.PASS), measurement=now, **kwargs)


def test_percentiles_of_launches_are_kept_and_counters_and_no_samples() -> None:
    (added,) = entry.entries([measured()], run())
    (row,) = added.measurements
    assert row.launch_seconds == {
        "p10": (0.0109, 0.0218),
        "p50": (0.0505, 0.101),
        "p90": (0.0901, 0.1802),
    }
    assert row.counters == {"all_reduce.count": 5}
    assert row.must_match == {"batch_size": 32, "timing": "step"}
    assert row.recorded == {"torch": "2.13.0", "host": "h", "env:NCCL_ALGO": "Ring"}
    assert (added.environment, added.key["world_size"]) == ("cpu-gloo-ws2", 2)


def test_each_environment_has_an_entry() -> None:
    other = replace(measured(), nodeid="b")
    assert other.measurement is not None
    four = Environment(key={"device_type": "cpu", "backend": "gloo", "world_size": 4})
    other = replace(other, measurement=replace(other.measurement, environment=four))
    added = entry.entries([measured(), other], run())
    assert [each.environment for each in added] == ["cpu-gloo-ws2", "cpu-gloo-ws4"]


@pytest.mark.parametrize(
    "left_out",
    [
        FAILED,
        outcome(verdict(Status.NOT_GATED, "disabled")),
        outcome(verdict(Status.NOT_GATED, "debugging-variable")),
        outcome(
            verdict(Status.PASS), beside=Beside(version=Version(ref="main", commit="a", now="b"), seed=1, order="bn")
        ),
    ],
    ids=["failed", "disabled", "debugging", "beside another version"],
)
def test_what_does_not_tell_how_fast_a_commit_is_is_left_out(left_out: Outcome) -> None:
    assert entry.entries([left_out], run()) == []


def test_a_suspicion_that_turns_settled_is_kept() -> None:
    beside = Beside(version=Version(ref="a", commit="a", now="b"), seed=1, order="bn")
    settled = outcome(verdict(Status.REGRESSED), beside=beside, stored=verdict(Status.REGRESSED))
    assert len(entry.entries([settled], run())) == 1


@pytest.mark.parametrize(
    ("of", "why"),
    [
        ({"commit": "", "committed": ""}, "what was measured is no commit of a git repository"),
        (
            {"commit": "c0ffee" * 6 + "-dirty"},
            "the working tree differs from commit c0ffeec0ffee: commit what is measured",
        ),
        ({}, ""),
    ],
)
def test_a_history_is_one_of_commits(of: dict[str, str], why: str) -> None:
    assert entry.unfit(run(**of)) == why


def test_an_entry_comes_back_as_it_was(tmp_path: Path) -> None:
    added = one(
        3, kept(), kept(0.5, replace(TEST, label="second"), must_match={"batch_size": 64}, recorded={"torch": "2.13"})
    )
    path = folder.add(tmp_path, added)
    assert path.name.startswith("20260104T000000Z-000000000000-")
    assert path.parent == tmp_path / "cpu-gloo-ws2"
    (again,) = folder.read(tmp_path)
    assert again == replace(
        added,
        measurements=tuple(
            replace(each, launch_seconds={name: list(q) for name, q in each.launch_seconds.items()})
            for each in added.measurements
        ),
    )


def test_a_measurement_is_a_line_of_at_most_a_kilobyte() -> None:
    steps = tuple(0.0123456789 + 1e-7 * number for number in range(30))
    many = Samples(step_seconds=(steps,) * 40, rank_seconds=((steps, steps),) * 40)
    full = measured()
    assert full.measurement is not None
    long = TestId(module="tests/perf/" + "m" * 40, name="test_" + "n" * 60)
    counters = dict.fromkeys(
        ("rpc.calls", "rpc.bytes", "all_reduce.count", "all_reduce.bytes", "gradient_bytes"), 10**11
    )
    big = replace(full, test=long, measurement=replace(full.measurement, samples=many, counters=counters))
    content = entry.text(entry.entries([big], run())[0])
    assert max(map(len, content.splitlines())) <= 1024
    assert len(content) <= 1024 + 800  # what the run shares


def test_what_is_there_is_never_rewritten(tmp_path: Path) -> None:
    path = folder.add(tmp_path, one(1, kept()))
    path.write_text("edited")
    assert folder.add(tmp_path, one(1, kept())) == path
    assert path.read_text() == "edited"
    assert folder.add(tmp_path, one(1, kept(0.02))) != path
    assert [each.name.startswith(".") for each in path.parent.iterdir()] == [False, False]


def test_runs_come_back_in_the_order_of_commits(tmp_path: Path) -> None:
    again = run(1).created.replace("02T", "09T")
    for each in (one(2, kept()), one(1, kept(0.02), created=again), one(1, kept())):
        folder.add(tmp_path, each)
    assert [(each.run.commit[-1], each.run.created[8:10]) for each in folder.read(tmp_path)] == [
        ("1", "02"),
        ("1", "09"),
        ("2", "03"),
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("", "is no file of a history, or not all of it: Expecting value"),
        ("{", "is no file of a history, or not all of it"),
        ("[1]", "is no file of a history: it has no schema"),
        ({"schema": 2}, "has schema 2; this version of pytest-ddpperf reads up to 1: upgrade it"),
        ({"run": {"commit": 1}}, "is no file of a history, or not all of it: commit: expected a string"),
        ({"run": {"committed": "then", "created": "now"}}, "Invalid isoformat string"),
        ({"measurements": None}, "is no file of a history, or not all of it"),
        ({"measurements": [{"test": {"module": "m"}}]}, "lacks 'name'"),
        ({"measurements": [{"test": {"module": "m", "name": "n"}}]}, "lacks 'launch_seconds'"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, change: Any, problem: str) -> None:
    path = folder.add(tmp_path, one(1, kept()))
    text = change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change})
    path.write_text(text)
    with pytest.raises(HistoryError) as raised:
        folder.read(tmp_path)
    assert str(raised.value).startswith(f"{path}: ")
    assert problem in str(raised.value)


def test_figures_that_are_no_durations_are_named() -> None:
    bad = replace(kept(), launch_seconds={"p50": [0.0, 0.1]})
    series = [*history(stepped()), replace(one(99, bad), file=Path("h/bad.json"))]
    with pytest.raises(
        HistoryError, match=r"h/bad\.json: tests/perf/test_step::test_train: launch_seconds\.p50 are no"
    ):
        judged(series)


def test_a_folder_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match=r"/none: cannot be read: No such file or directory"):
        folder.read(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryError, match=r"cannot be written: (Not a directory|File exists)"):
        folder.add(tmp_path / "file", one(1, kept()))


# --- steps


def test_a_step_has_its_commits_and_its_size() -> None:
    step = found(history(stepped((40, 9.0))))
    assert (step.status, step.reason, step.place) == (Status.REGRESSED, "step", 40)
    assert (step.before.run.commit, step.after.run.commit) == (f"{39:040x}", f"{40:040x}")
    assert step.change.estimate == pytest.approx(math.expm1(0.09), abs=0.01)
    assert step.change.low < math.expm1(0.09) < step.change.high
    assert step.seconds[1] / step.seconds[0] == pytest.approx(1 + step.change.estimate)
    assert step.points == 20


def test_a_step_to_faster_is_an_improvement() -> None:
    assert found(history(stepped((40, -9.0)))).status is Status.IMPROVED


def test_what_changed_with_a_step_is_told() -> None:
    series = history(stepped((40, 9.0)))
    later = {"recorded": {"torch": "2.13", "env:NCCL_ALGO": "Ring"}, "counters": {"all_reduce.count": 6}}
    series[40:] = [replace(each, measurements=(replace(each.measurements[0], **later),)) for each in series[40:]]
    assert found(series).differences == ("NCCL_ALGO unset -> Ring", "torch 2.12 -> 2.13", "all_reduce.count 5 -> 6")


def test_a_series_is_split_where_facts_differ_that_must_match() -> None:
    series = history(stepped((30, 50.0)))
    series[30:] = [
        replace(each, measurements=(replace(each.measurements[0], must_match={"batch_size": 64}),))
        for each in series[30:]
    ]
    told = judged(series)
    assert told.found == []
    assert [(len(track.marks), track.told) for track in told.tracks] == [(30, "batch_size 32"), (30, "batch_size 64")]


def test_environments_are_series_of_their_own() -> None:
    series = [replace(each, environment="ab"[number % 2]) for number, each in enumerate(history(stepped()))]
    assert [track.environment for track in tracks.tracks(series)] == ["a", "b"]


def test_a_step_between_runs_of_one_commit_is_the_machines() -> None:
    series = history(stepped((40, 9.0)))
    series[40] = replace(series[40], run=replace(series[40].run, commit=series[39].run.commit))
    step = found(series)
    assert (step.status, step.reason) == (Status.PASS, "same-commit")


def test_a_step_that_was_undone_fails_nothing() -> None:
    told = judged(history(stepped((25, 9.0), (40, -9.0)))).found
    assert sorted((step.status.value, step.reason) for step in told) == [("IMPROVED", "step"), ("PASS", "undone")]


def test_a_step_within_its_limit_fails_nothing() -> None:
    series = history(stepped((40, 9.0)))
    assert found(series, limits=[Limit(metric="p50", value=0.15, unit="%")]).reason == "within-limit"
    assert found(series, limits=[Limit(metric="p50", value=0.05, unit="%")]).reason == "step"
    assert found(series, limits=[Limit(metric="p50", value=0.002, unit="ms")]).reason == "within-limit"
    assert found(series, limits=[Limit(metric="p50", value=0.0005, unit="ms")]).reason == "step"


@pytest.mark.parametrize(("at", "reason"), [(38, "accepted"), (40, "accepted"), (42, "accepted"), (44, "step")])
def test_an_accepted_step_fails_nothing_where_further_points_move_it_a_little(at: int, reason: str) -> None:
    series = history(stepped((40, 9.0)))
    step = found(series, told=[Accepted(commit=f"{at:040x}", test=TEST, why="bigger model")])
    assert (step.reason, step.why) == (reason, "bigger model" * (reason == "accepted"))
    assert found(series, told=[Accepted(commit=f"{at:040x}", test=replace(TEST, label="b"), why="x")]).reason == "step"


def test_a_single_point_is_told_as_suspected() -> None:
    step = found(history([*gaussian(40), 15.0]))
    assert (step.status, step.reason, step.points) == (Status.INCONCLUSIVE, "suspected", 1)


def test_the_more_series_the_more_evidence_a_step_needs() -> None:
    small = history(stepped((40, 3.2)))
    alone = judged(small).found
    crowd = [
        replace(each, environment=f"e{number}") for number in range(60) for each in history(gaussian(20, seed=number))
    ]
    assert len(alone) == 1
    assert [step for step in judged([*small, *crowd]).found if step.track.environment == "cpu-gloo-ws2"] == []


def test_the_worst_comes_first() -> None:
    series = [
        *(replace(each, environment="small") for each in history(stepped((40, 9.0)))),
        *(replace(each, environment="faster") for each in history(stepped((40, -30.0)))),
        *(replace(each, environment="large") for each in history(stepped((40, 20.0)))),
    ]
    assert [step.track.environment for step in judged(series).found] == ["large", "small", "faster"]


def test_a_short_series_tells_nothing_and_is_counted() -> None:
    assert judged(history([0.0] * 5)).short == 1


def test_a_long_pause_lets_a_machine_drift_further() -> None:
    runs = history(stepped())
    late = [
        replace(each, run=replace(each.run, created=run(n + 30 * (n >= 30)).created)) for n, each in enumerate(runs)
    ]
    moved = [point.moved for point in tracks.tracks(late)[0].points("p50")]
    assert [moved[n] for n in (0, 29, 30, 31)] == [1.0, 1.0, 31.0, 1.0]


# --- accepted


def test_an_accepted_step_is_a_file_for_review(tmp_path: Path) -> None:
    told = Accepted(commit="c0ffee" * 6, test=TEST, why="a bigger model")
    path = accepted.write(tmp_path, told)
    assert path.parent == tmp_path / "accepted"
    assert path.name.startswith("c0ffeec0ffee-")
    assert '"why": "a bigger model"' in path.read_text()
    assert accepted.read(tmp_path) == [told]
    assert accepted.read(tmp_path.parent / "none") == []
    folder.add(tmp_path, one(1, kept()))
    assert len(folder.read(tmp_path)) == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 2}', '{"schema": 1, "commit": "a"}'])
def test_an_accepted_step_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    path = accepted.write(tmp_path, Accepted(commit="a", test=TEST, why="x"))
    path.write_text(content)
    with pytest.raises(HistoryError, match=f"{path}: is no accepted step"):
        accepted.read(tmp_path)


def test_measurements_without_any_are_no_entry() -> None:
    assert entry.entries([outcome(None, measurement=None)], run()) == []
