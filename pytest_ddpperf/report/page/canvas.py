"""Figures as SVG that stands in a page: drawn by matplotlib, coloured by the page's style, described for who cannot see
them.

Knows nothing of what is drawn. No text of users may reach matplotlib, which would read its dollar signs as formulas:
labels on axes are figures and names of ours.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# By their names in the style sheet, so that a page in the dark is drawn in other ones. Matplotlib, which must be told
# some colour, writes these, and they are put into words afterwards.
COLOURS = {
    "ink": "#000001", "now": "#000002", "base": "#000003", "limit": "#000004", "faint": "#000005",
    "bad": "#000006", "open": "#000007", "good": "#000008",
}  # fmt: skip
INK, NOW, BASE, LIMIT, FAINT, BAD, OPEN, GOOD = COLOURS.values()
GROUND = "#000009"  # behind a figure: the inside of hollow marks

_WIDTH, _HEIGHT = (
    360.0,
    185.0,
)  # points, which are the units of a figure: as wide as a phone, so that text is read there
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 20.0, 8.0, 30.0  # margins
_TICKS = 5  # on an axis, about
_INNER = _WIDTH - _LEFT - _RIGHT
_LETTERS = 11  # points high
_LETTER = 6.5  # points wide, about
_UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns"))


class Canvas:
    """One figure of matplotlib's, drawn on again and again: to make axes costs as much as to draw on them. For the same
    reason they have no ticks of matplotlib's, each of which is laid out three times. Used within `style`."""

    def __init__(self) -> None:
        from matplotlib.figure import Figure

        self._figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72), dpi=72)
        self._figure.patch.set_visible(False)
        self._axes = self._figure.add_axes((0, 0, 1, 1))
        self._axes.set_axis_off()
        self._axes.autoscale(False)

    def svg(
        self, draw: Callable[[Axes], None], *, key: str, title: str, description: str, height: float = _HEIGHT
    ) -> str:
        """What `draw` puts on axes that have nothing yet, as markup. `key` is this figure's alone in its page: ids
        begin with it."""
        from matplotlib.backends.backend_svg import RendererSVG

        new_renderer: Any = RendererSVG  # which has no types
        axes, text = self._axes, io.StringIO()
        self._figure.set_figheight(height / 72)
        inner = (_WIDTH - _LEFT - _RIGHT) / _WIDTH, (height - _TOP - _BOTTOM) / height
        axes.set_position((_LEFT / _WIDTH, _BOTTOM / height, *inner))
        try:
            draw(axes)
            renderer = new_renderer(_WIDTH, height, text, metadata=dict.fromkeys(_METADATA))
            self._figure.draw(renderer)
            renderer.finalize()
        finally:
            for artist in [*axes.lines, *axes.collections, *axes.patches, *axes.texts]:
                artist.remove()
        return _as_part_of_a_page(text.getvalue(), key, title, description, height)


# What matplotlib would write of itself; with a date, no two pages would be the same.
_METADATA = ("Date", "Creator", "Format", "Type")


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib's own settings, whatever the user's are, and nothing of what it has to say of itself: under -W error
    that would end a run whose tests are over."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import matplotlib

        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ddpperf", "path.simplify": False})
            yield


def along(axes: Axes, places: Sequence[float], labels: Sequence[str], *, ends: tuple[float, float]) -> None:
    """What is across the figure, from end to end: as many of the labels as have room."""
    longest = max(map(len, labels), default=1)
    room = max(1, int(_INNER / (_LETTER * (longest + 1))))
    every = -(-len(places) // room)
    _below(axes, list(places)[::every], list(labels)[::every], ends)


def across(axes: Axes, low: float, high: float, labels: Callable[[Sequence[float]], list[str]]) -> None:
    """What is across the figure, where it is a figure."""
    places = _ticks(low, high)
    _below(axes, places, labels(places), (low, high))


def _below(axes: Axes, places: Sequence[float], labels: Sequence[str], ends: tuple[float, float]) -> None:
    axes.set_xlim(*ends)
    style: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "color": INK, "fontsize": _LETTERS}
    for place, label in zip(places, labels, strict=True):
        axes.text(place, -0.05, label, ha="center", va="top", **style)


def upwards(axes: Axes, values: Sequence[float], labels: Callable[[Sequence[float]], list[str]]) -> None:
    """What is upwards: from the least to the largest of the values, with lines at round ones."""
    low, high = min(values), max(values)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    places = _ticks(low - pad, high + pad)
    beside(axes, places, labels(places), ends=(low - pad, high + pad))


