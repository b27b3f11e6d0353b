"""The results of the experiments of a run, shown at its end."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pytest_ddpperf import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Lines = Iterator[str]  # of a report
PHASES = ("forward", "backward", "optimizer")
ALONE = "without communication"
OVERLAPPED = "overlapped"
NOT_OVERLAPPED = "not overlapped"
PERCENTILES = (50, 75, 90, 95)  # of PyTorch's benchmarks
_SECONDS = "seconds an iteration"  # along an axis

T = TypeVar("T")


class Tables:
    """The tables of a run, and what was skipped."""

    def __init__(self) -> None:
        # name of a test, and the reason
        self.skipped: list[tuple[str, str]] = []
        self.plots: list[Plot] = []  # of single tests
        self._tables: dict[type[Any], Any] = {}
        # by whether they are columns, and title
        self._rows: dict[tuple[bool, str], list[Mapping[str, object]]] = {}
        self._texts: list[Iterable[str]] = []

    def get(self, kind: type[T]) -> T:
        """Return the table of that kind, made empty: it has `lines()` as its users know them, and
        `plots()`."""
        return self._tables.setdefault(kind, kind())

    def add(
        self, title: str, cells: Mapping[str, object], *, column: bool = False
    ) -> None:
        """Add a row, or a `column`, to the plain table of that title."""
        self._rows.setdefault((column, title), []).append(cells)

    def add_text(self, text: Iterable[str]) -> None:
        """Add a table that is text already."""
        self._texts.append(text)

    def lines(self) -> Lines:
        """Yield all tables, then what was skipped."""
        texts = [
            *self._texts,
            *(table.lines() for table in self._tables.values()),
        ]
        for key in sorted(self._rows, key=itemgetter(0)):
            texts.append(self._plain_table(*key))
        for text in texts:
            yield from text
            yield ""
        yield from self._not_measured()

    def _plain_table(self, are_columns: bool, title: str) -> Lines:
        rows = self._rows[are_columns, title]
        table: list[Sequence[str]] = [list(rows[0])]
        for row in rows:
            table.append([str(cell) for cell in row.values()])
        if are_columns:
            table = list(zip(*table, strict=True))
        yield title
        yield from markdown(table)

    def _not_measured(self) -> Lines:
        """Yield a line per test and reason, with all parameters that have it."""
        alike: dict[tuple[str, str], list[str]] = {}
        for name, reason in sorted(self.skipped):
            test, _, parameters = name.partition("[")
            alike.setdefault((test, reason), []).append(
                parameters.removesuffix("]")
            )
        for (test, reason), each in alike.items():
            parameters = f"[{', '.join(each)}]" if any(each) else ""
            yield f"skipped: {test}{parameters}: {reason}"

    def all_plots(self) -> Iterator[Plot]:
        """Yield the figures of all tables."""
        for table in self._tables.values():
            yield from table.plots()
        yield from self.plots


def markdown(rows: Sequence[Sequence[str]]) -> Lines:
    """Yield a Markdown table; the first row has the titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line_below_titles = [":".ljust(width, "-") for width in widths]
    for row in (rows[0], line_below_titles, *rows[1:]):
        cells = [
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ]
        yield f"| {' | '.join(cells)} |"


_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def describe(result: Result, *further: str, heading: str) -> Lines:
    """Yield versions and, below the heading, the topology, in the form of PyTorch's benchmarks."""
    facts = result.environment.recorded
    yield f"* PyTorch version: {facts.get('torch')}"
    yield f"* CUDA version: {facts.get('cuda')}"
    yield from further
    yield ""
    yield heading
    yield ""
    yield from topology()


def topology() -> list[str]:
    """Return nvidia-smi's matrix of what links the GPUs of this machine."""
    if shutil.which("nvidia-smi") is None:
        return ["(there is no nvidia-smi)"]
    called = subprocess.run(
        ["nvidia-smi", "topo", "-m"],
        capture_output=True,
        text=True,
        check=False,
    )
    # it underlines the titles of columns
    return _ESCAPE.sub("", called.stdout or called.stderr).splitlines()


def percentile_cells(percentile: Callable[[float], float], count: float) -> str:
    """Return the seconds at each percentile and the rate of so many examples, as PyTorch's
    benchmarks show them."""
    cells = ""
    for q in PERCENTILES:
        seconds = percentile(q)
        cells += f"  p{q:02d}:  {seconds:1.3f}s  {count / seconds:6.0f}/s"
    return cells


def slowest_ranks(
    launches: Iterable[Sequence[Sequence[float | None]]],
) -> list[list[float]]:
    """Return launch x step: the value of the rank that recorded the most."""
    slowest = []
    for launch in launches:
        steps = zip(*launch, strict=True)
        # a rank may have recorded nothing
        slowest.append([max(value or 0.0 for value in step) for step in steps])
    return slowest


class Spread(NamedTuple):
    """A value over several launches or seeds, with the least and the most."""

    middle: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.middle:.6f}s ({self.least:.6f} to {self.most:.6f})"


