"""A level that walks at random, seen through noise: how likely a series is under it, and what a jump would explain.

A machine drifts, and that is no step. So the level of a series may walk: A. C. Harvey's local level model,
"Forecasting, Structural Time Series Models and the Kalman Filter", Cambridge University Press (1989). Where it is
reset, it begins anew with nothing known of it. Pure functions over floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Series:
    """Points in order: what was seen, the variance of its noise relative to that of others, and how many usual moves of
    the level lie before it."""

    values: Sequence[float]
    noise: Sequence[float]
    moves: Sequence[float]


@dataclass(frozen=True, slots=True)
class Filtered:
    """A series under one share of the walk: the variance of a usual move over that of usual noise.

    By point, `jumps` says by how many standard errors the level jumps there, but for the scale of the noise; 0 where
    the level is reset. `errors` are those standard errors, with the same scale.
    """

    squares: float  # of the innovations over their relative variances: their sum
    logs: float  # of those variances: their sum
    free: int  # the number of innovations
    jumps: list[float]
    errors: list[float]

    def deviance(self, less: float = 0.0) -> float:
        """-2 times the log-likelihood, but for a constant, at the likeliest scale of the noise; `less` is what a
        further effect takes from the squares."""
        left = self.squares - less
        return self.free * math.log(left / self.free) + self.logs if left > 0 else -math.inf


def filtered(series: Series, resets: Set[int], share: float) -> Filtered:
    """The Kalman filter forwards, what each jump would explain backwards: P. de Jong and J. Penzer, "Diagnosing shocks
    in time series", Journal of the American Statistical Association 93 (1998)."""
    log, root = math.log, math.sqrt
    scaled: list[float] = []
    precisions: list[float] = []
    kept: list[float] = []
    squares = logs = level = spread = 0.0
    free = 0
    for place, (value, noise, move) in enumerate(zip(series.values, series.noise, series.moves, strict=True)):
        if place == 0 or place in resets:
            level, spread = value, noise
            scaled.append(0.0)
            precisions.append(0.0)
            kept.append(0.0)
            continue
        spread += share * move
        precision = 1 / (spread + noise)
        error = value - level
        gain = spread * precision
        level += gain * error
        spread *= 1 - gain
        squares += error * error * precision
        logs -= log(precision)
        free += 1
        scaled.append(error * precision)
        precisions.append(precision)
        kept.append(1 - gain)
    count = len(scaled)
    jumps, errors = [0.0] * count, [0.0] * count
    behind = weight = 0.0
    for place in range(count - 1, 0, -1):
        keep = kept[place]
        behind = scaled[place] + keep * behind
        weight = precisions[place] + keep * keep * weight
        if weight:
            errors[place] = error = 1 / root(weight)
            jumps[place] = behind * error
    return Filtered(squares, logs, free, jumps, errors)


def apart(series: Series, resets: Set[int], share: float) -> list[float]:
    """By how many standard errors, but for the scale of the noise, each point lies from what all others tell of it.

    A. C. Harvey and S. J. Koopman, "Diagnostic checking of unobserved-components time series models", Journal of
    Business & Economic Statistics 10 (1992): the auxiliary residuals of the noise.
    """
    rows: list[tuple[float, float, float]] = []  # an innovation over its variance, that variance's inverse, the gain
    level = spread = 0.0
    for place, (value, noise, move) in enumerate(zip(series.values, series.noise, series.moves, strict=True)):
        if place == 0 or place in resets:
            level, spread = value, noise
            rows.append((0.0, 0.0, 1.0))
            continue
        spread += share * move
        precision = 1 / (spread + noise)
        gain = spread * precision
        rows.append(((value - level) * precision, precision, gain))
        level += gain * (value - level)
        spread *= 1 - gain
    found: list[float] = []
    behind = weight = 0.0
    for scaled, precision, gain in reversed(rows):
        certain = precision + gain * gain * weight
        found.append((scaled - gain * behind) / math.sqrt(certain) if certain else 0.0)
        behind = scaled + (1 - gain) * behind
        weight = precision + (1 - gain) ** 2 * weight
    return found[::-1]
