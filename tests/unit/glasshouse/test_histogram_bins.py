import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from glasshouse.histogram_bins import (
    NUM_BINS,
    QUANTILES,
    RELATIVE_ERROR,
    bins_of,
    coarse,
    edges,
    ordered,
    quantiles,
)

FINITE = [number for number in range(NUM_BINS) if number % 2048 < 0x7F8]
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
VALUES = arrays(np.float32, st.integers(1, 60), elements=FLOATS)
SCALES = [1e-30, 1e-6, 1.0, 3e4, 1e30]


def counted(values):
    bins, counts = np.unique(bins_of(values), return_counts=True)
    return bins.tolist(), counts.tolist()


def as_float32(bits: int) -> float:
    return float(np.array([bits], dtype=np.uint32).view(np.float32)[0])


def error_allowed(values, q: float) -> float:
    """That of the larger of the two values between which a quantile lies."""
    first, last = (np.quantile(values, q, method=method) for method in ("lower", "higher"))
    return RELATIVE_ERROR * float(max(abs(first), abs(last))) * (1 + 1e-6) + 2**-129


def test_edges_are_where_the_top_twelve_bits_of_a_float32_change():
    for number in FINITE:
        low, high = edges(number)
        near, last = as_float32(number << 20), as_float32((number << 20) | 0xFFFFF)
        assert low < high
        if number < 2048:
            assert low == near
            assert low < last < high
        else:
            assert high == near
            assert low < last < high
    assert edges(0x7F7) == (1.875 * 2.0**127, 2.0**128)
    assert edges(2048) == (-(2.0**-129), -0.0)


@pytest.mark.parametrize("number", [-1, 0x7F8, 0x7FF, 0xFF8, NUM_BINS])
def test_a_bin_without_finite_values_has_no_edges(number):
    with pytest.raises(ValueError, match="no bin"):
        edges(number)


def test_bins_in_order_of_value_touch_each_other():
    inside = ordered(FINITE)
    assert sorted(inside) == FINITE
    for number, after in pairwise(inside):
        assert edges(number)[1] == edges(after)[0]


@given(VALUES)
def test_a_value_lies_between_the_edges_of_its_bin(values):
    for value, number in zip(values.tolist(), bins_of(values).tolist(), strict=True):
        low, high = edges(number)
        if value == 0:
            assert number == 0
        elif value > 0:
            assert low <= value < high
        else:
            assert low < value <= high


def test_zeros_share_a_bin_and_what_is_beyond_float32_is_in_the_last():
    assert bins_of([0.0, -0.0, -1e-60]).tolist() == [0, 0, 0]
    assert bins_of([1e300, 3.4e38, -1e300]).tolist() == [0x7F7, 0x7F7, 0xFF7]
    assert bins_of([math.nan, math.inf, -math.inf]).tolist() == []
    assert bins_of(np.array([2**62 + 1, -3])).tolist() == bins_of([2.0**62, -3.0]).tolist()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("num", [1, 2, 7, 10_000])
def test_quantiles_are_those_of_numpy_within_the_stated_error(scale, num):
    values = (np.random.default_rng(num).normal(size=num) * scale).astype(np.float32)
    found = quantiles(*counted(values))
    for q, mine in zip(QUANTILES.values(), found, strict=True):
        assert mine == pytest.approx(np.quantile(values, q), abs=error_allowed(values, q))


@given(VALUES, st.floats(0, 1))
def test_quantiles_of_anything_are_within_the_stated_error(values, q):
    wide = values.astype(np.float64)
    (mine,) = quantiles(*counted(wide), [q])
    assert abs(mine - np.quantile(wide, q)) <= error_allowed(wide, q)


@given(VALUES)
def test_quantiles_do_not_fall_and_stay_between_known_extremes(values):
    low, high = float(values.min()), float(values.max())
    found = quantiles(*counted(values), np.linspace(0, 1, 21), low=low, high=high)
    assert found == sorted(found)
    assert low <= found[0] <= found[-1] <= high


def test_quantiles_of_one_constant_are_that_constant_when_the_extremes_are_known():
    assert quantiles(*counted([1.0] * 9), low=1.0, high=1.0) == [1.0] * 7
    assert quantiles(*counted([0.0] * 9 + [-0.0])) == [0.0] * 7


def test_there_are_no_quantiles_of_nothing():
    assert all(math.isnan(item) for item in quantiles([], []))
    assert all(math.isnan(item) for item in quantiles([5], [0], [0.5]))


def test_the_order_of_bins_says_nothing():
    bins, counts = counted(np.random.default_rng(0).normal(size=300))
    backwards = quantiles(bins[::-1], counts[::-1])
    assert backwards == quantiles(bins, counts)
    assert coarse(bins[::-1], counts[::-1], 20) == coarse(bins, counts, 20)


@given(VALUES, st.integers(1, 200))
@example(np.array([-1, 0], dtype=np.float32), 1)
def test_coarse_bars_keep_the_total_and_divide_no_bin(values, num):
    bins, counts = counted(values)
    bars = coarse(bins, counts, num)
    assert 1 <= len(bars.counts) <= num
    assert len(bars.edges) == len(bars.counts) + 1
    assert sum(bars.counts) == len(values)
    assert bars.edges == sorted(set(bars.edges))
    borders = {item for number in FINITE for item in edges(number)} if num == 1 else None
    assert borders is None or borders >= {*bars.edges}
    for low, high, count in zip(bars.edges, bars.edges[1:], bars.counts, strict=False):
        inside = [
            n for number, n in zip(bins, counts, strict=True) if low <= edges(number)[0] < high
        ]
        assert sum(inside) == count


def test_coarse_bars_of_a_bell_are_a_bell():
    values = np.random.default_rng(1).normal(size=100_000)
    bars = coarse(*counted(values), 40)
    widths = np.diff(bars.edges)
    heights = np.array(bars.counts) / widths / values.size
    middles = (np.array(bars.edges[1:]) + np.array(bars.edges[:-1])) / 2
    wanted = np.exp(-(middles**2) / 2) / math.sqrt(2 * math.pi)
    assert np.abs(heights - wanted).max() < 0.02
    assert len(bars.counts) >= 20


def test_coarse_bars_of_nothing_are_none():
    assert coarse([], [], 10) == ([], [])
    with pytest.raises(ValueError, match="1 bar"):
        coarse([1], [1], 0)
