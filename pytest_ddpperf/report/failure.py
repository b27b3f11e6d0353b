"""The text of a failed gate and of a failed launch, which replaces a traceback; and which rank was slower.

Ranks wait for each other in collectives, so a late rank makes the steps of all ranks longer. CPU time, which waiting
does not use, shows which rank worked more; nothing shows sleep and I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pytest_ddpperf.records import (
    Baseline,
    Comparison,
    CounterChange,
    LaunchRankSteps,
    Outcome,
    Plan,
    Samples,
    Status,
    Verdict,
)
from pytest_ddpperf.records.errors import LaunchError
from pytest_ddpperf.report import sentences, text
from pytest_ddpperf.verdict import of_one_length, stats


def explained(outcome: Outcome, *, baseline: Baseline | None, accept_command: str) -> Outcome:
    """Return the outcome with its evidence and the command that accepts it."""
    verdict = outcome.verdict
    assert verdict is not None
    evidence: Sequence[str] = ()
    if baseline is not None and verdict.status.compared and verdict.status is not Status.PASS:
        made_of = (
            sentences.interleaved_evidence(outcome)
            if outcome.baseline_side is not None
            else _evidence(outcome, baseline)
        )
        evidence = [made_of, *rank_lines(outcome, baseline)]
    accepts = verdict.status is not Status.NOT_GATED and (
        outcome.baseline_side is None or outcome.stored_verdict is not None
    )
    return replace(outcome, evidence=tuple(evidence), accept=accept_command if accepts else "")


def gate_failure(outcome: Outcome) -> str:
    """Return why a verdict fails its test, and the command that would accept the new figures."""
    return "\n".join(_gate_failure(outcome))


def launch_failure(error: LaunchError, launch: int, launches: int) -> str:
    """Return a launch's error with its place among the launches (from 1)."""
    return f"launch {launch} of {launches}: {error}"


def _gate_failure(outcome: Outcome) -> Iterator[str]:
    verdict = outcome.verdict
    assert verdict is not None
    if not verdict.status.compared:
        yield f"{verdict}: {sentences.why_not_compared(outcome)}"
        yield from outcome.notes
        yield from remedy(outcome)
        return
    who = outcome.plan.roles or f"{outcome.plan.world_size} {outcome.plan.backend} ranks"
    yield f"{verdict}: {outcome.test} on {who}"
    yield ""
    counters = [c for c in verdict.counters if c.status is verdict.status]
    comparisons = [c for c in verdict.comparisons if c.status is verdict.status]
    if verdict.status is Status.INCONCLUSIVE and outcome.stored_verdict is not None:
        comparisons = list(verdict.comparisons)  # which do not suspect anything, and that is the point
        yield sentences.machine_slower(outcome)
        yield ""
    yield from (f"  {line}" for line in text.aligned(metrics(comparisons, counters, outcome.plan)))
    yield ""
    yield from outcome.evidence
    yield from differences(verdict)
    yield from (f"note: {note}" for note in outcome.notes)
    if outcome.baseline_side is not None:
        yield f"against:  {sentences.compared_commits(outcome.baseline_side)}"
    if outcome.stored_verdict is not None:
        yield suspected(outcome.stored_verdict)
    if outcome.accept:
        yield f"baseline: {outcome.baseline_path}"
    yield from remedy(outcome)


def differences(verdict: Verdict) -> Iterator[str]:
    """Yield what differs in the environment, if anything."""
    if verdict.differences:
        yield f"differs from the baseline's environment: {', '.join(verdict.differences)}"


def remedy(outcome: Outcome) -> Iterator[str]:
    """Yield the command that makes the figures a baseline, if there is one."""
    compared = outcome.verdict is not None and outcome.verdict.status.compared
    if outcome.accept:
        yield f"accept:   {outcome.accept}" if compared else f"record: {outcome.accept}"


def suspected(stored: Verdict) -> str:
    """Say what the stored baseline alone said."""
    return f"suspected by the stored baseline: {', '.join(text.change(c) for c in stored.comparisons)}"


METRIC_TITLES = ("metric", "baseline", "now", "change [bounds]", "limit", "resolves")


def metrics(comparisons: Sequence[Comparison], counters: Sequence[CounterChange], plan: Plan) -> list[tuple[str, ...]]:
    """Return a row for each limit below one of titles: the same in every report."""
    rows: list[tuple[str, ...]] = [METRIC_TITLES]
    for c in comparisons:
        metric, _, limit = str(c.limit).partition(":")
        figures = [text.figure(c, seconds, plan.collective) for seconds in (c.baseline_seconds, c.now_seconds)]
        rows.append((metric, *figures, text.interval(text.changed(c)), limit, text.amount(text.resolution(c))))
    for counted in counters:
        metric, _, limit = str(counted.limit).partition(":")
        change = text.counted(counted).removeprefix(metric).strip()
        rows.append((metric, f"{counted.baseline:,}", f"{counted.now:,}", f"{change}, counted", limit, "all"))
    return rows


def _evidence(outcome: Outcome, baseline: Baseline) -> str:
    """Return the numbers of launches and sessions of both sides."""
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


# What makes up half of a change is its main cause; where it is less, more comes from something else.
_MAIN_PART = 0.5


