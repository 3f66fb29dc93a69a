"""Read rows of a source by their positions, checked and in the form in which they are stored.

Shape suffixes: B = rows that are read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.data.batches.rows import Loaded
from engine.data.columns.fields import checked_shape, field_columns
from engine.data.columns.loaded import LoadedField
from engine.data.columns.prepared import Prepared, Preparing
from engine.data.columns.ragged import Limited, LoadedSequence, RaggedColumn, limited
from engine.data.sources.fitting import Fitting, Look, nothing
from engine.data.sources.joined import JoinedStored, taken_rows
from engine.data.sources.loading import load_fields
from engine.data.sources.row_files import Runs, StoredTable, runs_of
from glasshouse.errors import DataFailed
from glasshouse.spec import Field, IntegerSequenceField, SequenceField, Sequences, Source

Integers = NDArray[np.int64]


class ReadsRows(Protocol):
    """Reads rows of a source by their positions."""

    num_rows: int
    left_out: dict[str, int]
    numbers: torch.Tensor | None
    prepared: Prepared
    sizes: list[int]
    lengths: torch.Tensor
    """Row lengths of the field that batches are bucketed by; empty if there is none."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The fields that are read of each row."""
        ...

    def read_runs(self, runs: Runs) -> dict[str, Loaded]:
        """Read runs of adjacent rows, in the order of the runs."""
        ...

    def read(self, places: Integers) -> dict[str, Loaded]:
        """Read any rows, in any order."""
        ...


class SourceReader:
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
    ) -> None:
        """Find the rows to use, and for the field ``bucket`` their lengths.

        If all rows must be read for that, or for statistics, ``look`` is called along the way.

        Raises:
            DataFailed: the fields do not fit the table, or no rows remain.
        """
        self._split = source.split
        self._fields = fields
        self._table = table
        self._limit = limit
        num_rows = table.num_rows(source.split)
        for name, field in fields.items():
            checked_shape(name, field, table.meta)
        fitting = Fitting(fields, table, source.split, preparing, look)
        rows, _ = taken_rows(table, source, seed)
        left_out: dict[str, int] = {}
        if preparing.on_bad_row == "drop":
            rows, left_out = fitting.good(rows)
        kept = self._kept(rows, fitting)
        self.left_out = left_out | kept.left_out
        """What is cut off or dropped, in words, and how much of it."""
        self.numbers = kept.rows
        """Each row's number in the split; None: these are all rows of the split."""
        self.num_rows = num_rows if kept.rows is None else len(kept.rows)
        if not self.num_rows:
            raise DataFailed(f"split {source.split!r} has no rows that are taken")
        self.prepared = fitting.prepare(kept.rows, limit)
        """Statistics and vocabularies."""
        self.lengths = torch.empty(0, dtype=torch.int64)
        if bucket is not None:
            self.lengths = self._lengths(bucket, fitting, rows)
        self.sizes = _sizes(table, kept.rows)
        """For joined sources, how many rows of each are used."""
        self._preparing = replace(preparing, known=self.prepared)

    def _kept(self, rows: torch.Tensor | None, fitting: Fitting) -> Limited:
        """Apply the length limit. Lengths follow from the offsets."""
        if self._limit.max_length is None:
            return Limited(rows, {})
        columns = {
            name: self._ragged(name, fitting, rows)
            for name, field in self._fields.items()
            if isinstance(field, SequenceField)
        }
        return limited(columns, rows, self._limit)

    def _ragged(self, name: str, fitting: Fitting, rows: torch.Tensor | None) -> RaggedColumn:
        """Return a column with the offsets of a field's rows, without values."""
        field = self._fields[name]
        if isinstance(field, IntegerSequenceField) and field.tokens is not None:
            return fitting.tokens_of(name, field, rows)
        column = field_columns(name, field)[0]
        ends = self._table.offsets(self._split, column)
        return RaggedColumn(column, self._split, np.empty(0), ends, self._table.where)

    def _lengths(self, name: str, fitting: Fitting, rows: torch.Tensor | None) -> torch.Tensor:
        lengths = torch.from_numpy(np.diff(self._ragged(name, fitting, rows).offsets))
        lengths = lengths if self.numbers is None else lengths[self.numbers]
        most = self._limit.max_length
        is_cut = most is not None and isinstance(self._fields[name], SequenceField)
        return lengths.clamp(max=most) if is_cut else lengths

    @property
    def fields(self) -> Mapping[str, Field]:
        """The fields that are read of each row."""
        return self._fields

    def read_runs(self, runs: Runs) -> dict[str, Loaded]:
        """Read runs of adjacent rows, in the order of the runs.

        Raises:
            DataFailed: the data cannot be read, or does not fit its declaration.
        """
        if self.numbers is not None:
            numbers = self.numbers.numpy()
            runs = [part for first, last in runs for part in runs_of(numbers[first:last])]
        window = self._table.window(self._split, runs)
        return load_fields(self._fields, window, self._split, self._limit, self._preparing)

    def read(self, places: Integers) -> dict[str, Loaded]:
        """Read any rows, in any order.

        Raises:
            DataFailed: the data cannot be read, or does not fit its declaration.
        """
        ascending, back = np.unique(places, return_inverse=True)
        found = self.read_runs(runs_of(ascending))
        return {name: picked(item, torch.from_numpy(back)) for name, item in found.items()}


