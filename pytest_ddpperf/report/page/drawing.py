"""Draw figures with matplotlib as SVG images, each with its numbers as a table, in one HTML file."""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pytest_ddpperf.records.errors import MissingExtraError
from pytest_ddpperf.report import text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis


def check(what: str) -> None:
    """Raises MissingExtraError, about `what` was asked for, where a page could not be made here."""
    needed = {"matplotlib": "matplotlib", "jinja2": "Jinja2"}
    missing = tuple(name for module, name in needed.items() if find_spec(module) is None)
    if missing:
        raise MissingExtraError(what, missing, "report")


def rendered(template: str, **content: Any) -> str:
    """A page, by a template of this folder. Whatever `content` holds is escaped, but for what a template calls safe,
    and what moves a cursor or turns the direction of writing around is spelt out."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("pytest_ddpperf.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.filters["breakable"] = _breakable
    return environment.get_template(template).render(**content)


def _breakable(name: str) -> Any:
    """A long name, which a narrow screen breaks where its parts end."""
    from markupsafe import Markup

    return Markup("<wbr>").join(re.split(r"(?<=[/:_\[-])(?=\w)", text.printable(name)))


def _printable(value: Any) -> Any:
    return text.printable(value) if type(value) is str else value  # not of Markup, which is safe


# As in the style sheet, where its ground is white: figures are drawn on white, in a dark page, too.
INK, FAINT = "#1c2126", "#d3d9df"
CURRENT, BASELINE, LIMIT = "#0a5cc2", "#9a5b00", "#b3261e"
BAD, GOOD = "#b3261e", "#136f3a"

_INCHES = (5.0, 2.6)  # as wide as a phone, so that its letters can be read there
_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # with a date, no two pages would be the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]  # the first cell names a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An entry of a legend; `mark` is its name in the style sheet."""

    mark: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    title: str
    description: str
    image: str  # a data URI
    keys: tuple[Key, ...]
    head: tuple[str, ...]  # of the table; the first column names a row
    rows: tuple[tuple[str, ...], ...]


class Sheet:
    """Draws the figures of a page. Used within `style`."""

    def __init__(self) -> None:
        from matplotlib.figure import Figure as Drawing

        self._drawing = Drawing(figsize=_INCHES, layout="constrained")

    def figure(self, draw: Callable[[Axes], None], title: str, description: str, **content: Any) -> Figure:
        """Return the figure that `draw` puts on new axes."""
        self._drawing.clear()
        axes = self._drawing.subplots()
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        draw(axes)
        file = io.BytesIO()
        self._drawing.savefig(file, format="svg", metadata=_METADATA)
        image = f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
        return Figure(title=title, description=description, image=image, **content)


@contextmanager
def style() -> Iterator[None]:
    """Use matplotlib's own settings, not the user's, and silence its warnings: under -W error they would end a run
    whose tests are over."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import matplotlib

        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ddpperf", "font.size": 11})
            yield


def show_seconds(axis: Axis) -> None:
    """Label an axis in s, ms or us."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(unit="s"))


def show_shares(axis: Axis) -> None:
    """Label an axis in percent."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0))
