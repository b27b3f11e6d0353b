"""Which figures of two runs may not be held against each other at all, where no store has seen to that."""

from __future__ import annotations

from pytest_ddpperf.records import Measurement, Status, Verdict
from pytest_ddpperf.verdict.times import LAUNCHES_NEEDED, differing

# Figures of which their own run said that they say nothing about the code: that holds whatever they are compared with.
_SAY_NOTHING = ("debugging-variable", "disabled")
_GATE_OFF = "gate-off"


def refused(current: Measurement, before: Measurement, *, now: Verdict | None, then: Verdict | None) -> Verdict | None:
    """Why `current`, which its own run called `now`, is not to be compared with `before`, which was called `then`; None
    where it is."""
    reasons = [verdict.reason for verdict in (now, then) if verdict is not None]
    not_gated = next((reason for reason in reasons if reason in _SAY_NOTHING), None)
    if not_gated is None and now is not None and now.reason == _GATE_OFF:
        not_gated = _GATE_OFF
    if not_gated is not None:
        return Verdict(status=Status.NOT_GATED, reason=not_gated)
    machines = differing(current.environment.key, before.environment.key)
    if machines:  # to the store that is another baseline
        return Verdict(status=Status.INCOMPARABLE, reason="must-match", differences=machines)
    if before.samples.launches < LAUNCHES_NEEDED:
        few = (f"{before.samples.launches} launch, and a comparison needs {LAUNCHES_NEEDED} a side",)
        return Verdict(status=Status.INCOMPARABLE, reason="baseline-support", differences=few)
    return None
