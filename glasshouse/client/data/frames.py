"""Data frames (pandas, polars, pyarrow) and torch datasets as columns. Imports none of them.

The numeric columns of a frame become one vector ``x``, in the order of the frame. Each text or
categorical column becomes a field of its own. ``label`` is the target.
"""

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from glasshouse.client.data.tensors import Array
from glasshouse.client.modules import is_dataset
from glasshouse.client.modules.weight_names import is_lengths

FEATURES = "x"
"""The field of the numeric columns of a frame."""
Library = Literal["pandas", "polars"]
_FRAMES: tuple[Library, ...] = ("pandas", "polars")
_LIBRARIES = ("pandas", "polars", "pyarrow")
_CATEGORIES = ("category", "Categorical", "Enum", "dictionary")


class Table(NamedTuple):
    """Columns and the fields that read them."""

    columns: dict[str, Any]
    fields: dict[str, dict[str, Any]]


class _Column(NamedTuple):
    values: Array
    classes: list[str] | None
    """For a categorical column: its categories, in the order of the library."""
    missing: int


def is_frame(data: Any) -> bool:
    """Whether this is a data frame of a supported library."""
    library = type(data).__module__.partition(".")[0]
    return library in _LIBRARIES and hasattr(data, "columns")


def frame(columns: Mapping[str, Array], library: Library | None = None) -> Any:
    """Create a data frame.

    Args:
        columns: arrays of equal length, by name.
        library: ``pandas`` or ``polars``. Default: the one that is already imported, or else the
            one that is installed.

    Raises:
        ImportError: the library is not installed.
    """
    wanted = _FRAMES if library is None else (library,)
    for name in sorted(wanted, key=lambda one: one not in sys.modules):
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name).DataFrame(dict(columns))
    raise ImportError(f"a data frame needs {' or '.join(wanted)}: install it")


def read_frame(data: Any, label: str | int | None, wanted: Sequence[str] = ()) -> Table:
    """Read a frame.

    Args:
        data: the frame.
        label: the target column; a number if the frame's column names are numbers.
        wanted: names that the network reads. A column with such a name becomes its own field.

    Raises:
        ValueError: the label column does not exist, a column has an unsupported dtype, or values
            are missing.
    """
    data, names = _named(data)
    label = label if label is None else str(label)
    if label is None or label not in names:
        reason = (
            "the target column is unset." if label is None else f"there is no column {label!r}."
        )
        raise ValueError(f"{reason} Set label= to one of {', '.join(names)}")
    columns: dict[str, Any] = {}
    fields: dict[str, dict[str, Any]] = {}
    features: list[str] = []
    for name in names:
        column = _read(data, name)
        _check(name, column)
        columns[name] = column.values
        field = _field(column, is_label=name == label)
        if name == label or name in wanted or field["type"] != "dense":
            called = field_name(name)
            if called in fields:
                raise ValueError(f"two columns map to the field {called!r}: rename {name!r}")
            fields[called] = field if called == name else {**field, "column": name}
        else:
            features.append(name)
    if features:
        if FEATURES in fields:
            raise ValueError(
                f"the column {FEATURES!r} has the name of the field of numeric columns: rename it"
            )
        fields = {FEATURES: {"type": "dense", "columns": features}, **fields}
    return Table(columns, fields)


def field_name(column: str) -> str:
    """The field name of a column: the column name with invalid characters replaced."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", column)
    return (f"column_{name}" if not name or name[0].isdigit() else name)[:64]


def _named(data: Any) -> tuple[Any, list[str]]:
    """The frame with its column names as strings (pandas allows others), and the names."""
    given = list(getattr(data, "column_names", data.columns))
    names = [str(name) for name in given]
    return (data if names == given else data.set_axis(names, axis="columns")), names


def columns_for(data: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The values of each field whose columns exist in the frame.

    Raises:
        ValueError: values are missing.
    """
    data, known = _named(data)
    found: dict[str, Any] = {}
    for field, how in fields.items():
        names = how.get("columns") or [how.get("column") or field]
        if not all(name in known for name in names):
            continue
        columns = [_read(data, name) for name in names]
        for name, column in zip(names, columns, strict=True):
            _check(name, column)
        values = [column.values for column in columns]
        found[field] = np.stack(values, axis=1) if "columns" in how else values[0]
        if values[0].dtype.kind == "U":
            found[field] = values[0].tolist()
        elif how["type"] == "dense" and found[field].ndim == 1:
            found[field] = found[field][:, None]
    return found


