"""Properties of a test for JUnit XML: the verdict in a few strings, no raw samples."""

from __future__ import annotations

from pytest_ddpperf.records import Outcome
from pytest_ddpperf.report import text
from pytest_ddpperf.verdict import stats

_NAMES = ("verdict", "reason", "metric", "ratio", "interval", "resolution", "against", "against_commit", "p50")


def names(label: str) -> tuple[str, ...]:
    """All properties that a measurement may have."""
    prefix = f"ddpperf.{label}." if label else "ddpperf."
    return tuple(prefix + name for name in _NAMES)


def properties(outcome: Outcome) -> list[tuple[str, str]]:
    """ddpperf.verdict, .reason, .p50 (seconds); with a comparison .metric, .ratio (now / baseline), .interval
    (of the ratio), .resolution (the relative slowdown it could tell); beside another version .against and
    .against_commit.

    A named measurement has its name in the property's: ddpperf.forward.verdict.
    """
    prefix = f"ddpperf.{outcome.test.label}." if outcome.test.label else "ddpperf."
    values: dict[str, str] = {}
    if outcome.verdict is not None:
        values |= {"verdict": str(outcome.verdict), "reason": outcome.verdict.reason}
        worst = outcome.verdict.worst
        if outcome.verdict.reason in ("counter-rose", "counter-fell"):
            (counted, *_) = [c for c in outcome.verdict.counters if c.status is outcome.verdict.status]
            values |= {"metric": counted.limit.metric, "ratio": f"{1 + counted.change:.4f}"}
        elif worst is not None:
            values["metric"] = worst.limit.metric
            change = text.changed(worst)
            values["ratio"] = f"{1 + change.estimate:.4f}"
            values["interval"] = f"{1 + change.low:.4f}..{1 + change.high:.4f}"
            values["resolution"] = f"{text.resolution(worst):.4f}"
    if outcome.baseline_side is not None:
        values |= {
            "against": str(outcome.baseline_side.version),
            "against_commit": outcome.baseline_side.version.commit,
        }
    if outcome.measurement is not None:
        p50 = stats.geometric_mean(stats.launch_quantiles(outcome.measurement.samples.step_seconds, 50))
        values["p50"] = f"{p50:.9f}"
    return [(prefix + name, value) for name, value in values.items()]
