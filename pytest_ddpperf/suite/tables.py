"""The results of the experiments of a run, shown at its end."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pytest_ddpperf import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes


PHASES = ("forward", "backward", "optimizer")
ALONE, OVERLAPPED, NOT_OVERLAPPED = (
    "without communication",
    "overlapped",
    "not overlapped",
)


T = TypeVar("T")


class Tables:
    """The tables of a run, and what was skipped."""

    def __init__(self) -> None:
        self.skipped: list[tuple[str, str]] = []  # name of a test, and the reason
        self.drawn: list[Path] = []
        self.problem = ""  # with drawing
        self.plots: list[Plot] = []  # of single tests
        self._tables: dict[type[Any], Any] = {}
        self._rows: dict[str, list[Mapping[str, object]]] = {}  # by title
        # by title and column
        self._columns: dict[str, dict[str, Mapping[str, object]]] = {}
        self._texts: list[Iterable[str]] = []

    def get(self, kind: type[T]) -> T:
        """Return the table of that kind, made empty: it has `lines()` as its users know them, and
        `plots()`."""
        table: T = self._tables.setdefault(kind, kind())
        return table

    def add(self, title: str, **cells: object) -> None:
        """Add a row to the plain table of that title; underscores in column names become spaces."""
        self._rows.setdefault(title, []).append(
            {name.replace("_", " "): cell for name, cell in cells.items()}
        )

    def add_column(self, title: str, name: str, cells: Mapping[str, object]) -> None:
        """Add a column to the table of that title, with a cell for each row."""
        self._columns.setdefault(title, {})[name] = cells

    def add_text(self, text: Iterable[str]) -> None:
        """Add a table that is text already."""
        self._texts.append(text)

    def lines(self) -> Iterator[str]:
        """Yield all tables, then what was skipped and drawn."""
        for text in (*self._texts, *(table.lines() for table in self._tables.values())):
            yield from (*text, "")
        for title, rows in self._rows.items():
            yield from (
                title,
                *markdown(
                    [
                        list(rows[0]),
                        *([str(cell) for cell in row.values()] for row in rows),
                    ]
                ),
                "",
            )
        for title, columns in self._columns.items():
            names = next(iter(columns.values()))
            by_row = [
                [name, *(str(cells[name]) for cells in columns.values())]
                for name in names
            ]
            yield from (title, *markdown([["", *columns], *by_row]), "")
        yield from self._not_measured()
        yield from (f"drawn: {path}" for path in self.drawn)
        if self.problem:
            yield self.problem

    def _not_measured(self) -> Iterator[str]:
        """Yield a line per test and reason, with all parameters that have it."""
        alike: dict[tuple[str, str], list[str]] = {}
        for name, reason in sorted(self.skipped):
            test, _, parameters = name.partition("[")
            alike.setdefault((test, reason), []).append(parameters.removesuffix("]"))
        for (test, reason), each in alike.items():
            yield (
                f"skipped: {test}" + f"[{', '.join(each)}]" * any(each) + f": {reason}"
            )

    def all_plots(self) -> Iterator[Plot]:
        """Yield the figures of all tables."""
        for table in self._tables.values():
            yield from table.plots()
        yield from self.plots


def markdown(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a Markdown table; the first row has the titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in (rows[0], [":" + "-" * (width - 1) for width in widths], *rows[1:]):
        yield (
            "| "
            + " | ".join(
                cell.ljust(width) for cell, width in zip(row, widths, strict=True)
            )
            + " |"
        )


_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def describe(result: Result, *further: str, heading: str) -> Iterator[str]:
    """Yield versions and, below the heading, the topology, in the form of PyTorch's benchmarks."""
    facts = result.environment.recorded
    yield f"* PyTorch version: {facts.get('torch')}"
    yield f"* CUDA version: {facts.get('cuda')}"
    yield from further
    yield ""
    yield heading
    yield ""
    if shutil.which("nvidia-smi") is None:
        yield "(there is no nvidia-smi)"
        return
    called = subprocess.run(
        ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False
    )
    # it underlines the titles of columns
    yield from _ESCAPE.sub("", called.stdout or called.stderr).splitlines()


def slowest_ranks(
    launches: Iterable[Sequence[Sequence[float | None]]],
) -> list[list[float]]:
    """Return launch x step: the value of the rank that recorded the most."""
    return [
        [
            max(value for value in step if value is not None)
            for step in zip(*launch, strict=True)
        ]
        for launch in launches
    ]


def spread_of(result: Result, iterations: int = 1) -> Spread:
    """Return p50 of an iteration, of all launches, the fastest and the slowest; a step may have
    several."""
    each = [median(launch) / iterations for launch in result.step_seconds]
    return Spread(result.p50 / iterations, min(each), max(each))


