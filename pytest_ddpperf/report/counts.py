"""How many measurements came to what: one count for the last line and for the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_ddpperf.records import Outcome, RunInfo, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    measured: int  # all outcomes, failed ones included
    compared: int
    passed: int  # PASS
    improved: int
    regressed: int
    inconclusive: int
    without_baseline: int
    incomparable: int
    not_gated: int
    failed: int  # no figures: a rank failed, or a baseline could not be read
    skipped: int
    never_measured: int  # tests that passed without a call of the fixture that they ask for
    other_failures: int  # of which no measurement tells


def count(outcomes: Sequence[Outcome], *runs: RunInfo) -> Counts:
    """Of the outcomes of these runs, with what runs count themselves."""
    statuses = [outcome.verdict.status for outcome in outcomes if outcome.verdict is not None]
    return Counts(
        measured=len(outcomes),
        compared=sum(status.compared for status in statuses),
        passed=statuses.count(Status.PASS),
        improved=statuses.count(Status.IMPROVED),
        regressed=statuses.count(Status.REGRESSED),
        inconclusive=statuses.count(Status.INCONCLUSIVE),
        without_baseline=statuses.count(Status.NO_BASELINE),
        incomparable=statuses.count(Status.INCOMPARABLE),
        not_gated=statuses.count(Status.NOT_GATED),
        failed=len(outcomes) - len(statuses),
        skipped=sum(run.skipped for run in runs),
        never_measured=sum(run.never_measured for run in runs),
        other_failures=sum(run.other_failures for run in runs),
    )


def last_line(counts: Counts, only_before: int = 0) -> str:
    """ "ddpperf: 3 of 5 compared: 2 passed, 1 regressed; 1 without baseline, 1 not gated; 1 skipped". `only_before` are
    measurements that what it was held against has and it has not."""

    def some(*named: tuple[int, str]) -> str:
        return ", ".join(f"{number} {name}" for number, name in named if number)

    parts = [
        some(
            (counts.passed, "passed"),
            (counts.improved, "improved"),
            (counts.regressed, "regressed"),
            (counts.inconclusive, "inconclusive"),
        ),
        some(
            (counts.without_baseline, "without baseline"),
            (counts.incomparable, "incomparable"),
            (counts.not_gated, "not gated"),
            (counts.failed, "failed to measure"),
        ),
        some((counts.other_failures, "other failure" + "s" * (counts.other_failures > 1))),
        some((counts.skipped, "skipped"), (counts.never_measured, "never measured")),
        some((only_before, "only in the base")),
    ]
    head = f"ddpperf: {counts.compared} of {counts.measured} compared"
    rest = "; ".join(part for part in parts if part)
    return f"{head}: {rest}" if rest else head
