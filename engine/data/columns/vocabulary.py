"""Split texts into tokens, and map tokens to integers. Uses numpy only.

0 is padding, and 1 is every token that is not in the vocabulary. Ids of tokens start at 2, the most
frequent token first. Equally frequent tokens are in the order of their characters.
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
from glasshouse.spec.preprocessing import NUM_RESERVED, Unit

UNKNOWN = 1
LINE_END = "\n"
_CHUNK_BYTES = 1 << 22


def split(text: str, unit: Unit) -> Sequence[str]:
    """Return the tokens of a text."""
    return text.split() if unit == "words" else text


class Tokens:
    """The tokens that have an id."""

    def __init__(self, listed: Iterable[str]) -> None:
        self.listed = list(listed)
        """The tokens in the order of their ids, from 2 on."""

    @cached_property
    def _ids(self) -> Mapping[str, int]:
        return {token: place + NUM_RESERVED for place, token in enumerate(self.listed)}

    @property
    def dim(self) -> int:
        """One more than the largest id."""
        return len(self.listed) + NUM_RESERVED

    def ids(self, tokens: Iterable[str]) -> list[int]:
        """Return the id of each token."""
        return [self._ids.get(token, UNKNOWN) for token in tokens]


def ranked(counts: Mapping[str, int], asked: Vocabulary, dim: int | None) -> Tokens:
    """Return the given vocabulary, or that of frequent tokens; ``dim``: max number of ids."""
    if asked.given is not None:
        return Tokens(asked.given)
    enough = [token for token, count in counts.items() if count >= asked.min_count]
    enough.sort(key=lambda token: (-counts[token], token))
    most = [asked.max_size, None if dim is None else dim - NUM_RESERVED]
    room = min((size for size in most if size is not None), default=None)
    return Tokens(enough[:room])


class Tokenized:
    """A text column split into tokens, with a provisional id for each unique token.

    So a text is split only once: row lengths, token counts of some rows, and the ids of any
    vocabulary are computed from the provisional ids.
    """

    def __init__(self, column: TextColumn, unit: Unit, *, line_ends: bool = False) -> None:
        """``line_ends``: append a token to each row."""
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
        """Rows of provisional ids, with as many steps as the row has tokens."""
        return RaggedColumn(self._name, self._split, self.passing, self.offsets)

    def build(self, asked: Vocabulary, dim: int | None, taken: NDArray[np.int32]) -> Tokens:
        """Build the vocabulary from the provisional ids ``taken``, those of the training rows.

        ``dim``: max number of ids.
        """
        counts = np.bincount(taken, minlength=len(self._tokens)).tolist()
        return ranked(dict(zip(self._tokens, counts, strict=True)), asked, dim)

    def ids(self, tokens: Tokens, passing: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
        """Convert provisional ids to those of a vocabulary; by default, all of them."""
        table: NDArray[Any] = np.array([UNKNOWN, *tokens.ids(self._tokens)], np.int32)
        return table[1:][self.passing if passing is None else passing]
