"""Read rows of a request as they stand in a dataset: numbers, classes, texts and image files.

Values of dense fields become the columns of a table in memory, which the readers of datasets read,
so that the tensors equal those of an uploaded file bit for bit. A column's dtype is that of a jsonl
file with the same rows; the pixels of images are bytes, as in an archive of images.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.data.batches.rows import Loaded
from engine.data.columns.checks import unfilled
from engine.data.columns.fields import BadField, field_columns
from engine.data.columns.loaded import LoadedField, LoadedSequence, in_units
from engine.data.columns.prepared import Prepared
from engine.data.columns.ragged import RaggedColumn
from engine.data.columns.table import Table
from engine.data.sources.inline import inline_field
from engine.data.sources.loading import reading_of
from engine.serving.asked import Problems, listed, similar, token
from engine.serving.model_inputs import ModelInputs
from glasshouse.errors import DataFailed, InvalidDataset
from glasshouse.jsonio import NONFINITE
from glasshouse.spec import (
    DenseField,
    DenseSequenceField,
    IntegerField,
    Sequences,
)

IMAGE_FORMATS = ("JPEG", "PNG")
_SPLIT = "all"
_CPU = torch.device("cpu")
_MISSING = object()


class _Bad(Exception):
    """A value does not fit its column: the code and what to do."""

    def __init__(self, detail: str, code: str = "type") -> None:
        super().__init__(detail)
        self.code = code


def read_rows(
    rows: Sequence[Any], inputs: ModelInputs, needed: Sequence[str], problems: Problems
) -> dict[str, Loaded]:
    """Return the needed fields of rows that are objects with values by column.

    A field that reads one column may also be given by its own name. Columns of fields that the
    network does not need, such as the true class, are not read.

    Raises:
        BadRequest: a row does not fit the model, or something was found before.
    """
    known = columns_by_key(inputs)
    checked = _checked_rows(rows, known, problems)
    if len(checked) < len(rows):
        problems.refuse()
    loaded = {name: _load(name, checked, inputs, problems) for name in needed}
    problems.refuse()
    return {name: item for name, item in loaded.items() if item is not None}


def columns_by_key(inputs: ModelInputs) -> dict[str, str]:
    """Return the column that each key of a row stands for."""
    fields = inputs.trained_by.data.fields
    known: dict[str, str] = {}
    for name, item in fields.items():
        own = field_columns(name, item)
        if len(own) == 1:
            known[name] = own[0]
    for name, item in fields.items():  # the name of a column comes before that of another field
        known |= {column: column for column in field_columns(name, item)}
    return known


def _checked_rows(
    rows: Sequence[Any], known: Mapping[str, str], problems: Problems
) -> list[dict[str, Any]]:
    """Return the values of each row by column."""
    found: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            detail = "a row is an object with a value for each column"
            problems.problem(f"/rows/{number}", detail, "type")
            continue
        if not row.keys() <= known.keys():
            for key in [key for key in row if key not in known]:
                columns = listed(dict.fromkeys(known.values()))
                detail = f"no field reads a column {key[:100]!r}; these are read: {columns}"
                detail += similar(key, known)
                problems.problem(f"/rows/{number}/{token(key)}", detail, "unknown_column")
        own = row if row.keys() <= known.keys() else {key: row[key] for key in row if key in known}
        values = {known[key]: value for key, value in own.items()}
        if len(values) < len(own):
            again = next(key for key in own if known[key] != key and known[key] in own)
            detail = f"{again!r} and {known[again]!r} are the same column: give one of them"
            problems.problem(f"/rows/{number}/{token(again)}", detail, "repeated")
        found.append(values)
    return found


def _load(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    inputs: ModelInputs,
    problems: Problems,
) -> Loaded | None:
    """Return one field of all rows; None: a value does not fit, as added to ``problems``."""
    field = inputs.fields[name]
    columns = field_columns(name, field)
    if isinstance(field, DenseField):
        return _load_dense(name, field, columns, rows, inputs, problems)
    values = [row.get(columns[0], _MISSING) for row in rows]
    before = len(problems.problems)
    for number, value in enumerate(values):
        if value is _MISSING or value is None:
            _add(problems, number, columns[0], _absent(name, columns[0], "give one"))
    if len(problems.problems) > before:
        return None
    if isinstance(field, DenseSequenceField):
        return _load_vectors(name, field, columns[0], values, inputs, problems)
    return _load_integers(name, columns[0], values, inputs, problems)


def _load_integers(
    name: str, column: str, values: list[Any], inputs: ModelInputs, problems: Problems
) -> Loaded | None:
    """Read integers, classes, texts and lists of integers: the same as ``inputs``."""
    shape, meaning = inputs.shapes[name], inputs.meaning
    if isinstance(meaning.fields.get(name), IntegerField):
        values = [int(value) if isinstance(value, bool) else value for value in values]
    try:
        return inline_field(name, values, shape, meaning, inputs.most)
    except BadField:
        pass
    for number, value in enumerate(values):  # find the rows
        try:
            inline_field(name, [value], shape, meaning, inputs.most)
        except BadField as cause:
            detail = str(cause).replace(": row 0 has", " has").replace("row 0: ", "")
            _add(problems, number, column, _Bad(detail, "value"))
    return None


def _add(problems: Problems, number: int, column: str, problem: _Bad) -> None:
    detail = f"row {number}: {problem}"
    problems.problem(f"/rows/{number}/{token(column)}", detail, problem.code)


def _absent(name: str, column: str, fix: str) -> _Bad:
    detail = f"there is no value in column {column!r}, and field {name!r} has no fill: {fix}"
    return _Bad(detail, "missing_value")


# --- dense fields ----------------------------------------------------------------------------


def _load_dense(
    name: str,
    field: DenseField,
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    inputs: ModelInputs,
    problems: Problems,
) -> Loaded | None:
    whole = inputs.shapes[name].shape
    shapes = _shapes_of(whole, columns)
    before = len(problems.problems)
    arrays: dict[str, NDArray[Any]] = {}
    for column in columns:
        values = [row.get(column) for row in rows]
        made = _column(name, field, column, values, shapes, problems)
        if made is not None:
            arrays[column] = made
    if len(problems.problems) > before:
        return None
    found = _read(name, field, _MemoryTable(arrays, len(rows)), inputs, problems)
    if not isinstance(found, LoadedField):
        return None
    return LoadedField(found.batch(slice(0, len(rows)), _CPU))


def _shapes_of(whole: tuple[int, ...], columns: Sequence[str]) -> tuple[int, ...] | None:
    """Return the shape of a value of each column; None: columns of several sizes side by side."""
    if len(columns) == 1:
        return whole
    return () if math.prod(whole) == len(columns) else None


def _column(
    name: str,
    field: DenseField,
    column: str,
    values: list[Any],
    shape: tuple[int, ...] | None,
    problems: Problems,
) -> NDArray[Any] | None:
    """Return the values of a column, [rows, …]; None: some do not fit."""
    kinds = {*map(type, values)}
    if kinds <= {int, float} and shape is not None and math.prod(shape) == 1:
        return _scalars(values, kinds)
    read: list[NDArray[Any]] = []
    for number, value in enumerate(values):
        try:
            read.append(_value(name, field, column, value, shape))
        except _Bad as problem:
            _add(problems, number, column, problem)
    if len(read) < len(values):
        return None
    if len({item.shape for item in read}) > 1:
        sizes = [*dict.fromkeys(str([*item.shape]) for item in read)]
        number = next(i for i, item in enumerate(read) if item.shape != read[0].shape)
        detail = f"values of column {column!r} have the shapes {' and '.join(sizes[:2])}:"
        _add(problems, number, column, _Bad(f"{detail} give all rows the same", "shape"))
        return None
    are_images = [item.dtype == np.uint8 for item in read]
    if any(are_images) and not all(are_images):
        number = are_images.index(not are_images[0])
        detail = f"column {column!r} has images and numbers: give all rows the same"
        _add(problems, number, column, _Bad(detail))
        return None
    return np.stack(read)


def _scalars(values: list[Any], kinds: set[type]) -> NDArray[Any]:
    if kinds == {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            pass
    return np.array(values, np.float64)


def _value(
    name: str, field: DenseField, column: str, value: Any, shape: tuple[int, ...] | None
) -> NDArray[Any]:
    """Return one value of a column: bytes for an image, else int64 or float64."""
    if value is None:
        if field.fill is None:
            fix = "give one, or train with data.fields." + name + ".fill"
            raise _absent(name, column, fix)
        if shape is None:
            raise _absent(name, column, "give one, because its size is not known")
        return np.full(shape, np.nan)
    data = image_data(value)
    if data is not None:
        return _image(column, data, shape)
    array = _numbers(column, value, shape)
    if shape is not None and array.size != math.prod(shape):
        detail = f"the value of column {column!r} has shape {[*array.shape]}; the network takes"
        raise _Bad(f"{detail} {[*shape]}", "shape")
    return array if shape is None else array.reshape(shape)


def _numbers(column: str, value: Any, shape: tuple[int, ...] | None) -> NDArray[Any]:
    flat, sizes = [value], list[int]()
    try:
        while flat and isinstance(flat[0], list):
            lengths = {len(item) for item in flat}
            if len(lengths) > 1:
                raise ValueError
            sizes.append(lengths.pop())
            flat = [item for part in flat for item in part]
        types = {*map(type, flat)}
        if types <= {int, float}:
            return _scalars(flat, types).reshape(sizes)
        if types == {bool}:
            return np.array(flat, np.int64).reshape(sizes)
        named = [NONFINITE[item] if isinstance(item, str) else item for item in flat]
        if not {*map(type, named)} <= {int, float}:
            raise ValueError
        return np.array(named, np.float64).reshape(sizes)
    except (KeyError, TypeError, ValueError):
        wanted = "a number" if shape == () else "a regular nested list of numbers"
        wanted += "" if not shape else f" of shape {[*shape]}"
        shown = f", not {_shown(value)}" if not isinstance(value, list | dict) else ""
        raise _Bad(f"column {column!r} takes {wanted}{shown}") from None


def _shown(value: Any) -> str:
    return repr(value[:100]) if isinstance(value, str) else str(value)[:100]


# --- images ----------------------------------------------------------------------------------


def image_data(value: Any) -> str | None:
    """Return the base64 of an image file; None: the value is none."""
    if isinstance(value, str) and value[:11].lower() == "data:image/":
        head, _, data = value.partition(",")
        if not head.lower().endswith(";base64"):
            raise _Bad("a data URL of an image needs base64: data:image/png;base64,…", "image")
        return data
    if not isinstance(value, dict):
        return None
    inner = value.get("image") if [*value] == ["image"] else None
    data = inner.get("base64") if isinstance(inner, dict) and [*inner] == ["base64"] else None
    if not isinstance(data, str):
        raise _Bad('an object is an image: {"image": {"base64": "…"}}', "image")
    return data


def _image(column: str, text: str, shape: tuple[int, ...] | None) -> NDArray[np.uint8]:
    """Return the pixels of an image file, [channels, height, width], in the shape of the field."""
    from engine.datasets.image_files import decode_image  # noqa: PLC0415 (a large library)

    axes = shape[-3:] if shape is not None and len(shape) >= 2 else ()
    channels, height, width = axes if len(axes) == 3 else (1, *axes) if axes else (0, 0, 0)
    if channels not in {1, 3} or shape is None or math.prod(shape) != channels * height * width:
        shown = "several columns" if shape is None else f"rows of shape {[*shape]}"
        detail = f"column {column!r} takes no images: the field has {shown}, and images are"
        raise _Bad(f"{detail} [channels, height, width] with 1 or 3 channels", "image")
    try:
        data = base64.b64decode(text, validate=True)
        return decode_image(data, (height, width), channels, IMAGE_FORMATS).reshape(shape)
    except InvalidDataset as cause:
        raise _Bad(f"column {column!r}: {cause}", "image") from None
    except ValueError:
        detail = f"the image of column {column!r} is not base64 (without line ends)"
        raise _Bad(detail, "image") from None


# --- sequences of vectors --------------------------------------------------------------------


def _load_vectors(
    name: str,
    field: DenseSequenceField,
    column: str,
    values: list[Any],
    inputs: ModelInputs,
    problems: Problems,
) -> Loaded | None:
    read: list[NDArray[Any]] = []
    for number, value in enumerate(values):
        try:
            read.append(_steps(column, field.dim, value))
        except _Bad as problem:
            _add(problems, number, column, problem)
    if len(read) < len(values):
        return None
    lengths = np.array([len(item) for item in read], np.int64)
    is_whole = all(item.dtype == np.int64 for item in read)
    steps = np.concatenate(read).astype(np.int64 if is_whole else np.float64)
    table = _MemoryTable({column: steps}, len(read), lengths)
    found = _read(name, field, table, inputs, problems)
    if not isinstance(found, LoadedSequence):
        return None
    floats = in_units(found.values.clone(), found.divide_by, found.scale)
    return replace(found, values=floats, divide_by=None, scale=None)


def _steps(column: str, dim: int, value: Any) -> NDArray[Any]:
    if not isinstance(value, list):
        detail = f"column {column!r} takes a list of steps, each of {dim} numbers"
        raise _Bad(f"{detail}, not {_shown(value) if not isinstance(value, dict) else 'an object'}")
    array = _numbers(column, value, None) if value else np.empty((0, dim), np.int64)
    if array.size != len(value) * dim:
        detail = f"the value of column {column!r} has shape {[*array.shape]}; the network takes"
        raise _Bad(f"{detail} {['steps', dim]}", "shape")
    return array.reshape(len(value), dim)


# --- a table in memory -----------------------------------------------------------------------


def _read(
    name: str,
    field: DenseField | DenseSequenceField,
    table: "_MemoryTable",
    inputs: ModelInputs,
    problems: Problems,
) -> Loaded | None:
    """Read a field as from a dataset; None: rows do not fit, as added to ``problems``."""
    preparing = inputs.meaning.preparing
    try:
        reading = reading_of(name, field, table, _SPLIT, preparing)
        bad = {int(row): flaw.failure for flaw in reading.flaws() for row in flaw.rows}
        if not bad:
            limit = Sequences(max_length=inputs.most)
            return reading.load(None, limit, preparing.known or Prepared())
    except DataFailed as cause:
        problems.problem("/rows", str(cause), "shape")
        return None
    is_bad = unfilled(field, preparing.normalize.get(name))
    for row, failure in bad.items():
        columns = [column for column in table.arrays if table.has(column, row, is_bad)]
        pointer = f"/rows/{row}/{token((columns or [*table.arrays])[0])}"
        problems.problem(pointer, f"{failure(row)}", "missing_value")
    return None


class _MemoryTable(Table):
    """The columns of one field as a dataset."""

    def __init__(
        self,
        arrays: Mapping[str, NDArray[Any]],
        num_rows: int,
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        """``lengths``: the steps of each row, if the arrays are the concatenated steps."""
        self.directory = Path()
        self.arrays, self._lengths = arrays, lengths
        columns = [
            {
                "name": name,
                "dtype": array.dtype.name,
                "shape": [*array.shape[1:]] if lengths is None else [None, *array.shape[1:]],
            }
            for name, array in arrays.items()
        ]
        if lengths is not None:
            known = {"min": int(lengths.min()), "max": int(lengths.max())}
            columns = [
                {**column, "lengths": {_SPLIT: {**known, "total": int(lengths.sum())}}}
                for column in columns
            ]
        self.meta = {"columns": columns, "splits": {_SPLIT: num_rows}}

    def where(self, split: str, row: int) -> str:
        """Return where a row is, in words."""
        return f"row {row}"

    def column(self, split: str, name: str) -> NDArray[Any]:
        """Return a column."""
        return self.arrays[name]

    def ragged(self, split: str, name: str) -> RaggedColumn:
        """Return a column of steps."""
        return RaggedColumn(name, split, self.arrays[name], self._ends, self.where)

    def has(self, column: str, row: int, is_bad: Any) -> bool:
        """Return whether a row has a bad value in a column."""
        ends = self._ends if self._lengths is not None else np.arange(len(self.arrays[column]) + 1)
        values = self.arrays[column][ends[row] : ends[row + 1]]
        return is_bad is not None and values.dtype.kind == "f" and bool(np.any(is_bad(values)))

    @property
    def _ends(self) -> NDArray[np.int64]:
        lengths = np.zeros(0, np.int64) if self._lengths is None else self._lengths
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
