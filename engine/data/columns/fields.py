"""Derive the shapes of a job's fields from a dataset's metadata. Reads no rows."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from engine.datasets.column_stats import MAX_MIN_COUNT
from engine.network.shapes import FieldShape
from glasshouse import jsonio
from glasshouse.errors import DataFailed
from glasshouse.spec import (
    DenseField,
    DenseSequenceField,
    Field,
    IntegerField,
    IntegerSequenceField,
    RaggedField,
    SequenceField,
    SparseField,
    SparseFloatField,
    Vocabulary,
)
from glasshouse.spec.preprocessing import NUM_RESERVED, Unit

_INTEGERS = {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "bool"}


class BadField(Exception):
    """A field cannot read the dataset. ``key`` is the part of the field to change, if any."""

    def __init__(self, detail: str, key: str = "") -> None:
        super().__init__(detail)
        self.key = key


def field_shape(
    name: str, field: Field, meta: dict[str, Any], split: str | None = None
) -> FieldShape:
    """Return the shape and dtype of a field for the network, from the dataset's metadata alone.

    A sequence has as many steps as the longest row of the split, or of all splits if none is named.

    Raises:
        BadField: a column is missing, or has a dtype or shape that the field does not accept.
    """
    columns = [_column(name, field, wanted, meta) for wanted in field_columns(name, field)]
    if isinstance(field, SparseField):
        _check_sparse(name, field, columns[0])
        return network_shape(field, _longest(columns[0], split), field.dim)
    if isinstance(field, SequenceField):
        dim = _sequence_dim(name, field, columns[0], split)
        return network_shape(field, _longest(columns[0], split), dim)
    if isinstance(field, IntegerField):
        return network_shape(field, 0, _num_classes(name, field, columns[0]))
    if any(None in column["shape"] for column in columns):
        return FieldShape(_even_shape(name, field, columns), torch.float32)
    if any("dim" in column for column in columns):
        raise BadField(f"field {name!r} is dense, and windows give integers", "type")
    if field.columns is not None:
        own: tuple[int, ...] = (sum(math.prod(column["shape"]) for column in columns),)
    else:
        own = tuple(columns[0]["shape"])
    if field.shape is not None and math.prod(field.shape) != math.prod(own):
        detail = f"field {name!r} wants rows of shape {list(field.shape)}, which the column's shape"
        raise BadField(f"{detail} {list(own)} cannot be seen as", "shape")
    return FieldShape(own if field.shape is None else field.shape, torch.float32)


def network_shape(field: IntegerField | RaggedField, num_steps: int, dim: int | None) -> FieldShape:
    """Return the shape and dtype of a field that is not dense; ``num_steps``: of a sequence."""
    if isinstance(field, IntegerField):
        return FieldShape((), torch.int64, dim)
    if isinstance(field, DenseSequenceField):
        return FieldShape((num_steps, field.dim), torch.float32, is_sequence=True)
    if isinstance(field, IntegerSequenceField):
        return FieldShape((num_steps,), torch.int64, dim, True, field.padding_value)
    has_values = isinstance(field, SparseFloatField)
    return FieldShape(
        (num_steps,), torch.int64, dim, is_sequence=True, has_values=has_values, is_sparse=True
    )


def _num_classes(name: str, field: IntegerField, column: dict[str, Any]) -> int:
    names: list[str] | None = column.get("classes")
    of = f"column {column['name']!r}"
    if column["dtype"] == "string" and field.classes is None:
        raise BadField(f"{of} holds text: list the classes of field {name!r}", "classes")
    if column["dtype"] != "string":
        has_gaps = column["dtype"] == "float64" and column.get("missing", 0) > 0
        if math.prod(column["shape"]) != 1 or not (column["dtype"] in _INTEGERS or has_gaps):
            detail = f"field {name!r} needs one integer per row, and {of} is"
            raise BadField(f"{detail} {column['dtype']} of shape {column['shape']}")
    if field.classes is not None:
        are_texts = isinstance(field.classes[0], str)
        holds_texts = column["dtype"] == "string" or (names is not None and are_texts)
        if are_texts != holds_texts:
            kinds = ("texts", "integers") if are_texts else ("integers", "texts")
            raise BadField(f"the classes are {kinds[0]}, and {of} holds {kinds[1]}", "classes")
        return len(field.classes)
    dim = field.dim or column.get("dim") or (None if names is None else len(names))
    if dim is None:
        detail = f"say how many different values field {name!r} has: {of} does not tell"
        raise BadField(detail, "dim")
    return int(dim)


def _even_shape(name: str, field: DenseField, columns: list[dict[str, Any]]) -> tuple[int, ...]:
    """Return the shape of a field that reads lists of one length from a column of lists."""
    number, column = next(item for item in enumerate(columns) if None in item[1]["shape"])
    inner = math.prod(column["shape"][1:])
    if field.shape is None or len(columns) > 1 or math.prod(field.shape) % inner:
        detail = f"field {name!r} needs rows of one shape, and those of column {column['name']!r}"
        detail += f" {_steps(column)} or dense_sequence, or a field of one such column with a shape"
        key = "" if field.column is None else "column"
        raise BadField(detail, key if field.columns is None else f"columns/{number}")
    return field.shape


def _steps(column: dict[str, Any]) -> str:
    ends = [item[end] for item in column["lengths"].values() for end in ("min", "max")]
    return f"have {min(ends)} to {max(ends)} steps; use the type integer_sequence"


def num_tokens(column: dict[str, Any], unit: Unit) -> dict[str, int]:
    """Return the number of tokens of a text column, by split.

    Raises:
        BadField: they were not counted.
    """
    return {split: int(found["total"]) for split, found in _tokens(column, unit).items()}


def _tokens(column: dict[str, Any], unit: Unit) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] | None = column.get("tokens", {}).get(unit)
    if found is None:
        detail = f"the {unit} of column {column['name']!r} were not counted when it was read;"
        raise BadField(f"{detail} upload the dataset again", "column")
    return found


def token_bound(
    column: dict[str, Any],
    unit: Unit,
    vocabulary: Vocabulary | None,
    split: str | None,
    *,
    line_ends: bool = False,
) -> int | None:
    """Return the max size of a column's vocabulary with reserved ids; None: unknown.

    The size is exact if all rows of the split are trained on, except for windows over characters
    whose texts have line ends of their own.
    """
    asked = vocabulary or Vocabulary()
    if asked.given is not None:
        return len(asked.given) + NUM_RESERVED
    found = _tokens(column, unit)
    sizes = [
        None if one["at_least"] is None else at_least(one["at_least"], asked.min_count)
        for one in ([found[split]] if split in found else found.values())
    ]
    counted = None if None in sizes else sum(size for size in sizes if size is not None)
    room = [] if counted is None else [counted + int(line_ends)]
    room += [] if asked.max_size is None else [asked.max_size]
    return min(room) + NUM_RESERVED if room else None


def at_least(counts: list[int], min_count: int) -> int:
    """Return the max number of tokens that occur ``min_count`` times; ``counts[0]`` is for 1.

    If a list ends early, no token occurs more often, unless the list has its maximum length.
    """
    if min_count > len(counts) and len(counts) < MAX_MIN_COUNT:
        return 0
    return int(counts[min(min_count, len(counts)) - 1])


def _tokenized(name: str, field: IntegerSequenceField, column: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a text column as the lists of integers that it becomes."""
    unit = field.tokens
    if column["dtype"] != "string" or unit is None:
        detail = f"field {name!r} makes tokens of texts, and column {column['name']!r} holds none"
        raise BadField(detail, "tokens")
    lengths = {
        split: {key: found[key] for key in ("min", "max", "total")}
        for split, found in _tokens(column, unit).items()
    }
    view = {"name": column["name"], "dtype": "int32", "shape": [None], "lengths": lengths}
    return view | {"tokens": column["tokens"]}


