"""Reports read back, whole or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import FileError
from pytest_ddpperf.records.outcome import Outcome, RunInfo
from pytest_ddpperf.records.samples import Status, TestId
from pytest_ddpperf.report import json_report
from tests.unit.test_report import (
    FAILED,
    comparison,
    measurement,
    outcome,
    verdict,
)

RUN = RunInfo(
    id="7e1",
    created="2026-01-02T03:04:05+00:00",
    version="0.1",
    commit="c0ffee",
    committed="then",
    skipped=2,
)
LOUD = replace(
    RUN,
    other_failures=1,
    problem="nothing differs",
    messages=("only main has a", "not in this clone: b"),
)


def written(path: Path, *outcomes: Outcome, run: RunInfo = RUN) -> Path:
    path.write_text(codec.dumps(json_report.report(outcomes, run)))
    return path


def changed(
    path: Path, *place: str | int, to: Any = None, without: bool = False
) -> Path:
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
    outcomes = (
        outcome(verdict(Status.REGRESSED, comparisons=(comparison(),))),
        FAILED,
    )
    report = json_report.read(
        [written(tmp_path / "a.json", *outcomes, run=LOUD)]
    )
    assert report.outcomes == outcomes
    assert report.runs == (LOUD,)
    assert [entry.run for entry in report.entries] == [LOUD, LOUD]
    assert report.messages == ()


def test_sections_of_several_runs_follow_one_another(tmp_path: Path) -> None:
    runs = [
        replace(
            RUN,
            id=str(n),
            sections={"tables": (f"of {n}",), f"only {n}": ("a",)},
        )
        for n in range(2)
    ]
    paths = [written(tmp_path / f"{run.id}.json", run=run) for run in runs]
    assert json_report.read(paths).run.sections == {
        "tables": ("of 0", "of 1"),
        "only 0": ("a",),
        "only 1": ("a",),
    }


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file or directory"),
        (b" \n", "the file is empty"),
        (
            b'{"schema": 1',
            "is not JSON, or not all of it: Expecting ',' delimiter: line 1 column 13 (char 12)",
        ),
        (b"[" * 100_000, "is not JSON, or not all of it: "),
        (b"\xff\xfe", "is not JSON, or not all of it: "),
        (b"[]", "is not a report: it holds no JSON object"),
        (
            b'{"benchmarks": []}',
            "is not a report of pytest --ddp-json: it has no schema and measurements",
        ),
        (
            b'{"schema": true, "measurements": []}',
            "is not a report of pytest --ddp-json",
        ),
        (
            b'{"schema": 99, "measurements": []}',
            "has schema 99; this version of pytest-ddpperf reads up to 1: upgrade",
        ),
        (
            b'{"schema": 1, "measurements": [3]}',
            "measurements[0]: expected `object`, got `int`",
        ),
    ],
)
def test_what_is_no_report_is_named_with_what_is_wrong(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileError) as failed:
        json_report.read([path])
    assert str(failed.value).startswith(f"{path}: {problem}")


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (("run_id",), 7, "id: expected `str`, got `int`"),
        (("machine", "torch"), [], "facts[...]: expected "),
        (("summary", "skipped"), "1", "skipped: expected `int`, got `str`"),
        (("messages", 1), 7, "messages[1]: expected `str`, got `int`"),
        (("summary",), None, "summary: expected `object`, got `null`"),
        (("base",), "x", "base: expected `object`, got `str`"),
        (("base",), {"commit": 7}, "base.commit: expected `str`, got `int`"),
        (("only_in_base",), 7, "only_in_base: expected `array`, got `int`"),
        (
            ("only_in_base",),
            [{"ranks": "2 gloo"}],
            "only_in_base[0]: object missing required field `name`",
        ),
        (
            ("measurements", 1, "plan", "world_size"),
            "2",
            "measurements[1].plan.world_size: expected `int`, got",
        ),
        (
            ("measurements", 1, "measurement", "samples", "step_seconds", 0, 1),
            -1.0,
            (
                "measurements[1].measurement.samples.step_seconds[0][1]: -1.0 is not a positive"
                " duration"
            ),
        ),
        (
            ("measurements", 1, "measurement", "samples", "rank_seconds", 0),
            [],
            "measurements[1].measurement.samples.rank_seconds[0]: 0 ranks, not 1",
        ),
        (
            ("measurements", 1, "verdict", "status"),
            "FINE",
            "measurements[1].verdict.status: invalid enum value 'FINE'",
        ),
    ],
)
def test_a_broken_field_is_named_with_its_place(
    tmp_path: Path, place: tuple[Any, ...], value: Any, problem: str
) -> None:
    run = replace(LOUD, facts={"torch": "2.13"})
    path = changed(
        written(
            tmp_path / "a.json", FAILED, outcome(verdict(Status.PASS)), run=run
        ),
        *place,
        to=value,
    )
    with pytest.raises(FileError) as failed:
        json_report.read([path])
    assert str(failed.value).startswith(f"{path}: {problem}")


# --- several reports


GOOD = outcome(verdict(Status.PASS))
BAD = replace(FAILED, nodeid=GOOD.nodeid, test=GOOD.test, plan=GOOD.plan)
OTHER = outcome(
    verdict(Status.PASS), nodeid="m.py::b", test=TestId(module="m", name="b")
)
LATER = replace(RUN, id="7e2", created="2026-01-02T04:00:00+00:00")
LAST = replace(RUN, id="7e3", created="2026-01-02T05:00:00+00:00")


def joined(
    folder: Path, *measured: tuple[Outcome, RunInfo]
) -> json_report.StoredReport:
    return json_report.read(
        [
            written(folder / f"{number}.json", each, run=run)
            for number, (each, run) in enumerate(measured)
        ]
    )


def test_several_reports_have_the_counts_and_messages_of_all(
    tmp_path: Path,
) -> None:
    runs = (
        LOUD,
        RUN,
        replace(LOUD, messages=("not in this clone: b", "c")),
        replace(RUN, problem="no such backend"),
    )
    report = json_report.read(
        [
            written(tmp_path / f"{number}.json", run=run)
            for number, run in enumerate(runs)
        ]
    )
    assert report.paths == tuple(
        tmp_path / f"{number}.json" for number in range(4)
    )
    assert report.run.problem == "nothing differs; no such backend"
    assert report.run.messages == (
        "only main has a",
        "not in this clone: b",
        "c",
    )
    assert (report.run.skipped, report.run.other_failures) == (8, 2)


@pytest.mark.parametrize(
    "measured",
    [
        ((GOOD, RUN), (replace(GOOD, measurement=measurement(0.3)), LATER)),
        ((replace(GOOD, measurement=measurement(0.3)), LATER), (GOOD, RUN)),
        ((BAD, RUN), (GOOD, LATER)),
        ((GOOD, RUN), (BAD, LATER)),
        ((GOOD, LATER), (BAD, RUN)),
        ((BAD, RUN), (BAD, LATER), (GOOD, LAST)),
    ],
    ids=[
        "later last",
        "later first",
        "passed again",
        "failed again",
        "failed before",
        "three",
    ],
)
def test_of_reruns_the_run_that_ended_last_counts(
    measured: tuple[tuple[Outcome, RunInfo], ...], tmp_path: Path
) -> None:
    report = joined(tmp_path, *measured)
    last, run = max(measured, key=lambda each: each[1].created)
    assert report.outcomes == (last,)
    assert report.messages == (
        f"{last.nodeid}: measured in several reports: that of {run.created} counts",
    )


def test_reports_of_several_commits_are_named_and_have_none(
    tmp_path: Path,
) -> None:
    third = outcome(
        verdict(Status.PASS),
        nodeid="m.py::c",
        test=TestId(module="m", name="c"),
    )
    dirty = replace(LATER, commit=f"{'decade' * 6}-dirty")
    report = joined(
        tmp_path,
        (GOOD, RUN),
        (OTHER, dirty),
        (third, replace(LATER, commit=RUN.commit)),
    )
    assert report.messages == (
        (
            "these reports are of several commits: c0ffee, decaded with uncommitted changes"
        ),
    )
    assert (report.run.commit, report.run.committed) == ("", "")
    alike = json_report.read([tmp_path / "0.json", tmp_path / "2.json"])
    assert alike.messages == ()
    assert (alike.run.commit, alike.run.committed) == (
        RUN.commit,
        RUN.committed,
    )
