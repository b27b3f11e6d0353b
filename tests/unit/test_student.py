from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_ddpperf.verdict.stats import t_cdf, t_quantile


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [
        (1, 6.313751515),
        (2, 2.919985580),
        (4, 2.131846786),
        (8, 1.859548038),
        (30, 1.697260887),
        (2.5, 2.558218614),
    ],
)
def test_t_quantile_agrees_with_tables(freedom: float, expected: float) -> None:
    assert t_quantile(0.95, freedom) == pytest.approx(expected, abs=1e-8)
    assert t_quantile(0.05, freedom) == pytest.approx(-expected, abs=1e-8)


def test_t_nears_the_normal_distribution() -> None:
    assert t_quantile(0.975, 1e6) == pytest.approx(1.959966, abs=1e-5)


def test_t_cdf_of_one_degree_is_cauchys() -> None:
    for t in (-3.0, -0.2, 0.0, 1.0, 12.0):
        assert t_cdf(t, 1) == pytest.approx(
            0.5 + math.atan(t) / math.pi, abs=1e-12
        )


@given(
    p=st.floats(0.5001, 0.9999999),
    freedom=st.floats(1.0, 1e6) | st.just(math.inf),
)
def test_the_quantile_is_the_inverse(p: float, freedom: float) -> None:
    assert t_cdf(t_quantile(p, freedom), freedom) == pytest.approx(p, abs=1e-9)
