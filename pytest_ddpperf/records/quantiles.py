"""Quantiles and means of durations: what describes one launch."""

import math
from collections.abc import Sequence
from statistics import fmean

OfLaunches = tuple[float, ...]  # one of each launch
LaunchRanks = tuple[tuple[float, ...], ...]  # launch x rank
LaunchSteps = tuple[tuple[float, ...], ...]  # launch x step
RankSteps = tuple[tuple[float, ...], ...]  # rank x step
LaunchRankSteps = tuple[RankSteps, ...]  # launch x rank x step


def quantile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) by linear interpolation: type 7 of Hyndman and Fan, "Sample
    Quantiles in Statistical Packages", The American Statistician 50 (1996), which is NumPy's
    default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def launch_quantiles(
    launches: Sequence[Sequence[float]], q: float
) -> OfLaunches:
    """The q-th percentile of each launch: the launch is the unit of replication, its steps are
    correlated."""
    return tuple(quantile(launch, q) for launch in launches)


def launch_means(launches: Sequence[Sequence[float]]) -> OfLaunches:
    """The mean of each launch: of step times, the time that its window takes per step."""
    return tuple(map(fmean, launches))


def percentile(launches: Sequence[Sequence[float]], q: float) -> float:
    """Return the mean over launches of their q-th percentile."""
    return geometric_mean(launch_quantiles(launches, q))


def mean(launches: Sequence[Sequence[float]]) -> float:
    """Return the mean over launches of their means."""
    return geometric_mean(launch_means(launches))


def geometric_mean(values: Sequence[float]) -> float:
    """The estimator over launches: step times are skewed, and changes are ratios. 0 if any value is
    0."""
    if min(values) <= 0:
        return 0.0
    return math.exp(fmean(map(math.log, values)))
