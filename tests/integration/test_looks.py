"""Further launches: asked for by a suspicion, by a session that is added; and launches that
recompile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.conftest import STEP, Run, last_line

# How long a step of each launch lasts, in milliseconds, from the file `lasts`: a line a launch, the
# last one for all further. `dynamo` in a line hands something to torch.compile in the window.
LAUNCHES = (
    STEP
    + """
def by_launch(ctx):
    with open("launches", "a+") as launches:
        if ctx.rank == 0:
            launches.write("x")
    all_reduce()
    lines = open("lasts").read().splitlines()
    words = lines[min(os.path.getsize("launches"), len(lines)) - 1].split()
    calls, plain = 0, lasting(ctx, float(words[0]))
    def step():
        nonlocal calls
        calls += 1
        if "dynamo" in words and calls == 5:
            import torch
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
        plain()
    return step

def test_step(ddp_benchmark):
    ddp_benchmark(by_launch)
"""
)


def launches(path: Path, lasts: str) -> None:
    """What the launches of the next run do."""
    (path / "launches").unlink(missing_ok=True)
    (path / "lasts").write_text(lasts)


def taken(path: Path) -> int:
    return len((path / "launches").read_text())


def sessions(path: Path) -> int:
    (file,) = (path / "baselines").rglob("*.json")
    return len(json.loads(file.read_text())["sessions"])


def test_launches_go_on_while_the_verdict_is_open(
    pytester: pytest.Pytester, run: Run
) -> None:
    path = pytester.path
    pytester.makepyfile(test_looks=LAUNCHES)
    launches(path, "5")
    run("--ddp-save-baseline").assert_outcomes(passed=1)
    assert sessions(path) == 1

    launches(path, "5")
    result = run()
    assert (
        last_line(result)
        == "compared with baselines: 1 passed (1 of 1 compared)"
    )

    # A disturbance that ends before the suspicion can be confirmed.
    launches(path, "\n".join(["80", "80", "80", "5"]))
    result = run("--ddp-threshold=p50:200%")
    assert taken(path) == 6
    assert result.ret == 0
    assert "REGRESSED" not in result.stdout.str()

    # A regression is confirmed; nothing more is tried.
    launches(path, "60")
    result = run("--ddp-max-launches=20")
    assert taken(path) == 6
    assert (
        last_line(result)
        == "compared with baselines: 1 regressed (1 of 1 compared)"
    )

    # Added to the baseline, a slower session would hide the regression.
    result = run("--ddp-extend-baseline")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*the session was not added, because it is worse: p50 12.0x",
            "measure again, or accept it *",
        ]
    )
    assert sessions(path) == 1

    launches(path, "5")
    result = run("--ddp-extend-baseline")
    assert sessions(path) == 2
    result = run()
    assert (
        last_line(result)
        == "compared with baselines: 1 passed (1 of 1 compared)"
    )
    assert "one session" not in result.stdout.str()


def test_launches_that_recompile_are_noted_and_hide_no_regression(
    pytester: pytest.Pytester, run: Run
) -> None:
    path = pytester.path
    pytester.makepyfile(test_looks=LAUNCHES)
    launches(path, "5\n5 dynamo\n5")
    result = run("--ddp-save-baseline")
    assert taken(path) == 3
    result.stdout.fnmatch_lines(
        [
            "*test_step: 1 of 3 launches: rank 0 recompiled at step 3: raise --ddp-warmup"
        ]
    )

    launches(path, "60 dynamo")
    result = run()
    assert (
        last_line(result)
        == "compared with baselines: 1 regressed (1 of 1 compared)"
    )

    launches(path, "5 dynamo")
    result = run()
    assert (
        last_line(result)
        == "compared with baselines: 1 inconclusive (1 of 1 compared)"
    )
    result.stdout.fnmatch_lines(
        ["*: 3 of 3 launches: rank 0 recompiled at step 3: raise --ddp-warmup"]
    )
