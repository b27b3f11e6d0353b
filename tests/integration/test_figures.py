"""Figures of the user's own, in whole runs: recorded by steps and written by programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_ddpperf.cli.main import main
from tests.git import git
from tests.integration.conftest import FEW, STEP, Run, last_line
from tests.own_clock import OWN_CLOCK

# A rate of RATE tokens a second, with a little noise.
RECORDING = (
    STEP
    + """
def recording(ctx):
    import random
    step = lasting(ctx)
    source = random.Random()
    def recorded():
        step()
        rate = float(os.environ.get("RATE", "1000"))
        ctx.record(
            "tps", rate * source.uniform(0.99, 1.01), better="higher"
        )
    return recorded

MARK
def test_step(ddp_benchmark):
    result = ddp_benchmark(recording)
    assert 900 < result.figures["tps"].mean < 1100 or "RATE" in os.environ
"""
)


def test_a_recorded_figure_is_stored_compared_and_shown(
    pytester: pytest.Pytester,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytester.makepyfile(test_own=RECORDING.replace("MARK", ""))
    assert run("--ddp-save-baseline").ret == 0
    (baseline,) = Path("baselines").rglob("*.json")
    (session,) = json.loads(baseline.read_text())["sessions"]
    stored = session["measurement"]["samples"]["figures"]["tps"]
    assert stored["figure"]["better"] == "higher"
    assert [[len(rank) for rank in each] for each in stored["values"]] == [
        [10, 10]
    ] * len(stored["values"])
    own = [each for each in session["limits"] if each["metric"] == "tps"]
    assert [(each["better"], each["value"]) for each in own] == [
        ("higher", 0.1)
    ]
    run("--ddp-json=before.json").assert_outcomes(passed=1)

    monkeypatch.setenv("RATE", "400")
    result = run("--ddp-json=now.json", "--ddp-html=page.html")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: tps * -> *, -60 % ?*? (limit 10 %)",
            "why: RATE unset -> digest *",
            "  p50 *ms*",
            "  tps * -60 % * 10 %",
            "FAILED test_own.py::test_step - REGRESSED tps -60 % (limit 10 %)*",
        ]
    )
    (measured,) = json.loads(Path("now.json").read_text())["measurements"]
    assert [
        each["limit"]["metric"] for each in measured["verdict"]["comparisons"]
    ] == ["p50", "tps"]
    assert main(["diff", "before.json", "now.json"]) == 1
    out, _ = capsys.readouterr()
    assert "tps -60 %" in out
    # a wider limit
    run("--ddp-threshold=tps:70%").assert_outcomes(passed=1)


def test_a_limit_on_a_figure_that_is_not_there_is_red_or_named(
    pytester: pytest.Pytester, run: Run
) -> None:
    mark = '@pytest.mark.ddp(threshold="tsp:5%")'
    pytester.makepyfile(test_own=RECORDING.replace("MARK", mark))
    result = run(*FEW)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*limit tsp:5%: this measurement has no figure tsp: it has tps"]
    )
    pytester.makepyfile(test_own=RECORDING.replace("MARK", ""))
    result = run(*FEW, "--ddp-threshold=tsp:5%,p50:300%")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "*there is a limit on tsp, and no test has such a figure: check the name"
        ]
    )


def test_a_figure_without_a_direction_is_red_where_it_stands(
    pytester: pytest.Pytester, run: Run
) -> None:
    text = RECORDING.replace("MARK", "").replace(', better="higher"', "")
    pytester.makepyfile(test_own=text)
    result = run(*FEW)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*TypeError: ctx.record('tps', ...): say better=\"higher\" or*"]
    )


TRAIN = (
    OWN_CLOCK
    + """
import random
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
source = random.Random()
while True:
    weight.sum().backward()
    dist.all_reduce(weight.grad)
    clock.time.now += 5_000_000
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"tps: {RATE * source.uniform(0.99, 1.01):,.2f}  mfu: 3")
"""
)
TEST = """
from pytest_ddpperf import Figure

def test_train(ddp_benchmark):
    tps = Figure(pattern=r"tps: ([\\d,.]+)", better="higher")
    ddp_benchmark.script("train.py", figures={"tps": tps})
"""


@pytest.fixture
def folder(pytester: pytest.Pytester) -> Path:
    """A repository with a training script and its test."""
    folder = pytester.path
    (folder / "tests").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / ".gitignore").write_text("__pycache__\n*.json\n")
    (folder / "train.py").write_text(TRAIN.replace("RATE", "1000"))
    (folder / "tests/test_train.py").write_text(TEST)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "a commit")
    return folder


def test_a_program_that_reports_less_is_found_next_to_its_last_commit(
    run: Run, folder: Path
) -> None:
    (folder / "train.py").write_text(TRAIN.replace("RATE", "400"))
    result = run("--ddp-against=HEAD", "--ddp-json=all.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: tps * -> *, -60 % ?*? (limit 10 %)",
            "why: changed: train.py",
        ]
    )
    (measured,) = json.loads((folder / "all.json").read_text())["measurements"]
    side = measured["baseline_side"]
    assert side["stretches"] == [], "a rate by the clock would count pauses"
    assert side["measurement"]["samples"]["figures"].keys() == {"tps"}


def test_a_program_that_no_longer_reports_is_red(
    run: Run, folder: Path
) -> None:
    run(*FEW, "--ddp-save-baseline").assert_outcomes(passed=1)
    (folder / "train.py").write_text(TRAIN.replace("tps: {RATE", "TPS {1000"))
    result = run(*FEW)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ['*tps has no value: pattern "tps: (*)" matches nothing in the output*']
    )
    assert last_line(result) == "1 failed to measure (0 of 1 compared)"


def test_a_stored_figure_with_another_pattern_is_not_compared(
    run: Run, folder: Path
) -> None:
    run(*FEW, "--ddp-save-baseline").assert_outcomes(passed=1)
    test = folder / "tests/test_train.py"
    test.write_text(TEST.replace('better="higher"', 'better="lower"'))
    result = run(*FEW, "--ddp-baseline-missing=fail")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "INCOMPARABLE*tps pattern *, higher is better -> pattern *, lower is better*"
        ]
    )
