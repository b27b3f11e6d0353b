"""The steps in one series. Knows points, and nothing of tests, commits or files.

A step is told from a walk by the ratio of likelihoods of the level jumping at one point and walking as well, and of it
walking alone, both with the likeliest walk and noise. What that ratio comes to at the best of all places where nothing
jumps was found by simulation; docs/history.md has the method, `benchmarks/history.py` the rates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from pytest_ddpperf.history.walk import Filtered, Jumps, Series, apart, filtered, jumps, levels
from pytest_ddpperf.verdict.student import t_cdf, t_quantile

# With fewer, no step could be told from noise.
FEWEST_POINTS = 6
# So many points on either side: one alone may be an outlier.
_LEAST = 2
# The variance of a move over that of the noise: from none to noise that does not matter. The step between two is small
# enough for a parabola through three.
_SHARES = (0.0, *(10 ** (exponent / 2) for exponent in range(-10, 3)))
# A share is so much less likely than another, as a deviance, that still larger ones need not be tried.
_OUT_OF_THE_QUESTION = 15.0
# A point further from what all others tell is given less weight: Huber's, as its influence then stays what it is there.
_FAR = 3.0
# A point so far hides steps by the noise that it adds.
_VERY_FAR = 6.0
# As a deviance: one place of a step is twenty times as likely as another. From the right place to a wrong one it comes
# to so much in at most one of twenty cases.
_CLEARLY = 2 * math.log(20)
# The level that the simulated ratios are of.
_LEVEL = 0.01
_USUAL_SESSION = 8.0  # degrees of freedom that the usual spread of launches counts for, in that of one point


@dataclass(frozen=True, slots=True)
class Point:
    """One run: the mean over launches of the logarithms of their percentiles, with what makes it uncertain."""

    value: float
    launches: int = 1
    spread: float = 0.0  # the variance between its launches
    moved: float = 1.0  # how many usual moves of the machine lie between it and the point before


@dataclass(frozen=True, slots=True)
class Step:
    """A jump of the level between two points."""

    place: int  # of the first point after it
    change: float  # of the logarithm
    error: float  # its standard error
    freedom: float
    p_value: float  # how likely so large a largest step is where nothing jumps; of this series alone

    def bounds(self, level: float = 0.95) -> tuple[float, float]:
        """Of the relative change: 0.05 is 5 % slower."""
        reach = t_quantile((1 + level) / 2, self.freedom) * self.error
        return math.expm1(self.change - reach), math.expm1(self.change + reach)


def series_of(points: Sequence[Point]) -> Series:
    """Points with their own errors: what their launches tell, and the drift between sessions, alike for all."""
    values = [point.value for point in points]
    pooled = _pooled(points)
    own = [_moderated(point, pooled) / point.launches for point in points]
    between = max(0.0, _noise(values) - fmean(own))
    noise = [variance + between for variance in own]
    usual = fmean(noise)
    relative = [variance / usual for variance in noise] if usual > 0 else [1.0] * len(values)
    return Series(values, relative, [point.moved for point in points])


def _pooled(points: Sequence[Point]) -> float:
    freedom = sum(point.launches - 1 for point in points)
    return sum((point.launches - 1) * point.spread for point in points) / freedom if freedom else 0.0


def _moderated(point: Point, pooled: float) -> float:
    """A spread of few launches is uncertain itself: G. K. Smyth's moderated variance (2004)."""
    freedom = point.launches - 1
    return (_USUAL_SESSION * pooled + freedom * point.spread) / (_USUAL_SESSION + freedom)


def _noise(values: Sequence[float]) -> float:
    """The variance of the noise, walk or not: what makes a rise follow on a fall. Rough, for it only sets weights."""
    differences = [after - before for before, after in pairwise(values)]
    if len(differences) < 2:
        return 0.0
    usual = 3 * 1.4826 * median(map(abs, differences))  # a step, or an outlier, shall not decide
    clipped = [max(-usual, min(usual, each)) for each in differences]
    return max(0.0, -fmean(before * after for before, after in pairwise(clipped)))


