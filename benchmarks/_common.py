"""What the benchmarks share: quartiles, a table, progress on stderr."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pytest_ddpperf.launch import Launcher
from pytest_ddpperf.launch.template import Templates
from pytest_ddpperf.wire.source_trees import Trees


class Quartiles(NamedTuple):
    first: float
    median: float
    third: float


def quartiles(values: Sequence[float]) -> Quartiles:
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def spread(values: Sequence[float], unit: str, scale: float = 1.0) -> str:
    """Median and quartiles: "0.067 s [0.064, 0.072]"."""
    first, median, third = (value * scale for value in quartiles(values))
    return f"{median:.3g} {unit} [{first:.3g}, {third:.3g}]"


def table(rows: Sequence[Sequence[str]]) -> str:
    """The rows in columns, the first row as titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    )


@contextmanager
def launchers_of_both_sides(
    modules: Mapping[str, str], trees: Trees | None = None
) -> Iterator[list[Launcher]]:
    """Two launchers whose rank servers are forked from one template, as those of a comparison
    are."""
    ours, theirs = Templates(), Templates()
    theirs.add(ours.fork_server(os.environ)[0].detach(), os.environ)
    launchers = [
        Launcher(lambda: modules, trees=trees, templates=templates)
        for templates in (ours, theirs)
    ]
    try:
        yield launchers
    finally:
        for launcher in launchers:
            launcher.close()


def done(results: Path) -> list[dict[str, Any]]:
    """The rows of a results file so far; a last line that an interrupt cut short is dropped, from
    the file too."""
    lines = (
        results.read_text().splitlines(keepends=True)
        if results.exists()
        else []
    )
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        results.write_text("".join(lines))
    return [json.loads(line) for line in lines]


def progress(done: int, of: int, what: str) -> None:
    """One line that is overwritten on a terminal, or a line at every tenth."""
    if sys.stderr.isatty():
        print(
            f"\r{what}: {done}/{of}\x1b[K",
            end="" if done < of else "\n",
            file=sys.stderr,
            flush=True,
        )
    elif done and done % max(1, of // 10) == 0:
        print(f"{what}: {done}/{of}", file=sys.stderr, flush=True)


def verdict(promises: Sequence[tuple[str, bool]]) -> int:
    """Print what was promised and whether it held; the exit status."""
    for promise, holds in promises:
        print(f"{'held  ' if holds else 'BROKEN'}  {promise}")
    return 0 if all(holds for _, holds in promises) else 1


def binomial_interval(count: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share that was seen `count` times `of` so many.

    C. J. Clopper and E. S. Pearson, "The use of confidence or fiducial limits illustrated in the
    case of the binomial", Biometrika 26 (1934); by bisection of the binomial distribution.
    """

    def at_most(most: int, share: float) -> float:
        inside, outside = math.log(share), math.log1p(-share)
        # By logarithms: the number of ways is beyond a float for a thousand trials.
        ways = (
            math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1)
            for k in range(most + 1)
        )
        return math.fsum(
            math.exp(way + k * inside + (of - k) * outside)
            for k, way in enumerate(ways)
        )

    def solved(most: int, target: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if at_most(most, middle) > target
                else (low, middle)
            )
        return low

    return (0.0 if count == 0 else solved(count - 1, 0.975)), (
        1.0 if count == of else solved(count, 0.025)
    )
