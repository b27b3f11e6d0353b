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

from pytest_ddpperf.history import accepted, curves, entry, folder, judging, tracks
from pytest_ddpperf.history.accepted import Accepted
from pytest_ddpperf.history.entry import Entry, Kept
from pytest_ddpperf.history.judging import Found, Judged
from pytest_ddpperf.records import (
    Beside,
    Environment,
    Limit,
    Measurement,
    Outcome,
    Plan,
    Run,
    Samples,
    Status,
    TestId,
    Version,
)
from pytest_ddpperf.records.errors import HistoryError
from tests.unit.test_report import FAILED, outcome, verdict
from tests.unit.test_steps import gaussian, jumping

FIRST = datetime(2026, 1, 1, tzinfo=timezone.utc)
TEST = TestId(module="tests/perf/test_step", name="test_train")
P50 = (Limit(metric="p50", value=0.0, unit="%"),)


def commit_of(day: int) -> str:
    """Whose first 12 digits tell it."""
    return f"{day:08x}" * 5


def run(day: int = 0, **kwargs: Any) -> Run:
    when = (FIRST + timedelta(days=day)).isoformat()
    usual = {"id": f"{day:x}", "created": when, "version": "0.1", "commit": commit_of(day), "committed": when}
    return Run(**{**usual, **kwargs})


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
    """Windows of 100 steps, of which 50 were asked for."""
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
    plan = Plan(world_size=2, backend="gloo", device="cpu", steps=50, min_seconds=1.0, most_steps=1000)
    return outcome(verdict(Status.PASS), measurement=now, **{"plan": plan, **kwargs})


def test_percentiles_of_launches_are_kept_and_counters_and_no_samples() -> None:
    (added,) = entry.entries([measured()], run())
    (row,) = added.measurements
    assert row.launch_seconds == {
        "p10": (0.0059, 0.0118),
        "p50": (0.0255, 0.051),
        "p90": (0.0451, 0.0902),
    }
    assert row.counters == {"all_reduce.count": 5}
    assert row.must_match == {"batch_size": 32, "timing": "step", "steps": 50}
    assert row.recorded == {"torch": "2.13.0", "host": "h", "env:NCCL_ALGO": "Ring"}
    assert (added.environment, added.key["world_size"]) == ("cpu-gloo-ws2", 2)


def test_percentiles_are_of_as_many_steps_as_were_asked_for_however_many_a_window_took() -> None:
    longer, slower = measured(), measured()
    assert slower.measurement is not None
    fewer = replace(slower.measurement, samples=slower.measurement.samples.first(60))
    (one,), (other,) = (
        entry.entries([each], run())[0].measurements for each in (longer, replace(slower, measurement=fewer))
    )
    assert one == other


def test_other_numbers_of_steps_are_series_of_their_own() -> None:
    many = replace(measured().plan, steps=100)
    added = [entry.entries([measured(**plan)], run(day))[0] for day, plan in enumerate(({}, {}, {"plan": many}))]
    assert [(len(track.marks), track.told) for track in tracks.tracks(added)] == [(2, "steps 50"), (1, "steps 100")]


def test_whether_the_world_size_is_in_pytests_name_is_kept(tmp_path: Path) -> None:
    test = TestId(module="tests/test_a", name="test_step[bf16]")
    plain = measured(test=test, nodeid="tests/test_a.py::test_step[bf16]")
    sized = measured(test=replace(test, label="b"), nodeid="tests/test_a.py::test_step[bf16-ws2]")
    (added,) = entry.entries([plain, sized], run())
    folder.add(tmp_path, added)
    (again,) = folder.read(tmp_path)
    assert [row.sized for row in (*added.measurements, *again.measurements)] == [False, True] * 2


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
        ({"commit": "../../../evil"}, "commit: '../../../evil' is no hash of a commit"),
        ({"commit": "c0ffee"}, "commit: 'c0ffee' is no hash of a commit"),
        ({"committed": "yesterday"}, "committed: 'yesterday' is no time in UTC, as ISO 8601 has it"),
        (
            {"committed": "2026-01-01T00:00:00"},
            "committed: '2026-01-01T00:00:00' is no time in UTC, as ISO 8601 has it",
        ),
        ({"created": "2026-01-01T00:00:00+02:00"}, "created: '2026-01-01T00:00:00+02:00' is no time in UTC, as ISO 86"),
        ({"commit": "c0ffee11" * 8}, ""),
        ({}, ""),
    ],
)
def test_a_history_is_one_of_commits(of: dict[str, str], why: str) -> None:
    assert entry.unfit(run(**of)).startswith(why)
    assert bool(entry.unfit(run(**of))) == bool(why)


