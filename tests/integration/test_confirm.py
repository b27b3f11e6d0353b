"""Suspicions against a stored baseline, settled by the baseline's own code, in whole runs."""

from __future__ import annotations

import json

import pytest

from tests.integration.conftest import Run, line
from tests.integration.test_against import STEP, Repository, git, repository

__all__ = ["repository"]

PROJECT = STEP + "from speed import MILLISECONDS\n"
TEST = """
def test_step(ddp_benchmark):
    ddp_benchmark(lambda ctx: lasting(ctx, MILLISECONDS * float(os.environ.get("LASTS", 1))))
"""
CONFIRM = "--ddp-confirm=auto"


@pytest.fixture
def project(repository: Repository, run: Run, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """A repository with a baseline, which was committed with its code."""
    monkeypatch.delenv("CI", raising=False)
    repository.write("tests/test_step.py", PROJECT, TEST)
    assert run("--ddp-save-baseline").ret == 0
    repository.commit()
    return repository


def test_slower_code_is_red_by_what_turns_show_and_named(project: Repository, run: Run) -> None:
    project.write("src/speed/__init__.py", "MILLISECONDS = 60\n")
    with project.untouched():
        result = run(CONFIRM, "--ddp-json=out/run.json")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: tests/test_step::test_step on 2 gloo ranks",
            "  p50 *5.00ms *0.0600s *x 12 *",
            "evidence: 6 launches a side, in turns, stretch by stretch *; 1 of 2 imported files differs: "
            "python code/src/speed/__init__.py",
            "against:  *, now * with uncommitted changes",
            "suspected by the stored baseline: p50 x 12 *",
            "baseline: baselines/*.json",
            "accept: *--ddp-save-baseline",
        ]
    )
    (measured,) = json.loads((project.root / "out/run.json").read_text())["measurements"]
    assert (measured["verdict"]["reason"], measured["stored"]["status"]) == ("confirmed", "REGRESSED")
    assert measured["beside"]["version"]["commit"] == git(project.top, "rev-parse", "HEAD"), "it has the baseline"
    assert [len(session["launch_seconds"]["p50"]) for session in measured["sessions"]] == [3], "of the baseline"
    assert (measured["file"], measured["level"]) == ("python code/tests/test_step.py", 0.05)


def test_a_machine_that_became_slower_is_told_and_not_red(
    project: Repository, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTS", "12")  # which nobody records
    with project.untouched():
        result = run(CONFIRM)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "tests/test_step.py::test_step: INCONCLUSIVE: p50 x 12 * against the baseline, but beside its own "
            "code it is within the limit, here and now: the machine is slower than when the baseline was recorded, *",
            "tests/test_step.py::test_step: against *: p50 *+0.0 %*; both sides imported the same, 2 files",
        ]
    )
    assert line(result, "ddpperf: 1 of") == "ddpperf: 1 of 1 compared: 1 inconclusive"
    assert run(CONFIRM, "--ddp-fail-on=regressed,drifted").ret == 1
    assert run("--ddp-confirm=never").ret == 1, "the stored rule alone says regressed"


def test_of_several_measurements_the_suspected_ones_are_settled(project: Repository, run: Run) -> None:
    several = """
        def test_several(ddp_benchmark):
            for name in (None, "second", "third"):
                milliseconds = MILLISECONDS if name == "third" else 5
                ddp_benchmark(lambda ctx: lasting(ctx, milliseconds), name=name)
        """
    project.write("tests/test_step.py", PROJECT, several)
    assert run("--ddp-save-baseline").ret == 0
    project.commit()
    project.write("src/speed/__init__.py", "MILLISECONDS = 60\n")
    result = run(CONFIRM)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: tests/test_step::test_several (third) on 2 gloo ranks",
            "against:  *, now * with uncommitted changes",
            "ddpperf: 3 of 3 compared: 2 passed, 1 regressed",
        ]
    )