def _sequence_dim(
    name: str, field: SequenceField, column: dict[str, Any], split: str | None
) -> int | None:
    """Return how many different values a field of integers has; None for one of vectors."""
    shape = column["shape"]
    key = "column" if field.column is not None else ""
    of = f"column {column['name']!r} is {column['dtype']} of shape {jsonio.dumps(shape)}"
    if not shape:
        raise BadField(f"field {name!r} needs a list per row, and {of}", key)
    width = math.prod(shape[1:])
    if not isinstance(field, IntegerSequenceField):
        if width != field.dim:
            detail = f"field {name!r} needs lists of vectors of {field.dim} values, and {of}"
            raise BadField(detail, "dim")
        return None
    if column["dtype"] not in _INTEGERS or width != 1:
        raise BadField(f"field {name!r} needs lists of integers, and {of}", key)
    if field.tokens is not None:
        return _token_dim(name, field, field.tokens, column, split)
    dim = field.dim or column.get("dim")
    if dim is None:
        detail = f"say how many different values field {name!r} has: {of}, which does not tell"
        raise BadField(detail, "dim")
    return dim


def _token_dim(
    name: str, field: IntegerSequenceField, unit: Unit, column: dict[str, Any], split: str | None
) -> int:
    """Return the vocabulary size: what the field says, or what the dataset's counts allow."""
    given = None if field.vocabulary is None else field.vocabulary.given
    if field.dim is not None:
        least = NUM_RESERVED + (1 if given is None else len(given))
        if field.dim < least:
            detail = f"dim counts padding and unknown tokens too: field {name!r} needs {least}"
            raise BadField(f"{detail}; or leave it out", "dim")
        return field.dim
    bound = token_bound(column, unit, field.vocabulary, split)
    if bound is None:
        detail = f"column {column['name']!r} has more different {unit} than were counted:"
        raise BadField(f"{detail} say how many of them have an id", "vocabulary/max_size")
    return bound


