"""`ddpperf history` and its commands, as a user calls them."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf.against import BaseSide, Invocation
from pytest_ddpperf.cli import confirming, main
from pytest_ddpperf.history import folder
from pytest_ddpperf.led import Sources
from pytest_ddpperf.measuring.outcomes import Report
from pytest_ddpperf.options import parse
from pytest_ddpperf.records import Beside, Environment, Run, Status, Version, codec
from pytest_ddpperf.records.errors import AgainstError
from tests.git import git
from tests.unit.test_history import TEST, commit_of, history, measured, run, stepped
from tests.unit.test_machine import settings
from tests.unit.test_reading import written
from tests.unit.test_report import measurement, outcome, verdict
from tests.unit.test_steps import gaussian

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Call `ddpperf history` and return its status, what it printed and what it complained of."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        status = main.main(["history", *map(str, arguments)])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def kept(root: Path, logs: Sequence[float]) -> Path:
    for each in history(logs):
        folder.add(root, each)
    return root


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept(tmp_path_factory.mktemp("slower"), stepped((40, 9.0)))


def test_a_step_is_told_with_its_commits_and_ends_with_1(slower: Path, say: Say) -> None:
    status, out, err = say(slower)
    first, second, empty, last = out.splitlines()
    assert (status, empty, err) == (1, "", "")
    assert first == "REGRESSED  tests/perf/test_step::test_train  cpu-gloo-ws2"
    assert second.startswith("  p10 +9.")
    assert second.endswith("; at 000000280000 of 2026-02-10, after 000000270000; 20 points since")
    assert last == "1 regressed in 1 series of 60 runs at 60 commits (p10)"


def test_no_step_ends_with_0(tmp_path: Path, say: Say) -> None:
    status, out, _ = say(kept(tmp_path, stepped()), "--threshold=p50:5%,p90:1ms")
    assert (status, out) == (0, "no step in 1 series of 60 runs at 60 commits (p50, p90)\n")


def test_an_improvement_fails_where_it_is_named(tmp_path: Path, say: Say) -> None:
    faster = kept(tmp_path, stepped((40, -9.0)))
    assert say(faster)[0] == 0
    assert say(faster, "--fail-on", "improved")[0] == 1


def test_a_suspicion_is_told_and_fails_where_it_is_named(tmp_path: Path, say: Say) -> None:
    root = kept(tmp_path, [*stepped(points=40), 15.0])
    status, out, _ = say(root)
    assert status == 0
    assert "INCONCLUSIVE  tests/perf/test_step::test_train" in out
    assert "  one point only: suspected" in out
    assert "1 suspected in 1 series" in out
    assert say(root, "--fail-on=regressed,suspected")[0] == 1


def test_a_step_within_its_limit_is_told(slower: Path, say: Say) -> None:
    status, out, _ = say(slower, "--threshold", "p10:20%")
    assert (status, "  within the limit" in out, "1 within the limit in 1 series" in out) == (0, True, True)


def test_series_are_chosen_by_name(slower: Path, say: Say) -> None:
    assert say(slower, "-k", "train and gloo")[0] == 1
    status, out, err = say(slower, "-k", "not train")
    assert (status, out) == (5, "")
    assert err == f"ddpperf: {slower}: nothing to judge\n"


@pytest.mark.parametrize("form", ["text", "json", "csv"])
def test_series_that_are_all_too_short_end_with_5(tmp_path: Path, say: Say, form: str) -> None:
    status, out, err = say(kept(tmp_path, [0.0] * 5), "--format", form)
    assert (status, err) == (5, f"ddpperf: {tmp_path}: nothing to judge: no series has 6 runs\n")
    if form == "text":
        assert out == "no step in 1 series of 5 runs at 5 commits (p10), 1 too short to tell\n"


def test_no_name_harms_what_is_told(tmp_path: Path, say: Say) -> None:
    name = 'test_a[<script>"\n::error::\x1b[31m\u202e' + "x" * 10_000 + "]"
    for each in history(stepped((40, 9.0))):
        (row,) = each.measurements
        folder.add(tmp_path, replace(each, measurements=(replace(row, test=replace(TEST, name=name)),)))
    assert say("accept", commit_of(40)[:10], "script", "-m", "why\n\x1b[31m", "--in", tmp_path)[0] == 0
    status, out, _ = say(tmp_path)
    first, _, why, *_ = out.splitlines()
    assert status == 0
    assert first.startswith('PASS  tests/perf/test_step::test_a[<script>"\\n::error::\\x1b')
    assert len(first) < 300
    assert why == "  accepted: why\\n\\x1b[31m"
    assert json.loads(say(tmp_path, "--format=json")[1])["steps"][0]["test"]["name"] == name
    (row,) = csv.DictReader(io.StringIO(say(tmp_path, "--format=csv")[1], newline=""))
    assert row["test"].startswith('tests/perf/test_step::test_a[<script>"\n::error::\\x1b[31m')


def test_json_has_steps_and_points(slower: Path, say: Say) -> None:
    status, out, _ = say(slower, "--format=json")
    told = json.loads(out)
    (step,) = told["steps"]
    (series,) = told["series"]
    assert (status, told["schema"], told["metrics"]) == (1, 1, ["p10"])
    assert (step["status"], step["reason"], step["commit"]) == ("REGRESSED", "step", commit_of(40))
    assert step["change"]["low"] < step["change"]["estimate"] < step["change"]["high"]
    assert len(series["points"]) == 60
    assert series["points"][40]["commit"] == commit_of(40)
    assert len(series["points"][40]["launch_seconds"]["p10"]) == 3


def test_csv_has_a_row_a_step(slower: Path, say: Say) -> None:
    (row,) = csv.DictReader(io.StringIO(say("show", slower, "--format", "csv")[1]))
    assert (row["status"], row["test"], row["metric"]) == ("REGRESSED", str(TEST), "p10")
    assert float(row["low"]) < float(row["change"]) < float(row["high"])


def test_a_page_is_written_beside_what_is_told(slower: Path, say: Say, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pages are drawn by matplotlib")
    file = tmp_path / "new" / "page.html"
    status, out, err = say(slower, "--html", file)
    assert (status, err) == (1, "")
    assert out.startswith("REGRESSED  tests/perf/test_step::test_train")
    assert "ddpperf history: 1 regressed in 1 series of 60 runs" in file.read_text(encoding="utf-8")
    status, _, err = say(slower, "--html", file / "page.html")
    assert status == 4
    assert f"{file / 'page.html'}: cannot be written: " in err


def test_a_page_that_could_not_be_made_is_said_before_anything_is_judged(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_ddpperf.report.page.shell.find_spec", lambda name: None)
    status, out, err = say("no-such-folder", "--html", "page.html")
    assert (status, out) == (4, "")
    assert "--html needs matplotlib and Jinja2: pip install 'pytest-ddpperf[report]'" in err


def test_a_series_of_its_own_is_told(tmp_path: Path, say: Say) -> None:
    for number, each in enumerate(history(stepped(points=20))):
        (row,) = each.measurements
        row = replace(row, must_match={"batch_size": 32 * (1 + number % 2)})
        folder.add(tmp_path, replace(each, measurements=(row,)))
    out = say(tmp_path)[1]
    assert out.splitlines()[:2] == [f"cpu-gloo-ws2, batch_size {size}: 1 series of its own" for size in (32, 64)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--threshold", "p50"], "argument --threshold: 'p50'"),
        (["--threshold", "p75:5%"], "'p75:5%': a history keeps p10, p50, p90, not p75"),
        (
            ["--fail-on", "regresed"],
            "'regresed' is none of regressed, improved, suspected",
        ),
        (["no-such-folder"], "no-such-folder: cannot be read: No such file or directory"),
        (["accept", "abc", "test_x"], "the following arguments are required: -m/--message"),
        (["accept", "abc", "test_x", "-m", " "], "argument -m/--message: ' ': say why the step is meant to stay"),
        (["confirm", "test_x", "--option", "it's"], 'argument --option: "it\'s": No closing quotation'),
    ],
)
def test_a_command_that_cannot_be_ends_with_4(arguments: Sequence[str], told: str, say: Say) -> None:
    status, _, err = say(*arguments)
    assert status == 4
    assert told in err


# --- add


def test_reports_are_added_each_once(tmp_path: Path, say: Say) -> None:
    report = written(tmp_path / "a.json", measured(), run=run(5))
    status, out, _ = say("add", report, "--to", tmp_path / "history")
    (file,) = (tmp_path / "history" / "cpu-gloo-ws2").iterdir()
    assert (status, out) == (0, f"{report} -> {file}\n")
    assert say("add", report, "--to", tmp_path / "history")[0] == 0
    assert list(file.parent.iterdir()) == [file]


def test_a_report_of_no_commit_is_refused(tmp_path: Path, say: Say) -> None:
    report = written(tmp_path / "a.json", measured(), run=run(commit="", committed=""))
    status, _, err = say("add", report)
    assert status == 4
    assert f"{report}: has no place in a history: what was measured is no commit of a git repository" in err


def test_a_report_whose_commit_would_lead_elsewhere_is_refused(tmp_path: Path, say: Say) -> None:
    report = written(tmp_path / "a.json", measured(), run=run(commit="../../../evil"))
    status, _, err = say("add", report, "--to", tmp_path / "history")
    assert status == 4
    assert f"{report}: has no place in a history: commit: '../../../evil' is no hash of a commit" in err
    report = written(tmp_path / "a.json", measured(), run=run(committed="yesterday"))
    status, _, err = say("add", report, "--to", tmp_path / "history")
    assert status == 4
    assert f"{report}: has no place in a history: committed: 'yesterday' is no time in UTC" in err
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_report_that_was_held_against_another_is_refused(tmp_path: Path, say: Say) -> None:
    """It has lost how it was measured."""
    base, now = (written(tmp_path / f"{name}.json", measured(), run=run(day)) for day, name in enumerate("ab"))
    assert main.main(["diff", str(base), str(now), "--json", str(tmp_path / "diff.json")]) in (0, 1)
    status, _, err = say("add", tmp_path / "diff.json", "--to", tmp_path / "history")
    assert status == 4
    assert "has no place in a history: it was held against another run: add the report of the run itself" in err


def test_a_report_of_nothing_that_counts_is_told(tmp_path: Path, say: Say) -> None:
    report = written(tmp_path / "a.json", outcome(verdict(Status.NOT_GATED, "disabled")), run=run())
    assert say("add", report, "--to", tmp_path)[1] == f"{report}: nothing was measured of its commit alone\n"


# --- accept


def test_an_accepted_step_fails_nothing_any_more(tmp_path: Path, say: Say) -> None:
    root = kept(tmp_path, stepped((40, 9.0)))
    status, out, _ = say("accept", commit_of(40), "test_train", "-m", "a bigger model", "--in", root)
    (file,) = (root / "accepted").iterdir()
    assert status == 0
    assert out.startswith("p10 +9.")
    assert out.endswith(f" in cpu-gloo-ws2: accepted in {file}: commit it\n")
    status, out, _ = say(root)
    assert status == 0
    assert "  accepted: a bigger model" in out
    assert "1 accepted in 1 series" in out


def test_every_step_of_the_test_at_a_commit_is_accepted_that_became_slower(tmp_path: Path, say: Say) -> None:
    kept(tmp_path, stepped((40, 9.0)))
    for each in history(stepped((40, -9.0))):
        folder.add(tmp_path, replace(each, environment="cpu-gloo-ws4"))
    arguments = (commit_of(40), "test_train", "-m", "why", "--in", tmp_path, "--threshold=p10:0%,p50:0%")
    status, out, _ = say("accept", *arguments)
    assert (status, [line.partition(" ")[0] for line in out.splitlines()]) == (0, ["p10", "p50"])
    assert "cpu-gloo-ws4" not in out
    out = say(tmp_path, "--threshold=p10:0%,p50:0%")[1]
    assert "2 improved, 2 accepted in 2 series" in out
    assert [line.split(" in ")[1].partition(":")[0] for line in say("accept", *arguments)[1].splitlines()] == [
        "cpu-gloo-ws4"
    ] * 2


def test_what_is_faster_by_evidence_is_accepted_before_what_only_may_be(tmp_path: Path, say: Say) -> None:
    kept(tmp_path, stepped((40, -9.0), points=60))
    for each in history([*stepped(points=40), -15.0]):
        folder.add(tmp_path, replace(each, environment="cpu-gloo-ws4"))
    status, out, _ = say("accept", commit_of(40), "test_train", "-m", "why", "--in", tmp_path)
    assert (status, len(out.splitlines())) == (0, 1)
    assert "cpu-gloo-ws2" in out


def test_of_a_commit_that_may_be_several_none_is_accepted(tmp_path: Path, say: Say) -> None:
    root = kept(tmp_path, stepped((25, 9.0), (40, 9.0)))
    status, _, err = say("accept", "0000", "test_train", "-m", "why", "--in", root)
    assert status == 4
    assert "0000: tests/perf/test_step::test_train has steps at several such commits: 000000190000, 000000280000" in err
    assert not (root / "accepted").exists()


def test_a_step_that_show_does_not_tell_cannot_be_accepted(tmp_path: Path, say: Say) -> None:
    """By itself it would be evidence; among sixty series it is not."""
    kept(tmp_path, stepped((40, 3.2)))
    for number in range(60):
        for each in history(gaussian(20, seed=number)):
            folder.add(tmp_path, replace(each, environment=f"e{number}"))
    accept = ("accept", commit_of(40), "test_train", "-m", "why", "--in", tmp_path)
    status, _, err = say(*accept)
    assert (status, err.endswith(f"test_train has no step at {commit_of(40)}\n")) == (4, True)
    assert say(*accept, "-k", "gloo")[0] == 0


def test_a_step_that_fails_nothing_cannot_be_accepted(tmp_path: Path, say: Say) -> None:
    root = kept(tmp_path, stepped((25, 9.0), (40, -9.0)))
    status, _, err = say("accept", commit_of(25), "test_train", "-m", "why", "--in", root)
    assert status == 4
    assert f"{commit_of(25)}: the step there fails nothing as it is: undone" in err


@pytest.mark.parametrize(
    ("commit", "test", "told"),
    [
        ("c0ffee", "test_train", "tests/perf/test_step::test_train has no step at c0ffee: there are steps at 0000"),
        ("", "test_train", "COMMIT: name the one that the step is at"),
        ("0", "test_eval", "test_eval: the history has no such test"),
    ],
)
def test_what_cannot_be_accepted_is_told(slower: Path, say: Say, commit: str, test: str, told: str) -> None:
    status, _, err = say("accept", commit, test, "-m", "why", "--in", slower)
    assert status == 4
    assert told in err


def test_a_name_that_fits_several_tests_is_refused(tmp_path: Path, say: Say) -> None:
    for each in history(stepped(points=8)):
        (row,) = each.measurements
        second = replace(row, test=replace(TEST, label="second"))
        folder.add(tmp_path, replace(each, measurements=(row, second)))
    status, _, err = say("accept", "0", "test_tr", "-m", "why", "--in", tmp_path)
    assert status == 4
    assert "test_tr: several tests are called that: tests/perf/test_step::test_train, tests/perf" in err


# --- confirm


def committed(top: Path, content: str) -> str:
    file = top / "tests" / "perf" / "test_step.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    git(top, "add", ".")
    git(top, "commit", "-qm", content)
    return git(top, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str, str]:
    """A repository with two commits, between which the history in it has a step."""
    top = tmp_path / "repository"
    top.mkdir()
    git(top, "init", "-q")
    earlier, later = committed(top, "earlier"), committed(top, "later")
    for day, each in enumerate(history(stepped((40, 9.0)))):
        commit = {39: earlier, 40: later}.get(day, each.run.commit)
        folder.add(tmp_path / "history", replace(each, run=replace(each.run, commit=commit)))
    monkeypatch.chdir(top)
    return tmp_path / "history", earlier, later


DIFFERING = Beside(
    version=Version(ref="a", commit="a", now="b"), seed=1, order="bn", imported=12, differing=("speed.py",)
)
SAME = replace(DIFFERING, differing=())
INSTALLED = replace(SAME, imported=0)


def json_of(command: Sequence[str]) -> Path:
    (option,) = (word for word in command if word.startswith("--ddp-json="))
    return Path(option.partition("=")[2])


def confirmed(
    monkeypatch: pytest.MonkeyPatch, status: Status, beside: Beside = DIFFERING, **key: Any
) -> list[tuple[list[str], Path, str, Any]]:
    """In place of pytest: what it was called with is in the list that this returns."""
    called: list[tuple[list[str], Path, str, Any]] = []
    environment = Environment(key={"device_type": "cpu", "backend": "gloo", "world_size": 2, **key})
    told = outcome(
        verdict(status), test=TEST, measurement=replace(measurement(), environment=environment), beside=beside
    )

    def pytest_run(command: list[str], folder: Path, environ: dict[str, str]) -> int:
        called.append((command, folder, (folder / "tests/perf/test_step.py").read_text(), environ))
        report = Report(Run())
        report.take({"outcomes": [codec.encode(told)]})
        report.end()
        json_of(command).write_text(codec.dumps(report.data()))
        return 4 if report.usage_error else int(status is Status.REGRESSED)

    monkeypatch.setattr(confirming, "_called", pytest_run)
    return called


@pytest.mark.parametrize(
    ("status", "beside", "ended", "why"),
    [
        (Status.REGRESSED, DIFFERING, 1, ""),
        (Status.REGRESSED, SAME, 1, ""),
        (Status.PASS, DIFFERING, 0, ""),
        (Status.IMPROVED, DIFFERING, 0, ""),
        (Status.PASS, SAME, 5, "no file that ranks imported differs: the step is in none, or both sides ran the same"),
        (Status.PASS, INSTALLED, 5, "no test imported a file that differs between a and the code at hand, nor"),
        (Status.REGRESSED, INSTALLED, 5, "no test imported a file that differs between a and the code at hand, nor"),
        (Status.INCONCLUSIVE, DIFFERING, 5, "neither slower nor certainly not: more launches may tell, as by --option"),
        (Status.NO_BASELINE, DIFFERING, 5, "nothing was compared"),
    ],
)
def test_how_confirm_ends_says_whether_it_is_slower(
    repository: tuple[Path, str, str],
    say: Say,
    monkeypatch: pytest.MonkeyPatch,
    status: Status,
    beside: Beside,
    ended: int,
    why: str,
) -> None:
    confirmed(monkeypatch, status, beside)
    told = say("confirm", "test_train", "--in", repository[0])
    assert told[0] == ended
    assert told[2].startswith(f"ddpperf: {why}" if why else "")
    assert bool(told[2]) == bool(why)


def test_another_kind_of_machine_confirms_nothing(
    repository: tuple[Path, str, str], say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirmed(monkeypatch, Status.REGRESSED, world_size=4)
    status, _, err = say("confirm", "test_train", "--in", repository[0])
    assert status == 5
    assert err == "ddpperf: this was measured in cpu-gloo-ws4, and the step is in cpu-gloo-ws2\n"


@pytest.mark.parametrize(
    ("name", "node"),
    [("test_train", "test_train[ws2]"), ("TestA::test_train[bf16-x]", "TestA::test_train[bf16-x-ws2]")],
)
def test_of_several_world_sizes_the_steps_own_is_measured(
    repository: tuple[Path, str, str], say: Say, monkeypatch: pytest.MonkeyPatch, name: str, node: str, tmp_path: Path
) -> None:
    for each in folder.read(repository[0]):
        (row,) = each.measurements
        row = replace(row, test=replace(TEST, name=name), sized=True)
        folder.add(tmp_path / "sized", replace(each, measurements=(row,)))
    called = confirmed(monkeypatch, Status.PASS)
    say("confirm", "test_train", "--in", tmp_path / "sized")
    ((command, *_),) = called
    assert command[3] == f"tests/perf/test_step.py::{node}"
    assert "--ddp-world-size=2,1" in command


def test_a_step_of_many_times_has_a_limit_that_pytest_reads(
    repository: tuple[Path, str, str], say: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    earlier, later = repository[1:]
    for day, each in enumerate(history(stepped((40, 350.0)))):
        commit = {39: earlier, 40: later}.get(day, each.run.commit)
        folder.add(tmp_path / "huge", replace(each, run=replace(each.run, commit=commit)))
    called = confirmed(monkeypatch, Status.PASS)
    say("confirm", "test_train", "--in", tmp_path / "huge")
    (limit,) = parse.limits(called[0][0][-1].removeprefix("--ddp-threshold="))
    assert 14.0 < limit.value < 18.0


def test_the_latest_step_that_is_slower_is_measured(
    repository: tuple[Path, str, str], say: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    earlier, later = repository[1:]
    for day, each in enumerate(history(stepped((25, 9.0), (40, -3.8)))):
        commit = {24: earlier, 25: later}.get(day, each.run.commit)
        folder.add(tmp_path / "two", replace(each, run=replace(each.run, commit=commit)))
    confirmed(monkeypatch, Status.PASS)
    assert f"measuring {later[:12]} beside {earlier[:12]}" in say("confirm", "test_train", "--in", tmp_path / "two")[1]
    last = history([*stepped((25, 9.0), (40, -3.8)), -15.0])[-1]  # one that may be faster
    folder.add(tmp_path / "two", last)
    assert f"measuring {later[:12]} beside {earlier[:12]}" in say("confirm", "test_train", "--in", tmp_path / "two")[1]
    assert (
        f"lacks commit {commit_of(39)[:12]}"
        in (say("confirm", "test_train", "--in", tmp_path / "two", "--at", commit_of(40))[2])
    )


@pytest.mark.parametrize(("status", "ended"), [(Status.REGRESSED, 1), (Status.PASS, 0)])
def test_the_later_commit_is_measured_beside_the_earlier_one(
    repository: tuple[Path, str, str],
    say: Say,
    monkeypatch: pytest.MonkeyPatch,
    status: Status,
    ended: int,
) -> None:
    root, earlier, later = repository
    called = confirmed(monkeypatch, status)
    monkeypatch.syspath_prepend(str(Path.cwd() / "src"))
    told = say("confirm", "test_train", "--in", root, "--option=--ddp-launches=3")
    ((command, cwd, content, environ),) = called
    assert told[0] == ended
    assert f"measuring {later[:12]} beside {earlier[:12]}\n{status}  " in told[1]
    assert command[1:6] == ["-m", "pytest", "tests/perf/test_step.py::test_train", "--ddp-against", earlier]
    *group, limit, extra = command[7:]
    assert (group, extra) == (["--ddp-backend=gloo", "--ddp-device=cpu", "--ddp-world-size=2"], "--ddp-launches=3")
    assert 4.0 < float(limit.removeprefix("--ddp-threshold=p10:").removesuffix("%")) < 5.0
    assert content == "later"
    assert environ["PYTHONPATH"].startswith(str(cwd / "src"))
    assert not cwd.exists()


def refused(monkeypatch: pytest.MonkeyPatch, status: int, problem: str) -> None:
    """In place of pytest that measures nothing and says so in its report."""

    def pytest_run(command: list[str], *_: Any) -> int:
        written(json_of(command), run=Run(problem=problem))
        return status

    monkeypatch.setattr(confirming, "_called", pytest_run)


@pytest.mark.parametrize(
    ("ended", "problem"),
    [(4, "file or directory not found: tests/perf/test_step.py::test_train"), (4, ""), (2, ""), (5, "")],
)
def test_pytest_that_measures_nothing_is_told(
    repository: tuple[Path, str, str], say: Say, monkeypatch: pytest.MonkeyPatch, ended: int, problem: str
) -> None:
    refused(monkeypatch, ended, problem)
    told = f"ddpperf: pytest ended with status {ended}: nothing was measured\n"
    assert say("confirm", "test_train", "--in", repository[0])[::2] == (4, told)
    monkeypatch.setattr(confirming, "_called", lambda *_: ended)
    assert say("confirm", "test_train", "--in", repository[0])[::2] == (4, told)


def test_a_step_where_nothing_but_tests_changed_is_not_in_the_code(
    repository: tuple[Path, str, str], say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, earlier, _ = repository
    top = Path.cwd()
    kept = (str(top / "tests"),)
    base = BaseSide(
        settings(against=earlier),
        Invocation(arguments=(), tests=(), folder=top, rootdir=top, caches=False, kept=kept, sys_path=()),
    )
    sources = Sources(python="3.11.7", prefix="/venv", files={})
    answers = SimpleNamespace(collect=lambda seconds: {"sources": codec.encode(sources)})
    monkeypatch.setattr(base, "tests", answers, raising=False)
    with pytest.raises(AgainstError) as same:
        base.collect(sources)
    refused(monkeypatch, 4, str(same.value))
    status, _, err = say("confirm", "test_train", "--in", root)
    assert status == 5
    assert err.startswith(f"ddpperf: --ddp-against: nothing differs between {earlier[:12]} and the code at hand: ")


def test_ctrl_c_waits_for_pytest_which_has_a_worktree_to_remove(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    class Process:
        def wait(self) -> int:
            waited.append("wait")
            if len(waited) == 1:
                raise KeyboardInterrupt
            return 2

    monkeypatch.setattr(confirming.subprocess, "Popen", lambda command, **how: Process())
    with pytest.raises(KeyboardInterrupt):
        confirming._called(["pytest"], Path(), {})
    assert waited == ["wait", "wait"]


def test_commits_that_the_clone_lacks_are_told_how_to_fetch(slower: Path, repository: Any, say: Say) -> None:
    status, _, err = say("confirm", "test_train", "--in", slower)
    assert status == 4
    assert f"this clone lacks commit {commit_of(39)[:12]}: git fetch --depth=1 origin {commit_of(39)} brings it" in err


def test_confirm_wants_to_be_called_where_pytest_is(
    repository: tuple[Path, str, str], say: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(Path.cwd() / "tests")
    status, _, err = say("confirm", "test_train", "--in", repository[0])
    assert status == 4
    assert f"tests/perf/test_step.py is not in tests of {repository[2][:12]}: call it where pytest is called" in err
    monkeypatch.chdir(tmp_path)
    err = say("confirm", "train", "--in", repository[0])[2]
    assert "is in no git repository: call it where pytest is called" in err


def test_the_recipe_for_ci_bears_a_push_meanwhile_and_a_job_that_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the workflow of docs/ci.md runs, each time in a shallow checkout as GitHub makes it."""
    recipe = (Path(__file__).parents[2] / "docs" / "ci.md").read_text()
    (script,) = re.findall(r"run: \|\n((?: {10}\S.*\n)+) {8}env:\n {10}COMMIT:", recipe)
    command = tmp_path / "bin" / "ddpperf"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pytest_ddpperf "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    origin, seed = tmp_path / "origin", tmp_path / "seed"
    git(tmp_path, "init", "-q", "--bare", "origin")
    git(tmp_path, "init", "-q", "seed")
    git(seed, "switch", "-q", "--orphan", "perf-history")
    git(seed, "commit", "-q", "--allow-empty", "-m", "A history")
    git(seed, "push", "-q", str(origin), "perf-history")

    def checkout(name: str) -> Path:
        git(tmp_path, "clone", "-q", "--depth=1", "--branch=perf-history", origin.as_uri(), name)
        return tmp_path / name

    def job(folder: Path, day: int) -> None:
        report = tmp_path / f"{day}" / "report" / "ddpperf.json"
        if not report.exists():
            report.parent.mkdir(parents=True)
            written(report, measured(), run=run(day))
        environ = {**os.environ, "RUNNER_TEMP": str(report.parents[1]), "COMMIT": commit_of(day)}
        ended = subprocess.run(
            ["bash", "-e", "-c", script], cwd=folder, env=environ, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr

    first, second = checkout("first"), checkout("second")
    job(first, 1)
    job(second, 2)
    job(checkout("again"), 1)
    said = git(origin, "log", "--format=%s", "perf-history").splitlines()
    assert said == [f"Add a run of {commit_of(2)}", f"Add a run of {commit_of(1)}", "A history"]
    kept = git(origin, "ls-tree", "-r", "--name-only", "perf-history").splitlines()
    assert [Path(name).parent.as_posix() for name in kept] == ["history/cpu-gloo-ws2"] * 2


def test_neither_pytest_nor_torch_is_imported_to_find_steps(slower: Path) -> None:
    code = (
        "import sys; from pytest_ddpperf.cli.main import main; "
        f"main(['history', {str(slower)!r}]); "
        "print(sorted({'torch', '_pytest', 'pytest', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines()[-1] == "[]", ended.stderr
