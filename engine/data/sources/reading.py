"""Read rows of a source from its files: by their positions, or all of them before the first step.

Rows that stay in their files are read a block at a time, and only the columns that are needed: to
find rows that do not fit, to count tokens, and to compute statistics and vocabularies. The results
equal those for rows in memory bit for bit: statistics use the same blocks of values in the same
order.

Shape suffixes: B = rows that are read, S = steps of some rows together, D = the width of a vector.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.batches.buckets import Integers
from engine.data.batches.rows import Loaded
from engine.data.columns.checks import Note, without
from engine.data.columns.dense import DenseReading
from engine.data.columns.fields import checked_shape, field_columns
from engine.data.columns.normalization import BLOCK_VALUES, Floats, in_floats
from engine.data.columns.prepared import Prepared, Preparing
from engine.data.columns.ragged import RaggedColumn, limited
from engine.data.columns.sequences import SequenceReading, steps_at_once
from engine.data.columns.table import Runs, StoredTable, Window, runs_of
from engine.data.columns.vocabulary import Tokens, ranked, split
from engine.data.sources.joined import JoinedStored, JoinedWindow, taken_rows
from engine.data.sources.loading import (
    Reading,
    flaws_of,
    load_fields,
    prepare,
    reading_of,
    readings_of,
)
from glasshouse.errors import DataFailed
from glasshouse.spec import (
    DenseField,
    DenseSequenceField,
    Field,
    IntegerSequenceField,
    SequenceField,
    Sequences,
    Source,
    Vocabulary,
)

_CHUNK_BYTES = 1 << 22
_MANY_ROWS = 1 << 14
"""The maximum number of rows that are read at once."""
Look = Callable[[int], None]
"""Called with the number of rows just processed; may raise to stop."""


def nothing(_num_rows: int) -> None:
    """Do nothing."""


class RowReader(ABC):
    """Reads rows of a source by their positions."""

    def __init__(
        self,
        table: StoredTable | JoinedStored,
        source: Source,
        fields: Mapping[str, Field],
        look: Look,
    ) -> None:
        self._table, self._source, self._fields, self._look = table, source, fields, look
        self._num_all = table.num_rows(source.split)
        self.num_rows = self._num_all
        self.left_out: dict[str, int] = {}
        """What is cut off or dropped, in words, and how much of it."""
        self.numbers: Tensor | None = None
        """Each row's number in the split; None: these are all rows of the split."""
        self.prepared = Prepared()
        """Statistics and vocabularies."""
        self.sizes: list[int] = []
        """For joined sources, how many rows of each are used."""
        self.lengths = torch.empty(0, dtype=torch.int64)
        """Row lengths of the field that batches are bucketed by; empty if there is none."""

    @abstractmethod
    def read_runs(self, runs: Runs) -> dict[str, Loaded]:
        """Read runs of adjacent rows, in the order of the runs.

        Raises:
            DataFailed: the data cannot be read, or does not fit its declaration.
        """

    def read(self, places: Integers) -> dict[str, Loaded]:
        """Read any rows, in any order.

        Raises:
            DataFailed: the data cannot be read, or does not fit its declaration.
        """
        ascending, back = np.unique(places, return_inverse=True)
        found = self.read_runs(runs_of(ascending))
        return {name: item.taken(torch.from_numpy(back)) for name, item in found.items()}

    def tokens(
        self, name: str, field: IntegerSequenceField, rows: Tensor | None
    ) -> Iterator[tuple[Window | JoinedWindow, list[Sequence[str]]]]:
        """Yield the tokens of a text field, a block of rows at a time."""
        (column,) = field_columns(name, field)
        assert field.tokens is not None  # noqa: S101 (the callers looked)
        for window in self._windows(rows, self._rows_at_once({name: field})):
            chunks = window.texts(self._source.split, column).chunks(_CHUNK_BYTES)
            yield window, [split(text, field.tokens) for text in chain.from_iterable(chunks)]

    def _windows(self, rows: Tensor | None, at_once: int) -> Iterator[Window | JoinedWindow]:
        """Yield rows (None: all), ``at_once`` rows at a time."""
        numbers = None if rows is None else rows.numpy()
        count = self._num_all if numbers is None else len(numbers)
        for start in range(0, count, at_once):
            stop = min(start + at_once, count)
            runs = [(start, stop)] if numbers is None else runs_of(numbers[start:stop])
            yield self._table.window(self._source.split, runs)
            self._look(stop - start)

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
            found = (column.get("tokens") or {}).get("characters", {}).get(self._source.split)
            return 100 if found is None else int(found["total"]) // max(1, self._num_all) + 1
        shape = column["shape"]
        if None not in shape:
            return int(np.prod(shape))
        total = int(column["lengths"][self._source.split]["total"])
        return (total // max(1, self._num_all) + 1) * int(np.prod(shape[1:]))


class SourceReader(RowReader):
    """Reads the rows of one source from its files."""

    def __init__(  # noqa: PLR0913 (a source, how it is read, and who hears of it)
        self,
        source: Source,
        fields: Mapping[str, Field],
        table: StoredTable | JoinedStored,
        *,
        seed: int,
        limit: Sequences,
        preparing: Preparing = Preparing(),  # noqa: B008 (frozen)
        look: Look = nothing,
        bucket: str | None = None,
        note: Note | None = None,
    ) -> None:
        """Find the rows to use, and for the field ``bucket`` their lengths.

        If all rows must be read for that, or for statistics, ``look`` is called along the way.
        ``note`` is called for each row that is dropped because it does not fit its field.

        Raises:
            DataFailed: the fields do not fit the table, or no rows remain.
        """
        super().__init__(table, source, fields, look)
        self._split, self._limit, self._preparing = source.split, limit, preparing
        self._note = note
        for name, field in fields.items():
            checked_shape(name, field, table.meta)
        rows, _ = taken_rows(table, source, seed)
        if preparing.on_bad_row == "drop":
            rows, self.left_out = self._good(rows)
        sequences = [name for name, field in fields.items() if isinstance(field, SequenceField)]
        limits = {
            name: self._ragged(name, rows) for name in sequences if limit.max_length is not None
        }
        kept = limited(limits, rows, limit)
        self.left_out |= kept.left_out
        self.numbers = kept.rows
        if kept.rows is not None:
            self.num_rows = len(kept.rows)
        if not self.num_rows:
            raise DataFailed(f"split {source.split!r} has no rows that are taken")
        self.prepared = prepare(
            fields,
            preparing,
            lambda name: partial(self._blocks, name, kept.rows),
            lambda name: self._vocabulary(name, kept.rows),
        )
        if bucket is not None:
            most = limit.max_length if bucket in sequences else None
            self.lengths = self._lengths(bucket, rows, most)
        if isinstance(table, JoinedStored):
            self.sizes = self._sizes(table)
        self._preparing = replace(preparing, known=self.prepared)

    def read_runs(self, runs: Runs) -> dict[str, Loaded]:
        """Read runs of adjacent rows, in the order of the runs."""
        if self.numbers is not None:
            numbers = self.numbers.numpy()
            runs = [part for first, last in runs for part in runs_of(numbers[first:last])]
        window = self._table.window(self._split, runs)
        return load_fields(self._fields, window, self._split, self._limit, self._preparing)

    def _lengths(self, bucket: str, rows: Tensor | None, most: int | None) -> Tensor:
        """Return the lengths of the used rows of a field, of at most ``most`` values each."""
        lengths = torch.from_numpy(self._ragged(bucket, rows).lengths)
        lengths = lengths if self.numbers is None else lengths[self.numbers]
        return lengths if most is None else lengths.clamp(max=most)

    def _sizes(self, table: JoinedStored) -> list[int]:
        """Return how many rows of each joined source are used."""
        used = self.numbers
        cuts = table.ends if used is None else np.searchsorted(used.numpy(), table.ends)
        return np.diff(cuts).tolist()

    # --- rows that do not fit --------------------------------------------------------------------

    def _good(self, rows: Tensor | None) -> tuple[Tensor | None, dict[str, int]]:
        """Return the rows that fit all fields, and what was dropped, in words, with its counts."""
        fields = {n: item for n, item in self._fields.items() if self._can_be_bad(n, item)}
        left_out: Counter[str] = Counter()
        kept: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
        for window in self._windows(rows, self._rows_at_once(fields)) if fields else ():
            readings = readings_of(fields, window, self._split, self._preparing)
            numbers = torch.from_numpy(window.numbers)
            note = None if self._note is None else partial(self._noted, numbers)
            num_rows = window.num_rows(self._split)
            found = without(flaws_of(readings), None, num_rows, "drop", note)
            left_out.update(found.left_out)
            kept.append(numbers if found.rows is None else numbers[found.rows])
        return (torch.cat(kept), dict(left_out)) if left_out else (rows, {})

    def _noted(self, numbers: Tensor, row: int, detail: str) -> None:
        """Report a row of a window, of which ``numbers`` are the numbers in the split."""
        if self._note is not None:
            self._note(int(numbers[row]), detail)

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

    def _ragged(self, name: str, rows: Tensor | None) -> RaggedColumn:
        """Return a column with the offsets of a field's rows, without values.

        A row of a text that is not in ``rows`` has length 0. Other lengths follow from the offsets.
        """
        field = self._fields[name]
        column = field_columns(name, field)[0]
        if isinstance(field, IntegerSequenceField) and field.tokens is not None:
            lengths = np.zeros(self._num_all, np.int64)
            for window, tokens in self.tokens(name, field, rows):
                lengths[window.numbers] = [len(row) for row in tokens]
            ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        else:
            ends = self._table.offsets(self._split, column)
        return RaggedColumn(column, self._split, np.empty(0), ends, self._table.where)

    # --- statistics and vocabularies -------------------------------------------------------------

    def _vocabulary(self, name: str, rows: Tensor | None) -> Tokens:
        field = self._fields[name]
        assert isinstance(field, IntegerSequenceField)  # noqa: S101 (only it has tokens)
        asked = field.vocabulary or Vocabulary()
        if asked.given is not None:
            return Tokens(asked.given)
        counts: Counter[str] = Counter()
        for _, tokens in self.tokens(name, field, rows):
            counts.update(chain.from_iterable(row[: self._limit.max_length] for row in tokens))
        return ranked(counts, asked, field.dim)

    def _blocks(self, name: str, rows: Tensor | None) -> Iterator[Floats]:
        """Yield the values of a field from the start, in the same blocks as rows in memory."""
        field = self._fields[name]
        if isinstance(field, DenseField):
            shape = checked_shape(name, field, self._table.meta).shape
            for reading in self._readings(name, field, rows, DenseReading.rows_at_once(shape)):
                assert isinstance(reading, DenseReading)  # noqa: S101 (that of a dense field is one)
                yield from reading.blocks(None)
            return
        assert isinstance(field, DenseSequenceField)  # noqa: S101 (others have no statistics)
        whole = self._vectors(name, field, rows)
        for piece in recut(whole, steps_at_once(field)):
            yield in_floats(field, piece)

    def _vectors(
        self, name: str, field: DenseSequenceField, rows: Tensor | None
    ) -> Iterator[NDArray[Any]]:
        for reading in self._readings(name, field, rows, self._rows_at_once({name: field})):
            assert isinstance(reading, SequenceReading)  # noqa: S101 (that of a sequence is one)
            yield reading.vectors(field, None, self._limit)[0]

    def _readings(
        self, name: str, field: Field, rows: Tensor | None, at_once: int
    ) -> Iterator[Reading]:
        """Yield the reader of some rows at a time, which all fit the field."""
        for window in self._windows(rows, at_once):
            reading = reading_of(name, field, window, self._split, self._preparing)
            without(reading.flaws(), None, window.num_rows(self._split), "fail")
            yield reading


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
