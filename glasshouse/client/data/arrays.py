"""In-memory arrays as a dataset: the file that is uploaded, and the fields that read it.

A column is an array, or a list of arrays of different lengths whose rows are sequences.
"""

import json
from collections.abc import Mapping, Sequence
from typing import IO, Any, cast

import numpy as np

from glasshouse.client.data.tensors import Array

SPLITS = ("train", "validation", "test")
Column = Array | list[Array]
Split = dict[str, Column]
Splits = dict[str, Split]


def read_splits(data: Any, validation: Any = None) -> Splits:
    """Read a dict of arrays, a dict of such dicts by split, or an ``(x, y)`` pair.

    Raises:
        ValueError: it is none of these, or the arrays differ in their number of rows.
    """
    splits: dict[str, Any] = dict(data) if _is_by_split(data) else {"train": data}
    if validation is not None:
        if "validation" in splits:
            raise ValueError("data already has a validation split: remove validation")
        splits["validation"] = validation
    unknown = sorted(set(splits) - set(SPLITS))
    if unknown:
        raise ValueError(f"unknown splits {', '.join(unknown)}; use {', '.join(SPLITS)}")
    return {name: _split(name, value) for name, value in splits.items()}


def is_arrays(data: Any) -> bool:
    """Whether this is in-memory data, and not the name or description of a dataset."""
    if isinstance(data, Mapping):
        values = cast("Mapping[str, Any]", data).values()
        return not any(isinstance(value, Mapping) and "dataset" in value for value in values)
    return isinstance(data, Sequence) and not isinstance(data, str)


def is_ragged(splits: Splits) -> bool:
    """Whether a column has rows of different lengths."""
    return any(isinstance(item, list) for split in splits.values() for item in split.values())


def write_jsonl(split: Split, file: IO[bytes]) -> None:
    """Write the rows of one split, one per line."""
    names = list(split)
    for row in zip(*split.values(), strict=True):
        line = {name: np.asarray(value).tolist() for name, value in zip(names, row, strict=True)}
        file.write(json.dumps(line).encode() + b"\n")


def write_splits(splits: Splits, file: IO[bytes]) -> str:
    """Write a file with these columns and return its format.

    Raises:
        ValueError: several splits have rows of different lengths, which no format supports.
    """
    if not is_ragged(splits):
        write_npz(splits, file)
        return "npz"
    if len(splits) > 1:
        raise ValueError("rows of different lengths: upload each split as its own dataset")
    write_jsonl(next(iter(splits.values())), file)
    return "jsonl"


def write_npz(splits: Splits, file: IO[bytes]) -> None:
    """Write the arrays, named ``<column>_<split>``."""
    named = {
        f"{column}_{split}": array
        for split, columns in splits.items()
        for column, array in columns.items()
    }
    np.savez(file, **cast("dict[str, Any]", named))


def derive_fields(
    splits: Splits, read: Sequence[str] = (), label: str | int | None = None
) -> dict[str, dict[str, Any]]:
    """Infer the fields: a column of integers, one per row, has classes; other numbers are dense.

    A text column is split into words if the network reads it, and otherwise has classes.

    Args:
        splits: the columns.
        read: the columns that the network reads, if known. Default: the first column.
        label: the target column, if known.
    """
    first = next(iter(splits.values()))
    inputs = [name for name in read if name in first] or [*first][:1]
    inputs = [name for name in inputs if name != str(label)]
    fields: dict[str, dict[str, Any]] = {}
    for column in first:
        arrays = [columns[column] for columns in splits.values() if column in columns]
        ragged = [rows for rows in arrays if isinstance(rows, list)]
        plain = [array for array in arrays if not isinstance(array, list)]
        if plain and all(_is_texts(array) for array in plain) and not ragged:
            words = {"type": "integer_sequence", "tokens": "words"}
            fields[column] = words if column in inputs else {"type": "integer"}
        else:
            fields[column] = _sequence(column, ragged, plain) if ragged else _plain(plain)
    return fields


def _is_texts(array: Array) -> bool:
    return array.dtype.kind in "SU" and array.ndim == 1


