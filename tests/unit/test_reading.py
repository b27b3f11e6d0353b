"""Reports read back, whole or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.records import Outcome, RunInfo, Status, TestId, codec
from pytest_ddpperf.records.errors import ReportError
from pytest_ddpperf.report import json_report
from tests.unit.test_report import FAILED, comparison, measurement, outcome, verdict

RUN = RunInfo(
    id="7e1", created="2026-01-02T03:04:05+00:00", version="0.1", commit="c0ffee", committed="then", skipped=2
)
TOLD = replace(RUN, other_failures=1, problem="nothing differs", messages=("only main has a", "not in this clone: b"))


def written(path: Path, *outcomes: Outcome, run: RunInfo = RUN) -> Path:
    path.write_text(codec.dumps(json_report.report(outcomes, run)))
    return path


def changed(path: Path, *place: str | int, to: Any = None, without: bool = False) -> Path:
    """A report with one field that is another, or gone."""
    data = json.loads(path.read_text())
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    if without:
        del inner[place[-1]]
    else:
        inner[place[-1]] = to
    path.write_text(json.dumps(data))
    return path


def test_a_report_comes_back_as_it_was(tmp_path: Path) -> None:
    outcomes = (outcome(verdict(Status.REGRESSED, comparisons=(comparison(),))), FAILED)
    report = json_report.read([written(tmp_path / "a.json", *outcomes, run=TOLD)])
    assert report.outcomes == outcomes
    assert report.runs == (TOLD,)
    assert [entry.run for entry in report.entries] == [TOLD, TOLD]
    assert report.messages == ()


def test_a_report_from_before_runs_had_ids_is_read() -> None:
    """Written by the version before they had, and kept as it was."""
    report = json_report.read([Path(__file__).parent / "data" / "report-without-run-id.json"])
    first, second = report.outcomes
    assert (first.verdict, first.limits, first.level, first.sessions, first.file) == ("REGRESSED", (), None, (), "")
    assert first.measurement == measurement()
    assert second.error.endswith("ValueError: bad")
    facts = {"torch": "2.13.0", "device_count": 0}
    created = "2026-01-02T03:04:05+00:00"
    assert report.runs == (RunInfo(created=created, version="0.1.0", facts=facts, skipped=1, never_measured=2),)


def test_a_report_of_another_version_lacks_fields_and_has_others(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", outcome(verdict(Status.PASS)), run=TOLD)
    for name in ("file", "line", "limits", "level", "sessions"):
        changed(path, "measurements", 0, name, without=True)
    for name in ("run_id", "commit", "committed", "problem", "messages"):
        changed(path, name, without=True)
    changed(path, "summary", "other_failures", without=True)
    changed(path, "measurements", 0, "verdict", "comparisons", 0, "of_tomorrow", to=[1])
    (again,) = json_report.read([path]).outcomes
    assert again == outcome(verdict(Status.PASS))
    assert json_report.read([path]).runs == (replace(RUN, id="", commit="", committed=""),)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file or directory"),
        (b" \n", "the file is empty"),
        (b'{"schema": 1', "is not JSON, or not all of it: Expecting ',' delimiter: line 1 column 13 (char 12)"),
        (b"[" * 100_000, "is not JSON, or not all of it: "),
        (b"\xff\xfe", "is not JSON, or not all of it: "),
        (b"[]", "is not a report: it holds no JSON object"),
        (b'{"benchmarks": []}', "is not a report of pytest --ddp-json: it has no schema and measurements"),
        (b'{"schema": true, "measurements": []}', "is not a report of pytest --ddp-json"),
        (b'{"schema": 99, "measurements": []}', "has schema 99; this version of pytest-ddpperf reads up to 1: upgrade"),
        (b'{"schema": 1, "measurements": [3]}', "measurements[0]: expected an object, found 3"),
    ],
)
def test_what_is_no_report_is_named_with_what_is_wrong(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ReportError) as failed:
        json_report.read([path])
    assert str(failed.value).startswith(f"{path}: {problem}")


def counted(metric: str) -> dict[str, Any]:
    limit = {"metric": metric, "value": 0.0, "unit": "%", "default": False}
    return {"limit": limit, "status": "REGRESSED", "baseline": 1, "now": 2}


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (("measurements", 1, "plan", "world_size"), "2", "plan.world_size: expected an integer, found '2'"),
        (
            ("measurements", 1, "measurement", "samples", "step_seconds", 0, 1),
            -1.0,
            "measurement.samples.step_seconds[0][1]: -1.0 is not a positive duration",
        ),
        (
            ("measurements", 1, "measurement", "samples", "rank_seconds", 0),
            [],
            "measurement.samples.rank_seconds[0]: 0 ranks, but at least one expected",
        ),
        (
            ("measurements", 1, "verdict", "comparisons", 0, "limit", "metric"),
            "pfifty",
            "limits: 'pfifty' is not a metric",
        ),
        (
            ("measurements", 1, "limits"),
            [{"metric": "p100", "value": 0.1, "unit": "%", "default": False}],
            "limits: 'p100' is not a metric",
        ),
        (("measurements", 1, "verdict", "status"), "FINE", "verdict.status: expected one of 'PASS'"),
        (
            ("measurements", 1, "stored_verdict"),
            codec.encode(verdict(Status.PASS)) | {"counters": [counted("rpc.bytes"), counted("|@everyone")]},
            "limits: '|@everyone' is not a metric",
        ),
    ],
)
def test_a_broken_field_is_named_with_its_place(
    tmp_path: Path, place: tuple[Any, ...], value: Any, problem: str
) -> None:
    path = written(tmp_path / "a.json", FAILED, outcome(verdict(Status.PASS)))
    with pytest.raises(ReportError) as failed:
        json_report.read([changed(path, *place, to=value)])
    assert str(failed.value).startswith(f"{path}: measurements[1].{problem}")


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (("run_id",), 7, "run_id: expected a string, found 7"),
        (("machine", "torch"), [], "machine.torch: expected "),
        (("summary", "skipped"), "1", "summary.skipped: expected an integer, found '1'"),
        (("problem",), ["x"], "problem: expected a string, found "),
        (("messages", 1), 7, "messages[1]: expected a string, found 7"),
    ],
)
def test_a_broken_fact_of_the_run_is_named_as_the_file_has_it(
    tmp_path: Path, place: tuple[Any, ...], value: Any, problem: str
) -> None:
    path = written(tmp_path / "a.json", run=replace(TOLD, facts={"torch": "2.13"}))
    with pytest.raises(ReportError) as failed:
        json_report.read([changed(path, *place, to=value)])
    assert str(failed.value).startswith(f"{path}: {problem}")


def test_shards_make_one_report(tmp_path: Path) -> None:
    other = outcome(verdict(Status.PASS), nodeid="m.py::b", test=TestId(module="m", name="b"))
    of_other = replace(RUN, id="7e2")
    report = json_report.read([written(tmp_path / "a.json", FAILED), written(tmp_path / "b.json", other, run=of_other)])
    assert report.outcomes == (FAILED, other)
    assert [entry.run for entry in report.entries] == [RUN, of_other]
    assert report.paths == (tmp_path / "a.json", tmp_path / "b.json")
    assert report.messages == ()


def test_what_was_told_of_several_runs_is_told_of_all_once_each(tmp_path: Path) -> None:
    runs = TOLD, RUN, replace(TOLD, messages=("not in this clone: b", "c")), replace(RUN, problem="no such backend")
    whole = json_report.read([written(tmp_path / f"{number}.json", run=run) for number, run in enumerate(runs)]).run
    assert whole.problem == "nothing differs; no such backend"
    assert whole.messages == ("only main has a", "not in this clone: b", "c")
    assert (whole.skipped, whole.other_failures) == (8, 2)


def test_of_what_was_measured_again_the_run_that_ended_last_counts(tmp_path: Path) -> None:
    first, again = outcome(verdict(Status.PASS)), outcome(verdict(Status.REGRESSED))
    later = replace(RUN, created="2026-01-02T04:00:00+00:00")
    paths = [written(tmp_path / "b.json", again, run=later), written(tmp_path / "a.json", first)]
    report = json_report.read(paths)
    assert report.outcomes == (again,)
    assert report.messages == (
        "tests/test_a.py::test_step: measured in several reports: that of 2026-01-02T04:00:00+00:00 counts",
    )


NODEID = "tests/test_a.py::test_step"
LATER = replace(RUN, id="7e2", created="2026-01-02T04:00:00+00:00")


def failure() -> Outcome:
    good = outcome(verdict(Status.PASS))
    return replace(FAILED, nodeid=good.nodeid, test=good.test, plan=good.plan)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("last", [outcome(verdict(Status.PASS)), failure()], ids=["it passed", "it failed"])
def test_a_rerun_counts_instead_of_what_failed_and_the_other_way_round(
    last: Outcome, order: tuple[int, int], tmp_path: Path
) -> None:
    first = failure() if last.measurement is not None else outcome(verdict(Status.PASS))
    paths = [written(tmp_path / "a.json", first), written(tmp_path / "b.json", last, run=LATER)]
    report = json_report.read([paths[place] for place in order])
    assert report.outcomes == (last,)
    assert report.messages == (f"{NODEID}: measured in several reports: that of {LATER.created} counts",)


def test_a_third_attempt_is_told_once(tmp_path: Path) -> None:
    third = replace(RUN, created="2026-01-02T05:00:00+00:00")
    attempts = (failure(), failure(), outcome(verdict(Status.PASS)))
    paths = [
        written(tmp_path / f"{number}.json", each, run=run)
        for number, (each, run) in enumerate(zip(attempts, (RUN, LATER, third), strict=True))
    ]
    assert json_report.read(paths).messages == (
        f"{NODEID}: measured in several reports: that of {third.created} counts",
    )


@pytest.mark.parametrize(
    "changed_plan", [{"world_size": 4}, {"backend": "mpi"}, {"device": "xpu"}], ids=["ranks", "backend", "device"]
)
def test_what_failed_otherwise_stays(changed_plan: dict[str, Any], tmp_path: Path) -> None:
    failed, good = failure(), outcome(verdict(Status.PASS))
    failed = replace(failed, plan=replace(failed.plan, **changed_plan))
    report = json_report.read([written(tmp_path / "a.json", failed), written(tmp_path / "b.json", good, run=LATER)])
    assert report.outcomes == (failed, good)
    assert report.messages == ()


def test_what_failed_on_another_machine_of_a_fleet_stays(tmp_path: Path) -> None:
    failed, good = failure(), outcome(verdict(Status.PASS))
    of_a, of_b = (replace(run, facts={"cpu_model": name}) for run, name in ((RUN, "AMD"), (LATER, "Intel")))
    report = json_report.read(
        [written(tmp_path / "a.json", failed, run=of_a), written(tmp_path / "b.json", good, run=of_b)]
    )
    assert report.outcomes == (failed, good)


def test_reports_of_several_commits_are_told_and_are_of_none(tmp_path: Path) -> None:
    other = outcome(verdict(Status.PASS), nodeid="m.py::b", test=TestId(module="m", name="b"))
    third = outcome(verdict(Status.PASS), nodeid="m.py::c", test=TestId(module="m", name="c"))
    runs = RUN, replace(LATER, commit=f"{'decade' * 6}-dirty"), replace(LATER, commit=RUN.commit)
    measured = zip((outcome(verdict(Status.PASS)), other, third), runs, strict=True)
    report = json_report.read(
        [written(tmp_path / f"{n}.json", each, run=run) for n, (each, run) in enumerate(measured)]
    )
    assert report.messages == (
        "these reports are not of one commit: c0ffee (0.json, 2.json); decadedecade-dirty (1.json)",
    )
    assert (report.run.commit, report.run.committed) == ("", "")
    alike = json_report.read([tmp_path / "0.json", tmp_path / "2.json"])
    assert alike.messages == ()
    assert (alike.run.commit, alike.run.committed) == (RUN.commit, RUN.committed)


def test_the_same_test_elsewhere_is_another_measurement(tmp_path: Path) -> None:
    here = outcome(verdict(Status.PASS))
    cores = {"backend": "gloo", "cores": 64}
    machine = replace(measurement().environment, key=cores)
    there = replace(here, measurement=replace(measurement(), environment=machine))
    larger = replace(here, plan=replace(here.plan, world_size=4))
    paths = [written(tmp_path / f"{n}.json", each) for n, each in enumerate((here, there, larger))]
    assert json_report.read(paths).outcomes == (here, there, larger)
