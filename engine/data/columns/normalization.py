"""Compute what fills, shifts and divides the values of a field, from its rows.

All statistics are float64, and so are the sums behind them. Parts are merged by their means and
squared deviations (Chan, Golub and LeVeque, "Updating formulae", 1979), so that the order and the
size of the parts change nothing beyond rounding.

Shape suffixes: N = rows (for a sequence: steps), G = features with their own statistics, R = values
of one feature in a row, M = all values of one feature.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasshouse.errors import DataFailed
from glasshouse.spec import DenseField, DenseSequenceField, Fill, Normalize

Floats = NDArray[np.float64]
Blocks = Callable[[], Iterator[Floats]]
"""Reads the values from the start: blocks of rows, in the column's own units."""
_Keys = NDArray[np.uint64]
_BITS = 16
_FEW = 1 << 22
"""The number of values that may be collected at once."""
_SIGN = np.uint64(1 << 63)
BLOCK_VALUES = 1 << 20
"""The number of values in a block."""


@dataclass(frozen=True)
class ColumnFigures:
    """Statistics of each feature; None: not requested. A single value applies to all features."""

    fill: Floats | None = None
    """In the column's own units."""
    shift: Floats | None = None
    """In the network's units, like the divisor."""
    divisor: Floats | None = None

    def filled(self, x: Floats) -> Floats:
        """Fill missing values of a block [N, …]; may return the block itself."""
        if self.fill is None:
            return x
        is_missing = np.isnan(x)
        return np.where(is_missing, along(self.fill, x.ndim), x) if is_missing.any() else x

    def normalized(self, x: Floats) -> Floats:
        """Shift and divide a block [N, …]; may return the block itself."""
        if self.shift is None or self.divisor is None:
            return x
        return (x - along(self.shift, x.ndim)) / along(self.divisor, x.ndim)

    def applied(
        self, blocks: Iterator[Floats], shape: Sequence[int], scale: float | None
    ) -> NDArray[np.float32]:
        """Fill, scale, and normalize blocks of values; return all of them as float32."""
        made = np.empty(shape, np.float32)
        first = 0
        for block in blocks:
            x = self.filled(block)
            with np.errstate(over="ignore"):  # values beyond float32 become Inf
                made[first : first + len(x)] = self.normalized(x if scale is None else x * scale)
            first += len(x)
        return made

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing."""
        return self.fill is None and self.shift is None


def of_field(found: ColumnFigures | None, fill: Fill | None) -> ColumnFigures | None:
    """Combine the statistics of training rows with a number that the field sets as its fill."""
    if fill is None or isinstance(fill, str):
        return found
    return replace(found or ColumnFigures(), fill=np.array([fill], np.float64))


def in_floats(field: DenseField | DenseSequenceField, values: NDArray[Any]) -> Floats:
    """Return values in float64, in the column's own units; bytes without a scale are in [0, 1]."""
    x = np.asarray(values).astype(np.float64)
    return x / 255.0 if values.dtype == np.uint8 and field.scale is None else x


def along(figures_G: Floats, num_axes: int) -> Floats:
    """Reshape statistics to broadcast along the second axis, if any, of a block."""
    return figures_G if num_axes < 2 else figures_G.reshape(-1, *[1] * (num_axes - 2))


def find_figures(
    name: str, blocks: Blocks, scale: float | None, fill: Fill | None, normalize: Normalize | None
) -> ColumnFigures:
    """Compute the statistics of all values of a field.

    ``blocks`` are the training rows, [N, G, …] or [N]. All values are finite, except for missing
    ones that are filled.

    Raises:
        DataFailed: a feature has no value to compute its fill from.
    """
    figures = ColumnFigures(_fill(name, blocks, fill))
    if normalize is None:
        return figures
    filled = (figures.filled(block) for block in blocks())
    scaled = filled if scale is None else (block * scale for block in filled)
    shift_G, divisor_G = _moments(scaled, whole=normalize.per == "all").of(normalize)
    return replace(figures, shift=shift_G, divisor=divisor_G)


def _fill(name: str, blocks: Blocks, fill: Fill | None) -> Floats | None:
    if fill is None or fill == "NaN":
        return None
    if not isinstance(fill, str):
        return np.array([fill], np.float64)
    found_G = _moments(blocks()).mean if fill == "mean" else medians(blocks)
    empty = np.flatnonzero(np.isnan(found_G))
    if empty.size:
        detail = f"feature {int(empty[0])} of field {name!r} is missing in all training rows"
        raise DataFailed(
            f"{detail}: there is no {fill} to fill it by",
            hint=f"Give data.fields.{name}.fill a number, or leave the column out.",
        )
    return found_G


def _moments(blocks: Iterable[Floats], *, whole: bool = False) -> "Moments":
    moments = Moments(whole=whole)
    for block in blocks:
        moments.update(block)
    return moments