def test_an_entry_comes_back_as_it_was(tmp_path: Path) -> None:
    added = one(
        3, kept(), kept(0.5, replace(TEST, label="second"), must_match={"batch_size": 64}, recorded={"torch": "2.13"})
    )
    path = folder.add(tmp_path, added)
    assert path.name.startswith("20260104T000000Z-000000030000-")
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
    other = Environment(
        key=big.measurement.environment.key,
        must_match={"batch_size": 1024, "collective": "all_reduce 64 MiB float32", "timing": "free", "warmup": 50},
        recorded={"torch": "2.13.0+cu130", "host": "a-long-name.of-a-host.example", "env:NCCL_ALGO": "Tree"},
    )
    unlike = replace(big, nodeid="sized", measurement=replace(big.measurement, environment=other))
    content = entry.text(entry.entries([big, unlike], run())[0])
    rows = [line for line in content.splitlines() if '"test"' in line]
    assert ['"must_match"' in row and '"recorded"' in row for row in rows] == [True, True]
    assert max(map(len, rows)) <= 1024


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


def test_commits_of_one_second_come_back_in_the_order_in_which_they_were_measured(tmp_path: Path) -> None:
    """A rebased branch has such, and hashes have no order."""
    days = (1, 3, 2)
    for hour, day in enumerate(days):
        created = run(4).created.replace("T00", f"T0{hour}")
        folder.add(tmp_path, one(day, kept(), committed=run(3).committed, created=created))
    assert [each.run.commit for each in folder.read(tmp_path)] == [commit_of(day) for day in days]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("", "is no file of a history, or not all of it: Expecting value"),
        ("{", "is no file of a history, or not all of it"),
        ("[1]", "is no file of a history: it has no schema"),
        ({"schema": 2}, "has schema 2; this version of pytest-ddpperf reads up to 1: upgrade it"),
        ({"run": {"commit": 1}}, "is no file of a history, or not all of it: commit: expected a string"),
        (
            {"run": {"commit": "ab" * 20, "committed": "then", "created": "now"}},
            "run.committed: 'then' is no time in UTC, as ISO 8601 has it",
        ),
        ({"run": {"commit": "../evil"}}, "run.commit: '../evil' is no hash of a commit"),
        ({"measurements": None}, "is no file of a history, or not all of it"),
        ({"measurements": [{"test": {"module": "m"}}]}, "lacks 'name'"),
        ({"measurements": [{"test": {"module": "m", "name": "n"}}]}, "lacks 'launch_seconds'"),
        ({"measurements": [{"test": {"module": "m", "name": "n"}, "launch_seconds": {"p10": [1]}}]}, "lacks 'p50'"),
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


@pytest.mark.parametrize("figures", ["0.0,0.1", "0.1,-0.1", "0.1,NaN", "NaN,0.1", "0.1,Infinity", "0.1,1e999", ""])
def test_figures_that_are_no_durations_are_named(tmp_path: Path, figures: str) -> None:
    path = folder.add(tmp_path, one(1, kept(0.5)))
    path.write_text(path.read_text().replace('"p50":[0.495,0.5,0.505]', f'"p50":[{figures}]'))
    with pytest.raises(HistoryError, match=r"json: tests/perf/test_step::test_train: launch_seconds\.p50 are no durat"):
        folder.read(tmp_path)


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
    assert (step.before.run.commit, step.after.run.commit) == (commit_of(39), commit_of(40))
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


