"""Reading: the rows of a source, checked against their fields, into memory.

Values reach the network as float32 or int64:

- a uint8 column without ``scale`` is ``column.to(float32) / 255``, exactly that;
- any other column without ``scale`` is ``column.to(float32)``;
- with ``scale`` it is ``column.to(float32) * scale``.

Shape suffixes: N = rows of the split.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.data.fields import BadField, field_columns, field_shape
from engine.data.ragged import RaggedColumn, limited, load_sequence, load_sparse
from engine.data.rows import Loaded, LoadedField, Rows, place
from engine.data.table import Table
from engine.shapes import FieldShape
from glasshouse.errors import DataFailed
from glasshouse.spec import (
    DenseField,
    Field,
    IntegerField,
    RaggedField,
    SequenceField,
    Sequences,
    Source,
    SparseField,
)

_RANGE_CHUNK = 1 << 22


def load(
    source: Source,
    fields: dict[str, Field],
    table: Table,
    *,
    seed: int,
    device: torch.device,
    limit: Sequences = Sequences(),  # noqa: B008 (frozen)
) -> Rows:
    """Read the rows of a source; on the device where they fit well, else beside it.

    Raises:
        DataFailed: the data does not fit its declaration, or no rows are left.
    """
    num_rows = table.num_rows(source.split)
    sequences = ragged_columns(fields, table, source.split)
    limits = {n: item for n, item in sequences.items() if isinstance(fields[n], SequenceField)}
    kept = limited(limits, source_rows(num_rows, source.fraction, seed), limit)
    rows = kept.rows
    num_taken = num_rows if rows is None else len(rows)
    if num_taken == 0:
        raise DataFailed(
            f"split {source.split!r} has no rows"
            + (" in this fraction" if source.fraction else "")
            + (" that are short enough" if kept.left_out else "")
        )
    loaded = load_fields(fields, table, (source.split, rows), sequences, limit)
    made = place(loaded, num_taken, device, rows)
    made.left_out = kept.left_out
    return made


def ragged_columns(
    fields: Mapping[str, Field], table: Table, split: str
) -> dict[str, RaggedColumn]:
    """The columns of the fields that have a list per row, by field."""
    found: dict[str, RaggedColumn] = {}
    for name, field in fields.items():
        if isinstance(field, RaggedField):
            checked_shape(name, field, table)
            found[name] = table.ragged(split, field_columns(name, field)[0])
    return found


def load_fields(
    fields: Mapping[str, Field],
    table: Table,
    source: tuple[str, Tensor | None],
    sequences: Mapping[str, RaggedColumn],
    limit: Sequences,
) -> dict[str, Loaded]:
    """Read rows of a split, all of them where none are named, into memory.

    Raises:
        DataFailed: the data does not fit its declaration.
    """
    _, rows = source
    loaded: dict[str, Loaded] = {}
    for name, field in fields.items():
        if isinstance(field, SparseField):
            loaded[name] = load_sparse(name, field, sequences[name], rows)
        elif isinstance(field, SequenceField):
            loaded[name] = load_sequence(name, field, sequences[name], rows, limit)
        else:
            loaded[name] = load_field(name, field, table, source)
    return loaded


def source_rows(num_rows: int, fraction: tuple[float, float] | None, seed: int) -> Tensor | None:
    """The rows of a split that a source takes, ascending; None for all of them.

    The same seed and complementary fractions give disjoint parts that miss no row.
    """
    if fraction is None:
        return None
    order_N = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    first, last = (math.floor(part * num_rows) for part in fraction)
    return order_N[first:last].sort().values


def load_field(
    name: str, field: DenseField | IntegerField, table: Table, source: tuple[str, Tensor | None]
) -> LoadedField:
    """Read a field's columns into memory.

    Raises:
        DataFailed: a column is missing or misshapen, or an integer lies outside [0, dim).
    """
    split, rows = source
    shape = checked_shape(name, field, table)
    arrays = [table.column(split, column) for column in field_columns(name, field)]
    if isinstance(field, IntegerField):
        _check_range(name, field, arrays[0], (split, table))
        values = _tensor(arrays[0], rows).to(torch.int64).reshape(-1)
        return LoadedField(values, is_integer=True)
    tensors = [_tensor(array, rows) for array in arrays]
    if len(tensors) > 1:
        flat = [item.reshape(item.shape[0], -1) for item in tensors]
        kinds = {item.dtype for item in flat}
        values = torch.cat(
            flat if len(kinds) == 1 else [_wide(item, field) for item in flat], dim=1
        )
    else:
        values = tensors[0]
    values = values.reshape(values.shape[0], *shape.shape)
    divide_by = 255.0 if values.dtype == torch.uint8 and field.scale is None else None
    if values.dtype not in {torch.uint8, torch.float32}:
        values = values.to(torch.float32)
    return LoadedField(values, divide_by, field.scale)


def checked_shape(name: str, field: Field, table: Table) -> FieldShape:
    """What a field gives the network.

    Raises:
        DataFailed: it cannot read the table.
    """
    try:
        return field_shape(name, field, table.meta)
    except BadField as cause:
        raise DataFailed(str(cause)) from cause


def _wide(item: Tensor, field: DenseField) -> Tensor:
    """A column beside columns of other types: scaled on its own when it is uint8."""
    if item.dtype == torch.uint8 and field.scale is None:
        return item.to(torch.float32) / 255.0
    return item.to(torch.float32)


def _tensor(array: np.ndarray[Any, Any], rows: Tensor | None) -> Tensor:
    taken = array[rows.numpy()] if rows is not None else np.array(array)
    if taken.dtype.kind == "u" and taken.dtype != np.uint8:
        taken = taken.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(taken))


def _check_range(
    name: str, field: IntegerField, array: np.ndarray[Any, Any], source: tuple[str, Table]
) -> None:
    split, table = source
    values = array.reshape(-1)
    for start in range(0, len(values), _RANGE_CHUNK):
        part = values[start : start + _RANGE_CHUNK]
        wrong = np.flatnonzero((part < 0) | (part >= field.dim))
        if wrong.size:
            row = start + int(wrong[0])
            column = field_columns(name, field)[0]
            number = table.row_number(row)
            detail = f"row {number} of split {split!r} has {int(values[row])} in column {column!r};"
            raise DataFailed(
                f"{detail} field {name!r} takes integers in [0, {field.dim})",
                hint=f"Raise data.fields.{name}.dim, or correct the data.",
            )
