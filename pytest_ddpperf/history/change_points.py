"""Change points in one series of runs.

A change point is distinguished from a drift by the ratio of two likelihoods: the level jumps at one
point and drifts as well, or it drifts only, both with the likeliest drift and noise. The values of
that ratio where nothing jumps were simulated: docs/history.md has the method,
`benchmarks/history.py` the error rates.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from pytest_ddpperf.records.samples import Interval
from pytest_ddpperf.verdict.stats import Part, interval, pooled, t_quantile

# With fewer points no jump could be distinguished from noise.
MIN_POINTS = 6
# On either side of a change point: a single point may be an outlier.
_MIN_SIDE = 2
# The variance of a move over that of the noise, from no drift to drift alone. The values are close
# enough for a parabola through three.
_SHARES = (0.0, *(10 ** (exponent / 2) for exponent in range(-10, 3)))
# Larger shares are not tried where the deviance is above the least one by so much.
_HOPELESS = 15.0
# Points further away than this many standard errors get less weight, as Huber has it: their
# influence stays the same.
_FAR = 3.0
# A point so far away adds noise that may hide change points.
_VERY_FAR = 6.0
# The level of the simulated thresholds.
_LEVEL = 0.01
# The variance of a move that is unlikely: sessions of a busy machine differ by 4 to 10 %
# (docs/evidence.md).
_UNLIKELY_MOVE = 0.12**2
# The odds against a drift of larger moves. Longer series can outweigh them, and show that their
# level does drift.
_ODDS = 10.0
# Degrees of freedom of the spread of launches in other runs, as evidence about that in one run.
_PRIOR_FREEDOM = 8.0


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """A jump of the level between two points."""

    index: int  # of the first point after it
    change: float  # of the logarithm
    error: float  # the standard error of `change`
    freedom: float
    # the probability of so large a jump in this series where nothing changed
    p_value: float

    def interval(self) -> Interval:
        """Return the relative change with its 95 % interval: 0.05 is 5 % slower."""
        reach = t_quantile(0.975, self.freedom) * self.error
        return interval(self.change, reach)


def weigh_runs(
    values: Sequence[float],
    spreads: Sequence[Part],
    moves: Sequence[float] = (),
) -> Observations:
    """Return runs with their errors: the spread of their launches, and a drift between runs, alike
    for all.

    A value is the mean over launches of the logarithms of their percentiles; `spreads` are the
    variances between launches; a move is the time since the run before, in usual intervals (by
    default all are alike).

    The spread of few launches is uncertain. It is moderated by that of all runs: G. K. Smyth,
    "Linear models and empirical Bayes methods for assessing differential expression", Statistical
    Applications in Genetics and Molecular Biology 3 (2004).
    """
    usual = 0.0
    if any(spread.freedom for spread in spreads):
        usual = pooled(spreads).variance
    prior = Part(usual, _PRIOR_FREEDOM)
    own = [
        pooled([prior, spread]).variance / (spread.freedom + 1)
        for spread in spreads
    ]
    between = max(0.0, _noise_between(values) - fmean(own))
    noise = [variance + between for variance in own]
    ones = [1.0] * len(values)
    scale = fmean(noise)
    relative = [variance / scale for variance in noise] if scale > 0 else ones
    return Observations(values, relative, moves or ones, _UNLIKELY_MOVE)


def _noise_between(values: Sequence[float]) -> float:
    """Return the variance of the noise, with or without drift: a rise that follows a fall. It may
    come out below 0, and only sets weights."""
    differences = [after - before for before, after in pairwise(values)]
    if len(differences) < 2:
        return 0.0
    # change points and outliers must not decide
    usual = 3 * 1.4826 * median(map(abs, differences))
    clipped = [
        max(-usual, min(usual, difference)) for difference in differences
    ]
    return -fmean(before * after for before, after in pairwise(clipped))


def find_change_points(
    observations: Observations, level: float
) -> list[ChangePoint]:
    """Return the change points whose p-value is at most `level`, in order.

    They are found one after another, the largest first, with the level reset at those already
    known. In the end each must be found again next to all others.
    """
    found: list[ChangePoint] = []
    while True:
        point = find_largest(observations, {each.index for each in found})
        if point is None or point.p_value > level:
            break
        found.append(point)
    if len(found) > 1:
        for point in list(found):
            found.remove(point)
            again = find_largest(
                observations, {each.index for each in found}, near=point.index
            )
            if again is not None and again.p_value <= level:
                found.append(again)
    return sorted(found, key=lambda point: point.index)


def find_largest(
    observations: Observations,
    resets: Set[int] = frozenset(),
    near: int | None = None,
) -> ChangePoint | None:
    """Return the change point that explains the most beyond drift and the resets that are known.

    With `near` it is searched only between the two resets around that index. None: there are too
    few points.
    """
    if len(observations.values) - len(resets) < MIN_POINTS:
        return None
    point, distance, noise = _scan(observations, resets, near)
    if point is None or distance <= _FAR:
        return point
    if point.p_value <= 10 * _LEVEL or distance > _VERY_FAR:
        point, _, _ = _scan(observations._replace(noise=noise), resets, near)
    return point


def smallest_change(observations: Observations, level: float) -> float:
    """Return the relative change in the middle that is found at `level` in about four of five
    series like this one.

    It is the one that is found in the series itself, and a margin for the noise of another one,
    from simulations.
    """
    middle = len(observations.values) // 2
    filtered = _filter_by_share(observations, frozenset())
    known = filtered[_minimum([each.deviance() for each in filtered])[1]]
    jump = estimate_jumps(observations, known)[middle]
    point = _change_point(known, jump, middle, 1.0)

    def is_found(power: int) -> bool:
        more = point.error * 1.05**power - point.change
        moved = list(observations.values)
        for index in range(middle, len(moved)):
            moved[index] += more
        largest = find_largest(observations._replace(values=moved))
        return largest is not None and largest.p_value <= level

    # up to 490 standard errors
    power = bisect_left(range(127), True, key=is_found)
    return math.expm1(
        (1.05**power + t_quantile(0.95, point.freedom)) * point.error
    )


def _scan(
    observations: Observations, resets: Set[int], near: int | None
) -> tuple[ChangePoint | None, float, Sequence[float]]:
    """Return the likeliest change point; and how far the furthest point lies, with the noise that
    accounts for it."""
    filtered = _filter_by_share(observations, resets)
    without, best_share = _minimum([each.deviance() for each in filtered])
    # a jump leaves less for the drift to explain
    filtered = filtered[: best_share + 3]
    jumps = [estimate_jumps(observations, each) for each in filtered]
    tried: set[tuple[int, int]] = set()
    for start, end in pairwise([0, *sorted(resets), len(observations.values)]):
        if end - start >= 2 * _MIN_SIDE and (
            near is None or start <= near < end
        ):
            tried |= {_largest_jump(jump, start, end) for jump in jumps}
    best: tuple[float, int, int] | None = None
    for index, side in tried:
        deviances = [
            each.deviance(jump[index][0] ** 2)
            for each, jump in zip(filtered, jumps, strict=True)
        ]
        deviance, share = _minimum(deviances)
        variance = filtered[share].variance(jumps[share][index][0] ** 2)
        most = observations.unlikely_move / variance
        threshold = _threshold(filtered[0].free + 1, _SHARES[share], side, most)
        excess = without - deviance - threshold
        if best is None or excess > best[0]:
            best = excess, index, share
    if best is None:
        return None, 0.0, observations.noise
    excess, index, share = best
    likeliest = filtered[share]
    p_value = _p_value(excess, likeliest.free + 1)
    point = _change_point(likeliest, jumps[share][index], index, p_value)
    return point, *_downweigh_far_points(
        observations, {*resets, index}, _SHARES[share]
    )


def _filter_by_share(
    observations: Observations, resets: Set[int]
) -> list[FilteredLevel]:
    found: list[FilteredLevel] = []
    least = math.inf
    for share in _SHARES:
        found.append(filter_level(observations, resets, share))
        deviance = found[-1].deviance()
        least = min(least, deviance)
        if deviance > least + _HOPELESS:
            break
    return found


def _largest_jump(
    jumps: Sequence[tuple[float, float]], start: int, end: int
) -> tuple[int, int]:
    """Return the index of the largest jump in a stretch, and the number of points on its shorter
    side."""
    inner = [
        abs(size) for size, _ in jumps[start + _MIN_SIDE : end - _MIN_SIDE + 1]
    ]
    before = inner.index(max(inner)) + _MIN_SIDE
    return start + before, min(before, end - start - before)


def _minimum(deviances: list[float]) -> tuple[float, int]:
    """Return the least deviance over shares, by a parabola through the least and its neighbours,
    and its index."""
    index = min(range(len(deviances)), key=deviances.__getitem__)
    least = deviances[index]
    if 1 < index < len(deviances) - 1:
        before = deviances[index - 1] - least
        after = deviances[index + 1] - least
        if before + after > 0:
            least -= (before - after) ** 2 / (8 * (before + after))
    return least, index


def _threshold(points: int, share: float, side: int, most: float) -> float:
    """Return the ratio that the largest jump exceeds in 1 % of series where nothing changed,
    whatever the drift.

    Simulated by `benchmarks/history.py --calibrate`. The first line holds where the level can
    hardly have moved within the shorter side, given that so many points can exclude a drift only up
    to a share; the second where a drift that is likely, up to the share `most`, moves it little;
    else the third.
    """
    if (share + 10 / points**2) * side**2 <= 0.1:
        return 9.0 + 0.75 * math.log(points)
    return 12.2 if most * side <= 2 else 10.6 + 1.35 * math.log(points)


def _p_value(excess: float, points: int) -> float:
    """Beyond the threshold the ratio has the tail of chi-squared, a longer one where the scale
    rests on few points."""
    return min(
        1.0, _LEVEL * math.exp(-excess / 2 * (points - 3) / (points - 1))
    )


def _change_point(
    filtered: FilteredLevel,
    jump: tuple[float, float],
    index: int,
    p_value: float,
) -> ChangePoint:
    freedom = filtered.free - 1
    size, error = jump
    scale = math.sqrt(filtered.variance(size**2) * filtered.free / freedom)
    return ChangePoint(index, size * error, scale * error, freedom, p_value)


def _downweigh_far_points(
    observations: Observations, resets: Set[int], share: float
) -> tuple[float, Sequence[float]]:
    """Return the distance of the furthest point in standard errors, and the noise with Huber's
    weights."""
    distances = list(map(abs, measure_distances(observations, resets, share)))
    scale = 1.4826 * median(distances)
    if scale <= 0 or max(distances) <= _FAR * scale:
        return 0.0, observations.noise
    noise = [
        each * max(1.0, distance / (_FAR * scale)) ** 2
        for each, distance in zip(observations.noise, distances, strict=True)
    ]
    return max(distances) / scale, noise


# The effect of rounding to five digits on the logarithm of a time.
_LEAST_VARIANCE = 1e-11


class Observations(NamedTuple):
    """The points of a series in order."""

    values: Sequence[float]
    # the variance of each point, relative to that of the others
    noise: Sequence[float]
    # the usual moves of the level between a point and the one before
    moves: Sequence[float]
    # the variance of a usual move that is unlikely
    unlikely_move: float = math.inf


class FilteredLevel(NamedTuple):
    """Observations under one share: the variance of a usual move over that of usual noise.

    The lists have one item per point. All figures are relative to the scale of the noise.
    """

    # the sum of the innovations' squares over their relative variances
    squares: float
    logs: float  # the sum of the logarithms of those variances
    free: int  # the number of innovations
    scaled: list[float]  # innovations over their variances; 0 at a reset
    precisions: list[float]  # the inverse of those variances; 0 at a reset
    # the scale of the noise, squared, at which the drift is unlikely
    unlikely: float

    def deviance(self, less: float = 0.0) -> float:
        """Return -2 times the log-likelihood, up to a constant, at the likeliest scale of the
        noise.

        `less` is what one more effect takes from the squares. An unlikely drift has the odds
        against it.
        """
        variance = self.variance(less)
        against = 2 * math.log(_ODDS) / (1 + (self.unlikely / variance) ** 4)
        return self.free * math.log(variance) + self.logs + against

    def variance(self, less: float = 0.0) -> float:
        """Return the likeliest scale of the noise, squared."""
        return max((self.squares - less) / self.free, _LEAST_VARIANCE)


def filter_level(
    observations: Observations, resets: Set[int], share: float
) -> FilteredLevel:
    """Run the Kalman filter forwards. This loop is short because each point passes it several
    times."""
    rows = list(
        zip(
            observations.values,
            observations.noise,
            observations.moves,
            strict=True,
        )
    )
    scaled: list[float] = []
    precisions: list[float] = []
    squares = 0.0
    for start, end in pairwise([0, *sorted(resets), len(rows)]):
        level, spread, _ = rows[start]
        scaled.append(0.0)
        precisions.append(0.0)
        for value, noise, move in rows[start + 1 : end]:
            spread += share * move
            precision = 1 / (spread + noise)
            error = value - level
            own = error * precision
            squares += error * own
            level += spread * own
            spread *= noise * precision
            scaled.append(own)
            precisions.append(precision)
    logs = -math.fsum(map(math.log, filter(None, precisions)))
    unlikely = observations.unlikely_move / share if share else math.inf
    return FilteredLevel(
        squares, logs, len(rows) - 1 - len(resets), scaled, precisions, unlikely
    )


def estimate_jumps(
    observations: Observations, known: FilteredLevel
) -> list[tuple[float, float]]:
    """Return the jump of the level at each point, in standard errors, and its standard error
    relative to the scale of the noise; 0 at a reset.

    The filter runs backwards: P. de Jong and J. Penzer, "Diagnosing shocks in time series", Journal
    of the American Statistical Association 93 (1998).
    """
    jumps: list[tuple[float, float]] = []
    behind = 0.0
    weight = 0.0
    for scaled, precision, noise in _backwards(observations, known):
        # the part of a jump that is left after the next point
        kept = noise * precision
        behind = scaled + kept * behind
        weight = precision + kept * kept * weight
        error = 1 / math.sqrt(weight) if weight else 0.0
        jumps.append((behind * error, error))
    return jumps[::-1]


def measure_distances(
    observations: Observations, resets: Set[int], share: float
) -> list[float]:
    """Return the distance of each point from what all others predict, in standard errors relative
    to the noise.

    A. C. Harvey and S. J. Koopman, "Diagnostic checking of unobserved-components time series
    models", Journal of Business & Economic Statistics 10 (1992): the auxiliary residuals of the
    noise.
    """
    known = filter_level(observations, resets, share)
    distances: list[float] = []
    behind = 0.0
    weight = 0.0
    for scaled, precision, noise in _backwards(observations, known):
        kept = noise * precision
        gain = 1 - kept
        residual = scaled - gain * behind
        variance = precision + gain * gain * weight
        distances.append(residual / math.sqrt(variance) if variance else 0.0)
        behind = scaled + kept * behind
        weight = precision + kept * kept * weight
    return distances[::-1]


def _backwards(
    observations: Observations, known: FilteredLevel
) -> Iterable[tuple[float, float, float]]:
    return zip(
        reversed(known.scaled),
        reversed(known.precisions),
        reversed(observations.noise),
        strict=True,
    )
