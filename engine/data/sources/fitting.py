"""Compute what must be known of all rows before the first step, by reading their files.

Rows that stay in their files are read a block at a time, and only the columns that are needed: to
find rows that do not fit, to count tokens, and to compute statistics and vocabularies. The results
equal those for rows in memory bit for bit: statistics use the same blocks of values in the same
order.

Shape suffixes: S = steps of some rows together, D = the width of a vector.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.columns.checks import without
from engine.data.columns.dense import DenseReading
from engine.data.columns.fields import checked_shape, field_columns
from engine.data.columns.normalization import BLOCK_VALUES, Floats, find_figures
from engine.data.columns.prepared import Prepared, Preparing
from engine.data.columns.ragged import RaggedColumn
from engine.data.columns.sequences import SequenceReading, in_floats, steps_at_once
from engine.data.columns.vocabulary import Tokens, ranked, split
from engine.data.sources.joined import JoinedStored, JoinedWindow
from engine.data.sources.loading import flaws_of, needs_figures, reading_of
from engine.data.sources.row_files import StoredTable, Window, runs_of
from glasshouse.spec import (
    DenseField,
    DenseSequenceField,
    Field,
    IntegerSequenceField,
    Sequences,
    Vocabulary,
)

_CHUNK_BYTES = 1 << 22
_MANY_ROWS = 1 << 14
"""The maximum number of rows that are read at once."""
Look = Callable[[int], None]
"""Called with the number of rows just processed; may raise to stop."""


def nothing(_num_rows: int) -> None:
    """Do nothing."""


class Fitting:
    """Reads all rows of one split of a table, a block at a time."""

    def __init__(
        self,
        fields: Mapping[str, Field],
        table: StoredTable | JoinedStored,
        split: str,
        preparing: Preparing = Preparing(),  # noqa: B008 (frozen)
        look: Look = nothing,
    ) -> None:
        self._fields, self._table, self._split = fields, table, split
        self._preparing = preparing
        self._look = look
        self._num_rows = table.num_rows(split)

    def _windows(self, rows: Tensor | None, at_once: int) -> Iterator[Window | JoinedWindow]:
        """Yield rows (None: all), ``at_once`` rows at a time."""
        numbers = None if rows is None else rows.numpy()
        count = self._num_rows if numbers is None else len(numbers)
        for start in range(0, count, at_once):
            stop = min(start + at_once, count)
            runs = [(start, stop)] if numbers is None else runs_of(numbers[start:stop])
            yield self._table.window(self._split, runs)
            self._look(stop - start)

    # --- rows that do not fit --------------------------------------------------------------------

    def good(self, rows: Tensor | None) -> tuple[Tensor | None, dict[str, int]]:
        """Return the rows that fit all fields, and what was dropped, in words, with its counts."""
        fields = {n: item for n, item in self._fields.items() if self._can_be_bad(n, item)}
        left_out: Counter[str] = Counter()
        kept: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
        for window in self._windows(rows, self._rows_at_once(fields)) if fields else ():
            flaws = flaws_of(fields, window, self._split, self._preparing)
            found = without(flaws, None, window.num_rows(self._split), "drop")
            left_out.update(found.left_out)
            numbers = torch.from_numpy(window.numbers)
            kept.append(numbers if found.rows is None else numbers[found.rows])
        return (torch.cat(kept), dict(left_out)) if left_out else (rows, {})

    def _can_be_bad(self, name: str, field: Field) -> bool:
        if isinstance(field, IntegerSequenceField):
            return field.tokens is None
        if not isinstance(field, DenseField | DenseSequenceField):
            return True
        columns = [self._table.described(column) for column in field_columns(name, field)]
        is_dense = isinstance(field, DenseField)
        return any(
            column["dtype"].startswith("float") or (is_dense and None in column["shape"])
            for column in columns
        )

    def _rows_at_once(self, fields: Mapping[str, Field]) -> int:
        """Return a number of rows whose values make about one block."""
        columns = [
            self._table.described(column)
            for name, field in fields.items()
            for column in field_columns(name, field)
        ]
        return max(1, min(_MANY_ROWS, BLOCK_VALUES // max(1, sum(map(self._row_values, columns)))))

    def _row_values(self, column: Mapping[str, Any]) -> int:
        """Return the mean number of values in a row of a column."""
        if column["dtype"] == "string":
            found = (column.get("tokens") or {}).get("characters", {}).get(self._split)
            return 100 if found is None else int(found["total"]) // max(1, self._num_rows) + 1
        shape = column["shape"]
        if None not in shape:
            return int(np.prod(shape))
        total = int(column["lengths"][self._split]["total"])
        return (total // max(1, self._num_rows) + 1) * int(np.prod(shape[1:]))

    # --- tokens ----------------------------------------------------------------------------------

    def tokens_of(
        self, name: str, field: IntegerSequenceField, rows: Tensor | None
    ) -> RaggedColumn:
        """Count the tokens in the rows of a text field; 0 for rows that are not used."""
        lengths = np.zeros(self._num_rows, np.int64)
        for window, tokens in self.tokens(name, field, rows):
            lengths[window.numbers] = [len(row) for row in tokens]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        (column,) = field_columns(name, field)
        return RaggedColumn(column, self._split, np.empty(0), ends, self._table.where)

    def tokens(
        self, name: str, field: IntegerSequenceField, rows: Tensor | None
    ) -> Iterator[tuple[Window | JoinedWindow, list[Sequence[str]]]]:
        """Yield the tokens of a text field, a block of rows at a time."""
        (column,) = field_columns(name, field)
        assert field.tokens is not None  # noqa: S101 (the callers looked)
        for window in self._windows(rows, self._rows_at_once({name: field})):
            texts = chain.from_iterable(window.texts(self._split, column).chunks(_CHUNK_BYTES))
            yield window, [split(text, field.tokens) for text in texts]

    # --- statistics and vocabularies -------------------------------------------------------------

    def prepare(self, rows: Tensor | None, limit: Sequences) -> Prepared:
        """Return known statistics and vocabularies, and compute the others from these rows.

        Raises:
            DataFailed: a value is missing or infinite where it may not be, or all of a feature are.
        """
        known, found = self._preparing.known or Prepared(), Prepared()
        for name, field in self._fields.items():
            if name in known.figures:
                found.figures[name] = known.figures[name]
            elif name in known.tokens:
                found.tokens[name] = known.tokens[name]
            elif isinstance(field, IntegerSequenceField) and field.tokens is not None:
                found.tokens[name] = self._vocabulary(name, field, rows, limit)
            elif needs_figures(field, name, self._preparing):
                found.figures[name] = find_figures(
                    name,
                    lambda name=name, field=field: self._blocks(name, field, rows, limit),
                    field.scale,
                    field.fill,
                    self._preparing.normalize.get(name),
                )
        return found

    def _vocabulary(
        self, name: str, field: IntegerSequenceField, rows: Tensor | None, limit: Sequences
    ) -> Tokens:
        asked = field.vocabulary or Vocabulary()
        if asked.given is not None:
            return Tokens(asked.given)
        counts: Counter[str] = Counter()
        for _, tokens in self.tokens(name, field, rows):
            counts.update(chain.from_iterable(row[: limit.max_length] for row in tokens))
        return ranked(counts, asked, field.dim)

    def _blocks(
        self,
        name: str,
        field: DenseField | DenseSequenceField,
        rows: Tensor | None,
        limit: Sequences,
    ) -> Iterator[Floats]:
        """Yield the values of a field from the start, in the same blocks as rows in memory."""
        if isinstance(field, DenseField):
            return self._dense(name, field, rows)
        whole = self._vectors(name, field, rows, limit)
        return (in_floats(field, piece) for piece in recut(whole, steps_at_once(field)))

    def _dense(self, name: str, field: DenseField, rows: Tensor | None) -> Iterator[Floats]:
        shape = checked_shape(name, field, self._table.meta).shape
        for window in self._windows(rows, DenseReading.rows_at_once(shape)):
            reading = reading_of(name, field, window, self._split, self._preparing)
            assert isinstance(reading, DenseReading)  # noqa: S101 (that of a dense field is one)
            without(reading.flaws(), None, window.num_rows(self._split), "fail")
            yield from reading.blocks(None)

    def _vectors(
        self, name: str, field: DenseSequenceField, rows: Tensor | None, limit: Sequences
    ) -> Iterator[NDArray[Any]]:
        for window in self._windows(rows, self._rows_at_once({name: field})):
            reading = reading_of(name, field, window, self._split, self._preparing)
            assert isinstance(reading, SequenceReading)  # noqa: S101 (that of a sequence is one)
            without(reading.flaws(), None, window.num_rows(self._split), "fail")
            yield reading.vectors(field, None, limit)[0]


def recut(arrays: Iterator[NDArray[Any]], step: int) -> Iterator[NDArray[Any]]:
    """Yield the same values in pieces of ``step``; the last may be shorter."""
    waiting: list[NDArray[Any]] = []
    num = 0
    for array in arrays:
        waiting.append(array)
        num += len(array)
        if num < step:
            continue
        whole = np.concatenate(waiting)
        last = num // step * step
        yield from (whole[start : start + step] for start in range(0, last, step))
        waiting, num = [whole[last:].copy()], num - last
    if num:
        yield np.concatenate(waiting)
