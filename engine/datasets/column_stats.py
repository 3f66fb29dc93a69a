"""Compute the statistics of a column, block by block while it is written. Uses numpy only.

A plan needs the token counts of texts before the texts are read again: row lengths, and the
possible size of a vocabulary.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_DISTINCT = 1000
MAX_COUNTED_BYTES = 200
"""A longer text is not a class. A column that contains one is not counted by value."""
MAX_MIN_COUNT = 20
"""The largest n for which the number of tokens that occur at least n times is stored."""
UNITS: Mapping[str, Callable[[str], Sequence[str]]] = {
    "characters": lambda text: text,
    "words": str.split,
}
"""How a text is split into tokens, by unit."""


class Budget:
    """The number of unique items that all columns together may store, to bound wide files."""

    def __init__(self, num_items: int) -> None:
        self.left = num_items


class _Counts:
    """Counts how often each item occurs, until there are too many unique ones."""

    def __init__(self, budget: Budget, most: float = math.inf) -> None:
        self._budget = budget
        self._most = most
        self.known: Counter[Any] | None = Counter()

    def update(self, items: Iterable[Any] | Mapping[Any, int]) -> None:
        if self.known is None:
            return
        before = len(self.known)
        self.known.update(items)
        self._budget.left -= len(self.known) - before
        if len(self.known) > self._most or self._budget.left < 0:
            self.give_up()

    def give_up(self) -> None:
        if self.known is not None:
            self._budget.left += len(self.known)
            self.known = None

    def as_dict(self, *, listed: bool) -> dict[str, Any]:
        if self.known is None:
            return {"distinct": None, "counts": None}
        return {
            "distinct": len(self.known),
            "counts": sorted(self.known.items()) if listed else None,
        }


class NumberStats:
    """Moments of the finite values; NaN counts as missing. Scalar rows are counted by value."""

    def __init__(self, budget: Budget, *, scalar: bool, listed: bool) -> None:
        self.missing = 0
        self._count = 0
        self._infinite = 0
        self._finite = 0
        self._mean = 0.0
        self._squares = 0.0
        self._extremes: tuple[Any, ...] = ()
        self._counts = _Counts(budget, MAX_DISTINCT)
        self._listed = listed
        if not scalar:
            self._counts.give_up()

    def update(self, values: NDArray[Any]) -> None:
        """Add one flat block."""
        self._count += values.size
        finite = values
        if values.dtype.kind == "f":
            nan = int(np.isnan(values).sum())
            finite = values[np.isfinite(values)]
            self.missing += nan
            self._infinite += values.size - nan - finite.size
        if finite.size == 0:
            return
        seen = (finite.min().item(), finite.max().item(), *self._extremes)
        self._extremes = (min(seen), max(seen))
        self._merge(finite)
        if self._counts.known is not None:
            found, times = np.unique(finite, return_counts=True)
            # With more unique values the limit is exceeded: skip the conversion to Python numbers.
            if found.size > MAX_DISTINCT:
                self._counts.give_up()
            else:
                self._counts.update(dict(zip(found.tolist(), times.tolist(), strict=True)))

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
        low, high = self._extremes or (None, None)
        return {
            "count": self._count,
            "missing": self.missing,
            "infinite": self._infinite,
            "min": low,
            "max": high,
            "mean": self._mean if self._finite else None,
            "std": (self._squares / self._finite) ** 0.5 if self._finite else None,
            **self._counts.as_dict(listed=self._listed),
        }


class TextStats:
    """Counts texts and empty texts, and each unique text if they look like classes."""

    def __init__(self, budget: Budget) -> None:
        self.missing = 0
        self._count = 0
        self._counts = _Counts(budget, MAX_DISTINCT)

    def update(self, texts: Sequence[bytes]) -> None:
        """Add one block of UTF-8 texts."""
        self._count += len(texts)
        self.missing += texts.count(b"")
        if self._counts.known is None:
            return
        if max(map(len, texts), default=0) > MAX_COUNTED_BYTES:
            self._counts.give_up()
        else:
            self._counts.update(text.decode() for text in texts if text)

    def as_dict(self) -> dict[str, Any]:
        """Return the column's entry in ``stats.json``."""
        figures = dict.fromkeys(("min", "max", "mean", "std"))
        shared = {"count": self._count, "missing": self.missing, "infinite": 0}
        return {**shared, **figures, **self._counts.as_dict(listed=True)}


class TokenCounts:
    """Row lengths in tokens of one unit, and token counts while there is room."""

    def __init__(self, budget: Budget, split: Callable[[str], Sequence[str]]) -> None:
        self._split = split
        self._counts = _Counts(budget)
        self._shortest: int | None = None
        self._longest = self._total = 0

    def update(self, texts: Sequence[str]) -> None:
        """Add some rows, at least one."""
        rows = [self._split(text) for text in texts]
        lengths = [len(row) for row in rows]
        self._total += sum(lengths)
        self._longest = max(self._longest, *lengths)
        least = min(lengths)
        self._shortest = least if self._shortest is None else min(self._shortest, least)
        self._counts.update(chain.from_iterable(rows))

    def as_dict(self) -> dict[str, Any]:
        """Return the min, max and total tokens of rows, and the tokens by how often they occur."""
        lengths = {"min": self._shortest or 0, "max": self._longest, "total": self._total}
        if self._counts.known is None:
            return {**lengths, "at_least": None}
        times = Counter(min(count, MAX_MIN_COUNT) for count in self._counts.known.values())
        most = max(times, default=1)
        at_least = [
            sum(number for count, number in times.items() if count >= least)
            for least in range(1, most + 1)
        ]
        return {**lengths, "at_least": at_least}