class Latencies:
    """Step times by experiment and variant, compared with the variant that was measured first."""

    def __init__(self) -> None:
        # By experiment, ranks and variant: the result, and how many iterations a step has.
        self._results: dict[str, dict[int, dict[str, tuple[Result, int]]]] = {}

    def add(
        self, experiment: str, variant: str, result: Result, iterations: int = 1
    ) -> None:
        """Add a variant, whose step may have several iterations."""
        # fewer ranks may have found devices
        by_ranks = self._results.setdefault(f"{experiment}, {result.backend}", {})
        by_ranks.setdefault(result.world_size, {})[variant] = result, iterations

    def lines(self) -> Iterator[str]:
        for experiment, by_ranks in self._results.items():
            for ranks, taken in sorted(by_ranks.items()):
                yield (
                    f"{experiment}, {ranks} ranks (p50 of an iteration; from the fastest launch to"
                    " the slowest)"
                )
                spreads = {
                    variant: spread_of(*measured) for variant, measured in taken.items()
                }
                first = next(iter(spreads.values())).middle
                fastest = min(spread.middle for spread in spreads.values())
                for variant, spread in spreads.items():
                    best = "  fastest" * (spread.middle == fastest and len(spreads) > 1)
                    yield f"  {variant:>28}:  {spread}  {spread.middle / first - 1:+7.1%}{best}"

    def plots(self) -> Iterator[Plot]:
        for experiment, by_ranks in self._results.items():
            over_ranks: dict[str, dict[int, Spread]] = {}
            for ranks, taken in sorted(by_ranks.items()):
                seconds = {}
                for variant, (result, iterations) in taken.items():
                    seconds[variant] = [
                        step / iterations
                        for launch in result.step_seconds
                        for step in launch
                    ]
                    over_ranks.setdefault(variant, {})[ranks] = spread_of(
                        result, iterations
                    )
                yield boxes(f"{experiment}, {ranks} ranks", experiment, seconds)
            if len(by_ranks) > 1:
                yield _plot_over_ranks(f"{experiment} over ranks", over_ranks)


class Scaling:
    """Step times by model over numbers of ranks, each rank with the same work."""

    def __init__(self) -> None:
        self._spreads: dict[str, dict[int, Spread]] = {}

    def add(self, model: str, result: Result) -> None:
        self._spreads.setdefault(f"{model}, {result.backend}", {})[
            result.world_size
        ] = spread_of(result)

    def lines(self) -> Iterator[str]:
        yield (
            "Latency over ranks (p50; from the fastest launch to the slowest; efficiency: compared"
            " with the fewest)"
        )
        for model, by_ranks in self._spreads.items():
            first = by_ranks[min(by_ranks)].middle
            for ranks, spread in sorted(by_ranks.items()):
                yield f"  {model:>20} {ranks:>4} ranks:  {spread}  {first / spread.middle:7.0%}"

    def plots(self) -> Iterator[Plot]:
        yield _plot_over_ranks("Latency over ranks", self._spreads)


def _plot_over_ranks(title: str, spreads: Mapping[str, Mapping[int, Spread]]) -> Plot:
    sorted_spreads = {
        name: {float(ranks): points[ranks] for ranks in sorted(points)}
        for name, points in spreads.items()
    }
    return lines(title, "ranks", "seconds an iteration", sorted_spreads)


class Breakdown:
    """Step times by phase: medians over steps, of the slowest rank."""

    def __init__(self) -> None:
        # By model and ranks, then by variant: a launch's phases.
        self._taken: dict[str, dict[str, list[dict[str, float]]]] = {}

    def add(self, model: str, variant: str, result: Result) -> None:
        by_phase = {
            phase: list(map(median, slowest_ranks(result.recorded[phase])))
            for phase in PHASES
        }
        launches = [
            dict(zip(by_phase, launch, strict=True))
            for launch in zip(*by_phase.values(), strict=True)
        ]
        self._taken.setdefault(
            f"{model}, {result.backend}, {result.world_size} ranks", {}
        )[variant] = launches

    def _parts(self) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
        """Yield, by model and ranks, the phases of each variant over launches, with communication
        separated."""
        for trained, by_variant in self._taken.items():
            means = {
                variant: {
                    phase: fmean(launch[phase] for launch in launches)
                    for phase in PHASES
                }
                for variant, launches in by_variant.items()
            }
            alone = means.get(ALONE, {}).get("backward")
            yield (
                trained,
                {
                    variant: _separate(phases, alone)
                    for variant, phases in means.items()
                },
            )

    def lines(self) -> Iterator[str]:
        for trained, parts in self._parts():
            yield (
                f"Latency breakdown, {trained} (p50 of each phase; communication: what it adds to"
                " backward)"
            )
            yield (
                f"  {'':>24} {'forward':>11} {'backward':>11} {'communication':>14}"
                f" {'optimizer':>11} {'total':>11}"
            )
            totals = {variant: sum(each.values()) for variant, each in parts.items()}
            for variant, each in parts.items():
                apart = (
                    f"{each['communication']:13.6f}s"
                    if "communication" in each
                    else f"{'-':>14}"
                )
                cells = (
                    f"{each['forward']:10.6f}s {each['backward']:10.6f}s {apart}"
                    f" {each['optimizer']:10.6f}s"
                )
                yield f"  {variant:>24} {cells} {totals[variant]:10.6f}s"
            if {OVERLAPPED, NOT_OVERLAPPED} <= totals.keys():
                saved = 1 - totals[OVERLAPPED] / totals[NOT_OVERLAPPED]
                share = f"{'saves' if saved >= 0 else 'costs'} {abs(saved):.0%}"
                yield (
                    f"  overlap {share} of a step (the paper, ResNet-50: 38 % over NCCL, 27 % over"
                    " Gloo)"
                )

    def plots(self) -> Iterator[Plot]:
        for trained, parts in self._parts():
            wholes = {}
            for variant, launches in self._taken[trained].items():
                each = [sum(launch.values()) for launch in launches]
                wholes[variant] = Spread(fmean(each), min(each), max(each))
            yield stacks(f"Latency breakdown, {trained}", parts, wholes)


