"""What the fields of a job give the network, from a dataset's description alone. Reads no row."""

import math
from typing import Any

import torch

from engine.shapes import FieldShape
from glasshouse import jsonio
from glasshouse.spec import (
    DenseField,
    Field,
    IntegerField,
    IntegerSequenceField,
    RaggedField,
    SequenceField,
    SparseField,
    SparseFloatField,
)

_INTEGERS = {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "bool"}


class BadField(Exception):
    """A field cannot read the dataset; ``key`` is the part of the field to change, if one is."""

    def __init__(self, detail: str, key: str = "") -> None:
        super().__init__(detail)
        self.key = key


def field_shape(
    name: str, field: Field, meta: dict[str, Any], split: str | None = None
) -> FieldShape:
    """What a field gives the network, from the dataset's description alone.

    A sequence has the steps of the longest row of the split; of all splits if none is named.

    Raises:
        BadField: a column is missing, or is not of a kind or shape that the field can take.
    """
    columns = [_column(name, field, wanted, meta) for wanted in field_columns(name, field)]
    if isinstance(field, SparseField):
        return _sparse_shape(name, field, columns[0], split)
    if isinstance(field, SequenceField):
        return _sequence_shape(name, field, columns[0], split)
    if isinstance(field, IntegerField):
        column = columns[0]
        if column["dtype"] not in _INTEGERS or math.prod(column["shape"]) != 1:
            detail = f"field {name!r} needs one integer per row, and column {column['name']!r} is"
            raise BadField(f"{detail} {column['dtype']} of shape {column['shape']}")
        return FieldShape((), torch.int64, field.dim)
    if field.columns is not None:
        own: tuple[int, ...] = (sum(math.prod(column["shape"]) for column in columns),)
    else:
        own = tuple(columns[0]["shape"])
    if field.shape is not None and math.prod(field.shape) != math.prod(own):
        detail = f"field {name!r} wants rows of shape {list(field.shape)}, which the column's shape"
        raise BadField(f"{detail} {list(own)} cannot be seen as", "shape")
    return FieldShape(own if field.shape is None else field.shape, torch.float32)


def _sequence_shape(
    name: str, field: SequenceField, column: dict[str, Any], split: str | None
) -> FieldShape:
    shape = column["shape"]
    key = "column" if field.column is not None else ""
    of = f"column {column['name']!r} is {column['dtype']} of shape {jsonio.dumps(shape)}"
    if not shape:
        raise BadField(f"field {name!r} needs a list per row, and {of}", key)
    width, longest = math.prod(shape[1:]), _longest(column, split)
    if isinstance(field, IntegerSequenceField):
        if column["dtype"] not in _INTEGERS or width != 1:
            raise BadField(f"field {name!r} needs lists of integers, and {of}", key)
        padding = field.padding_value
        return FieldShape((longest,), torch.int64, field.dim, True, padding)
    if width != field.dim:
        raise BadField(
            f"field {name!r} needs lists of vectors of {field.dim} values, and {of}", "dim"
        )
    return FieldShape((longest, field.dim), torch.float32, is_sequence=True)


def _sparse_shape(
    name: str, field: SparseField, column: dict[str, Any], split: str | None
) -> FieldShape:
    shape = column["shape"]
    has_values = isinstance(field, SparseFloatField)
    width = 2 if has_values else 1
    if (
        not shape
        or math.prod(shape[1:]) != width
        or (not has_values and column["dtype"] not in _INTEGERS)
    ):
        wanted = "lists of pairs [place, value]" if has_values else "lists of integers"
        detail = f"field {name!r} needs {wanted}, and column {column['name']!r} is"
        detail += f" {column['dtype']} of shape {jsonio.dumps(shape)}"
        raise BadField(detail, "column" if field.column is not None else "")
    return FieldShape(
        (_longest(column, split),),
        torch.int64,
        field.dim,
        is_sequence=True,
        has_values=has_values,
        is_sparse=True,
    )


def _longest(column: dict[str, Any], split: str | None) -> int:
    """The steps of the longest row; at least one, since a batch has one."""
    if column["shape"][0] is not None:
        return int(column["shape"][0])
    found: dict[str, dict[str, int]] = column["lengths"]
    wanted = [found[split]] if split in found else found.values()
    return max(1, *(int(lengths["max"]) for lengths in wanted))


def num_steps(column: dict[str, Any], split: str, num_rows: int) -> int:
    """The steps of all rows of a split."""
    if column["shape"][0] is not None:
        return int(column["shape"][0]) * num_rows
    return int(column["lengths"][split]["total"])


def field_columns(name: str, field: Field) -> tuple[str, ...]:
    """The columns that a field reads, in order."""
    return field.source_columns or (name,)


def _column(name: str, field: Field, wanted: str, meta: dict[str, Any]) -> dict[str, Any]:
    key = "column" if field.column is not None else ""
    if isinstance(field, DenseField) and field.columns is not None:
        key = f"columns/{field.columns.index(wanted)}"
    for column in meta["columns"]:
        if column["name"] == wanted:
            if column["dtype"] == "string":
                detail = f"field {name!r} needs numbers, and column {wanted!r} holds text"
                raise BadField(detail, key)
            if None in column["shape"] and not isinstance(field, RaggedField):
                ends = [item[end] for item in column["lengths"].values() for end in ("min", "max")]
                detail = f"field {name!r} needs rows of one shape, and those of column {wanted!r}"
                detail += f" have {min(ends)} to {max(ends)} steps; use the type integer_sequence"
                raise BadField(f"{detail} or dense_sequence", key)
            return column
    listed = ", ".join(column["name"] for column in meta["columns"][:50])
    raise BadField(f"the dataset has no column {wanted!r}; it has: {listed}", key)
