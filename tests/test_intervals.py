"""Intervals against scipy's, and within what they are intervals of."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, bootstrap

from ragblend.intervals import mean_interval, wilson_interval


@given(num=st.integers(1, 10_000), data=st.data())
def test_wilsons_interval_holds_the_share_and_is_scipys(num, data):
    hits = data.draw(st.integers(0, num))
    low, high = wilson_interval(hits / num, num)
    assert 0 <= low <= hits / num + 1e-9
    assert hits / num - 1e-9 <= high <= 1
    expected = binomtest(hits, num).proportion_ci(method="wilson")
    assert math.isclose(low, expected.low, abs_tol=1e-4)
    assert math.isclose(high, expected.high, abs_tol=1e-4)


def test_the_bootstrap_interval_shrinks_with_more_values():
    few, many = mean_interval([0.0, 1.0] * 5), mean_interval([0.0, 1.0] * 500)
    assert few[0] < many[0] < 0.5 < many[1] < few[1]
    assert many == pytest.approx((0.5 - 1.96 * 0.5 / 1000**0.5, 0.5 + 1.96 * 0.5 / 1000**0.5), abs=0.01)


def test_the_bootstrap_interval_is_scipys_and_repeats():
    values = np.random.default_rng(7).gamma(2.0, size=80)
    found = mean_interval(values)
    assert found == mean_interval(list(values))
    expected = bootstrap((values,), np.mean, method="percentile", rng=1).confidence_interval
    assert found == pytest.approx(expected, abs=0.03)
