"""Figures of the experiments, as in the DDP paper. Only they need matplotlib."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Spread(NamedTuple):
    """A value over several launches or seeds, with the least and the most."""

    middle: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.middle:.6f}s ({self.least:.6f} to {self.most:.6f})"


class Plot(NamedTuple):
    """One figure."""

    title: str  # names its file, too
    draw: Callable[[Axes], None]


def boxes(title: str, across: str, seconds: Mapping[str, Sequence[float]]) -> Plot:
    """Plot a box per variant, from p25 to p75 of its steps, with a line at p50 and points for outliers."""

    def draw(axes: Axes) -> None:
        axes.boxplot(list(seconds.values()), tick_labels=list(seconds))
        axes.set(xlabel=across, ylabel="seconds an iteration", ylim=(0, None))

    return Plot(title, draw)


def lines(title: str, across: str, upwards: str, spreads: Mapping[str, Mapping[float, Spread]]) -> Plot:
    """Plot a line per variant, with bars from the least to the most, or a band if there are many points."""

    def draw(axes: Axes) -> None:
        for name, points in spreads.items():
            places = list(points)
            middle, least, most = (list(part) for part in zip(*points.values(), strict=True))
            if len(points) > 10:
                (line,) = axes.plot(places, middle, label=name)
                axes.fill_between(places, least, most, color=line.get_color(), alpha=0.25, linewidth=0)
            else:
                axes.errorbar(places, middle, yerr=_errors(middle, least, most), marker="o", capsize=3, label=name)
        axes.set(xlabel=across, ylabel=upwards, ylim=(0, None))
        if across == "ranks":
            axes.set_xscale("log", base=2)
            places = sorted({place for points in spreads.values() for place in points})
            axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.legend()

    return Plot(title, draw)


def stacks(title: str, parts: Mapping[str, Mapping[str, float]], wholes: Mapping[str, Spread]) -> Plot:
    """Plot a bar per variant, made of its parts, with a line from the least to the most of the whole."""

    def draw(axes: Axes) -> None:
        variants = list(parts)
        bottom = [0.0] * len(variants)
        for part in dict.fromkeys(part for each in parts.values() for part in each):
            heights = [parts[variant].get(part, 0.0) for variant in variants]
            axes.bar(variants, heights, bottom=bottom, label=part, width=0.6)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        middle, least, most = zip(*(wholes[variant] for variant in variants), strict=True)
        axes.errorbar(variants, middle, yerr=_errors(middle, least, most), fmt="none", ecolor="black", capsize=4)
        axes.set(ylabel="seconds an iteration")
        axes.legend()

    return Plot(title, draw)


def _errors(middle: Sequence[float], least: Sequence[float], most: Sequence[float]) -> list[list[float]]:
    return [[abs(m - end) for m, end in zip(middle, ends, strict=True)] for ends in (least, most)]


def save(plots: Iterable[Plot], folder: Path) -> Iterator[Path]:
    """Write a file per plot, named by its title, into a folder that is made."""
    from matplotlib.figure import Figure

    for plot in plots:
        folder.mkdir(parents=True, exist_ok=True)
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(plot.title)
        axes.grid(axis="y", alpha=0.3)
        plot.draw(axes)
        path = folder / f"{re.sub('[^a-z0-9]+', '-', plot.title.lower()).strip('-')}.png"
        figure.savefig(path, dpi=150)
        yield path
