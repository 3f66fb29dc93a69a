"""Compute exact medians of values that are read several times, in bounded memory.

A float64 maps to a 64-bit unsigned integer of the same order, its key. Each pass over the data
counts the next 16 bits of a feature's keys, among keys whose earlier bits equal the median's. When
few values remain, one more pass collects them, and they are sorted. Uses numpy only.

Shape suffixes: N = rows (for a sequence: steps), G = features with their own medians, M = all
values of one feature.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Blocks = Callable[[], Iterator[Floats]]
"""Reads the values from the start: blocks of rows, in the column's own units."""
_Keys = NDArray[np.uint64]
_BITS = 16
_FEW = 1 << 22
"""The number of values that may be collected at once."""
_SIGN = np.uint64(1 << 63)


def by_feature(block: Floats, *, whole: bool) -> Floats:
    """Return a block as [G, N * R]: all values of a feature are adjacent."""
    if whole or block.ndim == 1:
        return block.reshape(1, -1)
    return np.moveaxis(block.reshape(*block.shape[:2], -1), 1, 0).reshape(block.shape[1], -1)


def medians(blocks: Blocks) -> Floats:
    """Return the median of each feature, without missing values; NaN if all are missing."""
    counts_G = sum((~np.isnan(by_feature(x, whole=False))).sum(axis=1) for x in blocks())
    assert isinstance(counts_G, np.ndarray)  # noqa: S101 (there is a block at least)
    found = np.full(len(counts_G), np.nan)
    first = 0
    while first < len(counts_G):  # as many features as can be collected at once, at least one
        last = int(np.searchsorted(np.cumsum(counts_G[first:]), _FEW, side="right")) + first
        last = max(last, first + 1)
        part = [_Median(int(count)) for count in counts_G[first:last]]
        while any(item.is_wide for item in part):
            _read(blocks, part, first, _Median.narrow)
            for item in part:
                item.choose()
        _read(blocks, part, first, _Median.take)
        found[first:last] = [item.value for item in part]
        first = last
    return found


def _read(
    blocks: Blocks, part: list["_Median"], first: int, see: Callable[["_Median", _Keys], None]
) -> None:
    for block in blocks():
        rows = by_feature(block, whole=False)[first : first + len(part)]
        for item, row in zip(part, rows, strict=True):
            see(item, _keys(row[~np.isnan(row)]))


def _keys(values: Floats) -> _Keys:
    """Return integers in the order of the values."""
    bits = np.ascontiguousarray(values).view(np.uint64)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _floats(keys: _Keys) -> Floats:
    return np.where(keys & _SIGN, keys ^ _SIGN, ~keys).view(np.float64)


class _Median:
    """The search for the median of one feature: the range of keys that contains it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._low, self._bits = 0, 64
        """The keys in the range start at ``low`` and differ in their last ``bits`` bits."""
        self._below, self._inside = 0, count
        """Number of values below the range, and in it."""
        self._counts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._taken: list[_Keys] = []
        self._next: int | None = None

    @property
    def is_wide(self) -> bool:
        """Whether the range has too many values to collect."""
        return self._inside > _FEW and self._bits > 0

    def narrow(self, keys: _Keys) -> None:
        """Count the keys in the range by their next bits."""
        if not self.is_wide:
            return
        if not len(self._counts):
            self._counts = np.zeros(1 << _BITS, np.int64)
        inside = (keys[self._is_inside(keys)] - np.uint64(self._low)) >> np.uint64(
            self._bits - _BITS
        )
        self._counts += np.bincount(inside.astype(np.int64), minlength=1 << _BITS)

    def _is_inside(self, keys: _Keys) -> NDArray[np.bool_]:
        last = self._low + (1 << self._bits) - 1
        return (keys >= np.uint64(self._low)) & (keys <= np.uint64(last))

    def choose(self) -> None:
        """Narrow the range to the bits of the lower middle value."""
        if not len(self._counts):
            return
        before = np.cumsum(self._counts)
        rank = (self._count - 1) // 2 - self._below
        chosen = int(np.searchsorted(before, rank, side="right"))
        self._bits -= _BITS
        self._low += chosen << self._bits
        self._inside = int(self._counts[chosen])
        self._below += int(before[chosen]) - self._inside
        self._counts = np.zeros(0, np.int64)

    def take(self, keys: _Keys) -> None:
        """Collect the keys in the range, and the smallest key above it."""
        is_inside = self._is_inside(keys)
        if self._bits:
            self._taken.append(keys[is_inside])
        above = keys[keys > np.uint64(self._low + (1 << self._bits) - 1)]
        if len(above):
            least = int(above.min())
            self._next = least if self._next is None else min(self._next, least)

    @property
    def value(self) -> float:
        """The mean of the two middle values, which may be the same one."""
        if not self._count:
            return float("nan")
        ranks = ((self._count - 1) // 2 - self._below, self._count // 2 - self._below)
        keys = np.sort(np.concatenate(self._taken)) if self._taken else None
        both = [self._at(rank, keys) for rank in ranks]
        return float(np.mean(_floats(np.array(both, np.uint64))))

    def _at(self, rank: int, keys: _Keys | None) -> int:
        if rank >= self._inside:  # the upper middle value may be the first one above the range
            assert self._next is not None  # noqa: S101 (half of the values are above the median)
            return self._next
        return self._low if keys is None else int(keys[rank])
