"""The text of a failed gate and of a failed launch, as the user reads it in place of a traceback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pytest_ddpperf.records import Baseline, Comparison, CounterChange, Outcome, Status, Verdict
from pytest_ddpperf.records.collective import Collective
from pytest_ddpperf.records.errors import LaunchError
from pytest_ddpperf.report import beside, ranks, sentences, text


def explained(outcome: Outcome, *, baseline: Baseline | None, accept_command: str) -> Outcome:
    """With what a failed gate tells beyond the figures, from what it was held against: reports have no more of it."""
    verdict = outcome.verdict
    assert verdict is not None
    evidence: Sequence[str] = ()
    if baseline is not None and verdict.status.compared and verdict.status is not Status.PASS:
        made_of = beside.evidence(outcome) if outcome.baseline_side is not None else _evidence(outcome, baseline)
        evidence = [made_of, *ranks.told(outcome, baseline)]
    accepts = verdict.status is not Status.NOT_GATED and (
        outcome.baseline_side is None or outcome.stored_verdict is not None
    )
    return replace(outcome, evidence=tuple(evidence), accept=accept_command if accepts else "")


def gate_failure(outcome: Outcome) -> str:
    """Why a verdict fails its test, and the command that would accept the new figures."""
    return "\n".join(_gate_failure(outcome))


def launch_failure(error: LaunchError, launch: int, launches: int) -> str:
    """A launch's error, with its place among the launches (from 1)."""
    return f"launch {launch} of {launches}: {error}"


def _gate_failure(outcome: Outcome) -> Iterator[str]:
    verdict = outcome.verdict
    assert verdict is not None
    told = {
        Status.NO_BASELINE: sentences.missing(outcome),
        Status.INCOMPARABLE: sentences.incomparable(outcome),
        Status.NOT_GATED: sentences.not_gated(outcome),
    }.get(verdict.status)
    if told is not None:
        yield f"{verdict}: {told}"
        yield from outcome.notes
        yield from remedy(outcome)
        return
    yield f"{verdict}: {outcome.test} on {_who(outcome)}"
    yield ""
    counters = [c for c in verdict.counters if c.status is verdict.status]
    comparisons = [c for c in verdict.comparisons if c.status is verdict.status]
    if verdict.status is Status.INCONCLUSIVE and outcome.stored_verdict is not None:
        comparisons = list(verdict.comparisons)  # which do not suspect anything, and that is the point
        yield sentences.settled(outcome)
        yield ""
    yield from _metrics(comparisons, counters, outcome.plan.collective)
    yield from outcome.evidence
    yield from differences(verdict)
    yield from (f"note: {note}" for note in outcome.notes)
    if outcome.baseline_side is not None:
        yield f"against:  {beside.commits(outcome.baseline_side)}"
    if outcome.stored_verdict is not None:
        yield suspected(outcome.stored_verdict)
    if outcome.accept:
        yield f"baseline: {outcome.baseline_path}"
    yield from remedy(outcome)


def differences(verdict: Verdict) -> Iterator[str]:
    """What else is not as it was, if anything."""
    if verdict.differences:
        yield f"differs from the baseline's environment: {', '.join(verdict.differences)}"


def remedy(outcome: Outcome) -> Iterator[str]:
    """What makes the figures a baseline, if anything does."""
    compared = outcome.verdict is not None and outcome.verdict.status.compared
    if outcome.accept:
        yield f"accept:   {outcome.accept}" if compared else f"record: {outcome.accept}"


def suspected(stored: Verdict) -> str:
    """What the stored baseline by itself said, where turns settled it."""
    return f"suspected by the stored baseline: {', '.join(text.change(c) for c in stored.comparisons)}"


def _metrics(
    comparisons: list[Comparison], counters: list[CounterChange], collective: Collective | None
) -> Iterator[str]:
    rows = metrics(comparisons, counters, collective)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""


def metrics(
    comparisons: Sequence[Comparison], counters: Sequence[CounterChange], collective: Collective | None
) -> list[tuple[str, ...]]:
    """A row a limit, below one of titles."""
    rows: list[tuple[str, ...]] = [("metric", "baseline", "now", "change [bounds]", "limit", "resolves")]
    for c in comparisons:
        limit = str(c.limit).partition(":")[2]
        figures = [text.figure(c, seconds, collective) for seconds in (c.baseline_seconds, c.now_seconds)]
        change = text.interval(text.changed(c))
        rows.append((c.limit.metric, *figures, change, limit, text.amount(text.resolution(c))))
    for changed in counters:
        metric, _, limit = str(changed.limit).partition(":")
        change = text.counted(changed).removeprefix(metric).strip()
        rows.append((metric, f"{changed.baseline:,}", f"{changed.now:,}", f"{change}, counted", limit, "all"))
    return rows


def _evidence(outcome: Outcome, baseline: Baseline) -> str:
    """What both sides are made of."""
    assert outcome.verdict is not None
    sessions = len(baseline.sessions)
    before = sum(measurement.samples.launches for measurement in baseline.measurements)
    drifts = [c.drift for c in outcome.verdict.comparisons if c.drift is not None]
    how = "assumed" if sessions == 1 else "seen and assumed"
    drift = f"; sessions drift by {text.amount(max(drifts))} ({how})" if drifts else ""
    return (
        f"evidence: {len(outcome.phases)} launches now, {before} in the baseline's "
        f"{text.several(sessions, 'session')}{drift}"
    )


def _who(outcome: Outcome) -> str:
    return outcome.plan.roles or f"{outcome.plan.world_size} {outcome.plan.backend} ranks"
