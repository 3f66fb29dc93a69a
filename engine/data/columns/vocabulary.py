"""Texts as tokens, and tokens as integers. Knows numpy only.

0 is padding, 1 every token that is not in the vocabulary; its tokens follow from 2 on, the most
frequent first, those that are equally frequent in the order of their characters.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.columns.ragged import RaggedColumn
from engine.data.columns.table import TextColumn
from glasshouse.spec import Vocabulary
from glasshouse.spec.preparing import NUM_RESERVED, Unit

UNKNOWN = 1
LINE_END = "\n"
_CHUNK_BYTES = 1 << 22


def split(text: str, unit: Unit) -> Sequence[str]:
    """The tokens of a text."""
    return text.split() if unit == "words" else text


class Tokens:
    """The tokens that have an id of their own."""

    def __init__(self, listed: Iterable[str]) -> None:
        self.listed = list(listed)
        """In the order of their ids, from 2 on."""

    @cached_property
    def _ids(self) -> Mapping[str, int]:
        return {token: place + NUM_RESERVED for place, token in enumerate(self.listed)}

    @property
    def dim(self) -> int:
        """One more than the greatest id."""
        return len(self.listed) + NUM_RESERVED

    def ids(self, tokens: Iterable[str]) -> list[int]:
        """Of each token its id."""
        return [self._ids.get(token, UNKNOWN) for token in tokens]


def ranked(counts: Mapping[str, int], asked: Vocabulary, dim: int | None) -> Tokens:
    """The vocabulary of tokens that occur so often; ``dim``: the most ids that it may have."""
    enough = [token for token, count in counts.items() if count >= asked.min_count]
    enough.sort(key=lambda token: (-counts[token], token))
    most = [asked.max_size, None if dim is None else dim - NUM_RESERVED]
    room = min((size for size in most if size is not None), default=None)
    return Tokens(enough[:room])


class Tokenized:
    """A column of texts cut into tokens, each distinct one with a passing number of its own.

    So a text is cut once: how long rows are, how often each token occurs in some of them, and the
    ids of any vocabulary all follow from the passing numbers.
    """

    def __init__(self, column: TextColumn, unit: Unit, *, line_ends: bool = False) -> None:
        """``line_ends``: a token behind each row."""
        self._name, self._split = column.name, column.split
        numbers: defaultdict[str, int] = defaultdict()
        numbers.default_factory = numbers.__len__
        parts: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        lengths: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        for texts in column.chunks(_CHUNK_BYTES):
            rows = [split(text, unit) for text in texts]
            if line_ends:
                rows = [[*row, LINE_END] for row in rows]
            sizes = np.fromiter(map(len, rows), np.int64, len(rows))
            lengths.append(sizes)
            tokens = map(numbers.__getitem__, chain.from_iterable(rows))
            parts.append(np.fromiter(tokens, np.int32, int(sizes.sum())))
        self.passing = np.concatenate(parts)
        self.offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        self._tokens = list(numbers)

    @property
    def column(self) -> RaggedColumn:
        """Rows of passing numbers, whose lengths are those of the tokens."""
        return RaggedColumn(self._name, self._split, self.passing, self.offsets)

    def build(self, asked: Vocabulary, dim: int | None, taken: NDArray[np.int32]) -> Tokens:
        """The vocabulary of some passing numbers: those of the rows that are trained on.

        ``dim``: the most that it may need.
        """
        if asked.given is not None:
            return Tokens(asked.given)
        counts = np.bincount(taken, minlength=len(self._tokens)).tolist()
        return ranked(dict(zip(self._tokens, counts, strict=True)), asked, dim)

    def ids(self, tokens: Tokens, passing: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
        """The ids of a vocabulary in place of passing numbers; left out, of all of them."""
        table: NDArray[Any] = np.array([UNKNOWN, *tokens.ids(self._tokens)], np.int32)
        return table[1:][self.passing if passing is None else passing]
