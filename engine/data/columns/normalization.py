"""Compute what fills, shifts and divides the values of a field, from its rows.

All statistics are float64, and so are the sums behind them. Parts are merged by their means and
squared deviations (Chan, Golub and LeVeque, "Updating formulae", 1979), so that the order and the
size of the parts change nothing beyond rounding. Uses numpy only.

Shape suffixes: N = rows (for a sequence: steps), G = features with their own statistics, R = values
of one feature in a row.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.columns.medians import Blocks, Floats, by_feature, medians
from glasshouse.errors import DataFailed
from glasshouse.spec import Fill, Normalize

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
        return np.where(is_missing, self._along(self.fill, x), x) if is_missing.any() else x

    def normalized(self, x: Floats) -> Floats:
        """Shift and divide a block [N, …]; may return the block itself."""
        if self.shift is None or self.divisor is None:
            return x
        return (x - self._along(self.shift, x)) / self._along(self.divisor, x)

    @staticmethod
    def _along(figures_G: Floats, x: NDArray[Any]) -> Floats:
        return figures_G if x.ndim == 1 else along(figures_G, x.ndim)

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing."""
        return self.fill is None and self.shift is None


def of_field(found: ColumnFigures | None, fill: Fill | None) -> ColumnFigures | None:
    """Combine the statistics of training rows with a number that the field sets as its fill."""
    if fill is None or isinstance(fill, str):
        return found
    return replace(found or ColumnFigures(), fill=np.array([fill], np.float64))


def along(figures_G: Floats, num_axes: int) -> Floats:
    """Reshape statistics to broadcast along the second axis of a block with ``num_axes`` axes."""
    return figures_G.reshape(-1, *[1] * (num_axes - 2))


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
    moments = Moments(whole=normalize.per == "all")
    for block in blocks():
        filled = figures.filled(block)
        moments.update(filled if scale is None else filled * scale)
    shift_G, divisor_G = moments.of(normalize)
    return replace(figures, shift=shift_G, divisor=divisor_G)


def _fill(name: str, blocks: Blocks, fill: Fill | None) -> Floats | None:
    if fill is None or fill == "NaN":
        return None
    if not isinstance(fill, str):
        return np.array([fill], np.float64)
    found_G = _means(blocks) if fill == "mean" else medians(blocks)
    empty = np.flatnonzero(np.isnan(found_G))
    if empty.size:
        detail = f"feature {int(empty[0])} of field {name!r} is missing in all training rows"
        raise DataFailed(
            f"{detail}: there is no {fill} to fill it by",
            hint=f"Give data.fields.{name}.fill a number, or leave the column out.",
        )
    return found_G


def _means(blocks: Blocks) -> Floats:
    moments = Moments(whole=False)
    for block in blocks():
        moments.update(block)
    return moments.mean


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
        spread = self._high - self._low
        divisor = np.sqrt(self._squares / np.maximum(self._count, 1))
        if normalize.type != "standard":
            divisor = spread
        shift = self._low if normalize.type == "minmax" else self._mean
        is_empty = self._count == 0
        shift = np.where(is_empty, 0.0, np.where(is_same, self._low, shift))
        return shift, np.where(is_same | (divisor == 0), 1.0, divisor)
