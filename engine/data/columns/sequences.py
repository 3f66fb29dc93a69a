"""Read sequence and sparse fields: a list per row, or a text that becomes one, into memory.

Shape suffixes: S = the steps of all rows together, D = the width of a vector.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.data.columns.checks import BadRows, bad_places, not_there, steps_outside, unfilled
from engine.data.columns.fields import checked_shape, field_columns
from engine.data.columns.normalization import (
    BLOCK_VALUES,
    ColumnFigures,
    Floats,
    find_figures,
    of_field,
)
from engine.data.columns.prepared import Prepared
from engine.data.columns.ragged import (
    LoadedSequence,
    in_memory,
    load_integers,
    load_sparse,
    load_vectors,
    places_of,
    steps_of,
)
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
            yield from steps_outside(self._name, field.dim, places_of(field, self.column))
        elif isinstance(field, DenseSequenceField):
            yield from self._unfilled(field)
        elif self._tokenized is None:
            yield from steps_outside(self._name, self._dim, self.column)

    def _unfilled(self, field: DenseSequenceField) -> Iterator[BadRows]:
        is_normalized = self._normalize is not None
        is_bad = unfilled(is_filled=field.fill is not None, is_normalized=is_normalized)
        column = self.column
        if is_bad is None or column.values.dtype.kind != "f":
            return
        steps = bad_places(column.values, is_bad)
        if not steps.size:
            return

        def failure(row: int) -> DataFailed:
            first = int(column.offsets[row])
            values = column.values[first : int(column.offsets[row + 1])].reshape(-1, field.dim)
            step, place = np.argwhere(is_bad(values))[0]
            where = f"{column.where(row)}: value {place} of step {step} of column"
            return not_there(self._name, f"{where} {column.name!r}", float(values[step, place]))

        which = "missing or infinite" if is_normalized else "missing"
        what = f"rows with a {which} value in column {column.name!r} of split {column.split!r}"
        yield BadRows(what, column.rows_of(steps), failure)

    # --- values ----------------------------------------------------------------------------------

    def prepare(self, found: Prepared, rows: Tensor | None, limit: Sequences) -> None:
        """Compute statistics or the vocabulary from the training steps, if the field needs them.

        Raises:
            DataFailed: a feature has no value to compute its fill from.
        """
        field = self._field
        if self._tokenized is not None and isinstance(field, IntegerSequenceField):
            passing, _ = steps_of(self.column, rows, limit, np.int32)
            asked = field.vocabulary or Vocabulary()
            found.tokens[self._name] = self._tokenized.build(asked, field.dim, passing)
        elif isinstance(field, DenseSequenceField):
            if self._normalize is None and field.fill not in ("mean", "median"):
                return
            values_SD = self.vectors(field, rows, limit)[0]
            blocks = partial(self._blocks, field, values_SD)
            found.figures[self._name] = find_figures(
                self._name, blocks, field.scale, field.fill, self._normalize
            )

    def load(self, rows: Tensor | None, limit: Sequences, prepared: Prepared) -> LoadedSequence:
        """Read rows into memory; None: all of the split.

        Raises:
            DataFailed: the vocabulary is larger than the field's ``dim``.
        """
        field = self._field
        if isinstance(field, SparseBinaryField | SparseFloatField):
            return load_sparse(field, self.column, rows)
        if isinstance(field, IntegerSequenceField):
            column = self.column
            if self._tokenized is not None:
                tokens = check_tokens(self._name, prepared.tokens[self._name], self._dim)
                column = replace(column, values=self._tokenized.ids(tokens))
            return load_integers(field, column, rows, limit)
        figures = of_field(prepared.figures.get(self._name), field.fill)
        if figures is None or figures.is_empty:
            return load_vectors(field, self.column, rows, limit)
        return self._computed(field, rows, limit, figures)

    def _computed(
        self,
        field: DenseSequenceField,
        rows: Tensor | None,
        limit: Sequences,
        figures: ColumnFigures,
    ) -> LoadedSequence:
        values_SD, lengths = self.vectors(field, rows, limit)
        made = np.empty(values_SD.shape, np.float32)
        scale = 1.0 if field.scale is None else field.scale
        first = 0
        for block in self._blocks(field, values_SD):
            with np.errstate(over="ignore"):  # values beyond float32 become Inf
                x = figures.normalized(figures.filled(block) * scale)
                made[first : first + len(x)] = x
            first += len(block)
        return in_memory(made, lengths)

    def vectors(
        self, field: DenseSequenceField, rows: Tensor | None, limit: Sequences
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the concatenated steps of some rows, as stored, and the lengths."""
        wide = replace(self.column, values=self.column.values.reshape(-1, field.dim))
        return steps_of(wide, rows, limit, self.column.values.dtype)

    @staticmethod
    def _blocks(field: DenseSequenceField, values_SD: NDArray[Any]) -> Iterator[Floats]:
        step = steps_at_once(field)
        for start in range(0, len(values_SD), step):
            yield in_floats(field, values_SD[start : start + step])


def steps_at_once(field: DenseSequenceField) -> int:
    """Return how many steps a block of values has."""
    return max(1, BLOCK_VALUES // field.dim)


def in_floats(field: DenseSequenceField, block: NDArray[Any]) -> Floats:
    """Return steps in float64, in the column's own units; bytes without a scale are in [0, 1]."""
    x = block.astype(np.float64)
    return x / 255.0 if block.dtype == np.uint8 and field.scale is None else x


def check_tokens(name: str, tokens: Tokens, dim: int) -> Tokens:
    """Refuse a vocabulary, such as a checkpoint's, with more ids than the network supports.

    Raises:
        DataFailed: it has more than ``dim`` ids.
    """
    if tokens.dim > dim:
        detail = f"the vocabulary of {name!r} has {tokens.dim} ids, and its dim is {dim}"
        raise DataFailed(detail, hint=f"Leave out dim, or raise it to {tokens.dim}.")
    return tokens
