"""`ddpperf bisect` in real repositories, with runs of pytest that only write a report."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf import Figure
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.cli import bisect as bisecting
from pytest_ddpperf.cli import comparisons, console, main
from pytest_ddpperf.history.entries import BisectedChange, read_changes
from pytest_ddpperf.options import parse
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import NOTHING_DIFFERS, NodesError
from pytest_ddpperf.records.figure import FigureValues
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.plan import Limit, limits_for
from pytest_ddpperf.records.reason import Reason
from pytest_ddpperf.records.samples import (
    Baseline,
    Distribution,
    Measurement,
    Recording,
    Status,
    TestId,
    Verdict,
)
from pytest_ddpperf.remote.torchrun import Role
from pytest_ddpperf.report import json_report
from pytest_ddpperf.verdict import decision, stats
from pytest_ddpperf.verdict.decision import judge
from tests.git import git
from tests.reports import RUN, Drawn, in_turns, measurement, outcome

TEST = "tests/perf/test_step.py::test_train"
Call = Callable[..., tuple[int, str, str]]


class Project:
    """A repository whose file `work` says how long a step takes, in ms, and `PYTEST`, what a run of
    it reports."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.asked: list[tuple[str, ...]] = []
        self.interrupt_at = 0  # the number of the run in which Ctrl-C comes
        # whether commits with the same work differ in files that the test does not read
        self.has_other_files = False
        top.mkdir()
        git(top, "init", "--quiet", "--initial-branch=main")

    def write(self, work: object, name: str = "work") -> None:
        (self.top / name).write_text(f"{work}\n")

    def commit(self, work: object, subject: str = "A commit") -> str:
        self.write(work)
        git(self.top, "add", "--all")
        git(self.top, "commit", "--quiet", "--allow-empty", "-m", subject)
        return git(self.top, "rev-parse", "HEAD")

    def commits(self, work: Iterable[float]) -> list[str]:
        return [
            self.commit(each, f"Commit {number}")
            for number, each in enumerate(work)
        ]

    def pytest(self, path: Path, asked: Sequence[str]) -> None:
        self.asked.append(tuple(asked))
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        path.parent.mkdir(parents=True, exist_ok=True)
        options = dict(
            option.split("=", 1) for option in asked if "=" in option
        )
        found, problem = self._outcomes(options)
        content = codec.dumps(
            json_report.report(found, replace(RUN, problem=problem))
        )
        path.write_text(content)

    def _outcomes(self, options: dict[str, str]) -> tuple[list[Outcome], str]:
        now = float((self.top / "work").read_text())
        seed = random.Random(str(options)).randrange(1_000_000)
        launches = int(options.get("--ddp-launches", 10))
        drawn = Drawn(seed=seed, step=now / 1000, launches=launches)
        if variable := options.get("--ddp-against-env"):
            before = drawn.step / (1.3 if "CPU" in variable else 1)
            return [
                in_turns(
                    "test_train",
                    drawn,
                    replace(drawn, seed=seed + 1, step=before),
                )
            ], ""
        if python := options.get("--ddp-against-python"):
            assert Path(python).name == "python"
            return [
                in_turns(
                    "test_train",
                    drawn,
                    replace(drawn, seed=seed + 1, step=now / 1300),
                )
            ], ""
        if "--ddp-against" not in options:
            measured = measurement(drawn)
            return [
                outcome(
                    "test_train",
                    drawn,
                    Verdict(status=Status.NO_BASELINE, reason="no-baseline"),
                    measured,
                )
            ], ""
        there = git(self.top, "show", f"{options['--ddp-against']}:work")
        if there == "does not build":
            return (
                [],
                f"--ddp-against-setup: 'make' exited with status 2\nin {there}",
            )
        found = in_turns(
            "test_train",
            drawn,
            replace(drawn, seed=seed + 1, step=float(there.split()[0]) / 1000),
        )
        if "does not import" in there:
            side = found.baseline_side
            assert side is not None
            side = replace(
                side,
                measurement=None,
                error="ImportError: no module named net\nin test_step",
            )
            return [
                replace(
                    found,
                    verdict=Verdict(
                        status=Status.NO_BASELINE, reason="no-baseline"
                    ),
                    baseline_side=side,
                )
            ], ""
        if float(there) == now and self.has_other_files:
            return [replace(found, verdict=decision.unreached())], ""
        if float(there) == now:
            return (
                [],
                (
                    f"--ddp-against: {NOTHING_DIFFERS} it and the current code; tests are the same"
                    " on both sides"
                ),
            )
        return [found], ""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    project = Project(tmp_path / "project")
    monkeypatch.chdir(project.top)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        comparisons.Runs,
        "_pytest",
        lambda _, path, asked: project.pytest(path, asked),
    )
    return project


