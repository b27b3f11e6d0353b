"""Student's t distribution, which the standard library lacks; pure functions over floats."""

from __future__ import annotations

import math
from statistics import NormalDist

_NORMAL = NormalDist()
# Beyond it the two differ by less than 1e-5, and the continued fraction loses digits.
_AS_NORMAL = 1e5


def t_cdf(t: float, freedom: float) -> float:
    """The probability of a value up to `t`; `freedom`, the degrees of freedom, need not be whole, nor finite."""
    if freedom > _AS_NORMAL:
        return _NORMAL.cdf(t)
    tail = 0.5 * _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)
    return 1 - tail if t > 0 else tail


def t_quantile(p: float, freedom: float) -> float:
    """The t with t_cdf(t, freedom) == p; p between 0 and 1, the ends excluded.

    Newton's method from the normal quantile: right of 0 the distribution function is concave and that start lies
    left of the root, so the steps approach it from one side.
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
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    return math.exp(scale - (freedom + 1) / 2 * math.log1p(t * t / freedom))


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
        if abs(c * d - 1) < 1e-14:
            break
    return front * fraction / a