def _sizes(table: StoredTable | JoinedStored, rows: torch.Tensor | None) -> list[int]:
    if not isinstance(table, JoinedStored):
        return []
    if rows is None:
        return np.diff(table.ends).tolist()
    return np.diff(np.searchsorted(rows.numpy(), table.ends)).tolist()


def picked(item: Loaded, rows_B: torch.Tensor) -> Loaded:
    """Return some of the rows of a field, in the given order."""
    if isinstance(item, LoadedField):
        return replace(item, values=item.values.index_select(0, rows_B))
    return replace(item, starts=item.starts[rows_B], lengths=item.lengths[rows_B])


class RowStore:
    """Rows in memory, by slot; slots may be empty."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._like: dict[str, Loaded] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._lists: dict[str, list[NDArray[np.generic] | None]] = {}
        self.num_rows = 0
        """Number of stored rows."""
        self._row_bytes = self._list_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the stored rows, in bytes."""
        return self.num_rows * self._row_bytes + self._list_bytes

    def put(self, slots: Integers, rows: Mapping[str, Loaded]) -> None:
        """Store rows in empty slots."""
        if not self._like:
            self._prepare(rows)
        self.num_rows += len(slots)
        for name, item in rows.items():
            if isinstance(item, LoadedField):
                self._tensors[name].numpy()[slots] = item.values.numpy()
                continue
            self._put_lists(self._lists[name], slots, item, item.values)
            if item.weights is not None:
                self._put_lists(self._lists[f"{name}."], slots, item, item.weights)

    def _prepare(self, rows: Mapping[str, Loaded]) -> None:
        """Allocate tensors for the capacity; the system commits pages when they are written."""
        for name, item in rows.items():
            self._like[name] = picked(item, torch.zeros(0, dtype=torch.int64))
            if isinstance(item, LoadedField):
                shape = (self._capacity, *item.values.shape[1:])
                self._tensors[name] = torch.empty(shape, dtype=item.values.dtype)
                self._row_bytes += self._tensors[name].nbytes // self._capacity
                continue
            self._lists[name] = [None] * self._capacity
            if item.weights is not None:
                self._lists[f"{name}."] = [None] * self._capacity

    def _put_lists(
        self,
        kept: list[NDArray[np.generic] | None],
        slots: Integers,
        item: LoadedSequence,
        values: torch.Tensor,
    ) -> None:
        array = values.numpy()
        ends = item.starts + item.lengths
        for slot, start, end in zip(
            slots.tolist(), item.starts.tolist(), ends.tolist(), strict=True
        ):
            row = array[start:end].copy()  # a view would keep the whole array alive
            kept[slot] = row
            self._list_bytes += row.nbytes + LIST_BYTES

    def get(self, slots: Integers) -> dict[str, Loaded]:
        """Return the rows in some slots."""
        return {name: self._get(name, item, slots) for name, item in self._like.items()}

    def _get(self, name: str, like: Loaded, slots: Integers) -> Loaded:
        if isinstance(like, LoadedField):
            values = self._tensors[name].index_select(0, torch.from_numpy(slots))
            return replace(like, values=values)
        rows = self._of(name, slots)
        lengths = torch.tensor([len(row) for row in rows])
        values = torch.from_numpy(np.concatenate(rows))
        weights = None
        if like.weights is not None:
            weights = torch.from_numpy(np.concatenate(self._of(f"{name}.", slots)))
        starts = lengths.cumsum(0) - lengths
        return replace(like, values=values, starts=starts, lengths=lengths, weights=weights)

    def _of(self, name: str, slots: Integers) -> list[NDArray[np.generic]]:
        kept = self._lists[name]
        return [row for slot in slots.tolist() if (row := kept[slot]) is not None]

    def free(self, slots: Integers) -> None:
        """Remove rows from their slots."""
        self.num_rows -= len(slots)
        for kept in self._lists.values():
            for slot in slots.tolist():
                row = kept[slot]
                self._list_bytes -= 0 if row is None else row.nbytes + LIST_BYTES
                kept[slot] = None


LIST_BYTES = 128
"""Memory of a list row without its values, in bytes: a numpy array object and its reference."""
