"""Which rank made a step slower, and how much of that was work: as far as what is measured tells.

Ranks wait for each other in collectives, so one that is late makes the steps of all longer, its own no more than the
others'. CPU time, which waiting does not use, shows who worked more; who slept or waited for I/O nothing shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_ddpperf.records import Baseline, Comparison, LaunchRankSteps, Outcome, Plan, Samples, Verdict
from pytest_ddpperf.report import text
from pytest_ddpperf.verdict import of_one_length, stats

# What makes up half of a change is its main cause; where it is less, more comes from something else.
_MAIN_PART = 0.5


def told(outcome: Outcome, baseline: Baseline) -> Iterator[str]:
    """What the ranks' own figures say of the times that got worse, if any did."""
    assert outcome.verdict is not None
    assert outcome.measurement is not None
    sides = [outcome.measurement.samples, *(session.samples for session in baseline.measurements)]
    if len({len(side.rank_seconds[0]) for side in sides}) > 1:
        return
    change = _change(outcome.verdict)
    sides = of_one_length(sides)
    if change is not None:
        yield from _explained(outcome, change, sides)
    yield from _blocked(outcome.plan, now=sides[0], base=sides[-1])


def _change(verdict: Verdict) -> Comparison | None:
    """The largest change for the worse that the verdict rests on: of wall time, if there is one."""
    worse = [c for c in verdict.comparisons if c.status is verdict.status and c.change.estimate > 0]
    return max(worse, key=lambda c: (not c.limit.is_cpu_time, c.change.estimate), default=None)


def _explained(outcome: Outcome, change: Comparison, sides: Sequence[Samples]) -> Iterator[str]:
    q = change.limit.percentile
    rise = change.now_seconds - change.baseline_seconds
    of_it = f"of {text.more(rise)} at p{q:g}"
    rises = {}  # by figure: by how much each rank's rose, in seconds
    cpu = [side.cpu_seconds for side in sides if side.cpu_seconds is not None]
    if len(cpu) == len(sides):
        rises["CPU time"] = _rises(cpu, q)
        if (most := max(rises["CPU time"])) < rise * _MAIN_PART:
            yield f"CPU time: {text.more(most)} at most {of_it}: {_waited(outcome)}"
    if not change.limit.is_cpu_time:
        rises["own step time"] = _rises([side.rank_seconds for side in sides], q)
    if outcome.plan.world_size > 1:
        main = {figure: by_rank for figure, by_rank in rises.items() if max(by_rank) >= rise * _MAIN_PART}
        yield _slowest([text.process(outcome, rank) for rank in range(outcome.plan.world_size)], main, of_it)


def _waited(outcome: Outcome) -> str:
    """What a change is that CPU time does not explain. It may be real, so it acquits nobody."""
    waited = "the rest is waiting (sleep, I/O, communication)"
    if outcome.baseline_side is not None:
        return f"{waited}; other load would be on both sides"
    return f"{waited} or other load on the machine: measure again when it is quiet, or with --ddp-against"


def _slowest(names: Sequence[str], main: dict[str, list[float]], of_it: str) -> str:
    """The ranks whose figure rose by a main part of the change, and the others' by less than half as much; `names` are
    by rank."""
    for figure, by_rank in main.items():
        slow = [rank for rank, rise in enumerate(by_rank) if rise > max(by_rank) / 2]
        if len(slow) < len(by_rank):
            told = ", ".join(names[rank].removeprefix("rank ") for rank in slow)
            theirs = text.span([by_rank[rank] for rank in slow], text.more)
            others = text.more(max(rise for rank, rise in enumerate(by_rank) if rank not in slow))
            who = f"slowest rank: {told}, its" if len(slow) == 1 else f"slowest ranks: {told}, their"
            return f"{who} {figure} {theirs} {of_it}; others {others} at most"
    if "CPU time" in main:
        everyone = text.span(main["CPU time"], text.more)
        return f"slowest rank: none stands out; every rank's CPU time rose, {everyone} {of_it}"
    return "slowest rank: not told: ranks wait for each other, so one that is late makes the steps of all longer"


def _rises(sides: Sequence[LaunchRankSteps], q: float) -> list[float]:
    """By how many seconds each rank's q-th percentile rose, from the mean over sessions to the first side."""
    now, *before = (_by_rank(side, q) for side in sides)
    return [after - stats.geometric_mean(earlier) for after, *earlier in zip(now, *before, strict=True)]


def _by_rank(durations: LaunchRankSteps, q: float) -> list[float]:
    """Each rank's q-th percentile over launches, in seconds."""
    return [
        stats.geometric_mean(stats.launch_quantiles(tuple(launch[rank] for launch in durations), q))
        for rank in range(len(durations[0]))
    ]


def _blocked(plan: Plan, *, now: Samples, base: Samples) -> Iterator[str]:
    """How much of a step each trainer waited for RPC, and how much of the change that is."""
    if now.blocked_seconds is None or base.blocked_seconds is None:
        return
    waited, waits = _medians(base.blocked_seconds), _medians(now.blocked_seconds)
    took, takes = _medians(base.rank_seconds), _medians(now.rank_seconds)
    yield "blocked in RPC, at p50:"
    for rank, (before, after) in enumerate(zip(waited, waits, strict=True)):
        more = f"{text.more(after - before)} of the step's {text.more(takes[rank] - took[rank])}"
        yield f"  {plan.name(rank)}  {text.seconds(before)} -> {text.seconds(after)}  {more}"


def _medians(durations: LaunchRankSteps) -> list[float]:
    """Each rank's median over all steps of all launches, in seconds: there may be steps without any wait."""
    return [
        stats.quantile([step for launch in durations for step in launch[rank]], 50) for rank in range(len(durations[0]))
    ]