def spread_of(result: Result, iterations: int = 1) -> Spread:
    """Return p50 of an iteration, of all launches, the fastest and the slowest; a step may have
    several."""
    each = [median(launch) / iterations for launch in result.step_seconds]
    return Spread(result.p50 / iterations, min(each), max(each))


def spread_around_mean(values: Sequence[float]) -> Spread:
    """Return the mean, the least and the most of some values."""
    return Spread(fmean(values), min(values), max(values))


class Timing(NamedTuple):
    """The seconds of an iteration: in all launches, and in each step."""

    spread: Spread
    steps: list[float]


class Latencies:
    """Step times by experiment and variant, compared with the variant that was measured first."""

    def __init__(self) -> None:
        # by experiment, ranks and variant
        self._taken: dict[str, dict[int, dict[str, Timing]]] = {}

    def add(
        self, experiment: str, variant: str, result: Result, iterations: int = 1
    ) -> None:
        """Add a variant, whose step may have several iterations."""
        # fewer ranks may have found devices
        by_ranks = self._taken.setdefault(f"{experiment}, {result.backend}", {})
        steps = [
            step / iterations
            for launch in result.step_seconds
            for step in launch
        ]
        timing = Timing(spread_of(result, iterations), steps)
        by_ranks.setdefault(result.world_size, {})[variant] = timing

    def lines(self) -> Lines:
        for experiment, by_ranks in self._taken.items():
            for ranks, taken in sorted(by_ranks.items()):
                yield (
                    f"{experiment}, {ranks} ranks (p50 of an iteration; from the fastest launch to"
                    " the slowest)"
                )
                middles = [timing.spread.middle for timing in taken.values()]
                for variant, (spread, _) in taken.items():
                    change = spread.middle / middles[0] - 1
                    row = f"  {variant:>28}:  {spread}  {change:+7.1%}"
                    if len(taken) > 1 and spread.middle == min(middles):
                        row += "  fastest"
                    yield row

    def plots(self) -> Iterator[Plot]:
        for experiment, by_ranks in self._taken.items():
            over_ranks: dict[str, dict[float, Spread]] = {}
            for ranks, taken in sorted(by_ranks.items()):
                steps = {
                    variant: timing.steps for variant, timing in taken.items()
                }
                yield boxes(f"{experiment}, {ranks} ranks", experiment, steps)
                for variant, timing in taken.items():
                    over_ranks.setdefault(variant, {})[ranks] = timing.spread
            if len(by_ranks) > 1:
                title = f"{experiment} over ranks"
                yield lines(title, "ranks", _SECONDS, over_ranks)


class Scaling:
    """Step times by model over numbers of ranks, each rank with the same work."""

    def __init__(self) -> None:
        self._spreads: dict[str, dict[float, Spread]] = {}

    def add(self, model: str, result: Result) -> None:
        by_ranks = self._spreads.setdefault(f"{model}, {result.backend}", {})
        by_ranks[result.world_size] = spread_of(result)

    def lines(self) -> Lines:
        yield (
            "Latency over ranks (p50; from the fastest launch to the slowest; efficiency: compared"
            " with the fewest)"
        )
        for model, by_ranks in self._spreads.items():
            first = by_ranks[min(by_ranks)].middle
            for ranks, spread in sorted(by_ranks.items()):
                yield f"  {model:>20} {ranks:>4} ranks:  {spread}  {first / spread.middle:7.0%}"

    def plots(self) -> Iterator[Plot]:
        yield lines("Latency over ranks", "ranks", _SECONDS, self._spreads)


class Breakdown:
    """Step times by phase: medians over steps, of the slowest rank."""

    COLUMNS = ("forward", "backward", "communication", "optimizer", "total")

    def __init__(self) -> None:
        # By model and ranks, variant and phase: the seconds of each launch.
        self._taken: dict[str, dict[str, dict[str, list[float]]]] = {}

    def add(self, model: str, variant: str, result: Result) -> None:
        trained = f"{model}, {result.backend}, {result.world_size} ranks"
        phases = self._taken.setdefault(trained, {}).setdefault(variant, {})
        for phase in PHASES:
            launches = slowest_ranks(result.recorded[phase])
            phases[phase] = [median(launch) for launch in launches]

    def _parts(self, trained: str) -> dict[str, dict[str, float]]:
        """Return the mean phases of each variant, with communication separated: the backward pass
        takes as long as alone, if that is known, and communication adds the rest."""
        parts = {
            variant: {phase: fmean(each) for phase, each in phases.items()}
            for variant, phases in self._taken[trained].items()
        }
        if ALONE in parts:
            alone = parts[ALONE]["backward"]
            for mean in parts.values():
                whole = mean["backward"]
                mean["backward"] = min(whole, alone)
                mean["communication"] = max(whole - alone, 0.0)
                mean["optimizer"] = mean.pop("optimizer")  # which comes last
        return parts

    def lines(self) -> Lines:
        for trained in self._taken:
            yield (
                f"Latency breakdown, {trained} (p50 of each phase; communication: what it adds to"
                " backward)"
            )
            titles = [name.rjust(14) for name in self.COLUMNS]
            yield f"  {'':>24} {' '.join(titles)}"
            totals = {}
            for variant, phases in self._parts(trained).items():
                totals[variant] = sum(phases.values())
                phases["total"] = totals[variant]
                row = f"  {variant:>24}"
                for name in self.COLUMNS:
                    cell = f"{phases[name]:.6f}s" if name in phases else "-"
                    row += f" {cell:>14}"
                yield row
            if OVERLAPPED in totals and NOT_OVERLAPPED in totals:
                saved = 1 - totals[OVERLAPPED] / totals[NOT_OVERLAPPED]
                yield (
                    f"  overlap {'saves' if saved >= 0 else 'costs'} {abs(saved):.0%} of a step"
                    " (the paper, ResNet-50: 38 % over NCCL, 27 % over Gloo)"
                )

    def plots(self) -> Iterator[Plot]:
        for trained, by_variant in self._taken.items():
            wholes = {}
            for variant, phases in by_variant.items():
                launches = zip(*phases.values(), strict=True)
                wholes[variant] = spread_around_mean(
                    [sum(each) for each in launches]
                )
            yield stacks(
                f"Latency breakdown, {trained}", self._parts(trained), wholes
            )


