"""`ddpperf history` and its subcommands, as a user calls them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_ddpperf.cli import main
from pytest_ddpperf.history.entries import (
    BisectedChange,
    HistoryEntry,
    HistoryFigure,
    add_change,
    add_entry,
    read_entries,
)
from pytest_ddpperf.history.series import ChangeStatus, analyze, build_series
from pytest_ddpperf.records.figure import Better
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.samples import Status
from pytest_ddpperf.report.history_report import history_lines
from tests.git import git
from tests.unit.test_change_points import gaussian
from tests.unit.test_history import (
    commit_of,
    history,
    measured,
    of_two_launches,
    run,
    stepped,
)
from tests.unit.test_reading import written
from tests.unit.test_report import outcome, verdict

Say = Callable[..., tuple[int, str, str]]
P10 = (Limit(metric="p10", value=0.0, unit="%"),)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Call `ddpperf history` and return its status, its output and its errors."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        status = main.main(["history", *map(str, arguments)])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def kept(root: Path, logs: Sequence[float]) -> Path:
    return written_to(root, history(logs))


def written_to(root: Path, entries: Sequence[HistoryEntry]) -> Path:
    for each in entries:
        add_entry(root, each)
    return root


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept(tmp_path_factory.mktemp("slower"), stepped((40, 9.0)))


# --- show


def test_a_regression_is_shown_with_its_commits_and_ends_with_1(
    slower: Path, say: Say
) -> None:
    status, out, err = say(slower)
    first, second, empty, last = out.splitlines()
    assert (status, empty, err) == (1, "", "")
    assert first == "REGRESSED  tests/perf/test_step::test_train  cpu-gloo-ws2"
    assert second.startswith("  p10 +9.")
    assert second.endswith(
        "; at 000000280000 of 2026-02-10, after 000000270000; 20 runs since"
    )
    assert last == "1 regressed in 1 series of 60 runs at 60 commits (p10)"


@pytest.mark.parametrize(
    ("jumps", "arguments", "words"),
    [
        (
            (),
            ("--threshold=p50:5%,p90:1ms",),
            "no change point in 1 series of 60 runs at 60 commits (p50, p90)\n",
        ),
        (((40, -9.0),), (), "1 improved in 1 series"),
        (((40, 9.0),), ("--threshold=p10:20%",), "1 within limit in 1 series"),
    ],
)
def test_what_is_not_a_regression_ends_with_0(
    tmp_path: Path,
    say: Say,
    jumps: tuple[tuple[int, float], ...],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    status, out, _ = say("show", kept(tmp_path, stepped(*jumps)), *arguments)
    assert status == 0
    assert words in out
    assert "REGRESSED" not in out


def test_a_change_to_more_than_the_double_is_found_in_eight_noisy_runs(
    tmp_path: Path, say: Say
) -> None:
    root = written_to(tmp_path, of_two_launches(12, 11, 9, 16, 33, 23, 26, 27))
    status, out, err = say(root)
    assert (status, err) == (1, "")
    assert out.startswith(
        "REGRESSED  tests/perf/test_step::test_train  cpu-gloo-ws2\n  p10 2.30x ["
    )
    assert (
        "; at 000000040000 of 2026-01-05, after 000000030000; 4 runs since"
        in out
    )


def test_without_a_change_point_the_smallest_detectable_change_is_shown(
    tmp_path: Path, say: Say
) -> None:
    root = written_to(tmp_path, of_two_launches(12, 11, 9, 16, 13, 10, 15, 11))
    status, out, err = say(root)
    first, last = out.splitlines()
    assert (status, err) == (0, "")
    name, _, smallest = first.partition(
        "  p10: no change point; a change under "
    )
    assert name == "tests/perf/test_step::test_train  cpu-gloo-ws2"
    assert 100 < float(smallest.removesuffix(" % could not be seen")) < 300
    assert last == "no change point in 1 series of 8 runs at 8 commits (p10)"


def test_what_k_does_not_choose_does_not_count(
    tmp_path: Path, say: Say
) -> None:
    written_to(tmp_path, history(stepped((40, 9.0))))
    written_to(tmp_path, history(stepped(), environment="another"))
    assert say(tmp_path)[0] == 1
    status, out, _ = say(tmp_path, "-k", "another")
    assert status == 0
    assert "no change point in 1 series of 60 runs" in out
    assert "REGRESSED" not in out


@pytest.mark.parametrize("jumps", [(), ((40, 9.0),)])
def test_names_that_choose_no_series_end_with_5(
    tmp_path: Path, say: Say, jumps: tuple[tuple[int, float], ...]
) -> None:
    root = kept(tmp_path, stepped(*jumps))
    status, out, err = say(root, "-k", "no-such-test")
    assert status == 5
    assert err == (
        f"ddpperf: {tmp_path}: nothing to judge: no series that -k chooses has 6 runs with p10\n"
    )
    assert len(out.splitlines()) == 1


def test_series_that_are_all_too_short_end_with_5(
    tmp_path: Path, say: Say
) -> None:
    status, out, err = say(kept(tmp_path, [0.0] * 5))
    assert (status, err) == (
        5,
        f"ddpperf: {tmp_path}: nothing to judge: no series has 6 runs with p10\n",
    )
    assert (
        out
        == "no change point in 1 series of 5 runs at 5 commits (p10); too short: 1 series\n"
    )


def with_rate(
    entries: Sequence[HistoryEntry],
    falls_at: int = 40,
    first: int = 0,
    better: Better = "higher",
) -> list[HistoryEntry]:
    """Return the runs with a rate that falls to a half, from the `first` one on."""
    found = []
    for day, (entry, noise) in enumerate(
        zip(entries, gaussian(len(entries)), strict=True)
    ):
        rate = (500 if day >= falls_at else 1000) * math.exp(noise / 100)
        figure = HistoryFigure(
            better=better, launches=(0.99 * rate, rate, 1.01 * rate)
        )
        figures = {"tps": figure} if day >= first else {}
        kept = [replace(each, figures=figures) for each in entry.measurements]
        found.append(replace(entry, measurements=tuple(kept)))
    return found


@pytest.mark.parametrize("arguments", [(), ("--threshold=tps:5%",)])
@pytest.mark.parametrize("first", [0, 20])
def test_a_figure_of_ones_own_has_change_points(
    tmp_path: Path, say: Say, first: int, arguments: tuple[str, ...]
) -> None:
    runs = with_rate(history(stepped()), first=first)
    status, out, err = say(written_to(tmp_path / "h", runs), *arguments)
    lines = out.splitlines()
    assert (status, err) == (1, "")
    assert (
        lines[0] == "REGRESSED  tests/perf/test_step::test_train  cpu-gloo-ws2"
    )
    assert re.match(
        r"  tps -(49|50|51) % \[.*\], (1,0\d\d|9\d\d) -> (49|50)\d; at 000000280000",
        lines[1],
    )
    assert not any("mostly" in line for line in lines)
    assert lines[-1].endswith("(tps)" if arguments else "(p10, tps)")


def test_a_metric_that_hardly_any_run_has_is_not_judged(
    tmp_path: Path, say: Say
) -> None:
    folder = written_to(tmp_path / "h", with_rate(history(stepped()), first=56))
    for metric in ("tps", "tsp"):
        status, _, err = say(folder, f"--threshold={metric}:5%")
        assert status == 5
        assert err.endswith(f"no series has 6 runs with {metric}\n")


def test_a_limit_on_a_rate_is_a_fall(tmp_path: Path, say: Say) -> None:
    folder = written_to(tmp_path / "h", with_rate(history(stepped())))
    assert say(folder, "--threshold=tps:60%")[0] == 0
    status, out, _ = say(folder, "--threshold=tps:40%")
    assert (status, out.split()[0]) == (1, "REGRESSED")


def test_what_could_not_be_seen_of_a_rate_is_a_fall(
    tmp_path: Path, say: Say
) -> None:
    noise = [100 * each for each in gaussian(12)]
    runs = [
        replace(
            entry,
            measurements=tuple(
                replace(
                    each,
                    figures={
                        "tps": HistoryFigure(
                            better="higher",
                            launches=(1000 * math.exp(log / 100),) * 3,
                        )
                    },
                )
                for each in entry.measurements
            ),
        )
        for entry, log in zip(history(gaussian(12)), noise, strict=True)
    ]
    _, out, _ = say(written_to(tmp_path / "h", runs), "--threshold=tps:5%")
    (share,) = re.findall(r"tps: no change point; a change under (\d+) %", out)
    assert 50 < int(share) < 100


def test_a_figure_that_falls_is_better_if_lower_is(
    tmp_path: Path, say: Say
) -> None:
    runs = with_rate(history(stepped()), better="lower")
    status, out, _ = say(written_to(tmp_path / "h", runs))
    assert status == 0
    assert out.startswith("IMPROVED")
    assert "tps -" in out


def test_runs_of_another_direction_do_not_count(
    tmp_path: Path, say: Say
) -> None:
    before = with_rate(history(stepped()), better="lower")[:40]
    runs = before + with_rate(history(stepped()))[40:]
    status, out, _ = say(written_to(tmp_path / "h", runs))
    assert status == 0
    assert "tps: no change point" in out


def test_a_change_of_a_figure_is_accepted_and_drawn(
    tmp_path: Path, say: Say
) -> None:
    pytest.importorskip("matplotlib", reason="pages are drawn by matplotlib")
    folder = written_to(tmp_path / "h", with_rate(history(stepped()), first=20))
    page = tmp_path / "page.html"
    assert say(folder, "--html", page)[0] == 1
    drawn = page.read_text(encoding="utf-8")
    assert "tps of each run" in drawn
    assert drawn.count("<section id=") == 1, "one for each series"
    assert "tps: no change point" not in drawn
    status, out, _ = say(
        "accept", "000000280000", "test_train", "-m", "why", "--in", folder
    )
    assert status == 0
    assert out.startswith("tps -")
    assert say(folder)[0] == 0


def test_a_figure_in_a_history_is_above_0(tmp_path: Path, say: Say) -> None:
    figure = HistoryFigure(better="higher", launches=(1.0, 0.0))
    (entry,) = history([0.0])
    (each,) = entry.measurements
    wrong = replace(each, figures={"tps": figure})
    folder = written_to(tmp_path / "h", [replace(entry, measurements=(wrong,))])
    status, _, err = say(folder)
    assert status == 4
    assert "figures.tps: [1.0, 0.0] are not above 0" in err


def test_a_page_is_written(slower: Path, say: Say, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pages are drawn by matplotlib")
    file = tmp_path / "new" / "page.html"
    status, out, err = say(slower, "--html", file)
    assert (status, err) == (1, "")
    assert out.startswith("REGRESSED  tests/perf/test_step::test_train")
    assert (
        "ddpperf history: 1 regressed in 1 series of 60 runs"
        in file.read_text(encoding="utf-8")
    )
    status, _, err = say(slower, "--html", file / "page.html")
    assert status == 4
    assert f"{file / 'page.html'}: cannot be written: " in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--threshold", "p50"], "argument --threshold: 'p50'"),
        (
            ["--threshold", "p75:5%"],
            "'p75:5%': a history has p10, p50, p90, not p75",
        ),
        (
            ["no-such-folder"],
            "no-such-folder: cannot be read: No such file or directory",
        ),
        (
            ["accept", "abc", "test_x"],
            "the following arguments are required: -m/--message",
        ),
        (
            ["accept", "abc", "test_x", "-m", " "],
            "COMMIT and WHY must not be empty",
        ),
        (
            ["accept", "", "test_x", "-m", "why"],
            "COMMIT and WHY must not be empty",
        ),
    ],
)
def test_an_invalid_command_ends_with_4(
    arguments: Sequence[str], words: str, say: Say
) -> None:
    status, _, err = say(*arguments)
    assert status == 4
    assert words in err


def test_lines_fit_into_the_terminal(
    slower: Path, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchanged = written_to(
        tmp_path, of_two_launches(12, 11, 9, 16, 13, 10, 15, 11)
    )
    whole = [say(root)[1] for root in (slower, unchanged)]
    monkeypatch.setenv("COLUMNS", "50")
    for root, before in zip((slower, unchanged), whole, strict=True):
        out = say(root)[1]
        assert max(map(len, out.splitlines())) <= 50
        assert out.split() == before.split()


# --- add


def test_a_report_is_added_once(tmp_path: Path, say: Say) -> None:
    report = written(tmp_path / "a.json", measured(), run=run(5))
    status, out, _ = say("add", report, "--to", tmp_path / "history")
    (file,) = (tmp_path / "history").iterdir()
    assert (status, out) == (0, f"{report} -> {file}\n")
    assert say("add", report, "--to", tmp_path / "history")[0] == 0
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("measurement", "fields", "status", "words"),
    [
        (
            measured(),
            {"commit": ""},
            4,
            "cannot be added: what was measured is not a commit of a git repository",
        ),
        (
            measured(),
            {"commit": "../evil"},
            4,
            "cannot be added: commit: '../evil' is not the hash of a commit",
        ),
        (
            outcome(verdict(Status.NOT_GATED, "disabled")),
            {},
            0,
            "no measurement of this commit alone can be added (see docs/history.md)",
        ),
    ],
)
def test_an_unfit_report_is_not_added(
    tmp_path: Path,
    say: Say,
    measurement: Outcome,
    fields: dict[str, str],
    status: int,
    words: str,
) -> None:
    report = written(tmp_path / "a.json", measurement, run=run(**fields))
    assert (said := say("add", report, "--to", tmp_path / "history"))[
        0
    ] == status
    assert f"{report}: {words}" in "".join(said[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


# --- accept


def test_an_accepted_change_fails_nothing_any_more(
    tmp_path: Path, say: Say
) -> None:
    """Regressions are accepted before improvements."""
    root = kept(tmp_path, stepped((40, 9.0)))
    for each in history(stepped((40, -9.0)), environment="cpu-gloo-ws4"):
        add_entry(root, each)
    metrics = "--threshold=p10:0%,p50:0%"
    for environment in ("cpu-gloo-ws2", "cpu-gloo-ws4"):
        status, out, _ = say(
            "accept",
            commit_of(40),
            "test_train",
            "-m",
            "a bigger model",
            "--in",
            root,
            metrics,
        )
        assert status == 0
        lines = sorted(out.splitlines())
        files = [
            path
            for path in (root / "accepted").iterdir()
            if environment in path.read_text()
        ]
        assert [line.split()[0] for line in lines] == ["p10", "p50"]
        assert {
            line.partition(f" in {environment}: accepted in ")[2]
            for line in lines
        } == {f"{file}: commit it" for file in files}
    status, out, _ = say(root)
    assert status == 0
    assert "  accepted: a bigger model" in out
    assert "2 accepted in 2 series" in out


def test_a_change_point_shows_why_the_baseline_was_saved_there(
    tmp_path: Path, say: Say
) -> None:
    entries = history(stepped((20, 9.0), (40, 9.0)), why="the first")
    for at, entry in enumerate(entries[40:], 40):
        (measurement,) = entry.measurements
        newer = replace(measurement, why="a bigger\x1b model")
        entries[at] = replace(entry, measurements=(newer,))
    _, out, _ = say(written_to(tmp_path, entries))
    assert out.count("change point") == 0
    assert out.count(f"at {commit_of(20)[:12]}") == 1
    assert re.findall("at (.{12}) .*\n  its baseline was saved: (.*)", out) == [
        (commit_of(40)[:12], r"a bigger\x1b model")
    ]


def test_what_is_no_change_point_is_named_with_those_that_are(
    slower: Path, say: Say
) -> None:
    command = ("accept", "abc", "test_x", "-m", "why", "--in", slower)
    status, _, err = say(*command)
    assert status == 4
    place = f"tests/perf/test_step::test_train at {commit_of(40)[:12]}"
    assert f"no change point of test_x at abc: {place}" in err


# --- the whole


# --- which commit


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make a repository of 60 commits, and return them."""
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    for number in range(62):
        git(
            tmp_path,
            "commit",
            "--quiet",
            "--allow-empty",
            "-m",
            f"Commit {number}",
        )
    return git(tmp_path, "rev-list", "--reverse", "HEAD").split()


