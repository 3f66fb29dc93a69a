"""Arrays in memory as a dataset: the npz file that is uploaded, and the fields that read it."""

from collections.abc import Mapping, Sequence
from typing import IO, Any, cast

import numpy as np

from glasshouse.client.tensors import Array

SPLITS = ("train", "validation", "test")
Split = dict[str, Array]
Splits = dict[str, Split]


def read_splits(data: Any, validation: Any = None) -> Splits:
    """Read a dict of arrays, a dict of splits of them, or an ``(x, y)`` pair.

    Raises:
        ValueError: it is none of these, or its arrays do not belong together.
    """
    splits: dict[str, Any] = dict(data) if _is_by_split(data) else {"train": data}
    if validation is not None:
        if "validation" in splits:
            raise ValueError("data has a validation split already; leave validation out")
        splits["validation"] = validation
    unknown = sorted(set(splits) - set(SPLITS))
    if unknown:
        raise ValueError(f"a split is one of {', '.join(SPLITS)}; not {', '.join(unknown)}")
    return {name: _split(name, value) for name, value in splits.items()}


def is_arrays(data: Any) -> bool:
    """Whether this is data itself, and not the name or description of a dataset."""
    if isinstance(data, Mapping):
        values = cast("Mapping[str, Any]", data).values()
        return not any(isinstance(value, Mapping) and "dataset" in value for value in values)
    return isinstance(data, Sequence) and not isinstance(data, str)


def write_npz(splits: Splits, file: IO[bytes]) -> None:
    """Write the arrays, named ``<column>_<split>``."""
    named = {
        f"{column}_{split}": array
        for split, columns in splits.items()
        for column, array in columns.items()
    }
    np.savez(file, **cast("dict[str, Any]", named))


def derive_fields(splits: Splits) -> dict[str, dict[str, Any]]:
    """Declare the fields: whole numbers in one dimension are classes, all else is dense."""
    first = next(iter(splits.values()))
    fields: dict[str, dict[str, Any]] = {}
    for column in first:
        arrays = [columns[column] for columns in splits.values() if column in columns]
        lowest = min((int(array.min()) for array in arrays if _is_classes(array)), default=-1)
        if all(map(_is_classes, arrays)) and lowest >= 0:
            dim = 1 + max(int(array.max()) for array in arrays)
            fields[column] = {"type": "integer", "dim": dim}
        else:
            # a plain number per row is a vector of one: it meets a Linear's (B, 1)
            fields[column] = {"type": "dense", "shape": list(arrays[0].shape[1:]) or [1]}
    return fields


def as_array(name: str, value: Any) -> Array:
    """One array that JSON or npz can carry: what torch has detaches, floats become float32.

    Raises:
        ValueError: it holds objects or complex numbers.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biufSU" and array.dtype.name != "bfloat16":
        raise ValueError(
            f"{name!r} has the dtype {array.dtype}; numbers, booleans and strings can be uploaded"
        )
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        return array.astype(np.float32, copy=False)
    return array


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
        raise ValueError(f"{name}: give an (x, y) pair or a dict of arrays by column")
    columns = {column: as_array(column, array) for column, array in named.items()}
    if not columns:
        raise ValueError(f"{name}: there is no array in it")
    rows = {column: len(array) if array.ndim else None for column, array in columns.items()}
    if len(set(rows.values())) != 1 or None in rows.values():
        told = ", ".join(f"{column} {count}" for column, count in rows.items())
        raise ValueError(f"{name}: the arrays must have the same number of rows; they have {told}")
    return columns


def _is_classes(array: Array) -> bool:
    return array.dtype.kind in "iu" and array.ndim == 1 and len(array) > 0
