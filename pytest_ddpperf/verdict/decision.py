"""Limits on counters, and facts that must match: comparisons without noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.samples import CounterChange, Measurement, Status, Verdict
from pytest_ddpperf.verdict.times import LAUNCHES_NEEDED, fact_changes, gravest


def with_counters(
    verdict: Verdict, current: Measurement, baseline: Sequence[Measurement], limits: Sequence[Limit]
) -> Verdict:
    """A verdict on times, with that on counters: those that are limited, against the baseline's last session.

    Counts have no noise: more than the limit allows is REGRESSED, as much less is IMPROVED. A counter that is unknown
    on one side is reported; if the limit is the user's it is INCOMPARABLE, unless something else is REGRESSED.
    """
    if not (verdict.status.compared or verdict.reason == "no-supported-limit"):
        return verdict
    changes, dropped, unknown = [], [], list[tuple[str, str]]()
    for limit in limits:
        if not limit.is_counter:
            continue
        now, before = (side.counters.get(limit.metric) for side in (current, baseline[-1]))
        if now is not None and before is not None:
            changes.append(_counted(limit, before, now))
            continue
        side = "now" if now is None else "in the baseline"
        if limit.default:
            dropped.append(f"{limit}: unknown {side}")
        else:
            unknown.append((side, f"{limit.metric} is unknown {side}"))
    status, reason = verdict.status, verdict.reason
    if changes:
        counted = gravest(change.status for change in changes)
        if not status.compared or gravest((status, counted)) is not status:
            status, reason = counted, _COUNTED_REASONS[counted]
    if unknown and status is not Status.REGRESSED:
        status, reason = Status.INCOMPARABLE, "unknown-counter"
        if any(side == "now" for side, _ in unknown):  # which no other baseline would help
            reason = "unknown-counter-now"
    return replace(
        verdict,
        status=status,
        reason=reason,
        dropped=(*verdict.dropped, *dropped),
        differences=(*(what for _, what in unknown), *verdict.differences),
        counters=tuple(changes),
    )


_COUNTED_REASONS = {Status.REGRESSED: "counter-rose", Status.IMPROVED: "counter-fell", Status.PASS: "within-limit"}


def _counted(limit: Limit, before: int, now: int) -> CounterChange:
    allowed = 1 + limit.value + 1e-9  # 15 % of 100 are 15
    status = Status.PASS
    if now > before * allowed:
        status = Status.REGRESSED
    elif now * allowed < before:
        status = Status.IMPROVED
    return CounterChange(limit=limit, status=status, baseline=before, now=now)


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
    machines = fact_changes(current.environment.key, before.environment.key)
    if machines:  # to the store that is another baseline
        return Verdict(status=Status.INCOMPARABLE, reason="must-match", differences=machines)
    if before.samples.launches < LAUNCHES_NEEDED:
        few = (f"{before.samples.launches} launch, and a comparison needs {LAUNCHES_NEEDED} a side",)
        return Verdict(status=Status.INCOMPARABLE, reason="baseline-support", differences=few)
    return None
