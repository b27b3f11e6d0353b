"""Collectives as nccl-tests tells them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_ddpperf.records import Outcome
from pytest_ddpperf.report import text
from pytest_ddpperf.verdict import stats

_TITLES = ("", "op", "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong")
_UNITS = ("", "", "(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "")


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A row a size, at p50; nothing where no collective was measured."""
    rows = [_row(outcome) for outcome in outcomes if outcome.plan.collective and outcome.measurement]
    if rows:
        yield ""
        yield from text.aligned([_TITLES, _UNITS, *rows])


def _row(outcome: Outcome) -> tuple[str, ...]:
    asked, measured = outcome.plan.collective, outcome.measurement
    assert asked is not None
    assert measured is not None
    seconds = stats.geometric_mean(stats.launch_quantiles(measured.samples.step_seconds, 50))
    return (
        f"{outcome.nodeid} on {outcome.plan.world_size} {outcome.plan.backend}",
        asked.op,
        str(asked.size),
        str(asked.count),
        asked.dtype,
        asked.redop,
        str(asked.root),
        f"{seconds * 1e6:.5g}",
        f"{asked.algbw(seconds):.3g}",
        f"{asked.busbw(seconds):.3g}",
        "0",  # a wrong result ends its launch
    )