def test_a_change_point_of_several_commits_has_the_command_that_finds_the_one(
    repository: list[str],
    say: Say,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # of which the 41st and 42nd were not measured
    commits = [*repository[:40], *repository[42:]]
    place = {"world_size": 8, "backend": "nccl"}
    runs = history(stepped((40, 9.0)), key=place)
    folder = written_to(
        tmp_path / "history",
        [
            replace(each, commit=commit)
            for each, commit in zip(runs, commits, strict=True)
        ],
    )
    _, out, _ = say(folder)
    ends = f"--good {commits[39][:12]} --bad {commits[40][:12]}"
    command = f"ddpperf bisect tests/perf/test_step.py::test_train {ends} --history {folder}"
    command += " -- --ddp-world-size=8 --ddp-backend=nccl"
    assert f"  which commit: {command}\n" in out
    with monkeypatch.context() as narrow:
        narrow.setenv("COLUMNS", "50")
        # whole, so that it can be copied
        assert f"  which commit: {command}\n" in say(folder)[1]
    add_change(
        folder,
        BisectedChange(
            test=runs[0].measurements[0].test,
            good=commits[39],
            bad=commits[40],
            commit=repository[41],
            subject="Make it safe",
        ),
    )
    _, out, _ = say(folder)
    assert f"  slower at {repository[41][:12]}: Make it safe\n" in out
    assert "which commit" not in out


def test_a_change_point_of_one_commit_needs_no_command(
    repository: list[str], say: Say, tmp_path: Path
) -> None:
    runs = zip(history(stepped((40, 9.0))), repository, strict=False)
    _, out, _ = say(
        written_to(
            tmp_path / "history",
            [replace(each, commit=commit) for each, commit in runs],
        )
    )
    assert "REGRESSED" in out
    assert "which commit" not in out


def test_regressions_without_any_improvement_are_likely_noise(
    slower: Path,
) -> None:
    analysis = analyze(build_series(read_entries(slower)), P10, ())
    (change,) = analysis.changes
    noise = (
        "8 regressions, 0 improvements: this is likely noise; check that all runs are of one kind"
        " of machine, and "
    )
    for number, expected in ((7, False), (8, True)):
        lines = [*history_lines(replace(analysis, changes=[change] * number))]
        assert (lines[-1] == f"{noise}--threshold") is expected
    improved = replace(change, status=ChangeStatus.IMPROVED)
    assert not [
        *history_lines(replace(analysis, changes=[change] * 8 + [improved]))
    ][-1].endswith("--threshold")


def test_what_was_added_before_a_report_that_is_refused_is_named(
    tmp_path: Path, say: Say
) -> None:
    good = written(tmp_path / "a.json", measured(), run=run(5))
    bad = written(tmp_path / "b.json", measured(), run=run(commit=""))
    status, out, err = say("add", good, bad, "--to", tmp_path / "history")
    (file,) = (tmp_path / "history").iterdir()
    assert (status, out) == (4, f"{good} -> {file}\n")
    assert f"{bad}: cannot be added" in err
