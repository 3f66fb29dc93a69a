"""Stream windows over a running text: the text around them is read and tokenized again.

Only the offsets of the text's rows, in tokens, are kept in memory. Rows are tokenized
independently, so any part of the text can be tokenized again.

Shape suffixes: N = windows that are read.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.batches.rows import Loaded
from engine.data.columns.fields import checked_shape, field_columns
from engine.data.columns.loaded import LoadedField
from engine.data.columns.prepared import WINDOWS, Prepared
from engine.data.columns.ragged import LoadedSequence
from engine.data.columns.sequences import check_tokens
from engine.data.columns.vocabulary import LINE_END, Tokens, ranked, split
from engine.data.sources.fitting import Fitting, Look, nothing
from engine.data.sources.reading import Integers, picked
from engine.data.sources.row_files import Runs, StoredTable, runs_of
from engine.data.sources.text_windows import (
    check_some,
    described,
    ids_allowed,
    num_windows,
    offsets_of,
    part_of,
    stride_of,
)
from glasshouse.spec import (
    Field,
    IntegerField,
    IntegerSequenceField,
    Source,
    Windows,
)

_TEXT = "text"
_CHUNK_BYTES = 1 << 22


class WindowReader:
    """Reads the windows over the running text of one source, by their positions."""

    def __init__(
        self,
        source: Source,
        fields: Mapping[str, Field],
        table: StoredTable,
        windows: Windows,
        known: Prepared | None = None,
        look: Look = nothing,
    ) -> None:
        """Read through the text once; ``look`` is called along the way.

        Raises:
            DataFailed: there is no such text, it is shorter than a window, or a field reads
                something else.
        """
        self._source, self._fields, self._table = source, fields, table
        self._windows = windows
        table.num_rows(source.split)
        self._meta = described(table.meta, windows)
        num_tokens = int(self._meta["tokens"][source.split])
        self._first, last = part_of(num_tokens, source.fraction)
        self.num_rows = num_windows(windows, last - self._first)
        check_some(source, self.num_rows, last - self._first)
        has_tokens = known is not None and WINDOWS in known.tokens
        self._ends, counts = self._cut(last, look, counts=not has_tokens)
        if known is None or not has_tokens:
            known = Prepared(tokens={WINDOWS: self._vocabulary(counts)})
        self.prepared = known
        """The vocabulary."""
        self._tokens = known.tokens[WINDOWS]
        for name, field in fields.items():
            dim = int(checked_shape(name, field, self._meta).dim or 0)
            check_tokens(name, self._tokens, dim)
        self.left_out: dict[str, int] = {}
        self.numbers: Tensor | None = None
        self.sizes: list[int] = []
        self.lengths = torch.empty(0, dtype=torch.int64)

    @property
    def fields(self) -> Mapping[str, Field]:
        """The fields that are read of each window."""
        return self._fields

    def _cut(self, last: int, look: Look, *, counts: bool) -> tuple[Integers, Counter[str]]:
        """Return where each row of the text ends, in tokens, and token counts of the part used."""
        text = IntegerSequenceField(
            type="integer_sequence", column=self._windows.column, tokens=self._windows.tokens
        )
        fitting = Fitting({_TEXT: text}, self._table, self._source.split, look=look)
        found: Counter[str] = Counter()
        sizes: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        at = 0
        for _, rows in fitting.tokens(_TEXT, text, None):
            lengths = np.fromiter((len(row) + 1 for row in rows), np.int64, len(rows))
            sizes.append(lengths)
            start, at = at, at + int(lengths.sum())
            if counts and start < last and at > self._first:
                whole = list(chain.from_iterable((*row, LINE_END) for row in rows))
                found.update(whole[max(0, self._first - start) : last - start])
        return np.cumsum(np.concatenate(sizes)), found

    def _vocabulary(self, counts: Counter[str]) -> Tokens:
        asked = self._windows.vocabulary
        if asked.given is not None:
            return Tokens(asked.given)
        return ranked(counts, asked, ids_allowed(self._fields))

    def read_runs(self, runs: Runs) -> dict[str, Loaded]:
        """Read runs of adjacent windows, in the order of the runs.

        Raises:
            DataFailed: the text cannot be read.
        """
        parts = [self._of_run(first, last) for first, last in runs]
        return {name: _joined([part[name] for part in parts]) for name in self._fields}

    def read(self, places: Integers) -> dict[str, Loaded]:
        """Read any windows, in any order.

        Raises:
            DataFailed: the text cannot be read.
        """
        ascending, back = np.unique(places, return_inverse=True)
        found = self.read_runs(runs_of(ascending))
        return {name: picked(item, torch.from_numpy(back)) for name, item in found.items()}

    def _of_run(self, first: int, last: int) -> dict[str, Loaded]:
        whole = {
            n: offsets_of(self._windows, *field_columns(n, f)) for n, f in self._fields.items()
        }
        stride = stride_of(self._windows)
        width = max(int(offsets.max()) for offsets in whole.values()) + 1
        start = self._first + first * stride
        ids = self._ids(start, start + (last - first - 1) * stride + width)
        begins_N = np.arange(last - first) * stride
        made: dict[str, Loaded] = {}
        for name, offsets in whole.items():
            values = torch.from_numpy(ids[begins_N[:, None] + offsets].reshape(-1))
            if isinstance(self._fields[name], IntegerField):
                made[name] = LoadedField(values.to(torch.int64), is_integer=True)
                continue
            lengths_N = torch.full((last - first,), len(offsets))
            starts_N = lengths_N.cumsum(0) - lengths_N
            made[name] = LoadedSequence(values, starts_N, lengths_N, is_integer=True)
        return made

    def _ids(self, first: int, last: int) -> NDArray[np.int32]:
        """Return the ids of a run of tokens."""
        begin = int(np.searchsorted(self._ends, first, side="right")) - 1
        end = int(np.searchsorted(self._ends, last, side="left"))
        window = self._table.window(self._source.split, [(begin, end)])
        texts = window.texts(self._source.split, self._windows.column)
        tokens = list(
            chain.from_iterable(
                (*split(text, self._windows.tokens), LINE_END)
                for chunk in texts.chunks(_CHUNK_BYTES)
                for text in chunk
            )
        )
        start = int(self._ends[begin])
        return np.array(self._tokens.ids(tokens[first - start : last - start]), np.int32)


def _joined(parts: list[Loaded]) -> Loaded:
    """Concatenate the windows of several runs."""
    values = torch.cat([part.values for part in parts])
    if isinstance(parts[0], LoadedField):
        return LoadedField(values, is_integer=True)
    lengths_N = torch.cat([part.lengths for part in parts if isinstance(part, LoadedSequence)])
    return LoadedSequence(values, lengths_N.cumsum(0) - lengths_N, lengths_N, is_integer=True)
