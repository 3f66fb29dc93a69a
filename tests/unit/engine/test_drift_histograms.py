"""Histograms of served and training rows, and how far those of one distribution differ."""

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.serving.drift.histograms import (
    FALSE_ALARMS,
    Bins,
    category_bins,
    chi_squared,
    critical_psi,
    psi,
    quantile_bins,
)

Floats = NDArray[np.float64]


def normal(rng: np.random.Generator, num: int) -> Floats:
    return rng.normal(size=num)


def with_zeros(rng: np.random.Generator, num: int) -> Floats:
    return np.where(rng.random(num) < 0.6, 0.0, rng.lognormal(sigma=2.0, size=num))


def counted(rng: np.random.Generator, num: int) -> Floats:
    return rng.poisson(7, num).astype(np.float64)


def rare(rng: np.random.Generator, num: int) -> Floats:
    return rng.choice([0.0, 1.0, 2.0, 1000.0], p=[0.6, 0.39, 0.0098, 0.0002], size=num)


def missing(rng: np.random.Generator, num: int) -> Floats:
    return np.where(rng.random(num) < 0.004, np.nan, rng.normal(size=num))


def category(rng: np.random.Generator, num: int) -> Floats:
    return np.minimum(rng.zipf(1.3, num), 2000).astype(np.float64)


SHAPES = (normal, with_zeros, counted, rare, missing, category)


@pytest.mark.parametrize(
    ("degrees", "probability", "wanted"),
    [(1, 0.05, 3.841459), (9, 0.05, 16.918978), (10, 1e-4, 35.564014), (50, 1e-6, 114.0)],
)
def test_quantiles_of_chi_squared_are_those_of_tables(
    degrees: int, probability: float, wanted: float
):
    found = chi_squared(degrees, probability)
    assert found == pytest.approx(wanted, rel=1e-6 if degrees < 50 else 0.02)


def test_psi_is_the_sum_over_bins():
    training, served = np.array([100, 300, 600]), np.array([300, 300, 400])
    p, q = (training + 1) / 1003, (served + 1) / 1003
    assert psi(training, served) == pytest.approx(((q - p) * np.log(q / p)).sum(), rel=1e-12)
    many = 10**6  # the rows that are added no longer matter
    p, q = training / 1000, served / 1000
    wanted = ((q - p) * np.log(q / p)).sum()
    assert psi(training * many, served * many) == pytest.approx(wanted, rel=1e-6)
    assert psi(training, training * 7) == pytest.approx(0.0, abs=1e-3)


def test_bins_that_are_empty_in_both_do_not_count():
    training, served = np.array([100, 0, 50]), np.array([10, 0, 20])
    kept = np.array([100, 50]), np.array([10, 20])
    assert psi(training, served) == psi(*kept)
    assert critical_psi(training, served, 1) == critical_psi(*kept, 1)
    assert np.isfinite(psi(np.array([100, 0]), np.array([0, 10])))


def test_the_critical_value_is_that_of_chi_squared():
    training, served = np.full(10, 400), np.full(10, 100)
    wanted = (1 / 4000 + 1 / 1000) * chi_squared(9, FALSE_ALARMS / 20)
    assert critical_psi(training, served, 20) == pytest.approx(wanted)


@pytest.mark.parametrize(("num_training", "num_served"), [(4096, 1000), (4096, 100), (300, 200)])
def test_windows_of_the_training_distribution_raise_few_alarms(num_training: int, num_served: int):
    rng = np.random.default_rng(1)
    alarms, num_windows = 0, 500
    for _ in range(num_windows):
        found = False
        for shape in SHAPES:
            training, served = shape(rng, num_training), shape(rng, num_served)
            is_category = shape is category
            bins = category_bins(training, num_served) if is_category else quantile_bins(training)
            both = bins.counts(training), bins.counts(served)
            found |= psi(*both) > critical_psi(*both, len(SHAPES))
        alarms += found
    # at most 1 %, as each window has another reference; three standard deviations above it
    assert alarms <= 0.01 * num_windows + 3 * (0.01 * num_windows) ** 0.5


def test_a_frequent_value_has_a_bin_of_its_own():
    rng = np.random.default_rng(2)
    training = with_zeros(rng, 5000)
    counts = quantile_bins(training).counts(training)
    assert counts.sum() == 5000
    assert counts.max() == (training == 0).sum()  # zeros have a bin of their own
    assert (counts == 500).sum() == 4  # the rest is in equal parts, but for the part beside zero
    assert quantile_bins(training).counts(np.array([-1.0]))[0] == 1
    assert counts[0] == 0  # nothing is below zero, and a value there would be seen


def test_missing_values_have_a_bin_and_infinities_are_the_largest():
    bins = quantile_bins(np.arange(100.0))
    counts = bins.counts(np.array([np.nan, np.nan, np.inf, -np.inf]))
    assert (counts[-1], counts[-2], counts[0]) == (2, 1, 1)
    nothing = quantile_bins(np.full(5, np.nan))
    assert nothing.counts(np.array([np.nan, 1.0])).tolist() == [1, 1]


def test_rounding_moves_no_value_to_another_bin():
    rng = np.random.default_rng(3)
    for training in (counted(rng, 3000), with_zeros(rng, 3000), rare(rng, 3000), np.full(9, 3.3)):
        bins = quantile_bins(training)
        discrete = training if len(np.unique(training)) < 100 else training[training == 0]
        for factor in (1 - 1e-7, 1 + 1e-7):
            moved = discrete * factor
            moved[discrete == 0] = (factor - 1) * 1e-2
            assert bins.counts(moved).tolist() == bins.counts(discrete).tolist()
    bins = quantile_bins(with_zeros(rng, 3000))
    zero = bins.counts(np.zeros(1)).argmax()
    assert bins.counts(np.full(1, 0.1))[zero] == 0  # but what is not zero is not counted as zero


def test_rare_categories_are_counted_together():
    training = np.repeat([3.0, 5.0, 8.0], [800, 190, 10])
    bins = category_bins(training, 100)
    assert bins.counts(training).tolist() == [800, 190, 10]
    assert bins.counts(np.array([5.0, 8.0, 7.0, -1.0])).tolist() == [0, 1, 3]
    assert category_bins(training, 1000).num_bins == 4


@pytest.mark.parametrize("bins", [quantile_bins(np.arange(50.0)), Bins(None, np.array([1, 4]))])
def test_bins_are_read_as_they_were_written(bins: Bins):
    again = Bins.read(bins.as_dict())
    values = np.array([1.0, 4.0, 17.3, np.nan])
    assert again.counts(values).tolist() == bins.counts(values).tolist()


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"edges": [1.0, 1.0]},
        {"edges": [float("inf")]},
        {"edges": ["a"]},
        {"categories": [2, 1]},
        {"categories": [[1], 2]},
    ],
)
def test_bins_of_another_form_are_refused(found: dict[str, object]):
    with pytest.raises((ValueError, TypeError, KeyError)):
        Bins.read(found)