def _plain(arrays: Sequence[Array]) -> dict[str, Any]:
    lowest = min((int(array.min()) for array in arrays if _is_classes(array)), default=-1)
    if all(map(_is_classes, arrays)) and lowest >= 0:
        return {"type": "integer", "dim": 1 + max(int(array.max()) for array in arrays)}
    # a scalar per row is a vector of one value: it matches the (B, 1) output of a Linear
    return {"type": "dense", "shape": list(arrays[0].shape[1:]) or [1]}


def _sequence(name: str, ragged: Sequence[list[Array]], plain: Sequence[Array]) -> dict[str, Any]:
    """The field of rows of different lengths; in some splits, all rows may have one length."""
    rows = [row for split in ragged for row in split] + [row for split in plain for row in split]
    if all(row.dtype.kind in "iu" and row.ndim == 1 for row in rows):
        if min((int(row.min()) for row in rows if row.size), default=0) < 0:
            raise ValueError(f"{name!r} has negative integers: set fields= to say how to read it")
        highest = max((int(row.max()) for row in rows if row.size), default=0)
        return {"type": "integer_sequence", "dim": 1 + highest}
    return {"type": "dense_sequence", "dim": rows[0].shape[1]}


def as_array(name: str, value: Any) -> Array:
    """Convert to an array that JSON or npz can store: detach torch tensors, cast floats to float32.

    Raises:
        ValueError: the array has objects or complex numbers.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.kind == "O" and all(isinstance(item, str) for item in array.flat):
        array = array.astype(str)
    if array.dtype.kind not in "biufSU" and array.dtype.name != "bfloat16":
        raise ValueError(
            f"{name!r} has dtype {array.dtype}; only numbers, booleans and strings can be uploaded"
        )
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        return array.astype(np.float32, copy=False)
    return array


def as_column(name: str, value: Any) -> Column:
    """Convert to a column: an array, or a list of arrays if rows have different lengths.

    Raises:
        ValueError: the rows differ in more than their length, or have an unsupported dtype.
    """
    if not isinstance(value, (list, tuple)) or not value or not _are_arrays(value):
        return as_array(name, value)
    rows = [as_array(name, row) for row in cast("Sequence[Any]", value)]
    shapes = {row.shape for row in rows}
    if len(shapes) == 1:
        return np.stack(rows)
    if len({shape[1:] for shape in shapes}) > 1 or () in shapes:
        raise ValueError(f"the rows of {name!r} differ in more than their length: {shapes}")
    is_flat = any(row.ndim == 1 and row.dtype.kind == "f" for row in rows)
    return [row[:, None] for row in rows] if is_flat else rows


def _are_arrays(value: Any) -> bool:
    """Whether the rows are arrays, lists or tensors."""
    first = cast("Sequence[Any]", value)[0]
    return hasattr(first, "shape") or isinstance(first, (list, tuple))


def _is_by_split(data: Any) -> bool:
    if not isinstance(data, Mapping) or not data:
        return False
    values = cast("Mapping[str, Any]", data).values()
    return all(isinstance(value, (Mapping, tuple)) for value in values) and set(
        cast("Mapping[str, Any]", data)
    ) <= {*SPLITS, "all"}


def _split(name: str, value: Any) -> Split:
    if isinstance(value, Mapping):
        named = dict(cast("Mapping[str, Any]", value))
    elif isinstance(value, Sequence) and len(cast("Sequence[Any]", value)) == 2:
        named = dict(zip(("x", "y"), cast("Sequence[Any]", value), strict=True))
    else:
        raise ValueError(f"{name}: pass an (x, y) pair or a dict of arrays by column")
    columns = {column: as_column(column, array) for column, array in named.items()}
    if not columns:
        raise ValueError(f"{name} has no arrays")
    rows = {
        column: len(array) if isinstance(array, list) or array.ndim else None
        for column, array in columns.items()
    }
    if len(set(rows.values())) != 1 or None in rows.values():
        counts = ", ".join(f"{column} {count}" for column, count in rows.items())
        raise ValueError(f"{name}: the arrays must have the same number of rows, but have {counts}")
    return columns


def _is_classes(array: Array) -> bool:
    return array.dtype.kind in "iu" and array.ndim == 1 and len(array) > 0