@pytest.fixture
def bisect(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Call:
    """Call `ddpperf bisect` on TEST and return its status, its output and its errors."""
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        status = main.main(["bisect", TEST, *map(str, arguments)])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def contents(top: Path) -> dict[str, bytes | None]:
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in top.rglob("*")
    }


def test_commits_that_the_test_cannot_tell_from_the_working_tree_are_as_slow(
    project: Project, bisect: Call
) -> None:
    project.has_other_files = True
    commits = project.commits([20.0] * 3 + [23.0] * 4)
    status, out, _ = bisect("--good", commits[0])
    assert status == 0
    assert f"slower at {commits[3][:12]}: " in out
    assert "passed over" not in out
    status, out, _ = bisect("--good", commits[4])
    assert status == 1
    assert "nothing that the test reads differs" in out


def test_the_slower_commit_is_found_and_shown(
    project: Project, bisect: Call, tmp_path: Path
) -> None:
    commits = project.commits([20.0] * 17 + [23.0] * 24)
    before = contents(project.top)
    status, out, err = bisect(
        "--good", commits[0], "--json", tmp_path / "found.json"
    )
    assert status == 0
    assert contents(project.top) == before
    lines = out.splitlines()
    (found,) = [line for line in lines if line.startswith("slower at")]
    assert found.startswith(f"slower at {commits[17][:12]}: +1")
    assert found.endswith("% of the change")
    at = lines.index(found)
    assert lines[at + 1].startswith("  a, 20")
    assert lines[at + 1].endswith(": Commit 17")
    assert lines[at + 2] == "  changes work"
    assert lines[-1].startswith(
        "a wrong commit is named in at most 5 % of searches; "
    )
    assert len(project.asked) <= 8
    assert "2 of about 7: 40 commits left" in err
    data = json.loads((tmp_path / "found.json").read_text())
    assert [each["commit"] for each in data["found"]] == [commits[17]]
    assert data["found"][0]["files"] == ["work"]
    assert data["found"][0]["change"]["estimate"] == pytest.approx(
        0.15, abs=0.03
    )
    assert (data["good"], data["bad"], data["test"]) == (
        commits[0],
        commits[-1],
        TEST,
    )
    assert len(data["commits"]) == len(project.asked) + 1
    assert not any((tmp_path / "cache/pytest-ddpperf").iterdir())


def test_without_a_slowdown_one_comparison_is_enough(
    project: Project, bisect: Call
) -> None:
    commits = project.commits([20.0, 20.1, 20.05, 20.6])
    status, out, _ = bisect("--good", commits[0])
    assert (status, len(project.asked)) == (1, 1)
    first, second = out.splitlines()
    assert (
        first
        == f"{TEST} did not become slower beyond its limit from {commits[0][:12]} to"
        f" {commits[-1][:12]}"
    )
    assert second.startswith("p10 +")


def test_a_change_of_tests_alone_is_no_difference(
    project: Project, bisect: Call
) -> None:
    commits = project.commits([20.0])
    project.write("slower", "test_step.py")
    project.commit(20.0)
    status, out, _ = bisect("--good", commits[0])
    assert (status, len(project.asked)) == (1, 1)
    assert "tests are the same on both sides" in out


def test_two_slowdowns_are_both_found(project: Project, bisect: Call) -> None:
    commits = project.commits([20.0] * 8 + [23.0] * 12 + [26.5] * 8)
    status, out, _ = bisect("--good", commits[0])
    found = [
        line[10:22] for line in out.splitlines() if line.startswith("slower at")
    ]
    assert (status, found) == (0, [commits[8][:12], commits[20][:12]])


@pytest.mark.parametrize(
    ("work", "why"),
    [
        ("does not build", "--ddp-against-setup: 'make' exited with status 2"),
        ("20 does not import", "was not measured: ImportError"),
    ],
)
def test_commits_that_cannot_be_measured_are_named(
    project: Project, bisect: Call, work: str, why: str
) -> None:
    commits = project.commits([20.0] * 4)
    commits += [project.commit(work), *(project.commit(23.0) for _ in range(3))]
    status, out, _ = bisect("--good", commits[0])
    assert status == 0
    assert f"slower after {commits[3][:12]}, up to {commits[5][:12]}" in out
    assert "any of these 2 commits may be it" in out
    assert f"{commits[4][:12]}" in out
    assert "passed over: " in out
    assert why in out


def test_a_search_that_passed_over_all_commits_found_none(
    project: Project, bisect: Call
) -> None:
    good = project.commit(20.0)
    broken = [project.commit("does not build") for _ in range(3)]
    project.commit(23.0)
    status, out, _ = bisect("--good", good)
    assert status == 1
    assert "any of these 4 commits may be it" in out
    for commit in broken:
        assert commit[:12] in out


