"""Without PyTorch's flight recorder, which TORCH_FR_BUFFER_SIZE=0 switches off, what it would have
recorded is unknown. One launcher has that variable for all of these tests, since torch reads it when
it is imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.rank.sent import HAS_HOOKS
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.step_phases import EXPOSED, RANK_WAIT
from tests.launch import test_counters, test_phases, test_steady

PLAN = Plan(world_size=2, backend="gloo", device="cpu", warmup=3, steps=3)


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher(dict)
    yield launcher
    launcher.close()


@pytest.fixture
def unrecorded(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Return the launcher; its ranks have no flight recorder."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    return launcher


def test_all_reduces_are_unknown_where_the_flight_recorder_is_off(
    unrecorded: Launcher,
) -> None:
    setup = test_counters.training(4)
    counters = unrecorded.measure(PLAN, setup, Observer()).counters
    if HAS_HOOKS:  # which do without it
        assert counters["all_reduce.bytes"] == test_counters.GRADIENTS
    else:
        assert (counters["all_reduce.count"], counters["all_reduce.bytes"]) == (
            None,
            None,
        )
    assert counters["gradient_bytes"] == test_counters.GRADIENTS


def test_waits_are_unknown_where_the_flight_recorder_is_off(
    unrecorded: Launcher,
) -> None:
    setup = test_phases.training("plain")
    found = unrecorded.measure(PLAN, setup, Observer()).phases
    assert found is not None
    assert found.path == {}
    assert (found.own[EXPOSED], found.own[RANK_WAIT]) == (
        (None, None),
        (None, None),
    )


def test_what_a_step_sends_is_not_doubted_where_the_flight_recorder_is_off(
    unrecorded: Launcher,
) -> None:
    setup = test_steady.sending([3])
    assert "sent" not in unrecorded.measure(PLAN, setup, Observer()).doubts
