"""A level that moves at random, seen through noise: the likelihood of a series, and what a jump would explain.

Machines drift, and a drift is no change point. So the level of a series may move between runs: A. C. Harvey's local
level model, "Forecasting, Structural Time Series Models and the Kalman Filter", Cambridge University Press (1989).
At a reset the level starts anew, with nothing known of it. Pure functions over floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

# The effect of rounding to five digits on the logarithm of a time.
_LEAST_VARIANCE = 1e-11


@dataclass(frozen=True, slots=True)
class Observations:
    """The points of a series in order."""

    values: Sequence[float]
    noise: Sequence[float]  # the variance of each point, relative to that of the others
    moves: Sequence[float]  # the usual moves of the level between a point and the one before


@dataclass(frozen=True, slots=True)
class FilteredLevel:
    """Observations under one share: the variance of a usual move over that of usual noise.

    The lists have one item per point. All figures are relative to the scale of the noise.
    """

    squares: float  # the sum of the innovations' squares over their relative variances
    logs: float  # the sum of the logarithms of those variances
    free: int  # the number of innovations
    scaled: list[float]  # innovations over their variances; 0 at a reset
    precisions: list[float]  # the inverse of those variances; 0 at a reset

    def deviance(self, less: float = 0.0) -> float:
        """Return -2 times the log-likelihood, up to a constant, at the likeliest scale of the noise.

        `less` is what one more effect takes from the squares.
        """
        return self.free * math.log(self.variance(less)) + self.logs

    def variance(self, less: float = 0.0) -> float:
        """Return the likeliest scale of the noise, squared."""
        return max((self.squares - less) / self.free, _LEAST_VARIANCE)


def filter_level(observations: Observations, resets: Set[int], share: float) -> FilteredLevel:
    """Run the Kalman filter forwards. This loop is short because each point passes it several times."""
    rows = list(zip(observations.values, observations.noise, observations.moves, strict=True))
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
    return FilteredLevel(squares, logs, len(rows) - 1 - len(resets), scaled, precisions)


def estimate_jumps(observations: Observations, known: FilteredLevel) -> list[tuple[float, float]]:
    """Return the jump of the level at each point, in standard errors, and its standard error relative to the scale of
    the noise; 0 at a reset.

    The filter runs backwards: P. de Jong and J. Penzer, "Diagnosing shocks in time series", Journal of the American
    Statistical Association 93 (1998).
    """
    jumps: list[tuple[float, float]] = []
    behind = weight = 0.0
    for scaled, precision, noise in _backwards(observations, known):
        kept = noise * precision  # the part of a jump that is left after the next point
        behind = scaled + kept * behind
        weight = precision + kept * kept * weight
        error = 1 / math.sqrt(weight) if weight else 0.0
        jumps.append((behind * error, error))
    return jumps[::-1]


def measure_distances(observations: Observations, resets: Set[int], share: float) -> list[float]:
    """Return the distance of each point from what all others predict, in standard errors relative to the noise.

    A. C. Harvey and S. J. Koopman, "Diagnostic checking of unobserved-components time series models", Journal of
    Business & Economic Statistics 10 (1992): the auxiliary residuals of the noise.
    """
    known = filter_level(observations, resets, share)
    distances: list[float] = []
    behind = weight = 0.0
    for scaled, precision, noise in _backwards(observations, known):
        kept = noise * precision
        gain = 1 - kept
        residual = scaled - gain * behind
        variance = precision + gain * gain * weight
        distances.append(residual / math.sqrt(variance) if variance else 0.0)
        behind = scaled + kept * behind
        weight = precision + kept * kept * weight
    return distances[::-1]


def _backwards(observations: Observations, known: FilteredLevel) -> Iterable[tuple[float, float, float]]:
    return zip(reversed(known.scaled), reversed(known.precisions), reversed(observations.noise), strict=True)
