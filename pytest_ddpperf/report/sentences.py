"""Sentences about a measurement: its verdict, what it was compared with, and the reason. The same in every report."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_ddpperf.records import BaselineSide, Outcome, Status, Verdict
from pytest_ddpperf.report import text

# A reason code in words, with the next step.
_WHY_NOT_GATED = {
    "saving": "its figures become the baseline",
    "disabled": "--ddp-disable",
    "gate-off": "gate=False",
    "debugging-variable": "a debugging variable (CUDA_LAUNCH_BLOCKING, TORCH_DISTRIBUTED_DEBUG=DETAIL or "
    "NCCL_DEBUG=TRACE) is set: unset it",
    "no-supported-limit": "no limit has support: raise --ddp-steps or --ddp-launches",
}

_WHY_INCONCLUSIVE = {
    "not-significant": "launches and sessions differ as much by themselves",
    "not-confirmed": "further launches did not confirm it",
}
_RECOMPILED = "INCONCLUSIVE: most launches recompiled within their window: raise --ddp-warmup"


def verdict_of(outcome: Outcome) -> str:
    return str(outcome.verdict) if outcome.verdict is not None else "not measured"


def summary_lines(outcome: Outcome) -> Iterator[str]:
    """Yield the lines about a measurement that stand below the table."""
    name, verdict = text.name(outcome), outcome.verdict
    if verdict is None or verdict.status not in (Status.PASS, Status.REGRESSED):  # which the table, a failure, say
        yield f"{name}: {sentence(outcome)}"
    if verdict is not None:
        if outcome.stored_verdict is not None and verdict.status is Status.PASS:
            changes = ", ".join(text.change(c) for c in outcome.stored_verdict.comparisons)
            yield f"{name}: {changes} against the baseline; measured again next to its own code:"
        yield from (f"{name}: {line}" for line in (*left_out(verdict), *comparison_lines(outcome)))
    yield from (f"{name}: {note}" for note in outcome.notes)


def sentence(outcome: Outcome) -> str:
    """Return the verdict, the change that decided, and the reason if it is not obvious."""
    verdict = outcome.verdict
    if verdict is None:
        return f"not measured: {outcome.error}"
    if outcome.stored_verdict is not None and verdict.reason == "machine-slower":
        return f"INCONCLUSIVE: {machine_slower(outcome)}"
    if verdict.reason == "recompiled":
        return _RECOMPILED
    if verdict.status is Status.INCONCLUSIVE:
        why = _WHY_INCONCLUSIVE.get(verdict.reason, verdict.reason)
        return f"INCONCLUSIVE: {_changes(outcome)}: beyond the limit, but {why}"
    if verdict.status is Status.IMPROVED:
        accept = ": --ddp-save-baseline makes it the new baseline" if _stored(outcome) else ""
        return f"IMPROVED: {_changes(outcome)}{accept}"
    if verdict.status is Status.NO_BASELINE and _stored(outcome):
        return f"NO BASELINE at {outcome.baseline_path}: record one with --ddp-save-baseline"
    if verdict.status is Status.NOT_GATED and outcome.saved:
        earlier = outcome.saved - 1
        before = f", in addition to {text.several(earlier, 'earlier session')}" if earlier else ""
        return f"saved {outcome.baseline_path}, {len(outcome.phases)} launches{before}"
    return f"{verdict}: {_changes(outcome) if verdict.status.compared else why_not_compared(outcome)}"


def why_not_compared(outcome: Outcome) -> str:
    """Return why nothing was compared, and what to do."""
    assert outcome.verdict is not None
    if outcome.verdict.status is Status.NO_BASELINE:
        return _missing(outcome)
    return _incomparable(outcome) if outcome.verdict.status is Status.INCOMPARABLE else _not_gated(outcome)


def _stored(outcome: Outcome) -> bool:
    """Return whether it was compared with a stored baseline alone, which can be saved again."""
    return outcome.baseline_side is None and bool(outcome.baseline_path)


def machine_slower(outcome: Outcome) -> str:
    """Say why a suspicion is not the code's."""
    assert outcome.stored_verdict is not None
    changes = ", ".join(text.change(c) for c in outcome.stored_verdict.comparisons)
    return (
        f"{changes} against the baseline, but the machine is slower: the baseline's own code, measured again next to "
        "today's, is as slow (files outside the repository were not checked)"
    )


