"""A baseline saved, compared, and a regression caught."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.integration.conftest import FEW, STEP, Run, last_line

GATED = (
    STEP
    + """
def test_step(ddp_benchmark):
    ddp_benchmark(lasting, batch_size=4)
"""
)


def stored(path: Path) -> list[Path]:
    return sorted((path / "baselines").rglob("*.json"))


def test_save_pass_regress_accept(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_gate=GATED)
    # More seconds than there is room for: 6,000 steps of 2 ranks in 150 launches.
    result = run(
        "--ddp-save-baseline", "--ddp-min-time=1000", "--ddp-max-launches=150"
    )
    assert result.ret == 0
    assert last_line(result) == "1 saved (0 of 1 compared)"
    (baseline,) = stored(pytester.path)
    assert baseline.parts[-2:] == ("test_gate", "test_step.json")
    assert "-gloo-ws2-1x2" in baseline.parts[-3]

    (session,) = json.loads(baseline.read_text())["sessions"]
    assert {
        len(launch)
        for launch in session["measurement"]["samples"]["step_seconds"]
    } == {20}

    monkeypatch.setenv("LASTS", "6")
    result = run()
    assert result.ret == 0
    assert (
        last_line(result)
        == "compared with baselines: 1 passed (1 of 1 compared)"
    )
    before = baseline.read_text()

    monkeypatch.setenv("LASTS", "60")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    result = run(
        "--junitxml=junit.xml",
        "-o",
        "junit_family=xunit1",
        "--ddp-json=out/report.json",
    )
    assert result.ret == 1
    text = result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: step time p50 * -> * ms, *x ?*? (limit 300 %)",
            "why: waiting, not computing: CPU time *; NCCL_ALGO unset -> Ring, LASTS *",
            "  metric * before * now * change ?range? *limit",
            "  p50 * ms * 12.0x * 300 %",
            "measured: 6 launches now, ? in the baseline (*)",
            "FAILED test_gate.py::test_step - REGRESSED p50 *x (limit 300 %): wait*",
        ]
    )
    assert "pytest_ddpperf/" not in text  # no traceback of ours
    assert (
        last_line(result)
        == "compared with baselines: 1 regressed (1 of 1 compared)"
    )
    assert baseline.read_text() == before

    junit = (pytester.path / "junit.xml").read_text()
    assert '<property name="ddpperf.verdict" value="REGRESSED"' in junit
    assert '<property name="ddpperf.metric" value="p50"' in junit
    # What GitLab shows: where the test is, and all of the failure.
    assert re.search(r'<testcase [^>]*file="test_gate.py" line="\d+"', junit)
    assert re.search(
        r'message="REGRESSED p50 [^"]*">REGRESSED: step time p50 .*\n(.*\n)+accept: .*(\n.*)*--ddp-save-baseline</failure>',
        junit,
    )
    report = json.loads((pytester.path / "out/report.json").read_text())
    assert report["summary"]["regressed"] == 1
    assert (
        len(
            report["measurements"][0]["measurement"]["samples"]["rank_seconds"][
                0
            ][0]
        )
        == 10
    )

    accept = re.search(r"^accept:((.*\\\n)*.*)", text, re.MULTILINE)
    assert accept is not None
    command = shlex.split(accept[1].replace("\\\n", ""))
    assert command[:2] == ["pytest", "test_gate.py::test_step"]
    assert command[-1] == "--ddp-save-baseline"
    assert run(*command[1:]).ret == 0
    assert (
        last_line(run())
        == "compared with baselines: 1 passed (1 of 1 compared)"
    )

    monkeypatch.setenv("LASTS", "5")
    result = run("--ddp-steps=20")
    assert result.ret == 0
    assert (
        last_line(result)
        == "compared with baselines: 1 improved (1 of 1 compared)"
    )
    result.stdout.fnmatch_lines(
        [
            "test_step: only the first 10 of 20 steps of each launch were compared, *"
        ]
    )


def test_a_faster_step_that_computes_something_else_is_noted_or_red(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        test_loss=STEP
        + """
def setup(ctx):
    step = lasting(ctx)
    return lambda: {"loss": float(os.environ.get("LOSS", 2.31)) + 0 * (step() or 0)}

def test_step(ddp_benchmark):
    ddp_benchmark(setup)