def _check_sparse(name: str, field: SparseField, column: dict[str, Any]) -> None:
    shape, dtype = column["shape"], column["dtype"]
    has_values = isinstance(field, SparseFloatField)
    is_read = bool(shape) and math.prod(shape[1:]) == (2 if has_values else 1)
    if not is_read or not (has_values or dtype in _INTEGERS):
        wanted = "lists of pairs [place, value]" if has_values else "lists of integers"
        detail = f"field {name!r} needs {wanted}, and column {column['name']!r} is {dtype} of shape"
        raise BadField(
            f"{detail} {jsonio.dumps(shape)}", "column" if field.column is not None else ""
        )


def checked_shape(name: str, field: Field, meta: dict[str, Any]) -> FieldShape:
    """Return the shape and dtype of a field for the network, for a job that already runs.

    Raises:
        DataFailed: it cannot read the dataset.
    """
    try:
        return field_shape(name, field, meta)
    except BadField as cause:
        raise DataFailed(str(cause)) from cause


def _longest(column: dict[str, Any], split: str | None) -> int:
    """Return the steps of the longest row; at least one, because a batch has one."""
    if column["shape"][0] is not None:
        return int(column["shape"][0])
    found: dict[str, dict[str, int]] = column["lengths"]
    wanted = [found[split]] if split in found else found.values()
    return max(1, *(int(lengths["max"]) for lengths in wanted))


def num_steps(column: dict[str, Any], split: str, num_rows: int) -> int:
    """Return the number of steps in all rows of a split."""
    if column["shape"][0] is not None:
        return int(column["shape"][0]) * num_rows
    return int(column["lengths"][split]["total"])


def column_view(name: str, field: Field, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the first column of a field as the field reads it: texts may become tokens.

    Raises:
        BadField: the field cannot read it.
    """
    return _column(name, field, field_columns(name, field)[0], dict(meta))


def field_columns(name: str, field: Field) -> tuple[str, ...]:
    """Return the columns that a field reads, in order."""
    return field.source_columns or (name,)


def _holds_text(name: str, field: Field, column: Mapping[str, Any]) -> str:
    """Explain why a numeric field cannot read a text column, and what to do about it."""
    detail = f"field {name!r} needs numbers, and column {column['name']!r} holds text"
    if isinstance(field, IntegerSequenceField):
        return f"{detail}: say which tokens it is made of"
    first = column.get("no_number")
    if first is None:
        return f"{detail}: convert it, or read it with a field of the type integer (classes)"
    detail += f": line {first['line']} of the file has {jsonio.dumps(first['value'])}, the first"
    detail += " value that is not a number. Correct the file (a missing value is an empty cell)"
    return f"{detail} and upload it again, or read the column as classes (type integer)"


def _column(name: str, field: Field, wanted: str, meta: dict[str, Any]) -> dict[str, Any]:
    key = "column" if field.column is not None else ""
    if isinstance(field, DenseField) and field.columns is not None:
        key = f"columns/{field.columns.index(wanted)}"
    for column in meta["columns"]:
        if column["name"] == wanted:
            if isinstance(field, IntegerSequenceField) and field.tokens is not None:
                return _tokenized(name, field, column)
            if column["dtype"] == "string" and not isinstance(field, IntegerField):
                raise BadField(_holds_text(name, field, column), key)
            if None in column["shape"] and isinstance(field, IntegerField):
                detail = f"field {name!r} needs one integer per row, and the rows of column"
                raise BadField(f"{detail} {wanted!r} {_steps(column)}", key)
            return column
    listed = ", ".join(column["name"] for column in meta["columns"][:50])
    raise BadField(f"the dataset has no column {wanted!r}; it has: {listed}", key)
