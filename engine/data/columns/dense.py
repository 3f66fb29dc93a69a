"""Read fields with a tensor or an integer per row: checked, and converted, into memory.

Values of dense fields reach the network as float32:

- a uint8 column without ``scale`` is exactly ``column.to(float32) / 255``;
- any other column without ``scale`` is ``column.to(float32)``;
- with ``scale`` it is ``column.to(float32) * scale``;
- filled and normalized values are computed in float64 and rounded once. There are two exceptions,
  which are normalized in float32 when a batch is created: uint8 columns, which stay bytes in
  memory, and augmented fields, because augmentation comes before.

Shape suffixes: N = rows that are read.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.columns.checks import BadRows, bad_places, not_there, outside, unfilled
from engine.data.columns.fields import checked_shape, field_columns
from engine.data.columns.loaded import LoadedField
from engine.data.columns.normalization import (
    BLOCK_VALUES,
    Blocks,
    ColumnFigures,
    Floats,
    along,
    in_floats,
    of_field,
)
from engine.data.columns.prepared import Prepared
from engine.data.columns.ragged import RaggedColumn, forget_pages
from engine.data.columns.table import Table, TextColumn
from glasshouse import jsonio
from glasshouse.errors import DataFailed
from glasshouse.spec import DenseField, IntegerField, Normalize, Sequences


class _Even:
    """A column of lists of which only those of one length are read."""

    def __init__(self, column: RaggedColumn, num_steps: int) -> None:
        self.column = column
        self.num_steps = num_steps
        self.dtype = column.values.dtype

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        starts = self.column.offsets[:-1][rows]
        return self.column.values[starts[:, None] + np.arange(self.num_steps)]

    def bad_rows(self, is_bad: Any) -> NDArray[np.int64]:
        rows = self.column.rows_of(bad_places(self.column.values, is_bad))
        return rows[self.column.lengths[rows] == self.num_steps]


class DenseReading:
    """Reads a dense field of one split."""

    def __init__(
        self, name: str, field: DenseField, table: Table, split: str, normalize: Normalize | None
    ) -> None:
        """Map the columns.

        Raises:
            DataFailed: one is missing or has the wrong shape.
        """
        self._name, self.field, self._split, self._table = name, field, split, table
        self._normalize = normalize
        self._num_rows = table.num_rows(split)
        self._shape = checked_shape(name, field, table.meta).shape
        self._names = field_columns(name, field)
        first = table.described(self._names[0])["shape"]
        if None in first:
            num_steps = int(np.prod(self._shape)) // max(1, int(np.prod(first[1:])))
            self._columns: list[Any] = [_Even(table.ragged(split, self._names[0]), num_steps)]
        else:
            self._columns = [table.column(split, column) for column in self._names]

    # --- checks ----------------------------------------------------------------------------------

    def flaws(self) -> Iterator[BadRows]:
        """Yield rows of another length, and rows with missing values, or Inf if normalized."""
        for even in self._columns:
            if isinstance(even, _Even):
                yield self._of_another_length(even.column, even.num_steps)
        is_bad = unfilled(self.field, self._normalize)
        for column, values in zip(self._names, self._columns, strict=True):
            if is_bad is None or values.dtype.kind != "f":
                continue
            is_even = isinstance(values, _Even)
            rows = values.bad_rows(is_bad) if is_even else bad_places(values, is_bad)
            yield self._flaw(column, rows, values, is_bad)

    def _flaw(self, column: str, rows: NDArray[np.int64], values: Any, is_bad: Any) -> BadRows:
        def failure(row: int) -> DataFailed:
            flat = np.asarray(values[row : row + 1]).reshape(-1)
            place = int(np.flatnonzero(is_bad(flat))[0])
            which = "" if flat.size == 1 else f"value {place} of "
            where = f"{self._table.where(self._split, row)}: {which}column {column!r}"
            return not_there(self._name, where, float(flat[place]))

        which = "missing" if self._normalize is None else "missing or infinite"
        what = f"rows with a {which} value in column {column!r} of split {self._split!r}"
        return BadRows(what, rows, failure)

    def _of_another_length(self, column: RaggedColumn, num_steps: int) -> BadRows:
        def failure(row: int) -> DataFailed:
            detail = f"{column.where(row)} has {int(column.lengths[row])} values in"
            return DataFailed(
                f"{detail} column {column.name!r}; field {self._name!r} takes {num_steps}",
                hint="Correct the data, or set data.on_bad_row to drop.",
            )

        what = f"rows of another length than {num_steps} in column {column.name!r} of split"
        rows = np.flatnonzero(column.lengths != num_steps)
        return BadRows(f"{what} {self._split!r}", rows, failure)

    # --- values ----------------------------------------------------------------------------------

    def passes(self, rows: Tensor | None, limit: Sequences) -> Blocks:
        """Return a function that reads the training rows from the start."""
        return partial(self.blocks, rows)

    def load(self, rows: Tensor | None, limit: Sequences, prepared: Prepared) -> LoadedField:
        """Read rows into memory; None: all of the split."""
        figures = of_field(prepared.figures.get(self._name), self.field.fill)
        is_bytes = all(column.dtype == np.uint8 for column in self._columns)
        if figures is not None and not figures.is_empty and not is_bytes:
            if not self.field.augment:
                return self._computed(rows, figures)
            loaded = self._computed(rows, ColumnFigures(figures.fill))
        else:
            loaded = self._as_stored(rows)
        if figures is None or figures.shift is None or figures.divisor is None:
            return loaded
        shift, divisor = (
            torch.from_numpy(along(item, len(self._shape) + 1).astype(np.float32))
            for item in (figures.shift, figures.divisor)
        )
        return replace(loaded, normal=(shift, divisor))

    def _as_stored(self, rows: Tensor | None) -> LoadedField:
        values = self._stored(rows)
        divide_by = 255.0 if values.dtype == torch.uint8 and self.field.scale is None else None
        if values.dtype not in {torch.uint8, torch.float32}:
            values = values.to(torch.float32)
        return LoadedField(values, divide_by, self.field.scale)

    def _computed(self, rows: Tensor | None, figures: ColumnFigures) -> LoadedField:
        count = self._num_rows if rows is None else len(rows)
        before, after = (None, self.field.scale)
        if figures.shift is not None:
            before, after = after, before
        values = figures.applied(self.blocks(rows), (count, *self._shape), before)
        return LoadedField(torch.from_numpy(values), None, after)

    @staticmethod
    def rows_at_once(shape: tuple[int, ...]) -> int:
        """Return how many rows a block of values has."""
        return max(1, BLOCK_VALUES // max(1, int(np.prod(shape))))

    def blocks(self, rows: Tensor | None) -> Iterator[Floats]:
        """Yield rows in float64, in the columns' own units; bytes without a scale are in [0, 1]."""
        numbers = None if rows is None else rows.numpy()
        count = self._num_rows if numbers is None else len(numbers)
        step = self.rows_at_once(self._shape)
        for start in range(0, count, step):
            end = min(start + step, count)
            part = slice(start, end) if numbers is None else numbers[start:end]
            floats = [
                in_floats(self.field, column[part]).reshape(end - start, -1)
                for column in self._columns
            ]
            whole = floats[0] if len(floats) == 1 else np.concatenate(floats, axis=1)
            yield whole.reshape(end - start, *self._shape)
            for column in self._columns:
                forget_pages(column)

    def _stored(self, rows: Tensor | None) -> Tensor:
        """Return all columns as stored; if dtypes differ, each is converted on its own."""
        tensors = [as_tensor(column, rows) for column in self._columns]
        flat = [item.reshape(item.shape[0], -1) for item in tensors]
        kinds = {item.dtype for item in flat}
        if len(kinds) > 1:  # next to other dtypes uint8 is scaled on its own
            is_whole = self.field.scale is None
            divisors = [255.0 if is_whole and x.dtype == torch.uint8 else 1.0 for x in flat]
            both = zip(flat, divisors, strict=True)
            flat = [item.to(torch.float32) / divisor for item, divisor in both]
        values = flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
        return values.reshape(values.shape[0], *self._shape)