def test_of_a_merged_branch_the_merge_is_named(
    project: Project, bisect: Call
) -> None:
    good = project.commit(20.0)
    git(project.top, "switch", "--quiet", "--create", "branch")
    project.commits([21.0, 23.0])
    git(project.top, "switch", "--quiet", "main")
    project.write("other", "file")
    project.commit(20.0)
    git(
        project.top,
        "merge",
        "--quiet",
        "--no-ff",
        "-m",
        "Merge the branch",
        "branch",
    )
    merge = git(project.top, "rev-parse", "HEAD")
    project.write("more", "file")
    project.commit(23.0)
    _, out, _ = bisect("--good", good)
    assert f"slower at {merge[:12]}" in out
    assert ": Merge the branch" in out


@pytest.mark.parametrize("has_more", [False, True])
def test_a_merge_is_named_if_the_fast_commit_is_on_its_branch(
    project: Project, bisect: Call, has_more: bool
) -> None:
    """Commits that have never had the fast one are none after it, whether it is the branch's last
    or not."""
    project.commit(23.0)
    git(project.top, "switch", "--quiet", "--create", "branch")
    good = project.commit(20.0)
    if has_more:
        project.write("saved", "baseline")
        project.commit(20.0)
    git(project.top, "switch", "--quiet", "main")
    project.write("other", "file")
    aside = project.commit(23.0)
    merge = ("merge", "--quiet", "--no-ff", "--strategy=ours", "branch")
    git(project.top, *merge, "-m", "Merge the branch")
    _, out, _ = bisect("--good", good)
    assert f"slower at {git(project.top, 'rev-parse', 'HEAD')[:12]}" in out
    assert aside[:12] not in out


def of_steps(work: str) -> float:
    return float(work) / 1000


def rises_early(work: str) -> float:
    return 0.023 if float(work) > 20.01 else 0.02


@dataclass(frozen=True)
class Busy:
    """A machine on which others work: steps vary by `noise`, and their CPU time is exact, or
    unknown."""

    project: Project
    noise: float
    # of a step, by the work of a commit
    cpu_time: Callable[[str], float] | None
    seed: int = 0

    def outcomes(self, options: dict[str, str]) -> tuple[list[Outcome], str]:
        works = (
            (self.project.top / "work").read_text().strip(),
            git(self.project.top, "show", f"{options['--ddp-against']}:work"),
        )
        if works[0] == works[1]:
            return [], f"--ddp-against: {NOTHING_DIFFERS}"
        launches = int(options.get("--ddp-launches", 10))
        seed = random.Random(
            f"{self.seed} {works} {launches} {len(self.project.asked)}"
        ).randrange(1_000_000)
        now, base = (
            Drawn(
                seed=seed + side,
                step=of_steps(work),
                launches=launches,
                noise=self.noise,
            )
            for side, work in enumerate(works)
        )
        found = in_turns("test_train", now, base)
        other = found.baseline_side
        assert other is not None
        assert found.verdict is not None
        there = replace(
            other, measurement=self.with_cpu_time(other.measurement, works[1])
        )
        verdict = replace(found.verdict, status=Status.REGRESSED)
        measured = self.with_cpu_time(found.measurement, works[0])
        return [
            replace(
                found,
                verdict=verdict,
                measurement=measured,
                baseline_side=there,
            )
        ], ""

    def with_cpu_time(
        self, measured: Measurement | None, work: str
    ) -> Measurement:
        assert measured is not None
        assert measured.samples.cpu_seconds is not None
        cpu = None
        if self.cpu_time is not None:
            seconds = self.cpu_time(work)
            cpu = tuple(
                tuple(tuple(seconds for _ in rank) for rank in each)
                for each in measured.samples.cpu_seconds
            )
        return replace(
            measured, samples=replace(measured.samples, cpu_seconds=cpu)
        )


@pytest.mark.parametrize(
    ("cpu_time", "most"),
    [(of_steps, 6), (rises_early, 13), (lambda work: 0.02, 8), (None, 8)],
)
def test_cpu_time_says_where_to_look_and_time_what_is_slower(
    project: Project,
    bisect: Call,
    monkeypatch: pytest.MonkeyPatch,
    cpu_time: Callable[[str], float] | None,
    most: int,
) -> None:
    monkeypatch.setattr(
        project, "_outcomes", Busy(project, 0.06, cpu_time, seed=5).outcomes
    )
    commits = project.commits(
        [20.0 + number / 1000 if number < 27 else 23.0 for number in range(40)]
    )
    status, out, _ = bisect("--good", commits[0])
    assert status == 0
    assert f"slower at {commits[27][:12]}" in out
    assert len(project.asked) <= most
    assert out.splitlines()[-1].endswith(
        f"; {len(project.asked)} comparisons, 0.0 min"
    )


