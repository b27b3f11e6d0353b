"""Everything a run measured, as plain JSON values; the schema is in docs/json.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pytest_ddpperf.records import Outcome, RunInfo, codec
from pytest_ddpperf.report.counts import count
from pytest_ddpperf.verdict import stats

SCHEMA = 1


def report(outcomes: Sequence[Outcome], run: RunInfo) -> dict[str, Any]:
    """Raw samples included; never NaN."""
    return {
        "schema": SCHEMA,
        "run_id": run.id,
        "created": run.created,
        "version": run.version,
        "commit": run.commit,
        "committed": run.committed,
        "machine": dict(run.facts),
        "summary": asdict(count(outcomes, run)),
        "problem": run.problem,
        "messages": list(run.messages),
        "measurements": [_measurement(outcome) for outcome in outcomes],
    }


def _measurement(outcome: Outcome) -> dict[str, Any]:
    data: dict[str, Any] = dict(codec.encode(outcome))
    if outcome.measurement is not None:
        launches = outcome.measurement.samples.step_seconds
        data["percentile_seconds"] = {
            f"p{q}": stats.geometric_mean(stats.launch_quantiles(launches, q)) for q in (10, 50, 75, 90, 95)
        }
    return data
