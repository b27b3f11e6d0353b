"""The table of stored baselines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pytest_ddpperf.records import Baseline, Recording
from pytest_ddpperf.report import text

_TITLES = ("", "sessions", "last", "commit", "resolves")


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


def _day(session: Recording) -> str:
    return session.created.partition("T")[0] or "unknown"


def _resolves(session: Recording) -> str:
    """What two measurements like it would tell."""
    found = session.resolution.items()
    return ", ".join(f"{metric} {text.amount(text.resolved(metric, time))}" for metric, time in found)