def left_out(verdict: Verdict) -> Iterator[str]:
    """Yield what was not compared: default limits without support, each reason once, and the steps of other nodes."""
    if verdict.first_node:
        yield "the clocks of the nodes are not known closely enough for its steps: those of the first node are compared"
    limits: dict[str, list[str]] = {}
    for line in verdict.dropped:
        limit, _, reason = line.partition(": ")
        limits.setdefault(reason, []).append(limit)
    for reason, of_it in limits.items():
        yield f"dropped the default limit{'s' * (len(of_it) > 1)} {', '.join(of_it)}: {reason}"


def _missing(outcome: Outcome) -> str:
    """Return why there is nothing to compare with."""
    if outcome.baseline_side is not None:
        return not_measured(outcome.baseline_side)
    at = outcome.baseline_path
    return f"there is no baseline at {at}" if at else "there is nothing to compare it with"


def _changes(outcome: Outcome) -> str:
    assert outcome.verdict is not None
    verdict = outcome.verdict
    same = [f"{text.change(c)} (limit {c.limit})" for c in verdict.comparisons if c.status is verdict.status]
    same += [f"{text.counted(c)} (limit {c.limit})" for c in verdict.counters if c.status is verdict.status]
    return "; ".join(same)


def _incomparable(outcome: Outcome) -> str:
    """Return why the baseline cannot be compared, and what to do."""
    assert outcome.verdict is not None
    reason, differences = outcome.verdict.reason, ", ".join(outcome.verdict.differences)
    if reason == "no-cpu-time-now":
        return "CPU time is limited, and the ranks used none"
    if reason == "unknown-counter-now":
        return f"{differences}: launches differ, or do not report it, so no limit can apply"
    why = {
        "no-cpu-time": "CPU time is limited, and the baseline has none",
        "baseline-support": f"the baseline has too few steps: {differences}",
    }.get(reason, differences)
    if not _stored(outcome):
        return why
    return f"{why}; record a new baseline with --ddp-save-baseline, or measure as it was recorded"


def _not_gated(outcome: Outcome) -> str:
    """Return why nothing was compared."""
    assert outcome.verdict is not None
    if outcome.verdict.reason == "saving":
        return f"not saved: {outcome.error or 'the test did not pass as a whole, or this is a rerun'}"
    return _WHY_NOT_GATED.get(outcome.verdict.reason, outcome.verdict.reason)


def compared_commits(side: BaselineSide) -> str:
    """ "HEAD~1 (1a2b3c4d5e6f), now 5d6e7f8a9b0c with uncommitted changes"."""
    now = text.commit(side.version.now).replace("-dirty", " with uncommitted changes")
    return f"{side.version}, now {now}" if now else str(side.version)


def imported_files(side: BaselineSide) -> str:
    """ "; 1 of 12 imported files differs: src/net.py"; "" if none was imported."""
    if side.error or not side.imported:
        return ""
    count = len(side.differing)
    if not count:
        return f"; both sides imported the same, {text.several(side.imported, 'file')}"
    return f"; {count} of {side.imported} imported files differ{'s' * (count == 1)}: {text.some(side.differing)}"


def interleaved_evidence(outcome: Outcome) -> str:
    """Return what both sides were measured with."""
    assert outcome.baseline_side is not None
    side = outcome.baseline_side
    how = "interleaved step by step" if side.stretches else "interleaved launch by launch"
    launches = f"{len(outcome.phases)} launches a side, {how}"
    return f"evidence: {launches} (order by seed {side.seed}){imported_files(side)}"


def not_measured(side: BaselineSide) -> str:
    """Return why the baseline side has no measurement: its own error."""
    return f"{side.version} was not measured:\n{side.error}"


def comparison_lines(outcome: Outcome) -> Iterator[str]:
    """Yield the changes, the smallest detectable changes and the files that differ, for the end of a run."""
    side, verdict = outcome.baseline_side, outcome.verdict
    if side is None or verdict is None or not verdict.status.compared:
        return
    parts = [f"{text.change(c)}, resolves {text.amount(text.resolution(c))}" for c in verdict.comparisons]
    parts.append(f"{len(outcome.phases)} launches a side{imported_files(side)}")
    yield f"against {side.version}: {'; '.join(parts)}"
