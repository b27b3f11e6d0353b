"""The steps of a history, told: as text, as JSON, as CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pytest_ddpperf.history.judging import Found, Judged
from pytest_ddpperf.history.tracks import Mark, Track
from pytest_ddpperf.records import codec
from pytest_ddpperf.report import text

SCHEMA = 1

# Why a step fails nothing, in words.
_REASONS = {
    "within-limit": "within the limit",
    "undone": "undone since",
    "same-commit": "between runs of one commit: the machine, not the code",
    "suspected": "one point only: suspected",
}
_COLUMNS = (
    "status", "reason", "test", "environment", "metric", "change", "low", "high", "before_seconds", "after_seconds",
    "p_value", "before_commit", "commit", "committed", "points", "differences", "why",
)  # fmt: skip


def lines(judged: Judged) -> Iterator[str]:
    """The steps, worst first, and what they were looked for in."""
    for found in judged.found:
        yield f"{found.status}  {text.shortened(str(found.track.test))}  {text.shortened(found.track.environment)}"
        yield f"  {sentence(found)}"
        for line in told(found):
            yield f"  {line}"
        yield ""
    yield from apart(judged)
    yield summary(judged)


def sentence(found: Found) -> str:
    """A step without its verdict and its test."""
    run = found.after.run
    before, after = map(text.seconds, found.seconds)
    return (
        f"{found.metric} {text.interval(found.change)}, {before} -> {after}; "
        f"at {run.commit[:12]} of {run.committed[:10]}, after {found.before.run.commit[:12]}; "
        f"{text.several(found.points, 'point')} since"
    )


def told(found: Found) -> Iterator[str]:
    """Why it fails nothing, and what else changed there."""
    if found.reason in _REASONS:
        yield _REASONS[found.reason]
    if found.why:
        yield f"accepted: {text.shortened(found.why)}"
    if found.differences:
        yield f"there, too: {', '.join(map(text.shortened, found.differences))}"


def apart(judged: Judged) -> Iterator[str]:
    """What sets series apart that would else be one."""
    own = Counter((track.environment, track.told) for track in judged.tracks if track.told)
    for (environment, facts), number in own.items():
        whose = "its" if number == 1 else "their"
        yield f"{text.shortened(environment)}, {text.shortened(facts)}: {number} series of {whose} own"


def summary(judged: Judged) -> str:
    """The last line."""
    entries = {id(mark.entry): mark.entry for track in judged.tracks for mark in track.marks}
    commits = len({entry.run.commit for entry in entries.values()})
    runs = text.several(len(entries), "run")
    counts = [f"{number} {name}" for name, number in _counts(judged).items() if number]
    series = len(judged.tracks)
    short = f", {judged.short} too short to tell" if judged.short else ""
    return (
        f"{', '.join(counts) or 'no step'} in {series} series of {runs} at {text.several(commits, 'commit')}"
        f" ({', '.join(judged.metrics)}){short}"
    )


def _counts(judged: Judged) -> dict[str, int]:
    names = ["regressed", "improved", "suspected", "accepted", "undone", "within the limit", "of the machine"]
    counts = dict.fromkeys(names, 0)
    named = {"step": "", "within-limit": "within the limit", "same-commit": "of the machine"}
    for found in judged.found:
        counts[named.get(found.reason, found.reason) or found.status.value.lower()] += 1
    return counts


def data(judged: Judged) -> dict[str, Any]:
    """Everything, as plain JSON values; the schema is in docs/history.md."""
    return {
        "schema": SCHEMA,
        "metrics": list(judged.metrics),
        "steps": [_row(found) for found in judged.found],
        "series": [_series(track, judged) for track in judged.tracks],
    }


def _series(track: Track, judged: Judged) -> dict[str, Any]:
    return {
        "test": codec.encode(track.test),
        "environment": track.environment,
        "must_match": codec.encode(track.must_match),
        "points": [_point(mark, judged) for mark in track.marks],
    }


def _point(mark: Mark, judged: Judged) -> dict[str, Any]:
    run = mark.run
    launches = {metric: list(mark.kept.launch_seconds[metric]) for metric in judged.metrics}
    return {
        "commit": run.commit,
        "committed": run.committed,
        "created": run.created,
        "run_id": run.id,
        "launch_seconds": launches,
    }


def _row(found: Found) -> dict[str, Any]:
    run = found.after.run
    return {
        "status": found.status.value,
        "reason": found.reason,
        "test": codec.encode(found.track.test),
        "environment": found.track.environment,
        "must_match": codec.encode(found.track.must_match),
        "metric": found.metric,
        "change": codec.encode(found.change),
        "before_seconds": found.seconds[0],
        "after_seconds": found.seconds[1],
        "p_value": found.p_value,
        "before_commit": found.before.run.commit,
        "commit": run.commit,
        "committed": run.committed,
        "points": found.points,
        "differences": list(found.differences),
        "why": found.why,
    }


def table(judged: Judged) -> str:
    """CSV, a row a step; the change and its bounds are shares: 0.05 is 5 % slower."""
    buffer = io.StringIO()
    rows = csv.DictWriter(buffer, _COLUMNS, lineterminator="\n")
    rows.writeheader()
    for found in judged.found:
        row = {name: value for name, value in _row(found).items() if name in _COLUMNS}
        change = found.change
        rows.writerow(
            {
                **row,
                "test": str(found.track.test),
                "change": change.estimate,
                "low": change.low,
                "high": change.high,
                "differences": "; ".join(found.differences),
            }
        )
    return buffer.getvalue()
