"""Statistics of step times: pure functions over floats, Student's distribution included."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import NormalDist, fmean
from typing import NamedTuple

from pytest_ddpperf.records.quantiles import quantile
from pytest_ddpperf.records.record import record
from pytest_ddpperf.records.samples import Interval

_NORMAL = NormalDist()
# Beyond it the two differ by less than 1e-5, and the continued fraction loses digits.
_AS_NORMAL = 1e5


def t_cdf(t: float, freedom: float) -> float:
    """The probability of a value up to `t`; `freedom`, the degrees of freedom, need not be whole,
    nor finite."""
    if freedom > _AS_NORMAL:
        return _NORMAL.cdf(t)
    tail = 0.5 * _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)
    return 1 - tail if t > 0 else tail


def t_quantile(p: float, freedom: float) -> float:
    """The t with t_cdf(t, freedom) == p; p between 0 and 1, the ends excluded.

    Newton's method from the normal quantile: right of 0 the distribution function is concave and
    that start lies left of the root, so the steps approach it from one side.
    """
    if p < 0.5:
        return -t_quantile(1 - p, freedom)
    t = _NORMAL.inv_cdf(p)
    if freedom > _AS_NORMAL:
        return t
    for _ in range(100):
        step = (p - t_cdf(t, freedom)) / _t_density(t, freedom)
        t += step
        if abs(step) <= 1e-9 * t:  # the next would be its square
            break
    return t


def _t_density(t: float, freedom: float) -> float:
    scale = (
        math.lgamma((freedom + 1) / 2)
        - math.lgamma(freedom / 2)
        - 0.5 * math.log(freedom * math.pi)
    )
    return math.exp(scale - (freedom + 1) / 2 * math.log1p(t * t / freedom))


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction.

    Lentz's method, as in Press et al., "Numerical Recipes", section 6.4; good to about 1e-14 for a
    and b below 1e4.
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    # where the fraction of the mirrored function converges faster
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b)
        - math.lgamma(a)
        - math.lgamma(b)
        + a * math.log(x)
        + b * math.log1p(-x)
    )
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
        if abs(c * d - 1) < 1e-14:
            break
    return front * fraction / a


# A difference counts as resolved that would be found in so many of all measurements.
POWER = 0.8
# A percentile is supported where its distribution-free bound with this confidence exists.
_CONFIDENCE = 0.95


class Part(NamedTuple):
    """An estimated variance and the degrees of freedom it was estimated with."""

    variance: float
    freedom: float


NOTHING = Part(0.0, math.inf)


class Drift(NamedTuple):
    """What is assumed of the spread between sessions before any was seen; it counts as `freedom`
    further sessions would.

    Its variance is the sum of three: `floor` squared; `share` times the spread between launches,
    squared; and that of a machine on which others work, which shows in the launches: at most
    `steep` times their spread, at most `usual`.
    """

    floor: float
    share: float
    freedom: float
    usual: float = 0.0
    steep: float = 0.0

    def variance(self, launches: float) -> float:
        """`launches` is the variance between launches."""
        seen = self.steep**2 * launches
        busy = (
            seen * self.usual**2 / (seen + self.usual**2) if seen > 0 else 0.0
        )
        return self.floor**2 + busy + self.share**2 * launches


@record
class Difference:
    """A difference of means and what makes it uncertain, as independent parts."""

    estimate: float
    now: Part  # of the mean over launches
    base: Part  # of the mean over the launches of all sessions
    drift: Part  # of one session
    launches: int  # of now
    sessions: int = 1  # of the base

    @property
    def _parts(self) -> tuple[Part, ...]:
        return (
            self.now,
            self.base,
            Part(
                self.drift.variance * (1 + 1 / self.sessions),
                self.drift.freedom,
            ),
        )

    @property
    def error(self) -> float:
        """The standard error."""
        return math.sqrt(math.fsum(part.variance for part in self._parts))

    @property
    def freedom(self) -> float:
        """The degrees of freedom of `error`, by Welch and Satterthwaite.

        B. L. Welch, "The generalization of Student's problem when several different population
        variances are involved", Biometrika 34 (1947).
        """
        parts = [part for part in self._parts if part.variance > 0]
        total = math.fsum(part.variance for part in parts)
        # Relative to their sum, so that tiny variances do not underflow when squared.
        inverse = math.fsum(
            (part.variance / total) ** 2 / part.freedom for part in parts
        )
        return 1 / inverse if inverse > 0 else math.inf

    def p_value(self) -> float:
        """One-sided: how likely so large an estimate is where there is no difference, or one below
        zero."""
        if self.error == 0 and self.estimate <= 0:
            return 1.0
        return self.beyond(self.estimate)

    def beyond(self, bound: float) -> float:
        """How likely an estimate beyond `bound` is where there is no difference."""
        return (
            0.0 if self.error == 0 else t_cdf(-bound / self.error, self.freedom)
        )

    def reach(self, level: float) -> float:
        """How far a one-sided bound at `level` lies from the estimate."""
        return (
            0.0
            if self.error == 0
            else t_quantile(1 - level, self.freedom) * self.error
        )

    def resolution(self, level: float) -> float:
        """The difference that would be found at `level` four times out of five."""
        return self.reach(level) + self.reach(1 - POWER)

    def mirrored(self) -> "Difference":
        return replace(self, estimate=-self.estimate)

    def chance_to_settle(
        self,
        bound: float,
        seen: float,
        most: int,
        *,
        level: float,
        noise_level: float,
    ) -> tuple[float, float]:
        """Return how likely `most` launches show no difference beyond `bound`, and how likely they
        show one.

        By the predictive distribution of the mean of the launches that are left, from those so far.
        No difference: the estimate lies below the bound by its own noise at `noise_level`, and
        below `seen` by its whole error. A difference: the estimate is beyond the bound with
        evidence at `level`.
        """
        launches, left = self.launches, most - self.launches
        own = self.now.variance * launches  # of one launch
        fixed = self.error**2 - self.now.variance
        spread = math.sqrt(own / launches + own / left)
        if spread == 0:
            return float(self.estimate <= bound), float(self.estimate > bound)

        def likely(mean: float) -> float:
            """Return the probability that the mean of all launches is at most so large."""
            needed = (most * mean - launches * self.estimate) / left
            return t_cdf((needed - self.estimate) / spread, self.now.freedom)

        quantile = t_quantile(1 - noise_level, most - 1)
        noise = quantile * math.sqrt(own / most)
        whole = math.sqrt(own / most + fixed)
        unseen = quantile * whole
        evidence = t_quantile(1 - level, most - 1) * whole
        passes = 0.0
        if unseen <= seen:
            passes = likely(min(bound - noise, seen - unseen))
        return passes, 1 - likely(max(bound, evidence))

    def launches_for(self, resolution: float, level: float) -> int | None:
        """Return about how many current launches would detect so small a change, where these leave
        an error; None if no number of them would."""
        now, base, drift = self._parts
        # As many errors as now make a resolution; only the part of the current launches shrinks.
        room = (
            (resolution * self.error / self.resolution(level)) ** 2
            - base.variance
            - drift.variance
        )
        return (
            math.ceil(self.launches * now.variance / room) if room > 0 else None
        )


def difference(
    now: Sequence[float],
    sessions: Sequence[Sequence[float]],
    *,
    drift: Drift | None = None,
) -> Difference:
    """The mean of `now` over the mean of the sessions' means; `now` and each session need two
    values.

    Without `drift` both sides are of one occasion: Welch's t-test. With it the occasions differ,
    and the spread between them is part of the error. That variance is estimated from the sessions'
    means, less what their launches explain, and moderated by the assumed one: G. K. Smyth, "Linear
    models and empirical Bayes methods for assessing differential expression", Statistical
    Applications in Genetics and Molecular Biology 3 (2004).
    """
    means = [fmean(session) for session in sessions]
    spread_now = Part(variance(now), len(now) - 1)
    spread_base = pooled(
        [Part(variance(session), len(session) - 1) for session in sessions]
    )
    of_a_mean = spread_base.variance * fmean(
        1 / len(session) for session in sessions
    )
    between = NOTHING
    if drift:
        assumed = drift.variance(pooled([spread_now, spread_base]).variance)
        seen = max(0.0, variance(means) - of_a_mean) if len(means) > 1 else 0.0
        between = pooled(
            [Part(assumed, drift.freedom), Part(seen, len(means) - 1)]
        )
    return Difference(
        estimate=fmean(now) - fmean(means),
        now=Part(spread_now.variance / len(now), spread_now.freedom),
        base=Part(of_a_mean / len(means), spread_base.freedom),
        drift=between,
        launches=len(now),
        sessions=len(means),
    )


# Of five pairs, three would be left to tell how much they spread.
_TRIMMED_PAIRS = 10


def paired(
    now: Sequence[float], base: Sequence[float], *, trim: float = 0.0
) -> Difference:
    """The mean of the differences of two sides whose k-th values were taken one after the other;
    two pairs at least.

    Student's t-test on the differences: what drifted from pair to pair is in both sides and
    cancels. All of the error is that of `now`, since further launches are further pairs. From ten
    pairs on, the mean is without a share `trim` of the least and of the largest differences, its
    error from the winsorised variance: J. W. Tukey and D. H. McLaughlin, "Less Vulnerable
    Confidence and Significance Procedures for Location Based on a Single Sample", Sankhya A 25
    (1963).
    """
    differences = sorted(
        after - before for after, before in zip(now, base, strict=True)
    )
    pairs = len(differences)
    cut = int(pairs * trim) if pairs >= _TRIMMED_PAIRS else 0
    kept = differences[cut : pairs - cut]
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    free = len(kept) - 1
    error = variance(winsorised) * (pairs - 1) / (len(kept) * free)
    return Difference(
        estimate=fmean(kept),
        now=Part(error, free),
        base=NOTHING,
        drift=NOTHING,
        launches=pairs,
    )


def by_stretches(
    now: Sequence[float],
    base: Sequence[float],
    stretches: Sequence[int],
    q: float,
) -> float:
    """Return the logarithm of the ratio of two launches' q-th percentiles, if their windows were
    interleaved in `stretches` of these lengths: the median over stretches of the logarithm of each.
    A disturbance of some stretches of either side has no part in it."""
    ratios, start = [], 0
    for length in stretches:
        own, other = (
            quantile(side[start : start + length], q) for side in (now, base)
        )
        ratios.append(math.log(own / other))
        start += length
    return quantile(ratios, 50)


def variance(values: Sequence[float]) -> float:
    """The sample variance of two values or more; as the standard library's, without its exact
    fractions."""
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (
        len(values) - 1
    )


def pooled(parts: Sequence[Part]) -> Part:
    """Return the mean of the variances, weighted by their degrees of freedom."""
    freedom = math.fsum(part.freedom for part in parts)
    return Part(
        math.fsum(part.variance * part.freedom for part in parts) / freedom,
        freedom,
    )


class Evidence(NamedTuple):
    """Whether a p-value is evidence among several."""

    enough: bool
    level: float  # that it was compared with


def holm(
    p_values: Sequence[float], level: float, weights: Sequence[float] = ()
) -> tuple[Evidence, ...]:
    """Which of several p-values are evidence, such that any is wrong at most with probability
    `level`, which they share by their `weights`, equal by default.

    S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
    Statistics 6 (1979).
    """
    weights = weights or [1.0] * len(p_values)
    order = sorted(
        range(len(p_values)), key=lambda index: p_values[index] / weights[index]
    )
    found: dict[int, Evidence] = {}
    left, enough = 0.0, True
    for place, index in enumerate(order):
        if enough:
            left = math.fsum(weights[other] for other in order[place:])
        share = level * weights[index] / left
        enough = enough and p_values[index] <= share
        found[index] = Evidence(enough, share)
    return tuple(found[index] for index in range(len(order)))


def spent(level: float, fraction: float) -> float:
    """Return how much of an error rate may be spent when this fraction of all launches has been
    taken. It follows O'Brien and Fleming's boundary, which spends almost nothing at first.

    K. K. G. Lan, D. L. DeMets, "Discrete sequential boundaries for clinical trials", Biometrika 70
    (1983).
    """
    bound = _NORMAL.inv_cdf(1 - level / 2)
    return 2 * _NORMAL.cdf(-bound / math.sqrt(fraction))


def find_gap(values: Sequence[float], least: float) -> float | None:
    """Return the smallest of the large values, if values of 0 or more come in two groups; else
    None.

    The largest gap divides them. It is wider than `least`, and than all that the small values span
    from 0 on. The large values are at least two, and at most half of all.
    """
    ordered = sorted(values)
    places = range((len(ordered) + 1) // 2, len(ordered) - 1)
    place = max(
        places, key=lambda each: ordered[each] - ordered[each - 1], default=None
    )
    if place is None:
        return None
    below, above = ordered[place - 1], ordered[place]
    return above if above - below > max(least, below) else None


def fisher(slow: int, launches: int, slow_before: int, before: int) -> float:
    """Return how likely it is that so many of the `launches` are slow, or more, if the slow ones of
    both sides are distributed among them by chance; of the other side `slow_before` of `before`
    are.

    R. A. Fisher, "The logic of inductive inference", Journal of the Royal Statistical Society 98
    (1935): the exact test on the 2 x 2 table.
    """
    both = slow + slow_before
    ways = sum(
        math.comb(launches, each) * math.comb(before, both - each)
        for each in range(slow, min(both, launches) + 1)
    )
    return ways / math.comb(launches + before, both)


# How many rates of slow launches are tried, and up to how many pairs: with more, the exact test
# that needs no rate hardly differs, and it never claims more.
_RATES = 100
_FEW_PAIRS = 100


def more_are_slower(slower: int, faster: int, pairs: int) -> float:
    """Return how likely it is that, of `pairs` of launches, so many have the slow launch on one
    side (`slower`), and no more than `faster` on the other, or what is as clear, if each launch is
    slow with the same probability.

    S. Suissa, J. J. Shuster, "The 2 x 2 matched-pairs trial: exact unconditional design and
    analysis", Biometrics 47 (1991): the probability of all results that McNemar's exact test finds
    as clear, at the rate of slow launches where it is largest. One launch of a pair is slow and the
    other is not in at most half of all pairs, because launches are independent.
    """

    def mcnemar(now: int, before: int) -> float:
        differ = now + before
        ways = sum(math.comb(differ, each) for each in range(now, differ + 1))
        return ways / (1 << differ)

    p_value = mcnemar(slower, faster)
    if pairs > _FEW_PAIRS:
        return p_value
    as_clear = [
        (math.comb(pairs, now) * math.comb(pairs - now, before), now + before)
        for now, before in product(range(pairs + 1), repeat=2)
        if mcnemar(now, before) <= p_value
    ]
    # of pairs with the slow launch on one side
    rates = [each / _RATES / 4 for each in range(1, _RATES + 1)]
    return max(
        math.fsum(
            ways * rate**differ * (1 - 2 * rate) ** (pairs - differ)
            for ways, differ in as_clear
        )
        for rate in rates
    )


def steps_needed(q: float) -> int:
    """The least number of steps that supports the q-th percentile (between 0 and 100, the ends
    excluded): with fewer, no step need lie beyond it, and its distribution-free 95 % bound does not
    exist (59 for p95, 299 for p99).
    """
    share = max(q, 100 - q) / 100
    return math.ceil(math.log(1 - _CONFIDENCE) / math.log(share))


def as_share(logarithm: float) -> float:
    """Return a difference of logarithms as a relative change."""
    return math.expm1(min(logarithm, 700.0))


def interval(estimate: float, reach: float) -> Interval:
    """Return a difference of logarithms as a relative change, with the bounds at its `reach`."""
    return Interval(
        estimate=as_share(estimate),
        low=as_share(estimate - reach),
        high=as_share(estimate + reach),
    )
