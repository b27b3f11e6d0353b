"""A test against its reference in one run, by launches that never ran: what is launched, judged,
shown and refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf.baseline import Store
from pytest_ddpperf.cli import comparisons
from pytest_ddpperf.cli.console import UsageError
from pytest_ddpperf.compare.result import Measured
from pytest_ddpperf.compare.rounds import SILENT
from pytest_ddpperf.compare.run import carry_out
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.plugin.arguments import Reference, name_of, read_reference
from pytest_ddpperf.plugin.fixtures import DdpBenchmark
from pytest_ddpperf.plugin.outcomes import Took, build_outcome
from pytest_ddpperf.plugin.results import RunResults
from pytest_ddpperf.plugin.role import LeadsVersion
from pytest_ddpperf.records.errors import LaunchError
from pytest_ddpperf.records.metric import COUNTERS
from pytest_ddpperf.records.outcome import REFERENCE, Outcome, RunInfo
from pytest_ddpperf.records.plan import COUNTER_LIMITS, Limit, Plan
from pytest_ddpperf.records.samples import LaunchSamples, RankError
from pytest_ddpperf.report import markdown, sentences, summary, terminal
from tests.reports import Drawn, against_baseline, in_turns, report
from tests.unit.test_benchmark import job, lasting

P50 = Limit(metric="p50", value=0.02, unit="%")
Launch = Callable[[Plan], LaunchSamples]


def compared(
    now: float | Launch, before: float | Launch = 0.02, **asked: Any
) -> Measured:
    """Return what comes of a test against its reference, whose steps last so many seconds."""
    own = job(**{"turns": "launches", "limits": (P50,), **asked})
    plan = replace(own.plan, is_reference=True)
    other = replace(own, plan=plan, facts={"runs": "plain"})
    own = replace(own, facts={"runs": "wrapped"}, reference=other)

    def measure(plan: Plan, *_: Any) -> LaunchSamples:
        side = before if plan.is_reference else now
        launch = side if callable(side) else lasting(side)
        return launch(plan.exactly(50))

    launcher: Any = SimpleNamespace(measure=measure)
    return carry_out(own, launcher, Store(Path("/none")), Observer())


@pytest.mark.parametrize(
    ("silent", "notes"),
    [("plain", 0), ("wrapped", 1), ("plain wrapped", 1)],
)
def test_a_reference_that_sends_nothing_is_no_note(
    silent: str, notes: int
) -> None:
    def launch(name: str) -> Launch:
        def measured(plan: Plan) -> LaunchSamples:
            return replace(lasting(0.02)(plan), is_silent=name in silent)

        return measured

    found = compared(launch("wrapped"), launch("plain")).notes(Path("/"))
    assert [*found].count(SILENT) == notes
    assert sum(SILENT in note for note in found) == notes


def outcome_of(found: Measured) -> Outcome:
    return build_outcome(found, Path("/"), "pytest", Took(12.3, 0.0))


@pytest.mark.parametrize(
    ("seconds", "verdict", "ratio"),
    [
        (0.0202, "PASS", 1.01),
        (0.021, "REGRESSED", 1.05),
        (0.01, "IMPROVED", 0.5),
    ],
)
def test_the_verdict_is_on_the_ratio_to_the_reference(
    seconds: float, verdict: str, ratio: float
) -> None:
    found = compared(seconds)
    assert (found.verdict, found.fails) == (verdict, verdict == "REGRESSED")
    of_result = found.result.ratio
    assert of_result is not None
    assert of_result.estimate == pytest.approx(ratio)
    assert of_result.lower <= of_result.estimate <= of_result.upper
    side = found.baseline_side
    assert side is not None
    assert (str(side.version), sorted(side.order[:2])) == (
        "the reference",
        ["b", "n"],
    )
    assert (side.differing, side.same) == ((), False)
    assert outcome_of(found).accept == "", "there is no baseline to accept"
    assert found.result.verdict.facts[0].name == "runs"


def test_the_ratio_is_that_at_p50_or_of_the_first_limit() -> None:
    mean = Limit(metric="mean", value=0.5, unit="%")

    def slow_at_times(plan: Plan) -> LaunchSamples:
        launch = lasting(0.02)(plan)
        steps = (0.2, *launch.step_seconds[1:])
        return replace(launch, step_seconds=steps, rank_seconds=(steps,))

    for limits, ratio in (((mean,), 1.18), ((mean, P50), 1.0)):
        found = compared(slow_at_times, limits=limits).result.ratio
        assert found is not None
        assert found.estimate == pytest.approx(ratio)


def test_without_a_gate_both_are_measured_for_the_ratio() -> None:
    found = compared(0.03, gate=False)
    assert (found.verdict, found.verdict.reason) == ("NOT GATED", "gate-off")
    assert not found.fails
    assert found.result.ratio is not None
    assert found.result.ratio.estimate == pytest.approx(1.5)
    outcome = outcome_of(found)
    assert terminal.change(outcome).startswith("+50 %")
    assert [*sentences.problems([outcome])] == [], "the last line counts it"


def test_if_measuring_is_disabled_both_are_launched_once() -> None:
    found = compared(0.03, disable=True, launches=1)
    assert found.verdict.reason == "disabled"
    assert sorted(found.rounds[0].order) == ["b", "n"]
    assert len(found.rounds) == 1
    assert found.result.ratio is None


@pytest.mark.parametrize("option", ["save_baseline", "extend_baseline"])
def test_a_run_that_saves_compares_with_the_reference_all_the_same(
    option: str,
) -> None:
    assert compared(0.03, **{option: True}).verdict == "REGRESSED"
    assert compared(0.02, **{option: True}).verdict == "PASS"


def counting(sent: int, seconds: float = 0.02) -> Launch:
    counters = {**dict.fromkeys(COUNTERS, 0), "all_reduce.bytes": sent}
    counters["all_reduce.count"] = int(sent > 0)
    return lambda plan: replace(lasting(seconds)(plan), counters=counters)


def test_a_counter_has_no_limit_unless_it_is_named() -> None:
    found = compared(counting(200), counting(100))
    assert found.verdict == "PASS"
    assert not {*found.limits} & {*COUNTER_LIMITS}
    named = Limit(metric="all_reduce.bytes", value=0.0, unit="%")
    found = compared(counting(200), counting(100), limits=(P50, named))
    assert (found.verdict, found.verdict.reason) == (
        "REGRESSED",
        "counter-rose",
    )


def test_steps_that_send_nothing_are_not_comparable_with_a_reference_that_does() -> (
    None
):
    found = compared(counting(0, 0.01), counting(100))
    assert found.verdict.reason == "not-synchronised"
    assert found.result.ratio is None
    assert sentences.why_not_compared(outcome_of(found)).endswith(
        "if that is meant, name its limit with threshold="
    )


@pytest.mark.parametrize("gate", [True, False])
def test_with_another_number_of_examples_there_is_no_ratio(gate: bool) -> None:
    def taking(examples: int) -> Launch:
        return lambda plan: replace(
            lasting(0.02)(plan), examples=((examples,) * 50,)
        )

    found = compared(taking(8), taking(16), gate=gate)
    reason = "other-examples" if gate else "gate-off"
    assert (found.verdict.reason, found.result.ratio) == (reason, None)
    (note,) = sentences.left_out(
        found.verdict, sentences._whose(outcome_of(found))
    )
    assert note == "a step takes 0.50x the examples of the reference"


@pytest.mark.parametrize("gate", [True, False])
def test_losses_that_differ_are_red_if_that_is_asked_and_there_is_a_gate(
    gate: bool,
) -> None:
    def with_loss(loss: float) -> Launch:
        return lambda plan: replace(lasting(0.02)(plan), losses=(loss,) * 10)

    red = frozenset({"diverged"})
    found = compared(with_loss(2.0), with_loss(1.0), gate=gate, fail_on=red)
    assert found.fails is gate


def test_several_nodes_are_refused() -> None:
    fixture = DdpBenchmark.__new__(DdpBenchmark)
    own = job()
    own = replace(own, plan=replace(own.plan, nodes=2))
    with pytest.raises(pytest.fail.Exception, match=r"ddp\(nodes=1\)"):
        fixture._with_reference(own, Reference(own.setups[0], own.settings))


def test_a_reference_that_fails_is_an_error_and_no_verdict() -> None:
    problem = RankError(rank=0, when=0.0, phase="setup", summary="ValueError")

    def fail(plan: Plan) -> LaunchSamples:
        raise LaunchError(replace(problem, name=plan.name(0)), (), ())

    with pytest.raises(
        LaunchError, match=r"^rank 0 of the reference failed in"
    ):
        compared(0.02, fail)


def test_launches_of_a_reference_have_a_rank_server_of_their_own() -> None:
    launcher = Launcher(dict)
    plan = Plan(world_size=1, backend="gloo", device="cpu")
    both = plan, replace(plan, is_reference=True)
    servers = [launcher._server_for(each) for each in both]
    assert servers[0] is not servers[1]


# --- next to other versions


def test_another_version_passes_over_a_test_with_a_reference() -> None:
    passed: list[str] = []
    side: Any = SimpleNamespace(trees=None, pass_over=passed.append)
    session: Any = SimpleNamespace(
        comparison=lambda job, observer: lambda *base: ("measured", base)
    )
    own = replace(job(), reference=job())
    found: Any = LeadsVersion(side).carry_out(own, session, Observer())
    assert (passed, found) == ([""], ("measured", ()))


SLOWER = Drawn(step=0.03)


def with_reference(name: str, now: Drawn = SLOWER) -> Outcome:
    outcome = in_turns(name, now, Drawn(seed=9))
    assert outcome.baseline_side is not None
    side = replace(outcome.baseline_side, version=REFERENCE, differing=())
    return replace(outcome, baseline_side=side)


def test_files_that_differ_from_another_version_are_not_read_by_a_test_with_a_reference() -> (
    None
):
    found = with_reference("test_a")
    assert found.baseline_side is not None
    read = replace(found.baseline_side, read=("a.py",))
    against = in_turns("test_b", SLOWER, Drawn(seed=9))
    results = RunResults(RunInfo())
    results._outcomes = {
        ("a", ""): replace(found, baseline_side=read),
        ("b", ""): against,
    }
    results.end(changed=["a.py"])
    (message,) = results.messages
    assert message.endswith("what differs in a.py")


def test_a_bisection_of_a_test_with_a_reference_is_refused() -> None:
    runs: Any = SimpleNamespace(
        run=lambda *asked, **how: report([with_reference("test_a")])
    )
    with pytest.raises(UsageError, match="is compared with its reference"):
        comparisons.compare(runs)
    both = [with_reference("test_a"), in_turns("test_a", SLOWER, Drawn())]
    runs = SimpleNamespace(run=lambda *asked, **how: report(both))
    assert comparisons.compare(runs).outcomes == both[1:]


# --- reports


def test_reports_name_the_reference() -> None:
    one, two = with_reference("test_a"), with_reference("test_b")
    stored = against_baseline("test_c", Drawn(seed=1), Drawn(seed=100))
    version = in_turns("test_d", Drawn(), Drawn(seed=1))
    for outcomes, column, last in (
        ([one], "reference", "compared with the reference: 1 regressed"),
        ([one, two], "reference", "compared with references: 2 regressed"),
        ([one, stored], "base", "compared with baselines and the reference: "),
        (
            [one, version],
            "base",
            "compared with origin/main (1a2b3c4) and the reference: ",
        ),
        ([stored], "before", "compared with baselines: 1 passed"),
    ):
        assert summary.last_line(outcomes).startswith(last)
        table = "\n".join(terminal.table(outcomes))
        assert f"p50: {column} -> now" in table
    assert "| p50: reference -> now |" in markdown.report(report([one]))


def test_a_failure_names_the_reference() -> None:
    lines = sentences.gate_failure(with_reference("test_a")).splitlines()
    assert lines[0].startswith("REGRESSED: step time p50 ")
    (title,) = [line for line in lines if "metric" in line]
    assert title.split()[:3] == ["metric", "reference", "now"]
    assert lines[-1] == (
        "measured: 5 interleaved launches of the test and of the reference"
    )


# --- programs


def test_a_reference_is_a_program_with_the_same_arguments_or_its_own(
    tmp_path: Path,
) -> None:
    (tmp_path / "b.py").touch()
    asked = tmp_path, ["--lr", 1], None, {"A": "1"}
    for words, shown in (
        ("b.py", "b.py --lr 1"),
        (["b.py", "--eager"], "b.py --eager"),
        (("-m", "pkg.b", "--eager"), "-m pkg.b --eager"),
    ):
        found = read_reference("ddp_benchmark", words, *asked)
        assert found is not None
        assert found.env == {"A": "1"}
        line = name_of(replace(found, env={}), tmp_path, None)
        assert line == shown
    for wrong in ("c.py", 3, [], ["-m"]):
        with pytest.raises(ValueError, match=r"^ddp_benchmark\.script\("):
            read_reference("ddp_benchmark", wrong, *asked)


def test_the_rank_of_a_reference_is_named() -> None:
    plan = Plan(world_size=2, backend="gloo", device="cpu", is_reference=True)
    assert plan.name(1) == "rank 1 of the reference"
