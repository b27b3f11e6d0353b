"""Which measurements are to be looked at, and which first: the same in every report."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from pytest_ddpperf.records import Outcome, Status

# Not compared, though nobody asked for that.
_UNINTENDED = ("debugging-variable", "no-supported-limit")


class Concern(IntEnum):
    """How much a measurement is to be looked at, the most first."""

    FAILS = 0  # its test
    DOUBTFUL = 1  # its test passes, but not because all is well
    IMPROVED = 2
    NONE = 3


def concern(outcome: Outcome) -> Concern:
    if outcome.fails:
        return Concern.FAILS
    if outcome.verdict is None:
        return Concern.DOUBTFUL
    status, reason = outcome.verdict.status, outcome.verdict.reason
    if status is Status.IMPROVED:
        return Concern.IMPROVED
    if status is Status.PASS or (status is Status.NOT_GATED and reason not in _UNINTENDED):
        return Concern.NONE
    return Concern.DOUBTFUL


# What was found before what could not be; None: not even measured.
_ORDER = (
    Status.REGRESSED,
    None,
    Status.INCONCLUSIVE,
    Status.INCOMPARABLE,
    Status.NO_BASELINE,
    Status.IMPROVED,
    Status.PASS,
    Status.NOT_GATED,
)


def first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The worst first: by concern, verdict and the size of the change; what is alike stays in its order."""

    def key(outcome: Outcome) -> tuple[int, int, float]:
        verdict = outcome.verdict
        return concern(outcome), _ORDER.index(verdict.status if verdict is not None else None), -_size(outcome)

    return sorted(outcomes, key=key)


def _size(outcome: Outcome) -> float:
    """The largest change, of those that decided if any did; without direction where it is for the better."""
    verdict = outcome.verdict
    if verdict is None:
        return 0.0
    changes = [verdict.worst.change.estimate] if verdict.worst is not None else []
    changes += [counter.change for counter in verdict.counters if counter.status is verdict.status]
    return max(map(abs, changes) if verdict.status is Status.IMPROVED else changes, default=0.0)
