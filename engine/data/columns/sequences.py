"""Read sequence and sparse fields: a list per row, or a text that becomes one, into memory.

Shape suffixes: S = the steps of all rows together, D = the width of a vector.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.columns.checks import BadRows, bad_places, not_there, steps_outside, unfilled
from engine.data.columns.fields import checked_shape, field_columns
from engine.data.columns.loaded import LoadedSequence
from engine.data.columns.normalization import BLOCK_VALUES, Blocks, Floats, in_floats, of_field
from engine.data.columns.prepared import Prepared
from engine.data.columns.ragged import RaggedColumn, in_memory, steps_of
from engine.data.columns.table import Table
from engine.data.columns.vocabulary import Tokenized, Tokens
from glasshouse.errors import DataFailed
from glasshouse.spec import (
    DenseSequenceField,
    IntegerSequenceField,
    Normalize,
    RaggedField,
    Sequences,
    SparseBinaryField,
    SparseFloatField,
    Vocabulary,
)


class SequenceReading:
    """Reads a sequence or sparse field of one split."""

    def __init__(
        self, name: str, field: RaggedField, table: Table, split: str, normalize: Normalize | None
    ) -> None:
        """Map the column; split a column of texts into tokens.

        Raises:
            DataFailed: it is missing or has the wrong shape.
        """
        self._name, self._field, self._normalize = name, field, normalize
        self._dim = int(checked_shape(name, field, table.meta).dim or 0)
        (column,) = field_columns(name, field)
        self._tokenized: Tokenized | None = None
        if isinstance(field, IntegerSequenceField) and field.tokens is not None:
            self._tokenized = Tokenized(table.texts(split, column), field.tokens)
            self.column = self._tokenized.column
        else:
            self.column = table.ragged(split, column)

    @property
    def is_limited(self) -> bool:
        """Whether ``data.sequence`` applies to this field."""
        return not isinstance(self._field, SparseBinaryField | SparseFloatField)

    # --- checks ----------------------------------------------------------------------------------

    def flaws(self) -> Iterator[BadRows]:
        """Yield rows with integers out of range, missing values, or Inf if normalized."""
        field = self._field
        if isinstance(field, SparseBinaryField | SparseFloatField):
            yield steps_outside(self._name, field.dim, self._places())
        elif isinstance(field, DenseSequenceField):
            yield from self._unfilled(field)
        elif self._tokenized is None:
            yield steps_outside(self._name, self._dim, self.column)

    def _unfilled(self, field: DenseSequenceField) -> Iterator[BadRows]:
        is_bad = unfilled(field, self._normalize)
        column = self.column
        if is_bad is None or column.values.dtype.kind != "f":
            return

        def failure(row: int) -> DataFailed:
            first = int(column.offsets[row])
            values = column.values[first : int(column.offsets[row + 1])].reshape(-1, field.dim)
            step, place = np.argwhere(is_bad(values))[0]
            where = f"{column.where(row)}: value {place} of step {step} of column"
            return not_there(self._name, f"{where} {column.name!r}", float(values[step, place]))

        which = "missing" if self._normalize is None else "missing or infinite"
        what = f"rows with a {which} value in column {column.name!r} of split {column.split!r}"
        yield BadRows(what, column.rows_of(bad_places(column.values, is_bad)), failure)

    # --- values ----------------------------------------------------------------------------------

    def vocabulary(self, rows: Tensor | None, limit: Sequences) -> Tokens:
        """Build the vocabulary of the training steps of a text field."""
        field = self._field
        assert isinstance(field, IntegerSequenceField)  # noqa: S101 (only it has tokens)
        assert self._tokenized is not None  # noqa: S101 (the caller looked)
        passing, _ = steps_of(self.column, rows, limit, np.int32)
        return self._tokenized.build(field.vocabulary or Vocabulary(), field.dim, passing)

    def passes(self, rows: Tensor | None, limit: Sequences) -> Blocks:
        """Return a function that reads the training steps of a field of vectors from the start."""
        assert isinstance(self._field, DenseSequenceField)  # noqa: S101 (the caller looked)
        return partial(self._blocks, self._field, self.vectors(self._field, rows, limit)[0])

    def load(self, rows: Tensor | None, limit: Sequences, prepared: Prepared) -> LoadedSequence:
        """Read rows into memory; None: all of the split.

        Raises:
            DataFailed: the vocabulary is larger than the field's ``dim``.
        """
        field, column = self._field, self.column
        if isinstance(field, DenseSequenceField):
            return self._load_vectors(field, rows, limit, prepared)
        if self._tokenized is not None:
            tokens = check_tokens(self._name, prepared.tokens[self._name], self._dim)
            places = replace(column, values=self._tokenized.ids(tokens))
        else:
            places = self._places()
        limit = limit if self.is_limited else Sequences()
        dtype = np.int32 if (field.dim or 0) <= 2**31 else np.int64
        flat = replace(places, values=places.values.reshape(-1))
        values, lengths = steps_of(flat, rows, limit, dtype)
        padding = field.padding_value if isinstance(field, IntegerSequenceField) else 0
        found = in_memory(values, lengths, is_integer=True, padding_value=padding)
        if not isinstance(field, SparseFloatField):
            return found
        pairs = replace(column, values=column.values.reshape(-1, 2))
        weights = steps_of(pairs, rows, limit, np.float32)[0][:, 1:]
        return replace(found, weights=torch.from_numpy(weights.copy()))

    def _places(self) -> RaggedColumn:
        """Return the integers of a field, without the values of a sparse one."""
        if not isinstance(self._field, SparseFloatField):
            return self.column
        return replace(self.column, values=np.asarray(self.column.values.reshape(-1, 2))[:, 0])

    def _load_vectors(
        self, field: DenseSequenceField, rows: Tensor | None, limit: Sequences, prepared: Prepared
    ) -> LoadedSequence:
        figures = of_field(prepared.figures.get(self._name), field.fill)
        own = self.column.values.dtype
        if figures is None or figures.is_empty:
            dtype = own if own.name in ("uint8", "float32") else np.dtype(np.float32)
            values_SD, lengths = self.vectors(field, rows, limit, dtype)
            divide_by = 255.0 if dtype.name == "uint8" and field.scale is None else None
            return replace(in_memory(values_SD, lengths), divide_by=divide_by, scale=field.scale)
        values_SD, lengths = self.vectors(field, rows, limit)
        made = figures.applied(self._blocks(field, values_SD), values_SD.shape, field.scale)
        return in_memory(made, lengths)

    def vectors(
        self, field: DenseSequenceField, rows: Tensor | None, limit: Sequences, dtype: Any = None
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the concatenated steps of some rows, as stored or as ``dtype``, and lengths."""
        wide = replace(self.column, values=self.column.values.reshape(-1, field.dim))
        own = self.column.values.dtype
        return steps_of(wide, rows, limit, own if dtype is None else dtype)

    @staticmethod
    def _blocks(field: DenseSequenceField, values_SD: NDArray[Any]) -> Iterator[Floats]:
        step = steps_at_once(field)
        for start in range(0, len(values_SD), step):
            yield in_floats(field, values_SD[start : start + step])


def steps_at_once(field: DenseSequenceField) -> int:
    """Return how many steps a block of values has."""
    return max(1, BLOCK_VALUES // field.dim)


def check_tokens(name: str, tokens: Tokens, dim: int) -> Tokens:
    """Refuse a vocabulary, such as a checkpoint's, with more ids than the network supports.

    Raises:
        DataFailed: it has more than ``dim`` ids.
    """
    if tokens.dim > dim:
        detail = f"the vocabulary of {name!r} has {tokens.dim} ids, and its dim is {dim}"
        raise DataFailed(detail, hint=f"Leave out dim, or raise it to {tokens.dim}.")
    return tokens