def steps(series: Series, level: float) -> list[Step]:
    """The steps whose p-value is at most `level`, the largest first; the places that are left have none.

    Each further one is looked for with the level reset where those before were found, and in the end each must be
    found again beside all others.
    """
    found: list[Step] = []
    while (step := largest(series, {each.place for each in found})) is not None and step.p_value <= level:
        found.append(step)
    if len(found) < 2:
        return found
    for step in list(found):
        others = [each for each in found if each is not step]
        again = largest(series, {each.place for each in others}, near=step.place)
        found = others if again is None or again.p_value > level else [again if s is step else s for s in found]
    return found


def largest(series: Series, resets: Set[int] = frozenset(), near: int | None = None) -> Step | None:
    """The step that explains the most beyond the level's walk, beside resets that are known, in the stretch between two
    of them that holds the place `near` if there is one; None where there is no place for one, or nothing varies."""
    if len(series.values) - len(resets) < FEWEST_POINTS:
        return None
    step, far = _scan(series, resets, near)
    if step is not None and (step.p_value <= 10 * _LEVEL or far.most > _VERY_FAR) and far.noise is not series.noise:
        step, _ = _scan(replace(series, noise=far.noise), resets, near)
    return step


def moved(series: Series, step: Step, others: Set[int], places: Collection[int]) -> Step:
    """The step at the likeliest of the places, beside the places of other steps; as it was where its own is clearly
    likelier than all of them, or they leave too few points on a side."""
    start = max((other for other in others if other <= step.place), default=0)
    end = min((other for other in others if other > step.place), default=len(series.values))
    fitting = [place for place in places if start + _LEAST <= place <= end - _LEAST]
    known = _by_share(series, others)
    explained = [jumps(series, each) for each in known]

    def likelihood(place: int) -> tuple[float, int]:
        return _likeliest([each.deviance(jump.sizes[place] ** 2) for each, jump in zip(known, explained, strict=True)])

    deviance, at, place = min(((*likelihood(place), place) for place in fitting), default=(math.inf, 0, 0))
    if deviance - likelihood(step.place)[0] > _CLEARLY:
        return step
    return _step(known[at], explained[at], place, step.p_value)


@dataclass(frozen=True, slots=True)
class _Far:
    most: float
    noise: Sequence[float]


def _scan(series: Series, resets: Set[int], near: int | None) -> tuple[Step | None, _Far]:
    known = _by_share(series, resets)
    without, at = _likeliest([each.deviance() for each in known])
    known = known[: at + 3]  # a jump leaves less for the walk to explain
    explained = [jumps(series, each) for each in known]
    best: tuple[float, int, int] | None = None
    stretches = [
        (start, end)
        for start, end in pairwise([0, *sorted(resets), len(series.values)])
        if end - start >= 2 * _LEAST and (near is None or start <= near < end)
    ]
    for place, reach in {_furthest(each.sizes, start, end) for each in explained for start, end in stretches}:
        with_jump = [each.deviance(jump.sizes[place] ** 2) for each, jump in zip(known, explained, strict=True)]
        deviance, at = _likeliest(with_jump)
        excess = without - deviance - _threshold(known[0].free + 1, _SHARES[at], reach)
        if best is None or excess > best[0]:
            best = excess, place, at
    if best is None:
        return None, _Far(0.0, series.noise)
    excess, place, at = best
    step = _step(known[at], explained[at], place, _p_value(excess, known[at].free + 1))
    return step, _far(series, {*resets, place}, _SHARES[at])


def _by_share(series: Series, resets: Set[int]) -> list[Filtered]:
    """Under each share, up to those that are out of the question."""
    found: list[Filtered] = []
    least = math.inf
    for share in _SHARES:
        found.append(filtered(series, resets, share))
        deviance = found[-1].deviance()
        least = min(least, deviance)
        if deviance > least + _OUT_OF_THE_QUESTION:
            break
    return found


def _furthest(sizes: Sequence[float], start: int, end: int) -> tuple[int, int]:
    """The place of the largest jump in a stretch, and the number of points on its shorter side."""
    inner = list(map(abs, sizes[start + _LEAST : end - _LEAST + 1]))
    before = inner.index(max(inner)) + _LEAST
    return start + before, min(before, end - start - before)


