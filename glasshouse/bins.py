"""Histograms whose bins are the same for every tensor, step and rank, so that they add.

The bin of a value is the top 12 bits of it as an IEEE float32: sign, exponent and 3 bits of the
mantissa. That is 8 bins for each power of two and each sign; nobody has to know the range first,
and a histogram of any type is counted without comparing anything. Narrower types are widened to
float32. Wider ones go through float64 and are rounded to float32; what lies beyond its range is in
the last finite bin. Both zeros are in bin 0. NaN and the infinities are in no bin.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_BINS = 4096
QUANTILES = {
    "p01": 0.01, "p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99,
}  # fmt: skip
"""The quantiles that a probe keeps, by name."""
RELATIVE_ERROR = 1 / 16
"""How far a quantile may be from a value of its bin, relative to that value."""

_SHIFT = 20
_NUM_POSITIVE = NUM_BINS // 2
_FIRST_INFINITE = 0x7F8
_LARGEST = float(np.finfo(np.float32).max)

Integers = NDArray[np.int64]
Doubles = NDArray[np.float64]


class Bars(NamedTuple):
    """A histogram for drawing: one edge more than counts, both in order of value."""

    edges: list[float]
    counts: list[int]


def edges(number: int) -> tuple[float, float]:
    """Between which values a bin lies, the lower first; the one farther from zero is outside it.

    Raises:
        ValueError: there is no such bin, or it is one of an infinity or NaN.
    """
    if not 0 <= number < NUM_BINS or number % _NUM_POSITIVE >= _FIRST_INFINITE:
        raise ValueError(f"{number} is no bin of finite values")
    low, high = _bounds(np.array([number], dtype=np.int64))[0]
    return float(low), float(high)


def ordered(bins: Sequence[int]) -> list[int]:
    """Bins in order of value: from the most negative to the most positive."""
    return sorted(bins, key=_place)


def bins_of(values: ArrayLike) -> Integers:
    """The bin of each value; NaN and the infinities are left out."""
    wide = np.asarray(values, dtype=np.float64).ravel()
    finite = wide[np.isfinite(wide)]
    narrow = np.clip(finite, -_LARGEST, _LARGEST).astype(np.float32) + np.float32(0)  # -0 to 0
    return (narrow.view(np.uint32) >> _SHIFT).astype(np.int64)


def quantiles(
    bins: Sequence[int],
    counts: Sequence[int],
    qs: Sequence[float] = tuple(QUANTILES.values()),
    *,
    low: float = -np.inf,
    high: float = np.inf,
) -> list[float]:
    """The quantiles of counted values, as ``numpy.quantile`` defines them; NaN if there are none.

    Values are taken to lie evenly in their bin, but never so near an edge of it that the answer
    could be off by more than ``RELATIVE_ERROR`` of the value; below 2**-126 by 2**-129. Where a
    quantile lies between two values the error is relative to the larger of them. The extremes,
    where they are known (``low``, ``high``), narrow the outermost bins.
    """
    held = np.asarray(counts, dtype=np.int64)
    found = np.asarray(bins, dtype=np.int64)[held > 0]
    held = held[held > 0]
    if not held.size:
        return [float("nan")] * len(qs)
    order = np.argsort(_places(found))
    found, held = found[order], held[order]
    spots = np.asarray(qs, dtype=np.float64) * float(held.sum() - 1)
    before = np.floor(spots)
    lower = _ranked(found, held, before)
    upper = _ranked(found, held, np.ceil(spots))
    mixed = lower + (upper - lower) * (spots - before)
    return [float(item) for item in np.clip(mixed, low, high)]


def coarse(bins: Sequence[int], counts: Sequence[int], num: int) -> Bars:
    """A histogram of at most ``num`` bars, about equally wide where bins are narrow enough.

    Neighbouring bins are merged, none is divided, and none is left out: counts keep their sum.
    Far from zero a bar is as wide as a bin, so draw counts over widths.
    """
    if num < 1:
        raise ValueError("a histogram has at least 1 bar")
    if not len(bins):
        return Bars([], [])
    places = _places(np.asarray(bins, dtype=np.int64))
    first, last = int(places.min()), int(places.max())
    every = _bounds(_from_places(np.arange(first, last + 1)))
    borders: Doubles = np.append(every[:, 0], every[-1, 1])
    span = borders[-1] - borders[0]
    wished: Doubles = borders[0] + span * (np.arange(num + 1) / num)
    wished[-1] = borders[-1]  # a tiny last edge would be lost in the sum
    after: Integers = np.clip(np.searchsorted(borders, wished), 1, borders.size - 1)
    nearer = wished - borders[after - 1] < borders[after] - wished
    chosen: Integers = np.unique(after - nearer)
    merged = np.zeros(chosen.size - 1, dtype=np.int64)
    held = np.asarray(counts, dtype=np.int64)
    np.add.at(merged, np.searchsorted(chosen, places - first, side="right") - 1, held)
    return Bars([float(item) for item in borders[chosen]], [int(item) for item in merged])


def _ranked(bins: Integers, counts: Integers, ranks: Doubles) -> Doubles:
    """The values of these ranks, from bins in order of value."""
    ends = np.cumsum(counts)
    at = np.searchsorted(ends, ranks, side="right")
    inside = (ranks - (ends - counts)[at] + 0.5) / counts[at]
    low, high = _bounds(bins[at]).T
    even = low + (high - low) * inside
    near, far = np.minimum(np.abs(low), np.abs(high)), np.maximum(np.abs(low), np.abs(high))
    least, most = far * (1 - RELATIVE_ERROR), near * (1 + RELATIVE_ERROR)
    size: Doubles = np.abs(even)
    bent: Doubles = np.minimum(np.maximum(size, least), most)
    safe: Doubles = np.where(least <= most, bent, size)
    return np.where(bins[at] == 0, 0.0, np.copysign(safe, even))


def _place(number: int) -> int:
    """Where a bin stands in order of value; bin 0 is at 0."""
    return number if number < _NUM_POSITIVE else _NUM_POSITIVE - 1 - number


def _places(bins: Integers) -> Integers:
    return np.where(bins < _NUM_POSITIVE, bins, _NUM_POSITIVE - 1 - bins)


def _from_places(places: Integers) -> Integers:
    return np.where(places >= 0, places, _NUM_POSITIVE - 1 - places)


def _bounds(bins: Integers) -> Doubles:
    """The lower and the higher edge of each bin."""
    size = bins % _NUM_POSITIVE
    near, far = _magnitude(size), _magnitude(size + 1)
    is_positive = bins < _NUM_POSITIVE
    return np.stack([np.where(is_positive, near, -far), np.where(is_positive, far, -near)], axis=1)


def _magnitude(size: Integers) -> Doubles:
    """What the exponent and the 3 bits of the mantissa say; below 2**-126 no hidden bit."""
    exponent, mantissa = size >> 3, size & 7
    is_normal = exponent > 0
    return np.ldexp(np.where(is_normal, mantissa + 8.0, mantissa), np.maximum(exponent, 1) - 130)