def rank_lines(outcome: Outcome, baseline: Baseline) -> Iterator[str]:
    """Yield what the ranks' own figures say about times that got worse, if any did."""
    assert outcome.verdict is not None
    assert outcome.measurement is not None
    sides = [outcome.measurement.samples, *(session.samples for session in baseline.measurements)]
    if len({len(side.rank_seconds[0]) for side in sides}) > 1:
        return
    change = _worst_change(outcome.verdict)
    sides = of_one_length(sides)
    if change is not None:
        yield from _cause_lines(outcome, change, sides)
    yield from _blocked(outcome.plan, now=sides[0], base=sides[-1])


def _worst_change(verdict: Verdict) -> Comparison | None:
    """Return the largest change for the worse that the verdict rests on: of wall time, if there is one."""
    worse = [c for c in verdict.comparisons if c.status is verdict.status and c.change.estimate > 0]
    return max(worse, key=lambda c: (not c.limit.is_cpu_time, c.change.estimate), default=None)


def _cause_lines(outcome: Outcome, change: Comparison, sides: Sequence[Samples]) -> Iterator[str]:
    q = change.limit.percentile
    rise = change.now_seconds - change.baseline_seconds
    of_it = f"of {text.more(rise)} at p{q:g}"
    rises = {}  # by figure: by how much each rank's rose, in seconds
    cpu = [side.cpu_seconds for side in sides if side.cpu_seconds is not None]
    if len(cpu) == len(sides):
        rises["CPU time"] = _rises(cpu, q)
        if (most := max(rises["CPU time"])) < rise * _MAIN_PART:
            yield f"CPU time: {text.more(most)} at most {of_it}: {_waiting(outcome)}"
    if not change.limit.is_cpu_time:
        rises["own step time"] = _rises([side.rank_seconds for side in sides], q)
    if outcome.plan.world_size > 1:
        main = {figure: by_rank for figure, by_rank in rises.items() if max(by_rank) >= rise * _MAIN_PART}
        yield _slowest([text.process(outcome, rank) for rank in range(outcome.plan.world_size)], main, of_it)


def _waiting(outcome: Outcome) -> str:
    """Return what else may cause a change that CPU time does not explain; it may still be real."""
    waited = "the rest is waiting (sleep, I/O, communication)"
    if outcome.baseline_side is not None:
        return f"{waited}; other load would be on both sides"
    return f"{waited} or other load on the machine: measure again when it is quiet, or with --ddp-against"


def _slowest(names: Sequence[str], main: dict[str, list[float]], of_it: str) -> str:
    """Return the ranks whose figure rose by a main part of the change, if the others' rose by less than half as much.

    `names` are by rank."""
    for figure, by_rank in main.items():
        slow = [rank for rank, rise in enumerate(by_rank) if rise > max(by_rank) / 2]
        if len(slow) < len(by_rank):
            rank_lines = ", ".join(names[rank].removeprefix("rank ") for rank in slow)
            theirs = text.span([by_rank[rank] for rank in slow], text.more)
            others = text.more(max(rise for rank, rise in enumerate(by_rank) if rank not in slow))
            who = f"slowest rank: {rank_lines}, its" if len(slow) == 1 else f"slowest ranks: {rank_lines}, their"
            return f"{who} {figure} {theirs} {of_it}; others {others} at most"
    if "CPU time" in main:
        everyone = text.span(main["CPU time"], text.more)
        return f"slowest rank: none; every rank's CPU time rose, {everyone} {of_it}"
    return "slowest rank: unknown (ranks wait for each other in collectives)"


def _rises(sides: Sequence[LaunchRankSteps], q: float) -> list[float]:
    """Return by how many seconds each rank's q-th percentile rose, from the mean over sessions to the first side."""
    now, *before = (by_rank(side, q) for side in sides)
    return [after - stats.geometric_mean(earlier) for after, *earlier in zip(now, *before, strict=True)]


def by_rank(durations: LaunchRankSteps, q: float) -> list[float]:
    """Return each rank's q-th percentile over launches, in seconds."""
    return [stats.percentile(tuple(launch[rank] for launch in durations), q) for rank in range(len(durations[0]))]


def _blocked(plan: Plan, *, now: Samples, base: Samples) -> Iterator[str]:
    """Yield how long each trainer waited for RPC in a step, and how much of the change that is."""
    if now.blocked_seconds is None or base.blocked_seconds is None:
        return
    waited, waits = medians(base.blocked_seconds), medians(now.blocked_seconds)
    took, takes = medians(base.rank_seconds), medians(now.rank_seconds)
    yield "blocked in RPC, at p50:"
    for rank, (before, after) in enumerate(zip(waited, waits, strict=True)):
        more = f"{text.more(after - before)} of the step's {text.more(takes[rank] - took[rank])}"
        yield f"  {plan.name(rank)}  {text.seconds(before)} -> {text.seconds(after)}  {more}"


def medians(durations: LaunchRankSteps) -> list[float]:
    """Return each rank's median over all steps of all launches, in seconds: there may be steps without any wait."""
    return [
        stats.quantile([step for launch in durations for step in launch[rank]], 50) for rank in range(len(durations[0]))
    ]
