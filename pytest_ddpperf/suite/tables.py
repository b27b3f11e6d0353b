"""What the experiments of a run came to, to be told at its end."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pytest_ddpperf import Result


class Table(Protocol):
    """One experiment's; made empty."""

    def lines(self) -> Iterator[str]:
        """In the form in which its users know it."""


_T = TypeVar("_T", bound=Table)


class Tables:
    """Those of a run, and what was skipped."""

    def __init__(self) -> None:
        self.listed: dict[str, str] = {}  # by experiment, what it is for, where only that is asked
        self.skipped: list[tuple[str, str]] = []  # name of a test, and the reason
        self._tables: dict[type[Any], Table] = {}

    def of(self, kind: type[_T]) -> _T:
        """The table of that kind."""
        table = self._tables.setdefault(kind, kind())
        assert isinstance(table, kind)
        return table

    def lines(self) -> Iterator[str]:
        width = max(map(len, self.listed), default=0)
        yield from (f"{name:{width}}  {purpose}" for name, purpose in self.listed.items())
        for table in self._tables.values():
            yield from table.lines()
            yield ""
        yield from (f"skipped: {name}: {reason}" for name, reason in sorted(self.skipped))


def columns(cells: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    """A Markdown table of a column a variant, a row a figure; `cells` by column, then by row."""
    names = list(cells)
    yield from markdown(
        [["", *names], *([row, *(str(cells[name].get(row, "-")) for name in names)] for row in cells[names[0]])]
    )


def markdown(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first row has the titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in (rows[0], [":" + "-" * (width - 1) for width in widths], *rows[1:]):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"


def about(result: Result, *further: str) -> Iterator[str]:
    """Versions, backend and topology, as PyTorch's benchmarks have them."""
    facts = result.environment.recorded
    yield f"* PyTorch version: {facts.get('torch')}"
    yield f"* CUDA version: {facts.get('cuda')}"
    yield f"* Distributed backend: {result.backend}"
    yield from further
    yield ""
    yield "--- nvidia-smi topo -m ---"
    yield ""
    if shutil.which("nvidia-smi") is None:
        yield "(there is no nvidia-smi)"
        return
    asked = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
    yield from (asked.stdout or asked.stderr).splitlines()


class Latencies:
    """Step times by experiment and variant, beside the first variant's."""

    def __init__(self) -> None:
        self._results: dict[str, dict[str, tuple[Result, int]]] = {}  # and how many iterations a step has
        self._variants: dict[str, list[str]] = {}

    def add(
        self, experiment: str, variant: str, result: Result, *, among: Iterable[object], iterations: int = 1
    ) -> None:
        """`among` are all variants, in order: the first that was measured is what others are held beside."""
        where = f"{experiment}, {result.world_size} {result.backend} ranks"
        self._variants[where] = list(map(str, among))
        self._results.setdefault(where, {})[variant] = result, iterations

    def lines(self) -> Iterator[str]:
        for experiment, by_variant in self._results.items():
            yield experiment
            measured = [variant for variant in self._variants[experiment] if variant in by_variant]
            each = {variant: _each(by_variant[variant]) for variant in measured}
            first, fastest = each[measured[0]], min(each.values())
            for variant, seconds in each.items():
                best = "  fastest" * (seconds == fastest and len(each) > 1)
                yield f"  {variant:>28}:  p50  {seconds:.6f}s  {seconds / first - 1:+7.1%}{best}"


def _each(taken: tuple[Result, int]) -> float:
    result, iterations = taken
    return result.p50 / iterations