"""
    )
    assert run(*FEW, "--ddp-save-baseline").ret == 0
    monkeypatch.setenv("LASTS", "1")
    monkeypatch.setenv("LOSS", "2.58")
    result = run(*FEW)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["test_step: computes something else: loss 2.31 -> 2.58"]
    )
    other = "--ddp-against-env=LOSS=2.5", "--ddp-against-env=LASTS=5"
    result = run(
        *FEW, *other, "--ddp-fail-on=diverged", "--ddp-trace=out/traces"
    )
    assert result.ret == 1
    why = "why: computes something else: loss 2.5 -> 2.58"
    folder = "out/traces/test_loss.py/test_step"
    result.stdout.fnmatch_lines(
        ["DIVERGED: loss 2.5 -> 2.58", why, f"traces:   {folder}", "*DIVERGED"]
    )
    assert (
        last_line(result)
        == "compared with LOSS=2.5, LASTS=5: 1 diverged (1 of 1 compared)"
    )
    traces = sorted(file.name for file in (pytester.path / folder).iterdir())
    assert traces == [
        f"{side}-rank{rank}.json.gz"
        for side in ("before", "now")
        for rank in (0, 1)
    ]


def test_what_a_result_holds(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(
        STEP
        + """
import torch

def test_result(ddp_benchmark):
    result = ddp_benchmark(lambda ctx: lambda: time.sleep(0.005))
    assert 0.005 < result.p10 <= result.p50 <= result.p75 <= result.p90 <= result.p95
    assert result.percentile(50) == result.p50
    with pytest.raises(ValueError, match="from 0 to 100"):
        result.percentile(101)
    assert [len(launch) for launch in result.step_seconds] == [10] * 3
    assert [[len(rank) for rank in launch] for launch in result.samples] == [[10, 10]] * 3
    assert (result.world_size, result.backend) == (2, "gloo")
    assert result.verdict == "NO BASELINE"
    assert result.verdict.reason == "no-baseline"
    assert result.environment.key["backend"] == "gloo"

def test_ungated_and_named(ddp_benchmark):
    assert ddp_benchmark(lasting, gate=False).verdict == "NOT GATED"
    assert ddp_benchmark(lasting, name="again").verdict == "NO BASELINE"

def test_second_call_without_a_name(ddp_benchmark):
    ddp_benchmark(lasting, gate=False)
    ddp_benchmark(lasting)

async def waits(ctx): ...

@pytest.mark.parametrize(("kwargs", "words"), [
    ({"batch_size": 0}, "batch_size=0: examples per rank and step, a whole number from 1"),
    ({"facts": {"a": None}}, "facts={'a': None}: a fact has a name, and is text, a finite number, True or False"),
    ({"batch_size": 2.5}, "batch_size=2.5: examples per rank and step"),
    ({"facts": {"a": float("nan")}}, "facts={'a': nan}: a fact has a name"),
    ({"facts": ["a"]}, "facts=['a']: give a dict: a fact has a name"),
    ({"batch_size": 10**30}, "batch_size=1000000000000000000000000000000: examples per rank and step, a whole number"),
    ({"batch_size": torch.zeros(99, 99)}, "batch_size=tensor([[0., 0., 0., ..., 0., 0., 0.], [0., 0., "),
    ({"gate": "no"}, "gate='no': must be True or False"),
    ({"gate": None}, "gate=None: must be True or False"),
    ({"name": 3}, "name=3: must be printable"),
    ({"name": " "}, "name=' ': must be printable and not empty: it is used in reports and file names"),
    ({"name": "a\\nb"}, r"name='a\\nb': must be printable"),
    ({"name": "\\ud800"}, r"name='\\ud800': must be printable"),
])
def test_bad_argument(ddp_benchmark, kwargs, words):
    with pytest.raises(ValueError) as caught:
        ddp_benchmark(lasting, **kwargs)
    assert str(caught.value).startswith(words)
    assert len(str(caught.value).splitlines()) == 1

@pytest.mark.parametrize(("setup", "words"), [
    (3, "(int): setup must be a function, not int: setup(ctx) returns"),
    (all_reduce, "(all_reduce): setup is called with ctx, which all_reduce does not take: setup(ctx) returns the step"),
    (torch.nn.Linear(2, 2), "(Linear): setup must be a function, not Linear: setup(ctx) returns"),
    (waits, "(waits): setup must be a function without async, which waits is not: setup(ctx) returns"),
], ids="npma")
def test_setup_that_cannot_be_called(ddp_benchmark, ddp_run, setup, words):
    with pytest.raises(TypeError) as caught:
        ddp_benchmark(setup)
    assert str(caught.value).startswith("ddp_benchmark" + words)
    with pytest.raises(TypeError, match="fn is called with ctx and 2 more, which all_reduce does not take: fn"):
        ddp_run(all_reduce, 1, 2)
    with pytest.raises(TypeError, match=r"ddp_run\\(str\\): fn must be a function, not str: fn\\(ctx, ...\\) runs"):
        ddp_run("all_reduce")

