"""A measurement's journey without any ranks: what its outcome tells."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf import options
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.measuring.benchmark import Job, Measured, carry_out
from pytest_ddpperf.records import LaunchSamples, TestId
from tests.unit.test_launches import LAUNCH, UNFIT
from tests.unit.test_machine import settings

PROGRESS: Any = SimpleNamespace(begin=lambda launch, launches: None, launched=lambda samples: None)


def measure(launch: LaunchSamples, store: Store, **asked: Any) -> Measured:
    """Every launch is `launch`."""
    of_test = settings(**asked)
    job = Job(
        test=TestId(module="m", name="t"),
        nodeid="m.py::t",
        setup=lambda ctx: lambda: None,
        settings=of_test,
        plan=options.plan(of_test, world_size=1, backend="gloo", device="cpu"),
        launches=options.launches(of_test),
        level=0.05,
        batch_size=None,
        gate=True,
        facts={},
    )
    launcher: Any = SimpleNamespace(measure=lambda *_: launch)
    return carry_out(job, launcher, store, PROGRESS)


@pytest.mark.parametrize("disable", [False, True])
def test_a_disabled_measurement_has_no_advice_on_measuring(tmp_path: Path, disable: bool) -> None:
    notes = measure(UNFIT, Store(tmp_path), disable=disable).outcome.notes
    assert "rank 0's clean-up did not end" in notes
    assert any("raise --ddp-warmup" in note for note in notes) is not disable


def test_extending_says_that_there_was_nothing_to_extend(tmp_path: Path) -> None:
    store = Store(tmp_path)
    began = measure(LAUNCH, store, extend_baseline=True)
    assert began.outcome.notes == ("there was no baseline to extend: the first session begins one",)
    assert measure(LAUNCH, store, save_baseline=True).outcome.notes == ()
    store.extend(began.candidate)
    assert measure(LAUNCH, store, extend_baseline=True).outcome.notes == ()