def as_tensor(array: Any, rows: Tensor | None) -> Tensor:
    """Read rows of a mapped column; None: all of them."""
    if not isinstance(array, np.memmap) and not hasattr(array, "parts"):
        taken = array[slice(None) if rows is None else rows.numpy()]
        return torch.from_numpy(np.ascontiguousarray(taken, _kept_as(array.dtype)))
    count = len(array) if rows is None else len(rows)
    made = np.empty((count, *array.shape[1:]), _kept_as(array.dtype))
    step = max(1, BLOCK_VALUES // max(1, int(np.prod(array.shape[1:]))))
    for start in range(0, count, step):
        part = slice(start, start + step)
        made[part] = array[part if rows is None else rows[part].numpy()]
        forget_pages(array)
    return torch.from_numpy(made)


def _kept_as(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a tensor: torch has few unsigned dtypes, so only uint8 stays unsigned."""
    is_unsigned = dtype.kind == "u" and dtype != np.uint8
    return np.dtype(np.int64) if is_unsigned else dtype.newbyteorder("=")


# --- integers --------------------------------------------------------------------------------

_CHUNK_BYTES = 1 << 22
_LISTED = 20


class IntegerReading:
    """Reads an integer field of one split."""

    def __init__(self, name: str, field: IntegerField, table: Table, split: str) -> None:
        """Map the column, and find the class of each row if the field has classes.

        Raises:
            DataFailed: it is missing or has the wrong shape.
        """
        self._name, self._field, self._split, self._table = name, field, split, table
        shape = checked_shape(name, field, table.meta)
        self._dim = int(shape.dim or 0)
        (self._column,) = field_columns(name, field)
        described = table.described(self._column)
        self._texts: TextColumn | None = None
        if described["dtype"] == "string":
            self._texts = table.texts(split, self._column)
            self._given: NDArray[Any] = np.empty(0)
        else:
            self._given = table.column(split, self._column).reshape(-1)
        self._values = self._given
        if field.classes is not None:
            self._values = self._classified(field.classes, described.get("classes"))

    def _classified(self, classes: tuple[Any, ...], names: list[str] | None) -> NDArray[np.int64]:
        """Return the index of each row's value in the classes; -1 if it is none of them."""
        places = {value: place for place, value in enumerate(classes)}
        if self._texts is not None:
            chunks = self._texts.chunks(_CHUNK_BYTES)
            found = [[places.get(text, -1) for text in texts] for texts in chunks]
            return np.array([place for part in found for place in part], np.int64)
        if names is not None and isinstance(classes[0], str):
            places = {number: places.get(name, -1) for number, name in enumerate(names)}
        known, inverse = np.unique(self._given, return_inverse=True)
        table = np.array([places.get(value, -1) for value in known.tolist()], np.int64)
        return table[inverse.reshape(-1)]

    def flaws(self) -> Iterator[BadRows]:
        """Yield rows whose value is outside [0, dim), is missing, or is not a class."""
        of = f"field {self._name!r}"
        what = f"rows whose value of {of} is no class of it"
        if self._field.classes is None:
            what = f"rows with a value of {of} outside [0, {self._dim})"
        rows = bad_places(self._values, outside(self._dim))
        yield BadRows(f"{what}, of split {self._split!r}", rows, self._failure)

    def _failure(self, row: int) -> DataFailed:
        detail = f"{self._table.where(self._split, row)} has {self._shown(row)} in column"
        detail += f" {self._column!r};"
        key = f"data.fields.{self._name}"
        classes = self._field.classes
        if classes is not None:
            listed = ", ".join(jsonio.dumps(item) for item in classes[:_LISTED])
            more = f" and {len(classes) - _LISTED} more" if len(classes) > _LISTED else ""
            return DataFailed(
                f"{detail} the classes of field {self._name!r} are {listed}{more}",
                hint=f"List it in {key}.classes, correct the data, or set data.on_bad_row to drop.",
            )
        return DataFailed(
            f"{detail} field {self._name!r} takes integers in [0, {self._dim})",
            hint=f"Raise {key}.dim, or correct the data.",
        )

    def _shown(self, row: int) -> str:
        if self._texts is not None:
            return jsonio.dumps(self._texts.text(row)[:200])
        value = self._given[row].item()
        if isinstance(value, float) and np.isnan(value):
            return "no value"
        return f"{value:.17g}" if isinstance(value, float) else str(int(value))

    def load(self, rows: Tensor | None, limit: Sequences, prepared: Prepared) -> LoadedField:
        """Read rows into memory; None: all of the split."""
        return LoadedField(as_tensor(self._values, rows).to(torch.int64), is_integer=True)