def test_failure_carries_the_result(ddp_benchmark, pytestconfig):
    import pytest_ddpperf
    with pytest.raises(pytest.fail.Exception) as caught:
        ddp_benchmark(lasting)
    assert isinstance(caught.value, pytest_ddpperf.GateFailed)
    assert caught.value.result.verdict == "NO BASELINE"
test_failure_carries_the_result = pytest.mark.ddp()(test_failure_carries_the_result)
"""
    )
    result = run("--ddp-fail-on=no-baseline", "-k", "carries")
    result.assert_outcomes(passed=1, deselected=20)
    result = run("-k", "not carries")
    result.assert_outcomes(passed=19, failed=1, deselected=1)
    result.stdout.fnmatch_lines(
        [
            "E * ddp_benchmark: it was called before without a name in this test: give *"
        ]
    )
    assert "pytest_ddpperf/" not in result.stdout.str()


def test_a_fixture_that_nobody_knew_of_before_the_test_ran_is_refused(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(
        test_late=STEP
        + """
def test_late(request):
    request.getfixturevalue("ddp_benchmark")(lasting)

@pytest.mark.usefixtures("ddp_benchmark")
def test_told(request):
    request.getfixturevalue("ddp_benchmark")(lasting)
"""
    )
    result = run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "ddp_benchmark: make it an argument of the test; for request.getfixturevalue also add *"
        ]
    )
    assert (
        last_line(result)
        == "1 without baseline, 1 other failure (0 of 1 compared)"
    )


def test_world_sizes_make_ids_and_share_baselines_with_bare_ids(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(
        test_sizes=STEP
        + """
@pytest.mark.parametrize("n", [1])
def test_step(ddp_benchmark, n):
    ddp_benchmark(lasting)

@pytest.mark.ddp(world_size=2)
def test_fixed(ddp_run):
    assert len(ddp_run(lambda ctx: ctx.rank)) == 2
"""
    )
    result = run("--ddp-world-size=1,2", "--ddp-save-baseline", "-v")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        [
            "*test_step?1-ws1? PASSED*",
            "*test_step?1-ws2? PASSED*",
            "*::test_fixed PASSED*",
        ],
        consecutive=False,
    )
    assert [path.name for path in stored(pytester.path)] == [
        "test_step-1.json"
    ] * 2
    assert (
        last_line(run("--ddp-world-size=2"))
        == "compared with baselines: 1 passed (1 of 1 compared)"
    )


TRAINING = (
    STEP
    + """
class Clock(OwnClock):
    time_ns = time.time_ns

def training(ctx):
    import torch
    from pytest_ddpperf.rank import stamps
    clock = Clock(stamps)

    class Layer(torch.nn.Module):
        def forward(self, x):
            clock.go_on(float(os.environ.get("FORWARD", "2")))
            return x

    layer = Layer()

    def step():
        clock.go_on(1)
        layer(torch.ones(1))
        clock.go_on(100)
        all_reduce()
    return step

def test_step(ddp_benchmark):
    forward = ddp_benchmark(training).phases["forward"]
    assert forward == pytest.approx(float(os.environ.get("FORWARD", "2")) / 1000)
"""
)


def test_a_limit_on_a_phase_sees_what_is_small_beside_the_step(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_phase=TRAINING)
    limits = "--ddp-threshold=forward:10%,p50:10%"
    assert run("--ddp-save-baseline", limits, *FEW).ret == 0
    assert run(limits, *FEW).ret == 0
    monkeypatch.setenv("FORWARD", "3")
    result = run(limits, *FEW)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: forward 2.00 -> 3.00 ms, +50 % [[]*[]] (limit 10 %)",
            "  p50 *+1.0 % *10 %",
        ]
    )
    result = run("--ddp-threshold=backward:10%", *FEW)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "test_step: backward is unknown now, or 0, or differs between launches: see the*"
        ]
    )
