"""Stored baselines in words: a table of them, and one by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from pytest_ddpperf.records import Baseline, Recording, Scalar
from pytest_ddpperf.report import text
from pytest_ddpperf.verdict import differing, stats

_TITLES = ("", "sessions", "last", "commit", "resolves")
_LONGEST_LINE = 1_000  # characters, of facts
_PERCENTILES = (10, 50, 90, 95)


def table(environment: str, baselines: Iterable[Baseline]) -> Iterator[str]:
    """Those of one environment, a row a test, by what their last session tells."""
    rows = []
    for baseline in baselines:
        last = baseline.sessions[-1]
        name = text.shortened(str(baseline.test))
        rows.append(
            (name, str(len(baseline.sessions)), _day(last), text.commit(last.commit) or "-", _resolves(last) or "-")
        )
    yield environment
    yield from (f"  {line}" for line in text.aligned([_TITLES, *rows]))


def one(path: Path, baseline: Baseline) -> Iterator[str]:
    """All that a baseline's file says but its samples."""
    environment = baseline.measurements[0].environment
    yield text.shortened(str(baseline.test))
    yield f"  file        {path}"
    yield f"  key         {_facts(environment.key)}"
    yield f"  must match  {_facts(environment.must_match)}"
    for number, session in enumerate(baseline.sessions, 1):
        yield f"  session {number} of {len(baseline.sessions)}"
        yield from (f"    {line}" for line in _session(session))
    for before, after in pairwise(baseline.sessions):
        recorded = [session.measurement.environment.recorded for session in (after, before)]
        if changed := differing(*recorded):
            yield f"  {_day(before)} -> {_day(after)}: {text.shortened(', '.join(changed), _LONGEST_LINE)}"
    if len(baseline.sessions) == 1:
        yield "  one session cannot tell how far sessions drift apart: --ddp-extend-baseline on another day adds one"
    else:
        levels = [_percentile(session, 50) for session in baseline.sessions]
        apart = text.amount(max(levels) / min(levels) - 1)
        yield f"  p50 of its sessions: {text.span(levels, text.seconds)}, {apart} apart"


def _session(session: Recording) -> Iterator[str]:
    samples, recorded = session.measurement.samples, session.measurement.environment.recorded
    made = [session.created or "at an unknown time", f"commit {session.commit or 'unknown'}"]
    made += [f"{name} {recorded[name]}" for name in ("host", "torch") if recorded.get(name)]
    yield text.shortened(", ".join(made), _LONGEST_LINE)
    figures = ", ".join(f"p{q} {text.seconds(_percentile(session, q))}" for q in _PERCENTILES)
    yield f"{samples.launches} launches of {samples.steps} steps: {figures}"
    if resolves := _resolves(session):
        yield f"resolves {resolves}"
    known = {name: count for name, count in session.measurement.counters.items() if count}
    if known:
        yield f"a step: {', '.join(f'{name} {count:,}' for name, count in sorted(known.items()))}"
    if session.files:
        yield f"code: {len(session.files)} files of the repository, {len(session.distributions)} distributions"


def _percentile(session: Recording, q: float) -> float:
    return stats.geometric_mean(stats.launch_quantiles(session.measurement.samples.step_seconds, q))


def _facts(facts: Mapping[str, Scalar]) -> str:
    told = ", ".join(f"{name} {value}" for name, value in sorted(facts.items()))
    return text.shortened(told, _LONGEST_LINE)


def _day(session: Recording) -> str:
    return session.created.partition("T")[0] or "unknown"


def _resolves(session: Recording) -> str:
    """What two measurements like it would tell."""
    found = session.resolution.items()
    return ", ".join(f"{metric} {text.amount(text.resolved(metric, time))}" for metric, time in found)
