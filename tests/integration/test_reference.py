"""A test against its reference, in whole runs: steps, functions and programs, and what goes together
with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.conftest import FEW, STEP, Run, last_line
from tests.integration.test_against import Repository, repository
from tests.integration.test_programs import folder

__all__ = ["folder", "repository"]

JSON = "--ddp-json=run.json"
TEST = (
    STEP
    + """
def plain(ctx):
    print("a plain step")
    return lasting(ctx, 5)

def wrapped(ctx):
    return lasting(ctx, MILLISECONDS)

def test_step(ddp_benchmark):
    result = ddp_benchmark(wrapped, reference=plain, threshold="p50:20%")
    assert result.ratio is None or result.ratio.upper < 1.2
"""
)


def test_a_step_that_is_slower_than_its_reference_is_red(
    run: Run, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(test_a=TEST.replace("MILLISECONDS", "60"))
    result = run(*FEW, JSON)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: step time p50 5.00 -> 60.0 ms, * (limit 20 %)",
            "why: *; runs plain -> wrapped",
            "  metric  reference  *now  change *",
            "measured: * interleaved launches of the test and of the reference",
            "*stdout rank 0 of the reference*",
            "a plain step",
            "*p50: reference -> now *",
            "test_a.py::test_step *5.00 -> *60.0 ms *REGRESSED",
        ]
    )
    assert last_line(result) == (
        "compared with the reference: 1 regressed (1 of 1 compared)"
    )
    assert "accept:" not in result.stdout.str()
    (measured,) = json.loads(Path("run.json").read_text())["measurements"]
    side = measured["baseline_side"]
    assert side["version"]["is_reference"]
    assert {*side["order"]} == {"n", "b"}
    assert side["stretches"], "steps were interleaved"
    for each, runs in ((measured, "wrapped"), (side, "plain")):
        recorded = each["measurement"]["environment"]["recorded"]
        assert recorded["runs"] == runs
    assert measured["baseline_path"] == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "compared with the reference: 1 passed (1 of 1 compared)"),
        (
            ("--ddp-save-baseline",),
            "compared with the reference: 1 passed (1 of 1 compared)",
        ),
        (("--ddp-disable",), "1 not gated (0 of 1 compared)"),
    ],
    ids=["usual", "saving", "disabled"],
)
def test_a_step_as_fast_as_its_reference_passes_and_has_no_baseline(
    run: Run, pytester: pytest.Pytester, options: tuple[str, ...], said: str
) -> None:
    pytester.makepyfile(test_a=TEST.replace("MILLISECONDS", "5"))
    result = run(*FEW, *options)
    result.assert_outcomes(passed=1)
    assert last_line(result) == said
    assert not Path("baselines").exists()
    note = (
        "test_step: nothing was saved: a test with a reference has no baseline"
    )
    assert (note in result.outlines) == ("--ddp-save-baseline" in options)


def test_traces_of_the_reference_have_names_of_their_own(
    run: Run, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(test_a=TEST.replace("MILLISECONDS", "5"))
    run(*FEW, "--ddp-trace=traces").assert_outcomes(passed=1)
    names = {path.name for path in Path("traces").rglob("*.json.gz")}
    now = {"now-rank0.json.gz", "now-rank1.json.gz"}
    reference = {"now-reference-rank0.json.gz", "now-reference-rank1.json.gz"}
    assert names == now | reference


def test_a_reference_that_fails_is_named_with_its_own_traceback(
    run: Run, pytester: pytest.Pytester
) -> None:
    broken = 'raise ValueError("a bad shape")'
    test = TEST.replace("MILLISECONDS", "5")
    pytester.makepyfile(
        test_a=test.replace("return lasting(ctx, 5)", broken, 1)
    )
    result = run(*FEW)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "launch 1 of 2: rank * of the reference failed in setup: ValueError: a bad shape",
            "*, line *, in plain",
            '    raise ValueError("a bad shape")',
        ]
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            'plain, threshold="p50:2%"',
            "*threshold='p50:2%': goes with reference=; without one, write"
            " @pytest.mark.ddp(threshold=...)",
        ),
        (
            'plain, reference=plain, threshold="p50:2"',
            "*ValueError: threshold='p50:2': *",
        ),
        (
            "plain, reference=3",
            "*ddp_benchmark(int): reference must be a function, not int: reference(ctx) is what the"
            " test is compared with",
        ),
    ],
)
def test_a_mistake_in_a_call_fails_the_test(
    run: Run, pytester: pytest.Pytester, call: str, said: str
) -> None:
    pytester.makepyfile(
        test_a=STEP
        + f"""
def plain(ctx):
    return all_reduce

def test_step(ddp_benchmark):
    ddp_benchmark({call})
"""
    )
    result = run(*FEW)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([said])


def test_a_program_is_compared_with_the_same_one_with_other_arguments(
    run: Run, folder: Path
) -> None:
    (folder / "tests/test_train.py").write_text(
        """
def test_train(ddp_benchmark):
    slow = ["train.py", "--milliseconds=60"]
    result = ddp_benchmark.script("train.py", reference=slow)
    assert result.ratio.upper < 0.5

def test_loop(ddp_benchmark):
    def train(ctx):
        import runpy, sys
        sys.argv = ["train.py"]
        runpy.run_path("train.py")
    ddp_benchmark.loop(train, reference=train)
"""
    )
    result = run(*FEW, JSON)
    result.assert_outcomes(passed=2)
    assert last_line(result) == (
        "compared with references: 1 passed, 1 improved (2 of 2 compared)"
    )
    result.stdout.fnmatch_lines(
        [
            "test_loop: it is compared with itself, because reference= is the same.*"
        ]
    )
    result.stdout.no_fnmatch_line("test_train: it is compared with itself*")
    script, loop = json.loads(Path("run.json").read_text())["measurements"]
    assert script["verdict"]["differences"] == [
        "runs train.py --milliseconds=60 -> train.py"
    ]
    assert loop["verdict"]["differences"] == []


def test_next_to_another_version_a_test_with_a_reference_is_compared_with_that(
    run: Run, repository: Repository
) -> None:
    repository.write(
        "tests/test_step.py",
        STEP,
        """
        import speed

        def fast(ctx):
            return lasting(ctx, 5)

        def slow(ctx):
            return lasting(ctx, 60)

        def package(ctx):
            return lasting(ctx, speed.MILLISECONDS)

        def test_step(ddp_benchmark):
            ddp_benchmark(fast, reference=slow, name="first")
            ddp_benchmark(package)
        """,
    )
    repository.commit()
    repository.write("src/speed/__init__.py", "MILLISECONDS = 60\n")
    result = run(*FEW, "--ddp-against=HEAD")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*test_step.py::test_step (first) *60.0 -> *5.00 ms *IMPROVED",
            "*test_step *-> *60.0 ms *REGRESSED",
        ]
    )
    assert last_line(result).startswith("compared with HEAD (")
    assert " and the reference: 1 regressed, 1 improved (" in last_line(result)
