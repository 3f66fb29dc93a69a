"""Fewer points of a series, without losing what matters in it. Pure."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def kept_places(columns: Sequence[NDArray[np.float64]], max_points: int) -> NDArray[np.intp]:
    """Which of the points to keep: about ``max_points``, all columns together.

    First and last, the least and the greatest of each column in each of equal buckets, and the
    first and last point of every run that is not finite, whatever the limit.
    """
    num = len(columns[0])
    if num <= max_points:
        return np.arange(num)
    keep = np.zeros(num, bool)
    keep[[0, -1]] = True
    share = max(2, max_points // len(columns))
    size = max(1, math.ceil(num / max(1, share // 2)))
    for column in columns:
        keep[_ends_of_runs(~np.isfinite(column))] = True
        keep[_extremes(column, size)] = True
    return np.flatnonzero(keep)


def evenly(num: int, max_points: int) -> NDArray[np.intp]:
    """At most so many of ``num`` places, first and last among them, evenly apart."""
    if num <= max_points:
        return np.arange(num)
    return np.unique(np.linspace(0, num - 1, max_points).round().astype(np.intp))


def _ends_of_runs(inside: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The first and last place of every run."""
    padded = np.pad(inside, 1)
    return inside & ~(padded[:-2] & padded[2:])


def _extremes(column: NDArray[np.float64], size: int) -> NDArray[np.intp]:
    """The places of the least and the greatest finite value of each bucket."""
    finite = np.isfinite(column)
    num = -(-len(column) // size)
    found: list[NDArray[np.intp]] = []
    for sign in (1.0, -1.0):
        values = np.full(num * size, np.inf)
        values[: len(column)] = np.where(finite, sign * column, np.inf)
        buckets = values.reshape(num, size)
        least = buckets.argmin(axis=1)
        some = np.isfinite(buckets[np.arange(num), least])
        found.append((np.arange(num) * size + least)[some])
    return np.concatenate(found)