class Moments:
    """Count, mean, squares, min and max of each feature; missing values are not counted."""

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._count = self._mean = self._squares = np.zeros(1)
        self._low, self._high = np.array([np.inf]), np.array([-np.inf])

    def update(self, block: Floats) -> None:
        """Add a block [N, G, …] or [N]."""
        x = by_feature(block, whole=self._whole)
        is_there = ~np.isnan(x)
        count = is_there.sum(axis=1).astype(np.float64)
        least = np.maximum(count, 1)
        mean = np.where(is_there, x, 0).sum(axis=1) / least
        away = np.where(is_there, x - mean[:, None], 0)
        total = self._count + count
        apart = np.where(self._count > 0, mean - self._mean, mean)
        share = count / np.maximum(total, 1)
        with np.errstate(over="ignore", invalid="ignore"):  # for values near the float64 limit
            between = np.where(self._count > 0, np.square(apart) * self._count * share, 0)
            self._squares = self._squares + np.square(away).sum(axis=1) + between
        self._mean = self._mean + apart * share
        self._count = total
        self._low = np.minimum(self._low, np.where(is_there, x, np.inf).min(axis=1, initial=np.inf))
        self._high = np.maximum(
            self._high, np.where(is_there, x, -np.inf).max(axis=1, initial=-np.inf)
        )

    @property
    def mean(self) -> Floats:
        """The mean; NaN if there was no value."""
        return np.where(self._count > 0, self._mean, np.nan)

    def of(self, normalize: Normalize) -> tuple[Floats, Floats]:
        """Return the shift and the divisor.

        A constant feature is not divided. It is shifted by its value, because its mean may differ
        by a rounding error.
        """
        is_same = self._low >= self._high
        divisor = self._high - self._low
        if normalize.type == "standard":
            divisor = np.sqrt(self._squares / np.maximum(self._count, 1))
        shift = self._low if normalize.type == "minmax" else self._mean
        is_empty = self._count == 0
        shift = np.where(is_empty, 0.0, np.where(is_same, self._low, shift))
        return shift, np.where(is_same | (divisor == 0), 1.0, divisor)


# --- medians ---------------------------------------------------------------------------------

# They are exact, in bounded memory, of values that are read several times. A float64 maps to a
# 64-bit unsigned integer of the same order, its key. Each pass over the data counts the next 16
# bits of a feature's keys, among keys whose earlier bits equal the median's. When few values
# remain, one more pass collects them, and they are sorted.


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
        if last == first:
            found[first] = _median(lambda at=first: _keys_of(blocks, at), int(counts_G[first]))
            first += 1
            continue
        taken: list[list[_Keys]] = [[] for _ in range(first, last)]
        for block in blocks():
            rows = by_feature(block, whole=False)[first:last]
            for kept, row in zip(taken, rows, strict=True):
                kept.append(_keys(row[~np.isnan(row)]))
        for kept, count in zip(taken, counts_G[first:last].tolist(), strict=True):
            found[first] = _median(lambda kept=kept: kept, count)
            first += 1
    return found


def _keys_of(blocks: Blocks, feature: int) -> Iterator[_Keys]:
    for block in blocks():
        row = by_feature(block, whole=False)[feature]
        yield _keys(row[~np.isnan(row)])


def _keys(values: Floats) -> _Keys:
    """Return integers in the order of the values."""
    bits = np.ascontiguousarray(values).view(np.uint64)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _floats(keys: _Keys) -> Floats:
    return np.where(keys & _SIGN, keys ^ _SIGN, ~keys).view(np.float64)


def _median(read: Callable[[], Iterable[_Keys]], count: int) -> float:
    """Return the median of ``count`` keys: the mean of the middle two, which may be the same.

    The lower of them is in a range of keys that begins at ``low``. They differ in their last
    ``bits`` bits; ``below`` keys are smaller, and ``inside`` are in the range.
    """
    if not count:
        return float("nan")
    low, bits, below, inside = 0, 64, 0, count
    while inside > _FEW and bits:
        bits -= _BITS
        counts = np.zeros(1 << _BITS, np.int64)
        for keys in read():
            places = (keys - np.uint64(low)) >> np.uint64(bits)  # of smaller keys: more than all
            places = places[places < 1 << _BITS].astype(np.int64)
            counts += np.bincount(places, minlength=1 << _BITS)
        ends = np.cumsum(counts)
        chosen = int(np.searchsorted(ends, (count - 1) // 2 - below, side="right"))
        low += chosen << bits
        inside = int(counts[chosen])
        below += int(ends[chosen]) - inside
    first, last = np.uint64(low), np.uint64(low + (1 << bits) - 1)
    taken: list[_Keys] = []
    above: list[int] = []
    for keys in read():
        if bits:  # else all keys of the range are equal
            taken.append(keys[(keys >= first) & (keys <= last)])
        above += [int(keys[keys > last].min())] if (keys > last).any() else []
    middle = np.sort(np.concatenate(taken)) if taken else None

    def key_at(rank: int) -> int:
        if rank >= inside:  # the upper one may be the first above the range
            return min(above)
        return low if middle is None else int(middle[rank])

    both = [key_at((count - 1) // 2 - below), key_at(count // 2 - below)]
    return float(np.mean(_floats(np.array(both, np.uint64))))