def two_a_commit(logs: Sequence[float]) -> list[Entry]:
    return [replace(each, run=replace(each.run, commit=commit_of(day // 2))) for day, each in enumerate(history(logs))]


def test_a_step_at_a_commit_that_is_found_beside_it_is_not_the_machines() -> None:
    """Its place errs by a point or two: without a look at the commits nearby, one in ten would be told so."""
    reasons = [
        step.reason
        for seed in range(60)
        for step in judged(two_a_commit(jumping(gaussian(60, seed=seed), (40, 3.5)))).found
        if step.points > 1
    ]
    assert len(reasons) > 40
    assert reasons.count("same-commit") <= 1


def test_a_large_step_between_runs_of_one_commit_stays_the_machines() -> None:
    assert found(two_a_commit(stepped((41, 9.0)))).reason == "same-commit"
    assert found(two_a_commit(stepped((40, 9.0)))).reason == "step"


def test_a_machine_that_became_faster_undoes_no_step_of_the_code() -> None:
    steps = judged(two_a_commit(stepped((20, 9.0), (41, -9.0)))).found
    assert sorted((step.status.value, step.reason) for step in steps) == [
        ("PASS", "same-commit"),
        ("REGRESSED", "step"),
    ]


@pytest.mark.parametrize(("again", "told"), [(False, ("INCONCLUSIVE", "suspected")), (True, ("PASS", "same-commit"))])
def test_a_lone_last_run_is_no_suspicion_where_its_commit_was_measured_before(
    again: bool, told: tuple[str, str]
) -> None:
    series = history([*stepped(points=40), 15.0])
    if again:
        series[40] = replace(series[40], run=replace(series[40].run, commit=series[39].run.commit))
    step = found(series)
    assert (step.status.value, step.reason) == told
    (curve,) = (curves.curve(judged(series), step.track, "p50"),)
    assert curve.breaks == ()


def test_a_step_that_was_undone_fails_nothing() -> None:
    told = judged(history(stepped((25, 9.0), (40, -9.0)))).found
    assert sorted((step.status.value, step.reason) for step in told) == [("IMPROVED", "step"), ("PASS", "undone")]


def test_a_step_within_its_limit_fails_nothing() -> None:
    series = history(stepped((40, 9.0)))
    assert found(series, limits=[Limit(metric="p50", value=0.15, unit="%")]).reason == "within-limit"
    assert found(series, limits=[Limit(metric="p50", value=0.05, unit="%")]).reason == "step"
    assert found(series, limits=[Limit(metric="p50", value=0.002, unit="ms")]).reason == "within-limit"
    assert found(series, limits=[Limit(metric="p50", value=0.0005, unit="ms")]).reason == "step"


def bigger_model(**kwargs: Any) -> Accepted:
    """The step of `history(stepped((40, 9.0)))`, accepted."""
    return replace(judging.acceptance(found(history(stepped((40, 9.0)))), "bigger model"), **kwargs)


@pytest.mark.parametrize(("at", "reason"), [(38, "accepted"), (40, "accepted"), (42, "accepted"), (43, "step")])
def test_an_accepted_step_fails_nothing_where_further_points_move_it_a_little(at: int, reason: str) -> None:
    step = found(history(stepped((40, 9.0))), told=[bigger_model(commit=commit_of(at))])
    assert (step.reason, step.why) == (reason, "bigger model" * (reason == "accepted"))


@pytest.mark.parametrize(
    "of_another",
    [
        {"test": replace(TEST, label="b")},
        {"environment": "cpu-gloo-ws4"},
        {"must_match": {"batch_size": 64}},
        {"metric": "p10"},
        {"commit": commit_of(99)},
    ],
    ids=lambda of: next(iter(of)),
)
def test_a_step_of_another_series_is_not_accepted_with_it(of_another: dict[str, Any]) -> None:
    assert found(history(stepped((40, 9.0))), told=[bigger_model(**of_another)]).reason == "step"


def test_a_step_that_is_larger_or_the_other_way_is_not_accepted_with_it() -> None:
    told = [bigger_model()]
    assert found(history(stepped((40, 14.0))), told=told).reason == "step"
    assert found(history(stepped((40, -9.0))), told=told).reason == "step"
    assert found(history(stepped((40, 8.0))), told=told).reason == "accepted"
    faster = found(history(stepped((40, -9.0))))
    back = [judging.acceptance(faster, "faster")]
    assert found(history(stepped((40, -9.0))), told=back).reason == "accepted"
    assert found(history(stepped((40, -14.0))), told=back).reason == "step"


def test_of_two_steps_the_nearer_one_alone_is_accepted() -> None:
    both = history(stepped((40, 9.0), (42, 9.0)))
    reasons = {step.place: step.reason for step in judged(both, told=[bigger_model()]).found}
    assert reasons == {40: "accepted", 42: "step"}


def test_a_single_point_is_told_as_suspected() -> None:
    step = found(history([*gaussian(40), 15.0]))
    assert (step.status, step.reason, step.points) == (Status.INCONCLUSIVE, "suspected", 1)
    told = judging.acceptance(step, "bigger model")
    assert found(history([*gaussian(40), 15.0]), told=[told]).reason == "accepted"
    assert found(history([*gaussian(40), 15.0, 15.0, 14.0]), told=[told]).reason == "accepted"


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
    told = bigger_model(commit="c0ffee" * 6, why="a bigger model")
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
    path = accepted.write(tmp_path, bigger_model())
    path.write_text(content)
    with pytest.raises(HistoryError, match=f"{path}: is no accepted step"):
        accepted.read(tmp_path)


def test_measurements_without_any_are_no_entry() -> None:
    assert entry.entries([outcome(None, measurement=None)], run()) == []
