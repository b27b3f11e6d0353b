"""What the experiments of a run came to, to be told at its end."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pytest_ddpperf import Result
from pytest_ddpperf.suite.plots import Plot


class Table:
    """One experiment's; made empty."""

    def lines(self) -> Iterator[str]:
        """In the form in which its users know it."""
        raise NotImplementedError

    def plots(self) -> Iterable[Plot]:
        """None unless an experiment says otherwise."""
        return ()


_T = TypeVar("_T", bound=Table)


class Tables:
    """Those of a run, and what was skipped."""

    def __init__(self) -> None:
        self.skipped: list[tuple[str, str]] = []  # name of a test, and the reason
        self.drawn: list[Path] = []
        self.problem = ""  # with drawing
        self._tables: dict[type[Any], Table] = {}

    def of(self, kind: type[_T]) -> _T:
        """The table of that kind."""
        table = self._tables.setdefault(kind, kind())
        assert isinstance(table, kind)
        return table

    def lines(self) -> Iterator[str]:
        for table in self._tables.values():
            yield from table.lines()
            yield ""
        yield from self._not_measured()
        yield from (f"drawn: {path}" for path in self.drawn)
        if self.problem:
            yield self.problem

    def _not_measured(self) -> Iterator[str]:
        """A line a test and reason, with all parameters that it has: a size or a machine leaves out many alike."""
        alike: dict[tuple[str, str], list[str]] = {}
        for name, reason in sorted(self.skipped):
            test, _, parameters = name.partition("[")
            alike.setdefault((test, reason), []).append(parameters.removesuffix("]"))
        for (test, reason), each in alike.items():
            yield f"skipped: {test}" + f"[{', '.join(each)}]" * any(each) + f": {reason}"

    def plots(self) -> Iterator[Plot]:
        for table in self._tables.values():
            yield from table.plots()


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