class BestBuckets:
    """Which bucket size is the fastest for each model."""

    def __init__(self) -> None:
        # By backend and ranks: the megabytes of a model's gradients and its name, and p50 by
        # megabytes of a bucket.
        self._taken: dict[str, dict[tuple[float, str], dict[int, float]]] = {}

    def add(
        self, model: str, gradients: float, bucket: int, result: Result
    ) -> None:
        where = f"{result.backend}, {result.world_size} ranks"
        by_model = self._taken.setdefault(where, {})
        by_model.setdefault((gradients, model), {})[bucket] = result.p50

    def lines(self) -> Lines:
        for where, by_model in self._taken.items():
            best = []
            for (gradients, model), p50 in sorted(by_model.items()):
                bucket = min(p50, key=p50.__getitem__)
                best.append(
                    f"{bucket} MB for {model} ({gradients:.0f} MB of gradients)"
                )
            yield f"Fastest bucket size, {where}: {', '.join(best)}"

    def plots(self) -> Iterable[Plot]:
        return ()


class Plot(NamedTuple):
    """One figure."""

    title: str  # names its file, too
    draw: Callable[[Axes], None]


def boxes(
    title: str, across: str, seconds: Mapping[str, Sequence[float]]
) -> Plot:
    """Plot a box per variant, from p25 to p75 of its steps, with a line at p50 and points for
    outliers."""

    def draw(axes: Axes) -> None:
        axes.boxplot(list(seconds.values()), tick_labels=list(seconds))
        axes.set(xlabel=across, ylabel=_SECONDS, ylim=(0, None))

    return Plot(title, draw)


def lines(
    title: str,
    across: str,
    upwards: str,
    spreads: Mapping[str, Mapping[float, Spread]],
) -> Plot:
    """Plot a line per variant, with bars from the least to the most, or a band if there are many
    points."""

    def draw(axes: Axes) -> None:
        for name, points in spreads.items():
            places = sorted(points)
            in_order = [points[place] for place in places]
            middle, least, most = zip(*in_order, strict=True)
            if len(points) > 10:
                (line,) = axes.plot(places, middle, label=name)
                color = line.get_color()
                axes.fill_between(
                    places, least, most, color=color, alpha=0.25, linewidth=0
                )
            else:
                errors = _errors(in_order)
                axes.errorbar(
                    places, middle, errors, marker="o", capsize=3, label=name
                )
        axes.set(xlabel=across, ylabel=upwards, ylim=(0, None))
        if across == "ranks":
            axes.set_xscale("log", base=2)
            places = sorted(
                {place for points in spreads.values() for place in points}
            )
            axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.legend()

    return Plot(title, draw)


def stacks(
    title: str,
    parts: Mapping[str, Mapping[str, float]],
    wholes: Mapping[str, Spread],
) -> Plot:
    """Plot a bar per variant, made of its parts, with a line from the least to the most of the
    whole."""

    def draw(axes: Axes) -> None:
        bottom = dict.fromkeys(parts, 0.0)
        for part in dict.fromkeys(
            part for each in parts.values() for part in each
        ):
            heights = [each.get(part, 0.0) for each in parts.values()]
            below = list(bottom.values())
            axes.bar(list(parts), heights, bottom=below, label=part, width=0.6)
            for variant, height in zip(parts, heights, strict=True):
                bottom[variant] += height
        spreads = [wholes[variant] for variant in parts]
        middle = [spread.middle for spread in spreads]
        errors = _errors(spreads)
        axes.errorbar(
            list(parts), middle, errors, fmt="none", ecolor="black", capsize=4
        )
        axes.set(ylabel=_SECONDS)
        axes.legend()

    return Plot(title, draw)


def _errors(spreads: Sequence[Spread]) -> list[list[float]]:
    """Return how far the least and the most are from the middle."""
    below = [abs(each.middle - each.least) for each in spreads]
    above = [abs(each.middle - each.most) for each in spreads]
    return [below, above]


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
        name = re.sub("[^a-z0-9]+", "-", plot.title.lower()).strip("-")
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=150)
        yield path