def test_what_one_test_does_to_the_environment_is_not_the_baselines(project: Repository, run: Run) -> None:
    """With the variable of the first its code would take as long in the second as that at hand, and be acquitted."""
    second = TEST.replace("test_step", "test_second")
    project.write("tests/test_step.py", PROJECT, TEST, second)
    assert run("--ddp-save-baseline").ret == 0
    project.commit()
    project.write("src/speed/__init__.py", "MILLISECONDS = 60\n")
    first = TEST.replace("(ddp_benchmark):", "(ddp_benchmark, monkeypatch):\n    monkeypatch.setenv('LASTS', '12')")
    project.write("tests/test_step.py", PROJECT, first, second)
    result = run(CONFIRM)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["ddpperf: 2 of 2 compared: 2 regressed"])
    assert result.stdout.str().count("suspected by the stored baseline: ") == 2


def test_what_looks_slower_within_the_limit_passes_with_both_figures(
    project: Repository, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTS", "3")  # +200 % of 300 %: more than half of it
    result = run(CONFIRM)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "tests/test_step.py::test_step: p50 +200.0 % * against the baseline, and settled by its own code:",
            "tests/test_step.py::test_step: against *: p50 *+0.0 %*",
            "ddpperf: 1 of 1 compared: 1 passed",
        ]
    )


def test_a_recorded_variable_is_red_and_named_with_the_code_acquitted(
    project: Repository, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("tests/test_step.py", PROJECT, TEST.replace("LASTS", "GLOO_LASTS"))
    assert run("--ddp-save-baseline").ret == 0
    project.commit()
    monkeypatch.setenv("GLOO_LASTS", "12")
    result = run(CONFIRM)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: tests/test_step::test_step on 2 gloo ranks",
            "note: beside the baseline's own code (*), in turns: p50 *+0.0 %*: not the code is slower, but what else "
            "differs: GLOO_LASTS unset -> 12",
        ]
    )


def test_a_test_that_changed_is_named_as_such(project: Repository, run: Run) -> None:
    project.write("tests/test_step.py", PROJECT, TEST.replace("MILLISECONDS *", "12 * MILLISECONDS *"))
    result = run(CONFIRM)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "evidence: *; 1 of 2 imported files differs: python code/tests/test_step.py",
            "note: no file but tests differs: it is the test that changed",
        ]
    )


def test_without_the_baselines_code_the_stored_rule_decides_and_says_why(project: Repository, run: Run) -> None:
    """Recorded with code that was never committed."""
    project.write("src/speed/__init__.py", "MILLISECONDS = 5.0\n")
    assert run("--ddp-save-baseline").ret == 0
    project.write("src/speed/__init__.py", "MILLISECONDS = 60\n")
    result = run(CONFIRM)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: *",
            "evidence: 6 launches now, 3 in the baseline's 1 session*",
            "note: not confirmed on the baseline's own code: no commit at hand holds the baseline's code: in *, which "
            "had uncommitted changes, python code/src/speed/__init__.py differs",
        ]
    )


def test_what_cannot_be_settled_is_told(project: Repository, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTS", "12")
    result = run("--ddp-confirm=0.001")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["note: not confirmed on *: the 0.001 s of --ddp-confirm are spent, but for 0"])

    result = run(CONFIRM, "-n1")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["note: not confirmed on *: not under xdist: add -n 0"])


def test_saving_says_when_the_code_will_never_be_at_hand(project: Repository, run: Run) -> None:
    (project.top / ".gitignore").write_text("__pycache__\nout\nspeed\n")
    project.commit()
    assert "cannot be measured" not in run("--ddp-save-baseline").stdout.str(), "tracked files are in every commit"
    project.write("src/speed/made.py", "MILLISECONDS = 5\n")
    project.write("tests/test_step.py", PROJECT.replace("from speed import", "from speed.made import"), TEST)
    result = run("--ddp-save-baseline")
    result.stdout.fnmatch_lines(
        [
            "tests that look slower than these baselines cannot be measured beside the baselines' code: ignored by "
            "git: python code/src/speed/made.py"
        ]
    )