def test_the_ends_are_compared_again_while_it_is_open_whether_they_differ(
    project: Project, bisect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Busy(project, 0.06, None, seed=3)
    noises = iter([0.5])

    def outcomes(options: dict[str, str]) -> tuple[list[Outcome], str]:
        return replace(busy, noise=next(noises, 0.02)).outcomes(options)

    monkeypatch.setattr(project, "_outcomes", outcomes)
    commits = project.commits([20.0, 20.0, 22.8, 22.8])
    status, out, err = bisect("--good", commits[0])
    assert status == 0
    assert f"slower at {commits[2][:12]}" in out
    assert "2: comparing the ends" in err
    assert project.asked[0] == project.asked[1]


def test_ends_that_stay_open_are_not_said_to_be_as_fast(
    project: Project, bisect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        project, "_outcomes", Busy(project, 0.5, None, seed=3).outcomes
    )
    commits = project.commits([20.0, 20.0, 22.8, 22.8])
    status, out, _ = bisect("--good", commits[0])
    ends = f"from {commits[0][:12]} to {commits[-1][:12]}"
    assert (status, len(project.asked)) == (1, 3)
    assert out.startswith(
        f"{TEST}: too noisy to decide whether it became slower beyond its limit {ends}\np10 +"
    )


def test_a_slow_commit_of_the_past_needs_no_checkout(
    project: Project, bisect: Call
) -> None:
    commits = project.commits([20.0, 20.0, 20.0, 23.0, 23.0, 19.0, 19.0])
    status, out, _ = bisect("--good", commits[0], "--bad", commits[4])
    assert status == 0
    assert f"slower at {commits[3][:12]}" in out


def test_a_slow_commit_is_found_where_the_working_tree_is_as_fast_as_the_first(
    project: Project, bisect: Call
) -> None:
    commits = project.commits([20.0, 20.1, 23.0, 23.1, 20.0])
    status, out, _ = bisect("--good", commits[0], "--bad", commits[3])
    assert status == 0
    assert f"slower at {commits[2][:12]}" in out


def test_of_two_past_commits_their_own_difference_counts(
    project: Project, bisect: Call
) -> None:
    commits = project.commits([20.0, 20.1, 26.0])
    status, out, _ = bisect("--good", commits[0], "--bad", commits[1])
    assert status == 1
    assert "did not become slower beyond its limit" in out
    assert "REGRESSED" not in out


def test_measurements_that_are_not_compared_are_left_out(
    project: Project, bisect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = project._outcomes

    def with_another(options: dict[str, str]) -> tuple[list[Outcome], str]:
        outcomes, problem = found(options)
        verdict = Verdict(status=Status.NOT_GATED, reason="gate-off")
        free = outcome("test_train", Drawn(), verdict, measurement(Drawn()))
        return [free, *outcomes], problem

    monkeypatch.setattr(project, "_outcomes", with_another)
    commits = project.commits([20.0, 20.0, 23.0, 23.0])
    status, out, _ = bisect("--good", commits[0])
    assert status == 0
    assert f"slower at {commits[2][:12]}" in out


def test_a_test_may_ask_for_more_launches(
    project: Project, bisect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = project._outcomes
    monkeypatch.setattr(
        project,
        "_outcomes",
        lambda options: (
            [replace(each, launches=20) for each in found(options)[0]],
            "",
        ),
    )
    commits = project.commits([20.0, 20.1, 23.0, 23.1])
    bisect("--good", commits[0])
    assert "--ddp-max-launches=40" in project.asked[1]


def test_a_look_takes_no_more_launches_than_a_marker_may_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Markers win over the command line: `max_launches=10`, say."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        bisecting,
        "compare",
        lambda runs, *options, **others: asked.append(options),
    )
    found = replace(in_turns("a", Drawn(), Drawn(seed=2)), launches=10)
    search: Any = SimpleNamespace(
        _runs=None,
        _slower=(found, Limit(metric="p50", value=0.1, unit="%")),
        _key=("", "p50"),
        _commits=("1a2b",),
    )
    for launches in (8, 16):
        bisecting.CommitSearch._look(search, 0, launches, 0, "")
    assert [options[0] for options in asked] == [
        "--ddp-launches=8",
        "--ddp-launches=10",
    ]
    assert "--ddp-steps=10" in asked[0]
    p99 = Limit(metric="p99", value=0.2, unit="%")
    search._slower = (replace(found, limits=(p99,)), search._slower[1])
    bisecting.CommitSearch._look(search, 0, 8, 0, "")
    steps = max(1, math.ceil(stats.steps_needed(99) / 8))
    assert f"--ddp-steps={steps}" in asked[-1], "a marker keeps its limits"


TPS = Figure(better="higher")


def test_a_figure_of_the_users_own_is_searched_for_within_its_limits(
    project: Project, bisect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest refuses a limit on it of 100 % and more."""

    def with_tps(drawn: Drawn) -> Measurement:
        found = measurement(drawn)
        launches = [
            (tuple(1 / each for each in steps),)
            for steps in found.samples.step_seconds
        ]
        own = {"tps": FigureValues(figure=TPS, values=tuple(launches))}
        return replace(found, samples=replace(found.samples, figures=own))

    def outcomes(options: dict[str, str]) -> tuple[list[Outcome], str]:
        threshold = options.get("--ddp-threshold", "tps:5%")
        there = git(project.top, "show", f"{options['--ddp-against']}:work")
        works = [(project.top / "work").read_text(), there]
        if works[0].strip() == there:
            return [], f"--ddp-against: {NOTHING_DIFFERS}"
        seed = random.Random(str(options)).randrange(1_000_000)
        sides = [
            Drawn(seed=seed + number, step=float(work) / 1000)
            for number, work in enumerate(works)
        ]
        found = in_turns("test_train", *sides)
        limits = limits_for(found.plan, parse.limits(threshold), {"tps": TPS})
        now, before = map(with_tps, sides)
        assert found.baseline_side is not None
        side = replace(found.baseline_side, measurement=before)
        verdict = judge(now, [before], tuple(limits), interleaved=True)
        return [
            replace(found, measurement=now, verdict=verdict, baseline_side=side)
        ], ""

    monkeypatch.setattr(project, "_outcomes", outcomes)
    commits = project.commits([20.0, 20.0, 25.0, 25.0])
    status, out, _ = bisect("--good", commits[0])
    assert status == 0
    assert re.match(rf"{TEST}: tps -(19|20|21) % \[-2", out)
    assert f"slower at {commits[2][:12]}" in out
    for options in project.asked[1:]:
        assert "--ddp-threshold=tps:99%" in options
        assert not [each for each in options if "steps" in each]


def test_a_bandwidth_is_searched_for_by_its_time() -> None:
    limit = Limit(metric="busbw", value=0.1, unit="%")
    assert comparisons.key_of(in_turns("a", Drawn(), Drawn(seed=2)), limit) == (
        "",
        "p50",
    )


def test_changes_that_are_not_committed_can_be_what_is_slower(
    project: Project, bisect: Call
) -> None:
    commits = project.commits([20.0, 20.0, 20.0])
    project.write(23.0)
    status, out, _ = bisect("--good", commits[0])
    assert status == 0
    assert "slower at the working tree: +1" in out
    assert "  changes work" in out


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_an_interrupted_search_goes_on_where_it_was(
    project: Project, bisect: Call, at: int, tmp_path: Path
) -> None:
    commits = project.commits([20.0] * 5 + [23.0] * 4)
    _, whole, _ = bisect("--good", commits[0])
    asked, project.asked = project.asked, []
    project.interrupt_at = at
    status, out, err = bisect("--good", commits[0])
    assert (status, out) == (130, "")
    assert "interrupted: the same command goes on from here" in err
    status, again, _ = bisect("--good", commits[0])
    assert status == 0
    assert again.rpartition("; ")[0] == whole.rpartition("; ")[0]
    del project.asked[at - 1]
    assert project.asked == asked


def test_without_good_the_baseline_says_what_was_fast(
    project: Project, bisect: Call
) -> None:
    commits = project.commits([20.0, 20.0, 23.0])
    save(commits[0])
    status, out, _ = bisect()
    assert status == 0
    assert f"slower at {commits[2][:12]}" in out


def save(commit: str, **kwargs: Any) -> None:
    test = TestId(module="tests/perf/test_step", name="test_train")
    recording = Recording(
        measurement=measurement(Drawn()),
        created="2026-03-01",
        commit=commit,
        **kwargs,
    )
    Store(Path("baselines")).write(Baseline(test=test, sessions=(recording,)))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            (),
            (
                "baselines has no baseline of this test: name a fast commit with --good, or"
                " --baseline-dir"
            ),
        ),
        (("--good", "nowhere"), "'nowhere' is no commit of "),
        (("--good", "-x"), "--good: expected one argument"),
        (("--good", "HEAD"), "there is nothing between "),
        (("--good", "other"), "is no ancestor of "),
    ],
)
def test_what_cannot_be_searched_is_an_error(
    project: Project, bisect: Call, arguments: tuple[str, ...], error: str
) -> None:
    project.commits([20.0, 20.0])
    git(project.top, "branch", "other")
    git(
        project.top,
        "commit",
        "--quiet",
        "--amend",
        "--allow-empty",
        "-m",
        "Another",
    )
    status, out, err = bisect(*arguments)
    assert (status, out, project.asked) == (4, "", [])
    assert error in err


def test_a_test_of_several_world_sizes_has_a_baseline_of_each(
    project: Project, bisect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, *_ = project.commits([20.0, 20.0, 23.0])
    save(commit)
    own = measurement(Drawn())
    size = own.environment.key["world_size"]
    recording = Recording(measurement=own, created="2026-03-02", commit="x")
    test = TestId(module="tests/perf/test_step", name="test_b[a-3]")
    Store(Path("baselines")).write(Baseline(test=test, sessions=(recording,)))

    def found(test: str) -> str:
        arguments: Any = argparse.Namespace(
            baseline_dir=Path("baselines"), test=test
        )
        return bisecting._last_session(arguments).commit

    assert found(f"{TEST}[ws{size}]") == commit
    assert found(f"tests/perf/test_step.py::test_b[a-3-ws{size}]") == "x"
    with pytest.raises(console.UsageError):
        found(f"{TEST}[ws7]")


def test_a_shallow_clone_lacks_what_is_searched(
    project: Project, bisect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, *_ = project.commits([20.0, 20.0, 23.0])
    clone = project.top.parent / "clone"
    git(
        project.top.parent,
        "clone",
        "--quiet",
        "--depth=1",
        project.top.as_uri(),
        clone,
    )
    monkeypatch.chdir(clone)
    status, _, err = bisect("--good", good)
    assert status == 4
    assert (
        f"{good!r} is no commit of {clone}; this clone is shallow: git fetch --unshallow"
        in err
    )
    git(clone, "fetch", "--quiet", "--depth=1", "origin", good)
    status, _, err = bisect("--good", good)
    assert status == 4
    assert " in this clone, which is shallow: git fetch --unshallow" in err


def test_a_baseline_of_uncommitted_changes_names_no_commit(
    project: Project, bisect: Call
) -> None:
    save(f"{project.commit(20.0)}-dirty")
    status, _, err = bisect()
    assert (status, err) == (
        4,
        "ddpperf: error: the baseline is not of a commit: name one with --good\n",
    )


def test_outside_a_repository_there_is_nothing_to_search(
    bisect: Call, tmp_path: Path
) -> None:
    os.chdir(tmp_path)
    status, _, err = bisect("--good", "HEAD")
    assert status == 4
    assert "not a git repository" in err


def test_what_pytest_refuses_is_shown(
    project: Project, bisect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(project.top)
    monkeypatch.setenv("XDG_CACHE_HOME", str(project.top.parent / "cache"))
    commits = project.commits([20.0, 23.0])
    status, _, err = bisect("--good", commits[0], "--", "--ddp-no-such-option")
    assert status == 4
    assert "unrecognized arguments: --ddp-no-such-option" in err


def test_the_ends_must_be_measured(project: Project, bisect: Call) -> None:
    bad = project.commit("does not build")
    project.commit(23.0)
    status, _, err = bisect("--good", bad)
    assert status == 4
    assert (
        "the ends cannot be compared: --ddp-against-setup: 'make' exited with status 2"
        in err
    )
    bisect("--good", bad)
    assert len(project.asked) == 2  # what stood in the way may be gone


def test_names_need_not_be_unicode(project: Project) -> None:
    assert comparisons.Runs(TEST, ["--rootdir=\udcff"]).folder


def test_of_several_measurements_one_that_regressed_is_searched_for(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    slower = in_turns("a", Drawn(seed=1, step=0.022), Drawn(seed=2))
    noisy = in_turns("a", Drawn(seed=3, step=0.03), Drawn(seed=4))
    assert noisy.verdict is not None
    noisy = replace(
        noisy, verdict=replace(noisy.verdict, status=Status.INCONCLUSIVE)
    )
    monkeypatch.setattr(
        project, "_outcomes", lambda options: ([noisy, slower], "")
    )
    project.commit(20.0)
    compared = comparisons.compare(
        comparisons.Runs(TEST, ()), "--ddp-against=x"
    )
    assert compared.slowest()[0].verdict == "REGRESSED"


def test_what_the_gate_does_not_compare_is_not_searched_for(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with other numbers of examples: their times were compared, and say nothing."""
    other = in_turns("a", Drawn(seed=1, step=0.022), Drawn(seed=2))
    assert other.verdict is not None
    other = replace(
        other,
        verdict=replace(
            other.verdict,
            status=Status.INCOMPARABLE,
            reason=Reason.OTHER_EXAMPLES,
            details=("examples a step 64 -> 128",),
        ),
    )
    monkeypatch.setattr(project, "_outcomes", lambda options: ([other], ""))
    project.commit(20.0)
    with pytest.raises(comparisons.NotMeasured, match="64 -> 128"):
        comparisons.compare(comparisons.Runs(TEST, ()), "--ddp-against=x")


def test_facts_are_those_of_the_baseline_of_this_environment(
    project: Project,
) -> None:
    own = measurement(Drawn())
    key = own.environment.key
    other = replace(own.environment, key={**key, "cpu_model": "another"})
    test = TestId(module="tests/perf/test_step", name="test_train")
    for measured, day in ((own, 1), (replace(own, environment=other), 2)):
        session = Recording(
            measurement=measured, created=f"2026-03-0{day}", commit=str(day)
        )
        Store(Path("baselines")).write(Baseline(test=test, sessions=(session,)))
    arguments: Any = argparse.Namespace(
        baseline_dir=Path("baselines"), test=TEST
    )
    assert bisecting._last_session(arguments).commit == "2"
    assert bisecting._last_session(arguments, key).commit == "1"
    elsewhere = {**key, "cpu_model": "a third"}
    assert bisecting._last_session(arguments, elsewhere).commit == "2"


def test_looks_at_a_commit_count_together_without_the_pairs_that_differ_most() -> (
    None
):
    slower, disturbed = (
        comparisons.Compared(
            [
                in_turns(
                    "a",
                    Drawn(seed=seed, step=step, launches=12),
                    Drawn(seed=9, launches=12),
                )
            ]
        )
        for seed, step in ((1, 0.022), (2, 0.022))
    )
    slower.logs["", "p10"][0][3] += 1.0  # one launch was 2.7 times as slow
    one = comparisons.difference([slower], ("", "p10"))
    both = comparisons.difference([slower, disturbed], ("", "p10"))
    assert one.estimate == pytest.approx(0.1, abs=0.02)
    assert both.estimate == pytest.approx(0.1, abs=0.02)
    assert (one.launches, both.launches) == (12, 24)
    assert both.error < one.error
    with pytest.raises(comparisons.NotMeasured, match="p99 was not compared"):
        comparisons.difference([slower], ("", "p99"))


# --- facts


def test_a_variable_that_makes_a_test_slower_is_named(
    project: Project, bisect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = project.commit(23.0)
    recorded = {
        "env:OMP_NUM_THREADS": "2",
        "env:CPU_MODE": "fast",
        "env:GONE": "1",
        "torch": "2.13.0",
    }
    test = TestId(module="tests/perf/test_step", name="test_train")
    recording = Recording(
        measurement=measurement(Drawn(recorded=recorded)),
        created="2026-03-01",
        commit=commit,
    )
    Store(Path("baselines")).write(Baseline(test=test, sessions=(recording,)))
    status, out, _ = bisect("--facts")
    assert status == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["CPU_MODE", "fast", "->", "unset"] in [row[:4] for row in rows]
    assert rows[-1] == [
        f"{TEST}:",
        *["slower", "by", "CPU_MODE", "fast", "->", "unset"],
    ]
    assert [asked for asked in project.asked if "OMP" in str(asked)] == []


def test_facts_of_a_test_that_measures_nothing_are_an_error(
    project: Project, bisect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(project.commit(23.0))
    monkeypatch.setattr(project, "_outcomes", lambda _: ([], ""))
    status, _, err = bisect("--facts")
    assert status == 4
    assert f"{TEST} was not measured: it failed, or was skipped" in err


def test_a_build_without_facts_is_refused(
    project: Project, bisect: Call
) -> None:
    project.commit(23.0)
    status, _, err = bisect("--good", "HEAD", "--build", "make")
    assert status == 4
    assert (
        "--build is for --facts: for commits there is ddp_against_setup" in err
    )


def test_an_older_distribution_is_built_and_measured(
    project: Project, bisect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = project.commit(23.0)
    save(
        commit, distributions={"pytest": Distribution(version="1.0", digest="")}
    )
    status, out, _ = bisect("--facts")
    assert status == 1
    assert "not measured: --build makes an environment with it" in out
    assert out.endswith(
        "no fact that was compared makes it slower beyond its limit alone\n"
    )
    status, out, _ = bisect(
        "--facts", "--build", "mkdir -p {venv} && echo {requirements} >> made"
    )
    assert status == 0
    assert (project.top / "made").read_text() == "pytest==1.0\n"
    assert f"{TEST}: slower by pytest 1.0 -> {pytest.__version__}" in out
    status, out, _ = bisect("--facts", "--build", "echo no such version; false")
    assert "failed: no such version" in out
    _, out, _ = bisect("--facts", "--build", "true")
    assert "true failed: it made no environment" in out


# --- histories


def test_the_answer_is_added_to_a_history(
    project: Project, bisect: Call, tmp_path: Path
) -> None:
    commits = project.commits([20.0, 20.0, 23.0])
    bisect("--good", commits[0], "--history", tmp_path / "history")
    (found,) = read_changes(tmp_path / "history", BisectedChange)
    assert (found.good, found.bad, found.commit) == (
        commits[0],
        commits[2],
        commits[2],
    )
    assert (str(found.test), found.subject) == (
        "tests/perf/test_step::test_train",
        "Commit 2",
    )


# --- several nodes


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("variables", "asked", "seen"),
    [
        (
            {"TORCHELASTIC_USE_AGENT_STORE": "False"},
            [],
            "error: bisect over several nodes has to be started by torchrun: it",
        ),
        ({}, ["--facts"], "error: --facts does not run over several nodes"),
        (
            {"TORCHELASTIC_MAX_RESTARTS": "3"},
            [],
            "error: torchrun --max-restarts is not supported: use 0",
        ),
    ],
)
def test_what_several_nodes_cannot_do_is_refused_before_anything_runs(
    variables: dict[str, str],
    asked: list[str],
    seen: str,
    project: Project,
    bisect: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits = project.commits([20.0, 23.0])
    for name, value in {**TORCHRUN, **variables}.items():
        monkeypatch.setenv(name, value)
    status, _, err = bisect("--good", commits[0], *asked)
    assert (status, project.asked) == (4, [])
    assert seen in err


def test_srun_alone_is_refused(
    project: Project, bisect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = project.commits([20.0, 23.0])
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    status, _, err = bisect("--good", commits[0])
    assert (status, project.asked) == (4, [])
    assert "has to be started by torchrun" in err
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert bisect("--good", commits[0])[0] == 0


class Meetings:
    """torchrun's store; `says` is what it answers to the other nodes, one after the other."""

    def __init__(self, *says: dict[str, object]) -> None:
        self.says = list(says)
        self.asked: list[tuple[str, object]] = []

    def __call__(
        self, place: Role, seconds: float, reported: object = None
    ) -> Meetings:
        self.asked.append((place.run, reported))
        return self

    def answer(self) -> dict[str, object]:
        return {"found": self.says.pop(0)} if self.says else {"set": True}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_node_tells_the_others_when_it_is_over(
    fails: bool,
    project: Project,
    bisect: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits = project.commits([20.0, 20.0, 23.0])
    meetings = Meetings()
    monkeypatch.setattr(comparisons, "TorchrunStore", meetings)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    good = "no-such-commit" if fails else commits[0]
    status, out, _ = bisect("--good", good)
    assert (status, f"slower at {commits[2][:12]}" in out) == (
        (4, False) if fails else (0, True)
    )
    # the number after those of real runs of pytest, of which there was none
    assert meetings.asked == [("7-0", {})]


def test_an_answer_stands_if_another_node_does_not_hear_that_it_is_over(
    project: Project, bisect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> object:
        raise NodesError("torchrun's store did not answer")

    commits = project.commits([20.0, 23.0])
    monkeypatch.setattr(comparisons, "TorchrunStore", gone)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    status, out, _ = bisect("--good", commits[0])
    assert (status, f"slower at {commits[1][:12]}" in out) == (0, True)


def test_another_node_runs_pytest_as_often_as_the_first(
    project: Project, bisect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.commit(20.0)
    where = {"address": "head", "port": 1234, "secret": "s"}
    meetings = Meetings(where, {**where, "port": 1235}, {})
    monkeypatch.setattr(comparisons, "TorchrunStore", meetings)
    for name, value in {**TORCHRUN, "GROUP_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    started: list[tuple[Sequence[str], Role]] = []
    monkeypatch.setattr(comparisons, "_run", lambda *how: started.append(how))
    assert bisect("--", "--ddp-world-size=4") == (0, "", "")
    assert meetings.asked == [("7-0", None), ("7-1", None), ("7-2", None)]
    words = (TEST, "-q", "--ddp-world-size=4")
    assert [each for each, _ in started] == [words, words]
    assert [meeting.run for _, meeting in started] == ["7-0", "7-1"]


def test_further_processes_of_a_node_have_nothing_to_do(
    project: Project, bisect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.commit(20.0)
    for name, value in {**TORCHRUN, "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert bisect() == (0, "", "")
    assert project.asked == []


def test_without_a_folder_for_its_reports_it_says_how_to_name_one(
    project: Project, bisect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = project.commits([20.0, 23.0])
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    status, _, err = bisect("--good", commits[0])
    assert status == 4
    assert "there is no folder for reports: [Errno 20] Not a directory" in err
    assert err.endswith(": name one with XDG_CACHE_HOME\n")