class BestBuckets:
    """Which bucket size is the fastest for each model."""

    def __init__(self) -> None:
        # By backend and ranks, then by model: megabytes of its gradients, and p50 by megabytes of a
        # bucket.
        self._taken: dict[str, dict[str, tuple[float, dict[int, float]]]] = {}

    def add(self, model: str, gradients: float, bucket: int, result: Result) -> None:
        by_model = self._taken.setdefault(
            f"{result.backend}, {result.world_size} ranks", {}
        )
        by_model.setdefault(model, (gradients, {}))[1][bucket] = result.p50

    def lines(self) -> Iterator[str]:
        for where, by_model in self._taken.items():
            best = [
                f"{min(p50, key=p50.__getitem__)} MB for {model} ({gradients:.0f} MB of gradients)"
                for model, (gradients, p50) in sorted(
                    by_model.items(), key=lambda each: each[1][0]
                )
            ]
            yield f"Fastest bucket size, {where}: {', '.join(best)}"

    def plots(self) -> Iterable[Plot]:
        return ()


def _separate(phases: Mapping[str, float], alone: float | None) -> dict[str, float]:
    """Divide the backward pass into the time it takes alone, if that is known, and what
    communication adds."""
    if alone is None:
        return dict(phases)
    computed = min(phases["backward"], alone)
    return {
        "forward": phases["forward"],
        "backward": computed,
        "communication": phases["backward"] - computed,
        "optimizer": phases["optimizer"],
    }


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
    """Plot a box per variant, from p25 to p75 of its steps, with a line at p50 and points for
    outliers."""

    def draw(axes: Axes) -> None:
        axes.boxplot(list(seconds.values()), tick_labels=list(seconds))
        axes.set(xlabel=across, ylabel="seconds an iteration", ylim=(0, None))

    return Plot(title, draw)


def lines(
    title: str, across: str, upwards: str, spreads: Mapping[str, Mapping[float, Spread]]
) -> Plot:
    """Plot a line per variant, with bars from the least to the most, or a band if there are many
    points."""

    def draw(axes: Axes) -> None:
        for name, points in spreads.items():
            places = list(points)
            middle, least, most = (
                list(part) for part in zip(*points.values(), strict=True)
            )
            if len(points) > 10:
                (line,) = axes.plot(places, middle, label=name)
                axes.fill_between(
                    places, least, most, color=line.get_color(), alpha=0.25, linewidth=0
                )
            else:
                axes.errorbar(
                    places,
                    middle,
                    yerr=_errors(middle, least, most),
                    marker="o",
                    capsize=3,
                    label=name,
                )
        axes.set(xlabel=across, ylabel=upwards, ylim=(0, None))
        if across == "ranks":
            axes.set_xscale("log", base=2)
            places = sorted({place for points in spreads.values() for place in points})
            axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.legend()

    return Plot(title, draw)


def stacks(
    title: str, parts: Mapping[str, Mapping[str, float]], wholes: Mapping[str, Spread]
) -> Plot:
    """Plot a bar per variant, made of its parts, with a line from the least to the most of the
    whole."""

    def draw(axes: Axes) -> None:
        variants = list(parts)
        bottom = [0.0] * len(variants)
        for part in dict.fromkeys(part for each in parts.values() for part in each):
            heights = [parts[variant].get(part, 0.0) for variant in variants]
            axes.bar(variants, heights, bottom=bottom, label=part, width=0.6)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        middle, least, most = zip(
            *(wholes[variant] for variant in variants), strict=True
        )
        axes.errorbar(
            variants,
            middle,
            yerr=_errors(middle, least, most),
            fmt="none",
            ecolor="black",
            capsize=4,
        )
        axes.set(ylabel="seconds an iteration")
        axes.legend()

    return Plot(title, draw)


def _errors(
    middle: Sequence[float], least: Sequence[float], most: Sequence[float]
) -> list[list[float]]:
    return [
        [abs(m - end) for m, end in zip(middle, ends, strict=True)]
        for ends in (least, most)
    ]


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
        path = (
            folder / f"{re.sub('[^a-z0-9]+', '-', plot.title.lower()).strip('-')}.png"
        )
        figure.savefig(path, dpi=150)
        yield path
