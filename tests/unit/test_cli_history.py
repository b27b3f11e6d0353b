"""`ddpperf history` and its subcommands, as a user calls them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_ddpperf.cli import main
from pytest_ddpperf.history.entries import add_entry
from pytest_ddpperf.records import Status
from tests.git import git
from tests.unit.test_history import TEST, commit_of, history, measured, run, stepped
from tests.unit.test_reading import written
from tests.unit.test_report import outcome, verdict

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Call `ddpperf history` and return its status, its output and its errors."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        status = main.main(["history", *map(str, arguments)])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def kept(root: Path, logs: Sequence[float]) -> Path:
    for each in history(logs):
        add_entry(root, each)
    return root


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept(tmp_path_factory.mktemp("slower"), stepped((40, 9.0)))


# --- show


def test_a_regression_is_shown_with_its_commits_and_ends_with_1(slower: Path, say: Say) -> None:
    status, out, err = say(slower)
    first, second, empty, last = out.splitlines()
    assert (status, empty, err) == (1, "", "")
    assert first == "REGRESSED  tests/perf/test_step::test_train  cpu-gloo-ws2"
    assert second.startswith("  p10 +9.")
    assert second.endswith("; at 000000280000 of 2026-02-10, after 000000270000; 20 runs since")
    assert last == "1 regressed in 1 series of 60 runs at 60 commits (p10)"


@pytest.mark.parametrize(
    ("jumps", "arguments", "words"),
    [
        ((), ("--threshold=p50:5%,p90:1ms",), "no change point in 1 series of 60 runs at 60 commits (p50, p90)\n"),
        (((40, -9.0),), (), "1 improved in 1 series"),
        (((40, 9.0),), ("--threshold=p10:20%",), "1 within limit in 1 series"),
        (((40, 9.0),), ("-k", "no-such-test"), "1 regressed in 1 series"),
    ],
)
def test_what_is_not_a_regression_ends_with_0(
    tmp_path: Path, say: Say, jumps: tuple[tuple[int, float], ...], arguments: tuple[str, ...], words: str
) -> None:
    status, out, _ = say("show", kept(tmp_path, stepped(*jumps)), *arguments)
    assert status == 0
    assert words in out
    assert "REGRESSED" not in out


def test_a_change_between_runs_of_one_commit_is_noted(tmp_path: Path, say: Say) -> None:
    entries = history(stepped((40, 9.0)))
    entries[40] = replace(entries[40], commit=entries[39].commit)
    for each in entries:
        add_entry(tmp_path, each)
    assert "  both runs are of the same commit: the machine may have changed\n" in say(tmp_path)[1]


def test_series_that_are_all_too_short_end_with_5(tmp_path: Path, say: Say) -> None:
    status, out, err = say(kept(tmp_path, [0.0] * 5))
    assert (status, err) == (5, f"ddpperf: {tmp_path}: nothing to judge: no series has 6 runs\n")
    assert out == "no change point in 1 series of 5 runs at 5 commits (p10); too short: 1 series\n"


def test_no_name_can_harm_the_output(tmp_path: Path, say: Say) -> None:
    name = 'test_a[<script>"\n::error::\x1b[31m\u202e' + "x" * 10_000 + "]"
    for each in history(stepped((40, 9.0)), test=replace(TEST, name=name), must_match={"\x1b[31m": 1}):
        add_entry(tmp_path, each)
    assert say("accept", commit_of(40)[:10], "script", "-m", "why\n\x1b[31m", "--in", tmp_path)[0] == 0
    status, out, _ = say(tmp_path)
    first, _, why, *_ = out.splitlines()
    assert status == 0
    assert first.startswith('ACCEPTED  tests/perf/test_step::test_a[<script>"\\n::error::\\x1b')
    assert len(first) < 300
    assert why == "  accepted: why\\n\\x1b[31m"


def test_a_page_is_written(slower: Path, say: Say, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pages are drawn by matplotlib")
    file = tmp_path / "new" / "page.html"
    status, out, err = say(slower, "--html", file)
    assert (status, err) == (1, "")
    assert out.startswith("REGRESSED  tests/perf/test_step::test_train")
    assert "ddpperf history: 1 regressed in 1 series of 60 runs" in file.read_text(encoding="utf-8")
    status, _, err = say(slower, "--html", file / "page.html")
    assert status == 4
    assert f"{file / 'page.html'}: cannot be written: " in err


def test_a_page_that_cannot_be_made_is_refused_first(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_ddpperf.report.page.drawing.find_spec", lambda name: None)
    status, out, err = say("no-such-folder", "--html", "page.html")
    assert (status, out) == (4, "")
    assert "--html needs matplotlib and Jinja2: pip install 'pytest-ddpperf[report]'" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--threshold", "p50"], "argument --threshold: 'p50'"),
        (["--threshold", "p75:5%"], "'p75:5%': a history has p10, p50, p90, not p75"),
        (["no-such-folder"], "no-such-folder: cannot be read: No such file or directory"),
        (["accept", "abc", "test_x"], "the following arguments are required: -m/--message"),
        (["accept", "abc", "test_x", "-m", " "], "COMMIT and WHY must not be empty"),
        (["accept", "", "test_x", "-m", "why"], "COMMIT and WHY must not be empty"),
    ],
)
def test_an_invalid_command_ends_with_4(arguments: Sequence[str], words: str, say: Say) -> None:
    status, _, err = say(*arguments)
    assert status == 4
    assert words in err


# --- add


def test_a_report_is_added_once(tmp_path: Path, say: Say) -> None:
    report = written(tmp_path / "a.json", measured(), run=run(5))
    status, out, _ = say("add", report, "--to", tmp_path / "history")
    (file,) = (tmp_path / "history").iterdir()
    assert (status, out) == (0, f"{report} -> {file}\n")
    assert say("add", report, "--to", tmp_path / "history")[0] == 0
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"commit": "", "committed": ""}, "what was measured is not a commit of a git repository"),
        ({"commit": "../../../evil"}, "commit: '../../../evil' is not the hash of a commit"),
    ],
)
def test_a_report_of_no_commit_is_refused(tmp_path: Path, say: Say, fields: dict[str, str], words: str) -> None:
    report = written(tmp_path / "a.json", measured(), run=run(**fields))
    status, _, err = say("add", report, "--to", tmp_path / "history")
    assert status == 4
    assert f"{report}: cannot be added: {words}" in err
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_report_of_a_comparison_is_refused(tmp_path: Path, say: Say) -> None:
    base, now = (written(tmp_path / f"{name}.json", measured(), run=run(day)) for day, name in enumerate("ab"))
    assert main.main(["diff", str(base), str(now), "--json", str(tmp_path / "diff.json")]) in (0, 1)
    status, _, err = say("add", tmp_path / "diff.json", "--to", tmp_path / "history")
    assert status == 4
    assert "cannot be added: it compares two runs: add the report of the run itself" in err


def test_a_report_without_usable_measurements_adds_nothing(tmp_path: Path, say: Say) -> None:
    report = written(tmp_path / "a.json", outcome(verdict(Status.NOT_GATED, "disabled")), run=run())
    assert say("add", report, "--to", tmp_path)[1] == f"{report}: no measurement describes its commit alone\n"


# --- accept


def test_an_accepted_change_fails_nothing_any_more(tmp_path: Path, say: Say) -> None:
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


def test_regressions_are_accepted_before_improvements(tmp_path: Path, say: Say) -> None:
    kept(tmp_path, stepped((40, 9.0)))
    for each in history(stepped((40, -9.0)), environment="cpu-gloo-ws4"):
        add_entry(tmp_path, each)
    arguments = (commit_of(40), "test_train", "-m", "why", "--in", tmp_path, "--threshold=p10:0%,p50:0%")
    for environment in ("cpu-gloo-ws2", "cpu-gloo-ws4"):
        out = say("accept", *arguments)[1].splitlines()
        assert sorted(line.partition(" ")[0] for line in out) == ["p10", "p50"]
        assert all(f" in {environment}: accepted" in line for line in out)


@pytest.mark.parametrize(
    ("jumps", "commit", "test", "words"),
    [
        (((40, 9.0),), "c0ffee", "test_train", "::test_train has no change point at c0ffee; all: 000000280000"),
        (((40, 9.0),), "0", "test_eval", "test_eval: the history has no such test"),
        (((25, 9.0), (40, 9.0)), "0000", "train", "has several change points at 0000; all: 000000190000, 000000280000"),
        (((25, 9.0), (40, -9.0)), commit_of(25), "train", "nothing to accept: the change point there is UNDONE"),
    ],
)
def test_an_unclear_change_point_is_not_accepted(
    tmp_path: Path, say: Say, jumps: tuple[tuple[int, float], ...], commit: str, test: str, words: str
) -> None:
    root = kept(tmp_path, stepped(*jumps))
    status, _, err = say("accept", commit, test, "-m", "why", "--in", root)
    assert status == 4
    assert words in err
    assert not (root / "accepted").exists()


def test_a_name_of_several_tests_is_refused(tmp_path: Path, say: Say) -> None:
    for label in ("", "second"):
        for each in history(stepped(points=8), test=replace(TEST, label=label)):
            add_entry(tmp_path, each)
    assert "train: several tests have that name: " in say("accept", "0", "train", "-m", "w", "--in", tmp_path)[2]
    assert "has no change point at" in say("accept", "0", str(TEST), "-m", "w", "--in", tmp_path)[2]


# --- the whole


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
    assert [Path(name).parent.as_posix() for name in kept] == ["history"] * 2


def test_neither_pytest_nor_torch_is_imported(slower: Path) -> None:
    code = (
        "import sys; from pytest_ddpperf.cli.main import main; "
        f"main(['history', {str(slower)!r}]); "
        "print(sorted({'torch', '_pytest', 'pytest', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines()[-1] == "[]", ended.stderr
