"""What the experiments of a run came to, to be told at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar


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
    rows = [["", *names], *([row, *(str(cells[name].get(row, "-")) for name in names)] for row in cells[names[0]])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ruled = [rows[0], [":" + "-" * (width - 1) for width in widths], *rows[1:]]
    for row in ruled:
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
