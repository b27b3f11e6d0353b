"""The text of a failed gate and of a failed launch, as the user reads it in place of a traceback."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_ddpperf.records import (
    Baseline,
    Comparison,
    CounterChange,
    LaunchRankSteps,
    Measurement,
    Outcome,
    Plan,
    Status,
)
from pytest_ddpperf.records.errors import LaunchError
from pytest_ddpperf.report import beside, terminal, text
from pytest_ddpperf.verdict import stats

# Below it, two ranks' changes are called alike: a tenth of a limit people set.
_ALIKE = 0.02


def gate_failure(outcome: Outcome, *, baseline: Baseline | None, accept_command: str) -> str:
    """Why a verdict fails its test, and the command that would accept the new figures."""
    return "\n".join(_gate_failure(outcome, baseline, accept_command))


def launch_failure(error: LaunchError, launch: int, launches: int) -> str:
    """A launch's error, with its place among the launches (from 1)."""
    return f"launch {launch} of {launches}: {error}"


def _gate_failure(outcome: Outcome, baseline: Baseline | None, accept_command: str) -> Iterator[str]:
    verdict = outcome.verdict
    assert verdict is not None
    assert outcome.measurement is not None
    missing = f"there is no baseline at {outcome.baseline_path}"
    told = {
        Status.NO_BASELINE: beside.missing(outcome.beside) if outcome.beside is not None else missing,
        Status.INCOMPARABLE: terminal.incomparable(outcome),
        Status.NOT_GATED: terminal.not_gated(outcome),
    }.get(verdict.status)
    if told is not None:
        yield f"{verdict}: {told}"
        yield from outcome.notes
        if verdict.status is not Status.NOT_GATED and outcome.beside is None:
            yield f"record: {accept_command}"
        return
    yield f"{verdict}: {outcome.test} on {_who(outcome)}"
    yield ""
    counters = [c for c in verdict.counters if c.status is verdict.status]
    yield from _metrics([c for c in verdict.comparisons if c.status is verdict.status], counters)
    if baseline is not None:
        yield beside.evidence(outcome) if outcome.beside is not None else _evidence(outcome, baseline)
        yield from _slowest(outcome.measurement, baseline.measurements[-1], outcome.plan)
        yield from _blocked(outcome.measurement, baseline.measurements[-1], outcome.plan)
    if verdict.differences:
        yield f"differs from the baseline's environment: {', '.join(verdict.differences)}"
    yield from (f"note: {note}" for note in outcome.notes)
    if outcome.beside is not None:
        yield f"against:  {beside.commits(outcome.beside)}"
        return
    yield f"baseline: {outcome.baseline_path}"
    yield f"accept:   {accept_command}"


def _metrics(comparisons: list[Comparison], counters: list[CounterChange]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("metric", "baseline", "now", "change [bounds]", "limit", "resolves")]
    for c in comparisons:
        limit = str(c.limit).partition(":")[2]
        figures = (text.seconds(c.baseline_seconds), text.seconds(c.now_seconds), text.interval(c.change))
        rows.append((c.limit.metric, *figures, limit, text.amount(c.resolution)))
    for changed in counters:
        metric, _, limit = str(changed.limit).partition(":")
        change = text.counted(changed).removeprefix(metric).strip()
        rows.append((metric, f"{changed.baseline:,}", f"{changed.now:,}", f"{change}, counted", limit, "all"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""


def _evidence(outcome: Outcome, baseline: Baseline) -> str:
    """What both sides are made of."""
    assert outcome.verdict is not None
    sessions = len(baseline.sessions)
    before = sum(measurement.samples.launches for measurement in baseline.measurements)
    drifts = [c.drift for c in outcome.verdict.comparisons if c.drift is not None]
    how = "assumed" if sessions == 1 else "seen and assumed"
    drift = f"; sessions drift by {text.amount(max(drifts))} ({how})" if drifts else ""
    return (
        f"evidence: {len(outcome.phases)} launches now, {before} in the baseline's {sessions} "
        f"session{'s' * (sessions > 1)}{drift}"
    )


def _slowest(now: Measurement, base: Measurement, plan: Plan) -> Iterator[str]:
    """Who made it slow: by CPU time where there is some, for ranks wait for each other in wall time."""
    cpu = now.samples.cpu_seconds is not None and base.samples.cpu_seconds is not None
    if cpu:
        current, before = _by_rank(now.samples.cpu_seconds or ()), _by_rank(base.samples.cpu_seconds or ())
    else:
        current, before = _by_rank(now.samples.rank_seconds), _by_rank(base.samples.rank_seconds)
    if len(current) != len(before) or 0 in before:
        return
    changes = [after / earlier - 1 for after, earlier in zip(current, before, strict=True)]
    rank = max(range(len(changes)), key=changes.__getitem__)
    kind = "CPU time" if cpu else "own step time"
    if len(changes) > 1 and max(changes) - min(changes) < _ALIKE:
        yield f"slowest rank: none stands out; every rank's {kind} changed alike ({text.share(changes[rank])} at p50)"
    else:
        name = plan.name(rank).removeprefix("rank ")
        yield (
            f"slowest rank: {name}, its {kind} at p50 {text.seconds(before[rank])} -> {text.seconds(current[rank])} "
            f"({text.share(changes[rank])}; others {text.share(_others(changes, rank))})"
        )
    if cpu:
        wall = _by_rank(now.samples.rank_seconds)
        late = max(range(len(wall)), key=wall.__getitem__)
        yield f"longest own steps: {plan.name(late)}, {text.seconds(wall[late])} at p50"


def _blocked(now: Measurement, base: Measurement, plan: Plan) -> Iterator[str]:
    """How much of a step each trainer waited for RPC, and how much of the change that is."""
    if now.samples.blocked_seconds is None or base.samples.blocked_seconds is None:
        return
    sides = [(side.samples.blocked_seconds or (), side.samples.rank_seconds) for side in (base, now)]
    (waited, steps), (waits, takes) = (tuple(map(_medians, side)) for side in sides)
    if len(waited) != len(waits):
        return
    yield "blocked in RPC, at p50:"
    for rank, (before, after) in enumerate(zip(waited, waits, strict=True)):
        more = f"{(after - before) * 1000:+.3g} ms of the step's {(takes[rank] - steps[rank]) * 1000:+.3g} ms"
        yield f"  {plan.name(rank)}  {text.seconds(before)} -> {text.seconds(after)}  {more}"


def _medians(durations: LaunchRankSteps) -> list[float]:
    """Each rank's median over all steps of all launches, in seconds: there may be steps without any wait."""
    return [
        stats.quantile([step for launch in durations for step in launch[rank]], 50) for rank in range(len(durations[0]))
    ]


def _who(outcome: Outcome) -> str:
    return outcome.plan.roles or f"{outcome.plan.world_size} {outcome.plan.backend} ranks"


def _others(changes: list[float], rank: int) -> float:
    rest = changes[:rank] + changes[rank + 1 :]
    return stats.quantile(rest, 50) if rest else 0.0


def _by_rank(durations: LaunchRankSteps) -> list[float]:
    """Each rank's p50 over launches, in seconds."""
    return [
        stats.geometric_mean(stats.launch_quantiles(tuple(launch[rank] for launch in durations), 50))
        for rank in range(len(durations[0]))
    ]
