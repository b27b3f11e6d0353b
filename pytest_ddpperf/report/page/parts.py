"""What a page is made of within its shell: figures, each with its numbers, and tables. Knows nothing of what they
show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_ddpperf.report.page.canvas import Canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]  # the first cell names a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a mark stands for; `mark` is its name in the style sheet."""

    mark: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    title: str
    told: str  # what it shows, in words
    svg: str
    keys: tuple[Key, ...]
    head: tuple[str, ...]  # of the table; the first column names a row
    rows: tuple[tuple[str, ...], ...]


class Sheet:
    """Draws the figures of a page, each with ids of its own."""

    def __init__(self) -> None:
        self._canvas = Canvas()
        self._drawn = 0

    def figure(self, draw: Callable[[Axes], None], title: str, told: str, **what: Any) -> Figure:
        self._drawn += 1
        svg = self._canvas.svg(draw, key=f"f{self._drawn}", title=title, description=told)
        return Figure(title=title, told=told, svg=svg, **what)
