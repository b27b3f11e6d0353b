"""A figure of the user's own: what it is, and its values in launches."""

import re
from collections.abc import Iterable, Mapping
from statistics import fmean, geometric_mean
from typing import Literal, get_args

from pytest_ddpperf.records.quantiles import LaunchRankSteps, quantile
from pytest_ddpperf.records.record import record

Better = Literal["higher", "lower"]
_PERCENTILE = re.compile(r"(.+)_p(\d+(?:\.\d+)?)", re.ASCII)


def split_name(metric: str) -> tuple[str, float | None]:
    """Return the figure that a metric is of ("tps"), and the percentile ("tps_p90"), None for the
    mean."""
    match = _PERCENTILE.fullmatch(metric)
    return (match[1], float(match[2])) if match else (metric, None)


@record
class Figure:
    """A figure of the user's own, and where a program writes it: the part of its output that
    matches `pattern`, or a `file`.

    A `file` is a path from where the program runs, which may have `*` and `**`. With `pattern` it
    is read as text; with `key` it is JSON lines, or TensorBoard's event files. Raises TypeError
    without a direction, and ValueError."""

    #: which change is for the better; required
    better: Better = ""  # type: ignore[assignment]
    #: a regular expression whose only group is the number
    pattern: str = ""
    file: str = ""
    #: of a line's object; the tag of TensorBoard's scalars
    key: str = ""
    #: so many values at the beginning are left out: the warm-up
    skip: int = 0
    #: whether it may be the same in all launches, as a count may
    constant: bool = False

    def __post_init__(self) -> None:
        if self.better not in get_args(Better):
            raise TypeError(
                f"Figure(better={self.better!r}): say which change is for the"
                ' better: better="higher" or better="lower"'
            )
        if type(self.skip) is not int or self.skip < 0:
            raise ValueError(
                f"Figure(skip={self.skip!r}): a whole number from 0"
            )
        for name in ("pattern", "file", "key"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ValueError(f"Figure({name}={value!r}): must be a str")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(
                f"Figure(pattern={self.pattern!r}): {error}"
            ) from None
        if self.pattern and groups != 1:
            raise ValueError(
                f"Figure(pattern={self.pattern!r}): put the number, and nothing"
                " else, into a group: (...)"
            )

    def __str__(self) -> str:
        """Return "pattern tps: (.+), higher is better"."""
        words = [
            f"{name} {value}"
            for name in ("file", "key", "pattern", "skip")
            if (value := getattr(self, name))
        ]
        return ", ".join([*words, f"{self.better} is better"])


NamedFigures = Mapping[str, Figure]  # by name


@record
class FigureValues:
    """A figure and its values: those that a rank recorded in its timed steps, or that a program
    wrote meanwhile."""

    figure: Figure
    #: launch x rank x value; a rank without it has none
    values: LaunchRankSteps

    def by_launch(self, percentile: float | None = None) -> tuple[float, ...]:
        """Return the figure of each launch: the mean, or a percentile from 0 to 100, of each rank
        that has it, and the mean over these. () if a launch does not have it."""
        if not all(map(any, self.values)):
            return ()
        found = []
        for launch in self.values:
            ranks = [
                fmean(rank)
                if percentile is None
                else quantile(rank, percentile)
                for rank in launch
                if rank
            ]
            found.append(fmean(ranks))
        return tuple(found)

    @property
    def mean(self) -> float:
        """The geometric mean over launches, as the verdict has it; raises ValueError if a launch
        does not have it, or has one that is not above 0."""
        return geometric_mean(self.by_launch())


def figures_of(
    sides: Iterable[Mapping[str, FigureValues]],
) -> dict[str, Figure]:
    """Return the figures of some sides by name; the first that has one says what it is."""
    found: dict[str, Figure] = {}
    for side in sides:
        for name, each in side.items():
            found.setdefault(name, each.figure)
    return found
