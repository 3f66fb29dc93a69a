"""Count the tokens in the texts of a column while it is written. Does not use numpy.

A plan needs these counts before the texts are read again: row lengths, and the possible size of a
vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

MAX_DISTINCT = 300_000
"""The number of unique tokens that all columns of a dataset together may store."""
MAX_MIN_COUNT = 20
"""The largest n for which the number of tokens that occur at least n times is stored."""


class TokenBudget:
    """The number of unique tokens that all columns together may still store."""

    def __init__(self, num_tokens: int = MAX_DISTINCT) -> None:
        self.left = num_tokens


class TokenCounts:
    """Row lengths in tokens of one unit, and token counts while there is room."""

    def __init__(self, budget: TokenBudget, split: Callable[[str], Sequence[str]]) -> None:
        self._budget = budget
        self._split = split
        self._counts: Counter[str] | None = Counter()
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
        if self._counts is None:
            return
        before = len(self._counts)
        self._counts.update(chain.from_iterable(rows))
        self._budget.left -= len(self._counts) - before
        if self._budget.left < 0:
            self._budget.left += len(self._counts)
            self._counts = None

    def as_dict(self) -> dict[str, Any]:
        """Return the min, max and total tokens of rows, and the tokens by how often they occur."""
        lengths = {"min": self._shortest or 0, "max": self._longest, "total": self._total}
        if self._counts is None:
            return {**lengths, "at_least": None}
        times = Counter(min(count, MAX_MIN_COUNT) for count in self._counts.values())
        most = max(times, default=1)
        at_least = [
            sum(number for count, number in times.items() if count >= least)
            for least in range(1, most + 1)
        ]
        return {**lengths, "at_least": at_least}


class TextTokens:
    """A column's tokens by both units, in one split."""

    def __init__(self, budget: TokenBudget) -> None:
        self._units = {
            "characters": TokenCounts(budget, lambda text: text),
            "words": TokenCounts(budget, str.split),
        }

    def update(self, texts: Sequence[bytes]) -> None:
        """Add one block of UTF-8 texts."""
        decoded = [text.decode() for text in texts]
        for counts in self._units.values():
            counts.update(decoded)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the counts by unit."""
        return {unit: counts.as_dict() for unit, counts in self._units.items()}