def _field(column: _Column, *, is_label: bool) -> dict[str, Any]:
    if column.classes is not None:
        return {"type": "integer", "classes": column.classes}
    kind = column.values.dtype.kind
    if kind == "U":
        if is_label:
            return {"type": "integer", "classes": sorted(set(column.values.tolist()))}
        return {"type": "integer_sequence", "tokens": "words"}
    if is_label and kind in "iub" and len(column.values) and int(column.values.min()) >= 0:
        return {"type": "integer", "dim": int(column.values.max()) + 1}
    return {"type": "dense", "shape": [1]}


def _check(name: str, column: _Column) -> None:
    if column.missing:
        raise ValueError(
            f"the column {name!r} has {column.missing} missing values: fill them or drop the rows, "
            "or upload the frame as a file and set fill or on_bad_row; see the page on datasets"
        )


def _read(data: Any, name: str) -> _Column:
    series = data.column(name) if hasattr(data, "column_names") else data[name]
    kind = str(getattr(series, "type", None) or series.dtype)
    missing = _missing(series)
    if kind.startswith(_CATEGORIES):
        texts = _texts(name, series)
        classes = _classes(series) or sorted({text for text in texts if text is not None})
        return _Column(np.array([text or "" for text in texts]), classes, missing)
    if missing:
        return _Column(np.empty(0), None, missing)
    values = np.asarray(series.to_numpy())
    if values.dtype.kind in "OT" or kind.startswith(("str", "String", "Utf8", "large_string")):
        return _Column(np.array(_texts(name, series)), None, 0)
    if values.dtype.kind not in "biuf":
        raise ValueError(f"the column {name!r} has dtype {kind}: convert it to numbers or strings")
    if values.dtype.kind == "b":
        values = values.astype(np.int64)
    is_nan = values.dtype.kind == "f" and bool(np.isnan(values).any())
    return _Column(values, None, int(np.isnan(values).sum()) if is_nan else 0)


def _missing(series: Any) -> int:
    count: Any = series.null_count if hasattr(series, "null_count") else series.isna().sum()
    return int(cast("Any", count() if callable(count) else count))


def _texts(name: str, series: Any) -> list[Any]:
    rows: list[Any] = series.to_pylist() if hasattr(series, "to_pylist") else series.to_list()
    kinds = {type(row).__name__ for row in rows if row is not None and row == row}  # noqa: PLR0124
    if kinds - {"str"}:
        raise ValueError(
            f"the column {name!r} has values of type {', '.join(sorted(kinds))}: convert it to "
            "numbers or strings"
        )
    return [row if isinstance(row, str) else None for row in rows]


def _classes(series: Any) -> list[str]:
    """The categories of a pandas column, in order."""
    known = getattr(getattr(series, "cat", None), "categories", None)
    return [str(item) for item in known] if known is not None else []


def read_dataset(data: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """Read a torch ``Dataset`` once, row by row.

    Random transforms are applied only this once. Columns have the names in the rows. For tuples,
    they are ``x`` and ``y``, or the network's argument names and ``y``.

    Raises:
        ValueError: the dataset cannot be read by index, or its rows differ in structure.
    """
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ValueError("an IterableDataset has no length: pass a map-style Dataset or arrays")
    rows = [_row(data[number], arguments) for number in range(len(data))]
    if not rows:
        raise ValueError("the Dataset is empty")
    forms = {tuple(row) for row in rows}
    if len(forms) > 1:
        raise ValueError(f"the rows of the Dataset differ in structure: {sorted(forms)[:2]}")
    return {name: [row[name] for row in rows] for name in rows[0]}


def _row(item: Any, arguments: Sequence[str]) -> dict[str, Any]:
    if isinstance(item, Mapping):
        return dict(cast("Mapping[str, Any]", item))
    if not isinstance(item, (tuple, list)):
        return {FEATURES: item}
    values = cast("Sequence[Any]", item)
    names: Sequence[str] = getattr(values, "_fields", ())
    if not names:
        tensors = [name for name in arguments if not is_lengths(name)]
        inputs = next((one for one in (arguments, tensors) if len(one) == len(values) - 1), ())
        usual = (
            [FEATURES] if len(values) == 2 else [f"{FEATURES}{n}" for n in range(len(values) - 1)]
        )
        names = [*(inputs or usual), "y"]
    return dict(zip(names, values, strict=True))


def as_columns(
    data: Any, label: str | int | None, wanted: Sequence[str] = ()
) -> tuple[Any, dict[str, Any] | None]:
    """Frames and datasets as dicts of columns, with fields if known; other data unchanged."""
    if is_frame(data):
        table = read_frame(data, label, wanted)
        return table.columns, table.fields
    if is_dataset(data):
        return read_dataset(data, wanted), None
    return data, None
