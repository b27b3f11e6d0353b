"""What is told of a version that was measured beside the code at hand."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_ddpperf.records import BaselineSide, Outcome
from pytest_ddpperf.report import text

_FILES_NAMED = 5


def commits(beside: BaselineSide) -> str:
    """ "HEAD~1 (1a2b3c4d5e6f), now 5d6e7f8a9b0c with uncommitted changes"."""
    now = text.commit(beside.version.now).replace("-dirty", " with uncommitted changes")
    return f"{beside.version}, now {now}" if now else str(beside.version)


def files(beside: BaselineSide) -> str:
    """ "; 1 of 12 imported files differs: src/net.py"; "" where none was imported."""
    if beside.error or not beside.imported:
        return ""
    count = len(beside.differing)
    if not count:
        return f"; both sides imported the same, {text.several(beside.imported, 'file')}"
    named = ", ".join(beside.differing[:_FILES_NAMED]) + (", ..." if count > _FILES_NAMED else "")
    return f"; {count} of {beside.imported} imported files differ{'s' * (count == 1)}: {named}"


def evidence(outcome: Outcome) -> str:
    """What both sides are made of."""
    assert outcome.baseline_side is not None
    ways = "in turns, stretch by stretch" if outcome.baseline_side.stretches else "in turns"
    launches = f"{len(outcome.phases)} launches a side, {ways}"
    return f"evidence: {launches} (order by seed {outcome.baseline_side.seed}){files(outcome.baseline_side)}"


def missing(beside: BaselineSide) -> str:
    """Why there is nothing to compare with, in the other side's words."""
    return f"{beside.version} was not measured:\n{beside.error}"


def told(outcome: Outcome) -> Iterator[str]:
    """How far both sides differ and what would have been seen, for the summary of a run."""
    beside, verdict = outcome.baseline_side, outcome.verdict
    if beside is None or verdict is None or not verdict.status.compared:
        return
    parts = [f"{text.change(c)}, resolves {text.amount(text.resolution(c))}" for c in verdict.comparisons]
    parts.append(f"{len(outcome.phases)} launches a side{files(beside)}")
    yield f"against {beside.version}: {'; '.join(parts)}"
