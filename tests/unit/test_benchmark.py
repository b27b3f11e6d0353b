"""A measurement's journey without any ranks: what its outcome says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf.baseline import Store
from pytest_ddpperf.compare import rule, run
from pytest_ddpperf.compare.job import Job
from pytest_ddpperf.compare.result import Measured
from pytest_ddpperf.compare.run import carry_out
from pytest_ddpperf.launch import Observer
from pytest_ddpperf.options.settings import make_plan
from pytest_ddpperf.plugin.leader_connection import LeaderConnection
from pytest_ddpperf.plugin.outcomes import Took, build_outcome
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.records.outcome import Version
from pytest_ddpperf.records.plan import Limit, Plan
from pytest_ddpperf.records.samples import (
    LaunchCost,
    LaunchSamples,
    LossChange,
    Status,
    TestId,
)
from tests.unit.test_launches import LAUNCH, UNFIT
from tests.unit.test_machine import settings


def measure(launch: LaunchSamples, store: Store, **asked: Any) -> Measured:
    """Every launch is `launch`."""
    return carried_out(lambda plan: launch, store, **asked)


def carried_out(
    launch: Callable[[Plan], LaunchSamples], store: Store, **asked: Any
) -> Measured:
    launcher: Any = SimpleNamespace(measure=lambda plan, *_: launch(plan))
    return carry_out(job(**asked), launcher, store, Observer())


def notes_of(measured: Measured) -> tuple[str, ...]:
    return build_outcome(measured, Path("/"), "pytest", Took(12.3, 0.0)).notes


def job(*, gate: bool = True, **asked: Any) -> Job:
    of_test = settings(**asked)
    return Job(
        test=TestId(module="m", name="t"),
        nodeid="m.py::t",
        setups=(lambda ctx: lambda: None,),
        settings=of_test,
        plan=make_plan(of_test, world_size=1, backend="gloo", device="cpu"),
        level=0.05,
        batch_size=None,
        gate=gate,
        facts={},
    )


@pytest.mark.parametrize("disable", [False, True])
def test_a_disabled_measurement_has_no_advice_on_measuring(
    tmp_path: Path, disable: bool
) -> None:
    notes = notes_of(measure(UNFIT, Store(tmp_path), disable=disable))
    assert "rank 0's clean-up did not end" in notes
    assert any("raise --ddp-warmup" in note for note in notes) is not disable


def lasting(step_seconds: float) -> Callable[[Plan], LaunchSamples]:
    """Launches whose windows have as many steps as the plan says, of that length."""

    def launch(plan: Plan) -> LaunchSamples:
        steps = (step_seconds,) * plan.steps_for(step_seconds)
        return replace(LAUNCH, step_seconds=steps, rank_seconds=(steps,))

    return launch


def reported(steps: int, cut: int) -> str:
    return (
        f"only the first {cut} of {steps} steps of each launch were compared, because the baseline"
        " has no more: --ddp-save-baseline records longer windows"
    )


def test_sides_of_different_lengths_are_compared_and_it_is_noted_where_much_is_lost(
    tmp_path: Path,
) -> None:
    store, limits = Store(tmp_path), (Limit(metric="p50", value=0.1, unit="%"),)
    saved = carried_out(lasting(0.02), store, save_baseline=True)
    assert [len(launch) for launch in saved.result.step_seconds] == [50] * 5
    store.write(saved.candidate)
    for step_seconds, steps, verdict, notes in (
        (0.021, 48, "PASS", ()),  # one by chance slower, or faster
        (0.0101, 100, "IMPROVED", (reported(100, 50),)),
        (0.04, 30, "REGRESSED", ()),
    ):
        found = carried_out(lasting(step_seconds), store, limits=limits)
        assert {len(launch) for launch in found.result.step_seconds} == {steps}
        assert (str(found.result.verdict), notes_of(found)) == (verdict, notes)
        (change,) = found.result.verdict.comparisons
        assert (change.baseline_seconds, change.now_seconds) == pytest.approx(
            (0.02, step_seconds)
        )
        assert found.result.verdict.differences == (), (
            "of steps only what was asked is a fact"
        )


@pytest.mark.parametrize(
    ("judged", "is_offered"),
    [
        ({"status": Status.REGRESSED}, True),
        ({"status": Status.IMPROVED}, True),
        # the new times are of another training
        (
            {
                "status": Status.IMPROVED,
                "diverged": LossChange(before=2.0, now=3.0),
            },
            False,
        ),
        # the new times may be of a slow day
        ({"status": Status.INCONCLUSIVE}, False),
        ({"status": Status.NOT_GATED}, False),
    ],
)
def test_only_times_that_say_something_are_to_be_accepted(
    tmp_path: Path, judged: dict[str, Any], is_offered: bool
) -> None:
    store = Store(tmp_path)
    store.write(carried_out(lasting(0.02), store, save_baseline=True).candidate)
    found = carried_out(lasting(0.04), store)
    found = replace(found, verdict=replace(found.verdict, **judged))
    outcome = build_outcome(found, tmp_path, "pytest", Took(12.3, 0.0))
    assert bool(outcome.accept) is is_offered


def scattered(
    step_seconds: float, scatter: float
) -> Callable[[Plan], LaunchSamples]:
    """Launches of 10 s, with steps of that length, more or less."""
    lengths = cycle(
        step_seconds * (1 + scatter * place) for place in (0, 1, -1, 0.7, -0.7)
    )
    return lambda plan: replace(
        lasting(next(lengths))(plan), cost=LaunchCost(steps=10.0)
    )


@pytest.mark.parametrize(
    ("max_seconds", "launches"),
    [(600.0, 20), (200.0, 20), (199.0, 10), (1.0, 10)],
)
def test_an_open_verdict_has_as_many_launches_as_there_is_time_for_but_those_that_confirm(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    max_seconds: float,
    launches: int,
) -> None:
    store, limits = Store(tmp_path), (Limit(metric="p50", value=0.1, unit="%"),)
    store.write(
        carried_out(scattered(0.02, 0.01), store, save_baseline=True).candidate
    )
    monkeypatch.setattr(run, "MAX_SECONDS", max_seconds)
    monkeypatch.setattr(rule, "_FUTILE", 0.0)
    found = carried_out(scattered(0.022, 0.08), store, limits=limits)
    assert (len(found.result.step_seconds), found.result.verdict) == (
        launches,
        "PASS",
    )


def other_version(of_test: Job, lacking: str = "", error: str = "") -> Any:
    """Another version, whose steps last 20 ms. `lacking`: what it lacks, in words; `error`: why its
    test cannot begin."""

    def begin(nodeid: str, label: str, plan: Plan) -> Any:
        if error:
            raise BaseSideError(error)
        return SimpleNamespace(plan=plan, batch_size=None, facts={})

    return SimpleNamespace(
        begin=begin,
        measure=lambda observer, steps: lasting(0.02)(of_test.plan.exactly(50)),
        end_measurement=lambda: None,
        lacking=lambda files, own: lacking,
        checkout=SimpleNamespace(changed=()),
        version=Version(ref="main", commit="", now=""),
    )


def test_nothing_is_launched_to_confirm_with_a_version_that_cannot_begin(
    tmp_path: Path,
) -> None:
    of_test = job(turns="launches")
    unused: Any = None
    base = other_version(of_test, error="no such test")
    store, observer = Store(tmp_path), Observer()
    with pytest.raises(BaseSideError, match=r"^no such test$"):
        carry_out(of_test, unused, store, observer, base, confirm_seconds=60.0)


@pytest.mark.parametrize(
    ("problem", "order"),
    [
        ({"lacking": "it lacks fast.so"}, {"n", "b"}),
        ({"error": "no such test"}, {"n"}),
    ],
    ids=["lacks a file", "does not begin"],
)
def test_a_version_with_which_nothing_can_be_compared_leaves_the_current_side_alone(
    tmp_path: Path, problem: dict[str, str], order: set[str]
) -> None:
    of_test = job(turns="launches", against="main")
    launcher: Any = SimpleNamespace(
        measure=lambda plan, *_: lasting(0.02)(plan.exactly(50))
    )
    base = other_version(of_test, **problem)
    found = carry_out(of_test, launcher, Store(tmp_path), Observer(), base)
    assert (found.verdict, len(found.launches)) == ("NO BASELINE", 5)
    side = found.baseline_side
    assert side is not None
    assert (side.measurement, [side.error]) == (None, [*problem.values()])
    assert {*side.order} == order
    assert len(side.order) == 5 + ("b" in order), (
        "nothing more is launched there"
    )


@pytest.mark.parametrize(
    ("asked", "pairs"),
    [
        ({"against": "main"}, 7),
        ({"confirm_seconds": 60.0}, 10),
        ({"against": "self"}, 10),
    ],
    ids=["another version", "confirming a suspicion", "the same code"],
)
def test_a_confirmation_and_the_same_code_rest_on_all_pairs_of_a_look(
    tmp_path: Path, asked: dict[str, Any], pairs: int
) -> None:
    # without a gap, which would be two speeds
    first = [0.02, 0.0232, 0.0208, 0.0226, 0.02]
    open_then_steady = iter([*first, *[0.02] * 5])
    launcher: Any = SimpleNamespace(
        measure=lambda plan, *_: lasting(next(open_then_steady))(
            plan.exactly(50)
        )
    )
    limits = (Limit(metric="p50", value=0.1, unit="%"),)
    of_test = job(limits=limits, turns="launches", against=asked.get("against"))
    base = other_version(of_test)
    seconds = asked.get("confirm_seconds")
    found = carry_out(
        of_test,
        launcher,
        Store(tmp_path),
        Observer(),
        base,
        confirm_seconds=seconds,
    )
    assert (found.result.verdict, len(found.result.step_seconds)) == (
        "PASS",
        pairs,
    )


@pytest.mark.parametrize("option", ["save_baseline", "extend_baseline"])
@pytest.mark.parametrize(
    ("scatter", "max_seconds", "launches"),
    [
        (0.01, 600.0, 5),
        (0.1, 600.0, 10),
        (0.1, 99.0, 5),
        (0.2, 600.0, 20),
        (0.2, 199.0, 10),
    ],
)
def test_saving_takes_launches_until_two_such_measurements_resolve_the_limits_or_the_time_is_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scatter: float,
    max_seconds: float,
    launches: int,
    option: str,
) -> None:
    monkeypatch.setattr(run, "MAX_SECONDS", max_seconds)
    asked: dict[str, Any] = {
        option: True,
        "limits": (Limit(metric="p50", value=0.1, unit="%"),),
    }
    saved = carried_out(scattered(0.02, scatter), Store(tmp_path), **asked)
    assert len(saved.result.step_seconds) == launches


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail"),
        ("NCCL_DEBUG", "TRACE"),
    ],
)
def test_under_a_debugging_variable_nothing_is_compared(
    tmp_path: Path, variable: str, value: str
) -> None:
    store = Store(tmp_path)
    for reported, verdict in (
        (value, "debugging-variable"),
        ("INFO", "no-baseline"),
    ):
        launch = replace(LAUNCH, facts={f"env:{variable}": reported})
        assert measure(launch, store).result.verdict.reason == verdict
        assert (
            measure(launch, store, gate=False).result.verdict.reason
            == "gate-off"
        )


def test_what_another_version_measures_without_a_gate_fails_nothing_there(
    tmp_path: Path,
) -> None:
    asked: dict[str, Any] = {"gate": False, "fail_on": frozenset({"not-gated"})}
    assert measure(LAUNCH, Store(tmp_path), **asked).fails
    there = LeaderConnection.__new__(LeaderConnection)
    there.relay = Observer()
    launcher: Any = SimpleNamespace(measure=lambda *_: LAUNCH)
    session: Any = SimpleNamespace(
        launcher=launcher,
        comparison=lambda job, observer: partial(
            carry_out, job, launcher, Store(tmp_path), observer
        ),
    )
    assert not there.carry_out(job(**asked), session, Observer()).fails
