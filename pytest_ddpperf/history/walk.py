"""A level that walks at random, seen through noise: how likely a series is under it, and what a jump would explain.

A machine drifts, and that is no step. So the level of a series may walk: A. C. Harvey's local level model,
"Forecasting, Structural Time Series Models and the Kalman Filter", Cambridge University Press (1989). Where it is
reset, it begins anew with nothing known of it. Pure functions over floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

# Of the logarithm of a time that is kept with five digits: what rounding does to it.
_LEAST_VARIANCE = 1e-11


@dataclass(frozen=True, slots=True)
class Series:
    """Points in order: what was seen, the variance of its noise relative to that of others, and how many usual moves of
    the level lie before it."""

    values: Sequence[float]
    noise: Sequence[float]
    moves: Sequence[float]


@dataclass(frozen=True, slots=True)
class Filtered:
    """A series under one share of the walk: the variance of a usual move over that of usual noise. The lists have an
    item a point; all is but for the scale of the noise."""

    squares: float  # of the innovations over their relative variances: their sum
    logs: float  # of those variances: their sum
    free: int  # the number of innovations
    scaled: list[float]  # innovations over their variances; 0 where the level is reset
    precisions: list[float]  # the inverse of those variances; 0 there

    def deviance(self, less: float = 0.0) -> float:
        """-2 times the log-likelihood, but for a constant, at the likeliest scale of the noise; `less` is what a
        further effect takes from the squares."""
        return self.free * math.log(self.variance(less)) + self.logs

    def variance(self, less: float = 0.0) -> float:
        """The likeliest scale of the noise, squared."""
        return max((self.squares - less) / self.free, _LEAST_VARIANCE)


@dataclass(frozen=True, slots=True)
class Jumps:
    """What a jump of the level at each point would explain, but for the scale of the noise; 0 where it is reset."""

    sizes: list[float]  # in standard errors
    errors: list[float]  # those


def filtered(series: Series, resets: Set[int], share: float) -> Filtered:
    """The Kalman filter. A history has a hundred thousand points, and each is filtered several times: so this loop has
    little in it."""
    rows = list(zip(series.values, series.noise, series.moves, strict=True))
    scaled: list[float] = []
    precisions: list[float] = []
    squares = 0.0
    for start, end in pairwise([0, *sorted(resets), len(rows)]):
        level, spread, _ = rows[start]  # all that is known of it
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
    return Filtered(squares, logs, len(rows) - 1 - len(resets), scaled, precisions)


def jumps(series: Series, known: Filtered) -> Jumps:
    """The filter's way back: P. de Jong and J. Penzer, "Diagnosing shocks in time series", Journal of the American
    Statistical Association 93 (1998)."""
    root = math.sqrt
    sizes: list[float] = []
    errors: list[float] = []
    behind = weight = 0.0
    for scaled, precision, noise in _back(series, known):
        kept = noise * precision  # of a jump of the level, after the next point was seen
        behind = scaled + kept * behind
        weight = precision + kept * kept * weight
        error = 1 / root(weight) if weight else 0.0
        errors.append(error)
        sizes.append(behind * error)
    return Jumps(sizes[::-1], errors[::-1])


def _back(series: Series, known: Filtered) -> Iterable[tuple[float, float, float]]:
    return zip(reversed(known.scaled), reversed(known.precisions), reversed(series.noise), strict=True)


def apart(series: Series, resets: Set[int], share: float) -> list[float]:
    """By how many standard errors, but for the scale of the noise, each point lies from what all others tell of it.

    A. C. Harvey and S. J. Koopman, "Diagnostic checking of unobserved-components time series models", Journal of
    Business & Economic Statistics 10 (1992): the auxiliary residuals of the noise.
    """
    residuals = _residuals(series, filtered(series, resets, share))
    return [each / math.sqrt(certain) if certain else 0.0 for each, certain in residuals]


def levels(series: Series, resets: Set[int], share: float) -> list[float]:
    """What all points tell of the level at each of them: a point without the part that is its noise."""
    residuals = _residuals(series, filtered(series, resets, share))
    rows = zip(series.values, series.noise, residuals, strict=True)
    return [value - noise * each for value, noise, (each, _) in rows]


def _residuals(series: Series, known: Filtered) -> list[tuple[float, float]]:
    """Of each point what is likely its noise, over the noise's variance, with the variance of that."""
    found: list[tuple[float, float]] = []
    behind = weight = 0.0  # what the points behind say of the level
    for scaled, precision, noise in _back(series, known):
        kept = noise * precision
        gain = 1 - kept
        found.append((scaled - gain * behind, precision + gain * gain * weight))
        behind = scaled + kept * behind
        weight = precision + kept * kept * weight
    return found[::-1]