def _likeliest(deviances: list[float]) -> tuple[float, int]:
    """The least deviance over shares, by a parabola through the least of those tried and its neighbours, and which."""
    at = min(range(len(deviances)), key=deviances.__getitem__)
    least = deviances[at]
    if 1 < at < len(deviances) - 1:
        before, after = deviances[at - 1] - least, deviances[at + 1] - least
        if before + after > 0:
            least -= (before - after) ** 2 / (8 * (before + after))
    return least, at


def _threshold(points: int, share: float, reach: int) -> float:
    """The ratio that the largest step exceeds in 1 % of series where nothing jumps, whatever the walk.

    It was simulated (`benchmarks/history.py --calibrate`): the first line where the level has next to no room to walk
    within the shorter side of the step, as far as a series of so many points can exclude a walk; else the second.
    """
    if (share + 10 / points**2) * reach**2 <= 0.1:
        return 9.0 + 0.75 * math.log(points)
    return 10.6 + 1.35 * math.log(points)


def _p_value(excess: float, points: int) -> float:
    """Beyond the threshold the ratio's tail is that of chi-squared, longer where the scale rests on few points."""
    return min(1.0, _LEVEL * math.exp(-excess / 2 * (points - 3) / (points - 1)))


def _step(known: Filtered, explained: Jumps, place: int, p_value: float) -> Step:
    freedom = known.free - 1
    size, error = explained.sizes[place], explained.errors[place]
    scale = math.sqrt(known.variance(size**2) * known.free / freedom)
    return Step(place, size * error, scale * error, freedom, p_value)


def _far(series: Series, resets: Set[int], share: float) -> _Far:
    """How far the furthest point lies from what all others tell, in standard errors, and noise that says so."""
    distances = [abs(each) for each in apart(series, resets, share)]
    scale = 1.4826 * median(distances)
    if scale <= 0 or max(distances) <= _FAR * scale:
        return _Far(0.0, series.noise)
    noise = [
        each * max(1.0, distance / (_FAR * scale)) ** 2 for each, distance in zip(series.noise, distances, strict=True)
    ]
    return _Far(max(distances) / scale, noise)


def suspicion(series: Series, resets: Set[int] = frozenset()) -> Step | None:
    """The step that the last point would be the first one after: told with its p-value, though a point alone may be an
    outlier. None where nothing can be said, or the last point is like the one before."""
    last = len(series.values) - 1
    start = max([0, *resets])
    if last - len(resets) < FEWEST_POINTS or last - start < _LEAST or not _sudden(series.values):
        return None
    before = Series(series.values[:last], series.noise[:last], series.moves[:last])
    _, at = _likeliest([each.deviance() for each in _by_share(before, resets)])
    far = _far(before, resets, _SHARES[at])
    last_one = replace(series, noise=[*far.noise, series.noise[last]])
    known = filtered(last_one, resets, _SHARES[at])
    step = _step(known, jumps(last_one, known), last, 1.0)
    if step.error == 0:
        return None
    return replace(step, p_value=min(1.0, 2 * t_cdf(-abs(step.change) / step.error, step.freedom)))


def _sudden(values: Sequence[float]) -> bool:
    """Whether the last difference is large among all: what costs nothing to see."""
    differences = [abs(after - before) for before, after in pairwise(values)]
    return differences[-1] > 1.5 * 1.4826 * median(differences)


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a series comes to between its steps: logarithms, an item a point."""

    levels: list[float]
    errors: list[float]  # the standard errors of the points themselves


def fitted(series: Series, resets: Set[int]) -> Fitted:
    """The level under the likeliest walk, reset at steps that were found; a point that is far off counts less."""
    _, at = _likeliest([each.deviance() for each in _by_share(series, resets)])
    robust = replace(series, noise=_far(series, resets, _SHARES[at]).noise)
    scale = filtered(robust, resets, _SHARES[at]).variance()
    return Fitted(levels(robust, resets, _SHARES[at]), [math.sqrt(scale * noise) for noise in series.noise])
