"""Statistics of step times: pure functions over floats. Knows neither launches' origin nor what is a regression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, variance

from pytest_ddpperf.records import Interval, LaunchRankSteps

# The interval's ends are one-sided 95 % bounds, so it covers 90 %.
CONFIDENCE = 0.95


def quantile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) by linear interpolation: type 7 of Hyndman and Fan, "Sample Quantiles in
    Statistical Packages", The American Statistician 50 (1996), which is NumPy's default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def completions(starts: Sequence[float], ends: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The group's step times, between successive completions of the whole group, the first from the common start.

    `starts` is by rank, `ends` rank x step, all on one clock and in one unit, which is the result's. They add up to
    the wall time of the window.
    """
    marks = [max(starts), *(max(step) for step in zip(*ends, strict=True))]
    return tuple(after - before for before, after in pairwise(marks))


def launch_quantiles(launches: Sequence[Sequence[float]], q: float) -> tuple[float, ...]:
    """The q-th percentile of each launch: the launch is the unit of replication, its steps are correlated."""
    return tuple(quantile(launch, q) for launch in launches)


def cpu_quantiles(cpu_seconds: LaunchRankSteps, q: float) -> tuple[float, ...]:
    """Of each launch, the q-th percentile of the rank that used the most CPU time."""
    return tuple(max(quantile(rank, q) for rank in launch) for launch in cpu_seconds)


def geometric_mean(values: Sequence[float]) -> float:
    """The estimator over launches: step times are skewed, and changes are ratios. 0 if any value is 0."""
    if min(values) <= 0:
        return 0.0
    return math.exp(fmean(map(math.log, values)))


def welch(now: Sequence[float], base: Sequence[float]) -> Interval:
    """The difference of two means with its two-sided 90 % interval, by Welch's t-test.

    Each side needs two values. B. L. Welch, "The generalization of Student's problem when several different
    population variances are involved", Biometrika 34 (1947). Sides without any spread have an interval of no width.
    """
    difference = fmean(now) - fmean(base)
    parts = [(variance(side) / len(side), len(side) - 1) for side in (now, base)]
    squared_error = math.fsum(part for part, _ in parts)
    if squared_error == 0:
        return Interval(estimate=difference, low=difference, high=difference)
    # Relative to their sum, so that tiny variances do not underflow when squared.
    freedom = 1 / math.fsum((part / squared_error) ** 2 / degrees for part, degrees in parts)
    reach = t_quantile(CONFIDENCE, freedom) * math.sqrt(squared_error)
    return Interval(estimate=difference, low=difference - reach, high=difference + reach)


def steps_needed(q: float) -> int:
    """The least number of steps that supports the q-th percentile (between 0 and 100, the ends excluded): with
    fewer, no step need lie beyond it, and its distribution-free 95 % bound does not exist (59 for p95, 299 for p99).
    """
    share = max(q, 100 - q) / 100
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(share))


def t_cdf(t: float, freedom: float) -> float:
    """Student's t distribution; `freedom` need not be whole."""
    tail = 0.5 * _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)
    return 1 - tail if t > 0 else tail


def t_quantile(p: float, freedom: float) -> float:
    """The t with t_cdf(t, freedom) == p, by bisection; p between 0 and 1, the ends excluded."""
    if p < 0.5:
        return -t_quantile(1 - p, freedom)
    high = 1.0
    while t_cdf(high, freedom) < p:
        high *= 2
    low = 0.0
    while low < (middle := (low + high) / 2) < high:
        if t_cdf(middle, freedom) < p:
            low = middle
        else:
            high = middle
    return high


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction.

    Lentz's method, as in Press et al., "Numerical Recipes", section 6.4; good to about 1e-14 for a and b below 1e4.
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction of the mirrored function converges faster
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    fraction = d
    for m in range(1, 1000):
        for coefficient in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + coefficient * d or tiny)
            c = 1 + coefficient / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * fraction / a
