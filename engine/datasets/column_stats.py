"""Compute the statistics of a column, block by block while it is written. Uses numpy only."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_DISTINCT = 1000
MAX_COUNTED_BYTES = 200
"""A longer text is not a class. A column that contains one is not counted by value."""


class CountBudget:
    """The number of unique values that all columns together may store, to bound wide files."""

    def __init__(self, num_values: int = 200_000) -> None:
        self.left = num_values


class _Counts:
    """Counts how often each value occurs, until there are too many unique ones."""

    def __init__(self, budget: CountBudget) -> None:
        self._budget = budget
        self._counts: Counter[Any] | None = Counter()

    def update(self, values: Sequence[Any], times: Sequence[int]) -> None:
        if self._counts is None:
            return
        before = len(self._counts)
        for value, number in zip(values, times, strict=True):
            self._counts[value] += number
        self._budget.left -= len(self._counts) - before
        if len(self._counts) > MAX_DISTINCT or self._budget.left < 0:
            self.give_up()

    def give_up(self) -> None:
        if self._counts is not None:
            self._budget.left += len(self._counts)
            self._counts = None

    @property
    def alive(self) -> bool:
        return self._counts is not None

    def as_dict(self, *, listed: bool) -> dict[str, Any]:
        if self._counts is None:
            return {"distinct": None, "counts": None}
        counts = sorted(self._counts.items()) if listed else None
        return {"distinct": len(self._counts), "counts": counts}


class NumberStats:
    """Moments of the finite values; NaN counts as missing. Scalar rows are counted by value."""

    def __init__(self, budget: CountBudget, *, scalar: bool, listed: bool) -> None:
        self.missing = 0
        self._count = 0
        self._infinite = 0
        self._finite = 0
        self._mean = 0.0
        self._squares = 0.0
        self._extremes: tuple[Any, Any] | None = None
        self._counts = _Counts(budget)
        self._listed = listed
        if not scalar:
            self._counts.give_up()

    def update(self, values: NDArray[Any]) -> None:
        """Add one flat block."""
        self._count += values.size
        if values.dtype.kind == "f":
            nan = int(np.isnan(values).sum())
            finite = values[np.isfinite(values)]
            self.missing += nan
            self._infinite += values.size - nan - finite.size
        else:
            finite = values
        if finite.size == 0:
            return
        low, high = finite.min().item(), finite.max().item()
        if self._extremes is not None:
            low, high = min(low, self._extremes[0]), max(high, self._extremes[1])
        self._extremes = (low, high)
        self._merge(finite)
        if self._counts.alive:
            found, times = np.unique(finite, return_counts=True)
            # With more unique values the limit is exceeded: skip the conversion to Python numbers.
            if found.size > MAX_DISTINCT:
                self._counts.give_up()
            else:
                self._counts.update(found.tolist(), times.tolist())

    def _merge(self, finite: NDArray[Any]) -> None:
        """Merge by Chan's update: stable for all block sizes, unlike a running sum of squares."""
        with np.errstate(over="ignore", invalid="ignore"):
            x = finite.astype(np.float64)
            mean = float(x.mean())
            x -= mean
            squares = float(np.square(x, out=x).sum())  # not a dot: BLAS starts threads
        if self._finite == 0:
            self._finite, self._mean, self._squares = finite.size, mean, squares
            return
        total = self._finite + finite.size
        shift = mean - self._mean
        self._mean += shift * finite.size / total
        self._squares += squares + shift * shift * self._finite * finite.size / total
        self._finite = total

    def as_dict(self) -> dict[str, Any]:
        """Return the column's entry in ``stats.json``."""
        some = self._extremes is not None
        low, high = self._extremes if self._extremes is not None else (None, None)
        return {
            "count": self._count,
            "missing": self.missing,
            "infinite": self._infinite,
            "min": low,
            "max": high,
            "mean": self._mean if some else None,
            "std": (self._squares / self._finite) ** 0.5 if some else None,
            **self._counts.as_dict(listed=self._listed),
        }


class TextStats:
    """Counts texts and empty texts, and each unique text if they look like classes."""

    def __init__(self, budget: CountBudget) -> None:
        self.missing = 0
        self._count = 0
        self._counts = _Counts(budget)

    def update(self, texts: Sequence[bytes]) -> None:
        """Add one block of UTF-8 texts."""
        self._count += len(texts)
        self.missing += sum(1 for text in texts if not text)
        if not self._counts.alive:
            return
        if max(map(len, texts), default=0) > MAX_COUNTED_BYTES:
            self._counts.give_up()
            return
        found = Counter(text.decode() for text in texts if text)
        if len(found) > MAX_DISTINCT:
            self._counts.give_up()
        else:
            self._counts.update(list(found.keys()), list(found.values()))

    def as_dict(self) -> dict[str, Any]:
        """Return the column's entry in ``stats.json``."""
        figures = dict.fromkeys(("min", "max", "mean", "std"))
        shared = {"count": self._count, "missing": self.missing, "infinite": 0}
        return {**shared, **figures, **self._counts.as_dict(listed=True)}
