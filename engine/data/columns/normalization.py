"""What a field of floating-point values is filled, shifted and divided by, found from its rows.

All figures are float64, and so are the sums that they come from: parts are merged by their means
and squared distances (Chan, Golub and LeVeque, "Updating formulae", 1979), so that neither the
order nor the size of the parts matters beyond rounding. Knows numpy only.

Shape suffixes: N = rows (of a sequence: steps), G = features with figures of their own, R = values
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
"""The values of a block."""


@dataclass(frozen=True)
class ColumnFigures:
    """Of each feature; None: what is not asked for. One alone stands for all features."""

    fill: Floats | None = None
    """In the column's own units."""
    shift: Floats | None = None
    """In the network's, as all that follows."""
    divisor: Floats | None = None

    def filled(self, x: Floats) -> Floats:
        """A block [N, …] with missing values filled; may be the block itself."""
        if self.fill is None:
            return x
        is_missing = np.isnan(x)
        return np.where(is_missing, self._along(self.fill, x), x) if is_missing.any() else x

    def normalized(self, x: Floats) -> Floats:
        """A block [N, …] shifted and divided; may be the block itself."""
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
    """What a field goes by: figures of training rows, and the number that it gives itself."""
    if fill is None or isinstance(fill, str):
        return found
    return replace(found or ColumnFigures(), fill=np.array([fill], np.float64))


def along(figures_G: Floats, num_axes: int) -> Floats:
    """Figures so that they meet the second axis of a block of so many axes."""
    return figures_G.reshape(-1, *[1] * (num_axes - 2))


def find_figures(
    name: str, blocks: Blocks, scale: float | None, fill: Fill | None, normalize: Normalize | None
) -> ColumnFigures:
    """Look at all values of a field.

    ``blocks`` are of the rows that are trained on, [N, G, …] or [N]; all of them are finite, but
    for missing ones that are filled.

    Raises:
        DataFailed: a feature has no value to be filled by.
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
    """Count, mean, squares and extremes of each feature; missing values are not counted."""

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._count = self._mean = self._squares = np.zeros(1)
        self._low, self._high = np.array([np.inf]), np.array([-np.inf])

    def update(self, block: Floats) -> None:
        """Take in a block [N, G, …] or [N]."""
        x = by_feature(block, whole=self._whole)
        is_there = ~np.isnan(x)
        count = is_there.sum(axis=1).astype(np.float64)
        least = np.maximum(count, 1)
        mean = np.where(is_there, x, 0).sum(axis=1) / least
        away = np.where(is_there, x - mean[:, None], 0)
        total = self._count + count
        apart = np.where(self._count > 0, mean - self._mean, mean)
        share = count / np.maximum(total, 1)
        with np.errstate(over="ignore", invalid="ignore"):  # of numbers near the greatest
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
        """NaN where there was no value."""
        return np.where(self._count > 0, self._mean, np.nan)

    def of(self, normalize: Normalize) -> tuple[Floats, Floats]:
        """What to shift and to divide by.

        What is the same everywhere is not divided, and shifted by itself and not by its mean, which
        may be off by a rounding.
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
