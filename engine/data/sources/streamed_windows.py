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

from engine.data.batches.buckets import Integers
from engine.data.batches.rows import Loaded
from engine.data.columns.fields import field_columns
from engine.data.columns.loaded import LoadedField, LoadedSequence
from engine.data.columns.prepared import WINDOWS, Prepared
from engine.data.columns.table import Runs, StoredTable
from engine.data.columns.vocabulary import LINE_END, ranked, split
from engine.data.sources.reading import Look, RowReader, nothing
from engine.data.sources.text_windows import RunningText, ids_allowed, offsets_of, stride_of
from glasshouse.spec import Field, IntegerField, IntegerSequenceField, Source, Windows

_TEXT = "text"
_CHUNK_BYTES = 1 << 22


class WindowReader(RowReader):
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
        super().__init__(table, source, fields, look)
        self._cuts = windows
        text = RunningText(windows, table, source)
        self._first, self.num_rows = text.first, text.num_rows
        has_tokens = known is not None and WINDOWS in known.tokens
        self._ends, counts = self._cut(text.last, counts=not has_tokens)
        if known is None or not has_tokens:
            tokens = ranked(counts, windows.vocabulary, ids_allowed(fields))
            known = Prepared(tokens={WINDOWS: tokens})
        self.prepared = known
        self._tokens = known.tokens[WINDOWS]
        text.check(fields, self._tokens)

    def _cut(self, last: int, *, counts: bool) -> tuple[Integers, Counter[str]]:
        """Return where each row of the text ends, in tokens, and token counts of the part used."""
        text = IntegerSequenceField(
            type="integer_sequence", column=self._cuts.column, tokens=self._cuts.tokens
        )
        found: Counter[str] = Counter()
        sizes: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        at = 0
        for _, rows in self.tokens(_TEXT, text, None):
            lengths = np.fromiter((len(row) + 1 for row in rows), np.int64, len(rows))
            sizes.append(lengths)
            start, at = at, at + int(lengths.sum())
            if counts and start < last and at > self._first:
                whole = list(chain.from_iterable((*row, LINE_END) for row in rows))
                found.update(whole[max(0, self._first - start) : last - start])
        return np.cumsum(np.concatenate(sizes)), found

    def read_runs(self, runs: Runs) -> dict[str, Loaded]:
        """Read runs of adjacent windows, in the order of the runs."""
        parts = [self._of_run(first, last) for first, last in runs]
        return {name: self._loaded(name, [part[name] for part in parts]) for name in self._fields}

    def _of_run(self, first: int, last: int) -> dict[str, Tensor]:
        """Return the ids in some adjacent windows, [windows, ids of a window] for each field."""
        whole = {n: offsets_of(self._cuts, *field_columns(n, f)) for n, f in self._fields.items()}
        stride = stride_of(self._cuts)
        width = max(int(offsets.max()) for offsets in whole.values()) + 1
        start = self._first + first * stride
        ids = self._ids(start, start + (last - first - 1) * stride + width)
        begins_N = np.arange(last - first) * stride
        return {
            name: torch.from_numpy(ids[begins_N[:, None] + offsets])
            for name, offsets in whole.items()
        }

    def _loaded(self, name: str, parts: list[Tensor]) -> Loaded:
        """Return the windows of several runs as a field."""
        values = torch.cat(parts)
        if isinstance(self._fields[name], IntegerField):
            return LoadedField(values.reshape(-1).to(torch.int64), is_integer=True)
        lengths_N = torch.full((len(values),), values.shape[1])
        starts_N = lengths_N.cumsum(0) - lengths_N
        return LoadedSequence(values.reshape(-1), starts_N, lengths_N, is_integer=True)

    def _ids(self, first: int, last: int) -> NDArray[np.int32]:
        begin = int(np.searchsorted(self._ends, first, side="right")) - 1
        end = int(np.searchsorted(self._ends, last, side="left"))
        window = self._table.window(self._source.split, [(begin, end)])
        texts = window.texts(self._source.split, self._cuts.column)
        tokens = list(
            chain.from_iterable(
                (*split(text, self._cuts.tokens), LINE_END)
                for chunk in texts.chunks(_CHUNK_BYTES)
                for text in chunk
            )
        )
        start = int(self._ends[begin])
        return np.array(self._tokens.ids(tokens[first - start : last - start]), np.int32)