def beside(axes: Axes, places: Sequence[float], labels: Sequence[str], *, ends: tuple[float, float]) -> None:
    """Lines through the figure, with labels to their left."""
    axes.set_ylim(*ends)
    lines = [(0.0, place, 1.0, place) for place in (ends[0], *places)]
    style: dict[str, Any] = {"transform": axes.get_yaxis_transform()}
    segments(axes, lines, color=FAINT, linewidth=0.6, zorder=0, **style)
    for place, label in zip(places, labels, strict=True):
        axes.text(-0.02, place, label, ha="right", va="center_baseline", color=INK, fontsize=_LETTERS, **style)


def above(axes: Axes, marks: Sequence[tuple[float, str, str, str]]) -> None:
    """Shapes at the top, and beside each its label where there is room; the first marks have it first. A mark is place,
    shape, colour, label."""
    left, right = axes.get_xlim()
    taken: list[tuple[float, float]] = []
    for place, shape, colour, label in marks:
        at = (place - left) / (right - left) * _INNER
        width = _LETTER * len(label) + 1.5 * _LETTERS
        to_the_left = at + width > _INNER
        start = at - width + _LETTERS / 2 if to_the_left else at - _LETTERS / 2
        clear = all(start + width <= a or b <= start for a, b in taken)
        taken.append((start, start + width) if clear else (at - _LETTERS / 2, at + _LETTERS / 2))
        words = [label, shape] if to_the_left else [shape, label]
        axes.text(
            (at + (_LETTERS if to_the_left else -_LETTERS) / 2) / _INNER,
            0.95,
            " ".join(filter(None, words)) if clear else shape,
            ha="right" if to_the_left else "left",
            va="center_baseline",
            color=colour,
            fontsize=_LETTERS,
            transform=axes.transAxes,
        )


def below(axes: Axes, places: Sequence[float]) -> None:
    """Small marks at the bottom."""
    style: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "color": INK, "linestyle": "none"}
    axes.plot(places, [0.02] * len(places), marker="D", markersize=3.5, clip_on=False, **style)


def durations(places: Sequence[float]) -> list[str]:
    """In seconds, written in one unit, so that they can be told apart and their distance is seen."""
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if max(places, default=0) * scale >= 1), _UNITS[-1])
    return [f"{place * scale:.6g} {unit}" for place in places]


def shares(places: Sequence[float]) -> list[str]:
    """Relative changes."""
    return [f"{place * 100:+.6g} %" if place else "0" for place in places]


def _ticks(low: float, high: float) -> list[float]:
    """Round ones."""
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(_TICKS, steps=(1, 2, 5, 10)).tick_values(low, high)
    return [float(tick) for tick in found if low <= tick <= high]


def segments(axes: Axes, ends: Iterable[tuple[float, float, float, float]], **style: Any) -> None:
    """Lines from (x, y) to (x, y) as one path: a page has thousands."""
    lines = list(ends)
    x = [value for a, _, b, _ in lines for value in (a, b, math.nan)]
    y = [value for _, a, _, b in lines for value in (a, b, math.nan)]
    axes.plot(x, y, **{"solid_capstyle": "butt"} | style)


def _as_part_of_a_page(svg: str, key: str, title: str, description: str, height: float) -> str:
    """Without what only a file of its own needs, with ids of its own, and described."""
    body = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"<[^>]*>", lambda tag: _tag(tag[0], key), body)
    body = re.sub(r">\s+<", "><", body).strip()
    while (shorter := re.sub(r"<g></g>|<defs></defs>|<g>((?:<(?!g\b)[^>]*/>)*)</g>", r"\1", body)) != body:
        body = shorter
    head = f'<svg viewBox="0 0 {_WIDTH:g} {height:g}" role="img" aria-labelledby="{key}-t {key}-d">'
    told = f'<title id="{key}-t">{escape(title)}</title><desc id="{key}-d">{escape(description)}</desc>'
    return f"{head}{told}{body}</svg>"


def _tag(tag: str, key: str) -> str:
    # Of groups nobody asks for; markers and clips are referred to, and every figure has its own.
    tag = re.sub(r'(<g\b[^>]*?) id="[^"]*"', r"\1", tag)
    tag = re.sub(r' id="', f' id="{key}-', tag)
    tag = re.sub(r'(?:xlink:)?href="#', f'href="#{key}-', tag).replace("url(#", f"url(#{key}-")
    tag = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", tag)
    tag = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", tag)
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    tag = re.sub(r"(\.\d)\d+", r"\1", tag)  # a tenth of a point
    for name, colour in COLOURS.items():
        tag = tag.replace(colour, "currentColor" if name == "ink" else f"var(--{name})")
    tag = tag.replace(GROUND, "var(--ground)")
    return re.sub(r"\s+", " ", tag).replace(": ", ":").replace("; ", ";")
