"""Histograms whose bins are the same for every tensor, step and rank, so that they add.

The bin of a value is the top 12 bits of it as an IEEE float32: sign, exponent and 3 bits of the
mantissa. That is 8 bins for each power of two and each sign; nobody has to know the range first,
and a histogram of any type is counted without comparing anything. Narrower types are widened to
float32. Wider ones go through float64 and are rounded to float32; what lies beyond its range is in
the last finite bin. Both zeros are in bin 0. NaN and the infinities are in no bin.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_BINS = 4096
QUANTILES = {
    "p01": 0.01, "p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99,
}  # fmt: skip
"""The quantiles that a probe stores, by name."""
RELATIVE_ERROR = 1 / 16
"""The maximum relative error of a quantile."""

_SHIFT = 20
_NUM_POSITIVE = NUM_BINS // 2
_FIRST_INFINITE = 0x7F8
_TINIEST = 2.0**-129
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
    place = _place(number)
    return _border(place), _border(place + 1)


def ordered(bins: Sequence[int]) -> list[int]:
    """Bins in order of value: from the most negative to the most positive."""
    return sorted(bins, key=_place)


def bins_of(values: ArrayLike) -> Integers:
    """The bin of each value; NaN and Inf are skipped."""
    wide = np.asarray(values, dtype=np.float64).ravel()
    finite = wide[np.isfinite(wide)]
    narrow = np.clip(finite, -_LARGEST, _LARGEST).astype(np.float32) + np.float32(0)  # -0 to 0
    return (narrow.view(np.uint32) >> _SHIFT).astype(np.int64)


def quantiles(
    bins: Sequence[int],
    counts: Sequence[int],
    qs: Sequence[float] = tuple(QUANTILES.values()),
    *,
    low: float = -math.inf,
    high: float = math.inf,
) -> list[float]:
    """The quantiles of counted values, as ``numpy.quantile`` defines them; NaN if there are none.

    Values are taken to lie evenly in their bin, but never so near an edge of it that the answer
    could be off by more than ``RELATIVE_ERROR`` of the value; below 2**-126 by 2**-129. Where a
    quantile lies between two values the error is relative to the larger of them. The extremes,
    where they are known (``low``, ``high``), narrow the outermost bins.
    """
    found = [pair for pair in zip(map(_place, bins), counts, strict=True) if pair[1]]
    if not found:
        return [math.nan] * len(qs)
    found.sort()
    places = [place for place, _ in found]
    ends = [*accumulate(count for _, count in found)]

    def ranked(rank: int) -> float:
        at = bisect_right(ends, rank)
        before = ends[at - 1] if at else 0
        return _inside(places[at], (rank - before + 0.5) / (ends[at] - before))

    answers: list[float] = []
    for q in qs:
        center = q * (ends[-1] - 1)
        rank = int(center)
        value = ranked(rank)
        if center > rank:
            value += (ranked(rank + 1) - value) * (center - rank)
        answers.append(min(max(value, low), high))
    return answers


def coarse(bins: Sequence[int], counts: Sequence[int], num: int) -> Bars:
    """A histogram of at most ``num`` bars, about equally wide where bins are narrow enough.

    Neighboring bins are merged, none is divided or dropped: counts keep their sum.
    Far from zero a bar is as wide as a bin, so draw counts over widths.
    """
    if num < 1:
        raise ValueError("a histogram has at least 1 bar")
    if not len(bins):
        return Bars([], [])
    places = _places(np.asarray(bins, dtype=np.int64))
    first, last = int(places.min()), int(places.max())
    borders = np.array([_border(place) for place in range(first, last + 2)])
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


def _inside(place: int, share: float) -> float:
    """The value this far into a bin, away from an edge where that could be too far off."""
    if place < 0:
        return -_inside(-1 - place, 1 - share) if place < -1 else -_TINIEST * (1 - share)
    if place == 0:
        return 0.0
    near, far = _border(place), _border(place + 1)
    value = near + (far - near) * share
    if place < 8:  # below the normal range: there a bin is as wide as all before it
        return value
    return min(max(value, far * (1 - RELATIVE_ERROR)), near * (1 + RELATIVE_ERROR))


def _border(place: int) -> float:
    """The lower edge of a bin: what the exponent and 3 bits say; no hidden bit below 2**-126."""
    exponent, mantissa = divmod(abs(place), 8)
    size = math.ldexp(mantissa + 8.0 if exponent else mantissa, max(exponent, 1) - 130)
    return size if place >= 0 else -size


def _place(number: int) -> int:
    """Where a bin stands in order of value; bin 0 is at 0."""
    return number if number < _NUM_POSITIVE else _NUM_POSITIVE - 1 - number


def _places(bins: Integers) -> Integers:
    return np.where(bins < _NUM_POSITIVE, bins, _NUM_POSITIVE - 1 - bins)
