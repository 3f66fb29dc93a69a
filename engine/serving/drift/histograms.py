"""Histograms of a series, and the population stability index (PSI) of two of them.

PSI is the sum over bins of (q - p) ln(q / p), where p and q are the shares of two samples in a bin.
If both samples are drawn independently from one distribution, PSI / (1 / n + 1 / m) is close to
chi-squared with one degree of freedom less than there are bins, where n and m are the sizes of the
samples (B. Yurdakul, "Statistical properties of population stability index", dissertation, Western
Michigan University, 2018).

Shape suffixes: N = rows, B = bins.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

NUM_BINS = 10
"""The number of bins of a numeric series without frequent values."""
MAX_CATEGORIES = 50
MIN_EXPECTED = 5.0
"""A category has at least so many rows in a window, on average; rarer ones are counted together.
Below that the distribution of PSI is not close to chi-squared (Cochran's rule)."""
FALSE_ALARMS = 0.01
"""The probability that a window without drift has a series above its critical value, at most."""
_ADDED = 1.0
"""The rows that are added to each bin of both samples. Without them bins with few rows make PSI
exceed its critical value twice as often as the approximation says (measured with samples of 100 to
10,000 rows, see the tests); with them it is exceeded less often."""
_TOLERANCE = 1e-5
"""How far a value may be from a frequent value and be it, as a fraction of the standard deviation:
the same value is rounded differently in batches of other sizes."""


@dataclass(frozen=True, eq=False)
class Bins:
    """The bins of a series. The last one has missing values, or all other categories."""

    edges: Floats | None
    """Bin i has edges[i - 1] <= x < edges[i]. None: the bins are categories."""
    categories: Counts | None = None
    """The category of each bin but the last, ascending."""

    @property
    def num_bins(self) -> int:
        """The number of bins, with the last one."""
        if self.edges is not None:
            return len(self.edges) + 2
        return 1 if self.categories is None else len(self.categories) + 1

    def counts(self, values_N: Floats) -> Counts:
        """Return the number of values in each bin, [B]."""
        if self.edges is not None:
            places = np.searchsorted(self.edges, values_N, side="right")
            places[np.isnan(values_N)] = len(self.edges) + 1
        else:
            known = np.empty(0, np.int64) if self.categories is None else self.categories
            places = np.searchsorted(known, values_N)
            is_known = np.append(known, np.iinfo(np.int64).min)[places] == values_N
            places[~is_known] = len(known)
        return np.bincount(places, minlength=self.num_bins).astype(np.int64)

    def range_of(self, number: int) -> tuple[float, float] | None:
        """Return the edges of a bin; None: it has missing values."""
        assert self.edges is not None  # noqa: S101 (the callers looked)
        if number > len(self.edges):
            return None
        padded = np.concatenate([[-np.inf], self.edges, [np.inf]])
        return float(padded[number]), float(padded[number + 1])

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        if self.edges is not None:
            return {"edges": self.edges.tolist()}
        return {"categories": [] if self.categories is None else self.categories.tolist()}

    @staticmethod
    def read(found: Mapping[str, Any]) -> "Bins":
        """Read what `as_dict` returned.

        Raises:
            ValueError, TypeError: it is something else.
        """
        if "edges" in found:
            edges = np.array(found["edges"], np.float64).reshape(-1)
            if not (np.isfinite(edges).all() and (np.diff(edges) > 0).all()):
                raise ValueError("edges do not ascend")
            return Bins(edges)
        categories = np.array(found["categories"], np.int64).reshape(-1)
        if not (np.diff(categories) > 0).all():
            raise ValueError("categories do not ascend")
        return Bins(None, categories)


def quantile_bins(values_N: Floats, num_bins: int = NUM_BINS) -> Bins:
    """Return bins that each have about the same number of values.

    A value that is as frequent as a bin has a bin of its own, so that it does not make others
    empty. Other edges lie halfway between two values that occur, so that rounding moves no value to
    another bin.
    """
    finite = np.sort(values_N[np.isfinite(values_N)])
    if not len(finite):
        return Bins(np.empty(0))
    unique, firsts, counts = np.unique(finite, return_index=True, return_counts=True)
    at = np.arange(1, num_bins) * len(finite) // num_bins
    chosen = np.unique(np.searchsorted(firsts, at, side="right") - 1)
    with np.errstate(over="ignore"):
        tolerance = _TOLERANCE * float(finite.std())
    edges: set[float] = set()
    for place in chosen:
        value = float(unique[place])
        below = float(unique[place - 1]) if place else None
        if counts[place] < len(finite) / num_bins:
            edges.add(value if below is None else _between(below, value))
            continue
        above = float(unique[place + 1]) if place + 1 < len(unique) else None
        near = max(tolerance, _TOLERANCE * abs(value), 1e-30)
        edges.add(value - near if below is None else max(value - near, _between(below, value)))
        edges.add(value + near if above is None else min(value + near, _between(value, above)))
    return Bins(np.array(sorted(edge for edge in edges if np.isfinite(edge))))


def _between(below: float, above: float) -> float:
    """Return the middle of two values, which is above the first one."""
    middle = below / 2 + above / 2
    return middle if below < middle <= above else above


def category_bins(values_N: Floats, window: int) -> Bins:
    """Return a bin for each frequent category; ``window``: the rows of a window."""
    categories, counts = np.unique(values_N[np.isfinite(values_N)], return_counts=True)
    is_frequent = counts * window >= MIN_EXPECTED * len(values_N)
    frequent, counts = categories[is_frequent], counts[is_frequent]
    most = np.sort(np.argsort(-counts, kind="stable")[:MAX_CATEGORIES])
    return Bins(None, frequent[most].astype(np.int64))


def psi(reference_B: Counts, window_B: Counts) -> float:
    """Return the population stability index of two histograms with the same bins.

    Bins that are empty in both do not count. One row is added to each other bin of both, so that
    none is empty.
    """
    is_used = (reference_B > 0) | (window_B > 0)
    p_B, q_B = reference_B[is_used] + _ADDED, window_B[is_used] + _ADDED
    p_B, q_B = p_B / p_B.sum(), q_B / q_B.sum()
    return float(((q_B - p_B) * np.log(q_B / p_B)).sum())


def critical_psi(reference_B: Counts, window_B: Counts, num_series: int) -> float:
    """Return the PSI that two samples of one distribution exceed with a small probability.

    ``num_series``: the series that are compared at once; all of them together exceed theirs with a
    probability of at most `FALSE_ALARMS` (Bonferroni).
    """
    num_used = int(((reference_B > 0) | (window_B > 0)).sum())
    if num_used < 2:
        return 0.0
    each = 1 / max(1, reference_B.sum()) + 1 / max(1, window_B.sum())
    return float(each * chi_squared(num_used - 1, FALSE_ALARMS / max(1, num_series)))


@functools.lru_cache(maxsize=1000)
def chi_squared(degrees: int, probability: float) -> float:
    """Return the value that a chi-squared variable exceeds with a probability."""
    half = torch.tensor(degrees / 2, dtype=torch.float64)

    def exceeds(x: float) -> float:
        return float(torch.special.gammaincc(half, torch.tensor(x / 2, dtype=torch.float64)))

    low, high = 0.0, float(degrees)
    while exceeds(high) > probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) > probability else (low, middle)
    return high
