"""Reduce the points of a series without losing important ones. Pure functions."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def kept_places(columns: Sequence[NDArray[np.float64]], max_points: int) -> NDArray[np.intp]:
    """Return the indices of the points to keep: at most ``max_points`` for all columns together.

    Keeps the first and the last point. Then come the ends of each run of NaN or Inf, or as many of
    them as fit. Then come the min and max of each column in buckets of equal size or, if there is
    not room for all of these, evenly spaced points.
    """
    num = len(columns[0])
    if num <= max_points:
        return np.arange(num)
    keep = np.zeros(num, bool)
    keep[[0, -1][:max_points]] = True
    room = max(0, max_points - 2)
    odd = np.zeros(num, bool)
    for column in columns:
        odd |= _ends_of_runs(~np.isfinite(column))
    odd &= ~keep
    ends = np.flatnonzero(odd)
    if len(ends) >= room:
        keep[ends[evenly(len(ends), room)]] = True
        return np.flatnonzero(keep)
    keep[ends] = True
    room -= len(ends)
    if room < 2 * len(columns):
        keep[evenly(num, room + 2)] = True
        return np.flatnonzero(keep)
    size = math.ceil(num / (room // (2 * len(columns))))
    for column in columns:
        keep[_extremes(column, size)] = True
    return np.flatnonzero(keep)


def evenly(num: int, max_points: int) -> NDArray[np.intp]:
    """Return at most ``max_points`` of ``num`` indices, evenly spaced, including first and last."""
    if num <= max_points:
        return np.arange(num)
    if max_points <= 1:
        return np.arange(max_points)
    return np.unique(np.linspace(0, num - 1, max_points).round().astype(np.intp))


def _ends_of_runs(inside: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the first and last index of every run."""
    padded = np.pad(inside, 1)
    return inside & ~(padded[:-2] & padded[2:])


def _extremes(column: NDArray[np.float64], size: int) -> NDArray[np.intp]:
    """Return the indices of the finite min and max of each bucket."""
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
