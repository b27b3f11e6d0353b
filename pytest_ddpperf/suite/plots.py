"""Figures of the experiments, as the DDP paper's; only they need matplotlib."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Spread(NamedTuple):
    """A figure of several launches or seeds: one for all of them, and from the least to the most."""

    middle: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.middle:.6f}s ({self.least:.6f} to {self.most:.6f})"


class Plot(Protocol):
    """One figure."""

    @property
    def title(self) -> str:
        """Names its file, too."""

    def draw(self, axes: Axes) -> None:
        """On axes that have nothing yet."""


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """A box a variant, from p25 to p75 of its steps, with a line at p50; what lies far beside are points."""

    title: str
    across: str  # what variants are of
    seconds: Mapping[str, Sequence[float]]

    def draw(self, axes: Axes) -> None:
        axes.boxplot(list(self.seconds.values()), tick_labels=list(self.seconds))
        axes.set(xlabel=self.across, ylabel="seconds an iteration", ylim=(0, None))


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A line a variant, and from the least to the most as bars, or as a band where there are many points."""

    title: str
    across: str
    upwards: str
    lines: Mapping[str, Mapping[float, Spread]]  # by variant, then by what is across
    doubling: bool = False  # whether what is across doubles from point to point

    def draw(self, axes: Axes) -> None:
        for name, points in self.lines.items():
            places = list(points)
            middle, least, most = (list(part) for part in zip(*points.values(), strict=True))
            if len(points) > 10:
                (line,) = axes.plot(places, middle, label=name)
                axes.fill_between(places, least, most, color=line.get_color(), alpha=0.25, linewidth=0)
                continue
            bars = [[abs(m - end) for m, end in zip(middle, ends, strict=True)] for ends in (least, most)]
            axes.errorbar(places, middle, yerr=bars, marker="o", capsize=3, label=name)
        axes.set(xlabel=self.across, ylabel=self.upwards, ylim=(0, None))
        if self.doubling:
            axes.set_xscale("log", base=2)
            places = sorted({place for points in self.lines.values() for place in points})
            axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.legend()


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """A bar a variant, of parts that follow one another; a line from the least to the most of the whole."""

    title: str
    parts: Mapping[str, Mapping[str, float]]  # by variant, then by part: seconds
    wholes: Mapping[str, Spread]  # by variant

    def draw(self, axes: Axes) -> None:
        variants = list(self.parts)
        below = [0.0] * len(variants)
        for part in dict.fromkeys(part for parts in self.parts.values() for part in parts):
            heights = [self.parts[variant].get(part, 0.0) for variant in variants]
            axes.bar(variants, heights, bottom=below, label=part, width=0.6)
            below = [b + h for b, h in zip(below, heights, strict=True)]
        middle, least, most = zip(*(self.wholes[variant] for variant in variants), strict=True)
        bars = [[abs(m - end) for m, end in zip(middle, ends, strict=True)] for ends in (least, most)]
        axes.errorbar(variants, middle, yerr=bars, fmt="none", ecolor="black", capsize=4)
        axes.set(ylabel="seconds an iteration")
        axes.legend()


def drawable() -> bool:
    """Whether there is a matplotlib that has what is used of it."""
    try:
        major, minor, *_ = metadata.version("matplotlib").split(".")
    except (metadata.PackageNotFoundError, ValueError):
        return False
    return (int(major), int(minor)) >= (3, 9)


def save(plots: Iterable[Plot], folder: Path) -> Iterator[Path]:
    """A file a plot, named as it is; the folder is made."""
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
