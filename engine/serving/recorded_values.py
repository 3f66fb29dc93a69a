"""What the request log records of the values of a request, before and after the network.

Values of fields are those that the client sent, before scaling and normalization. A large value of
a row is recorded as its shape and its digest, an image file as its size and its digest.
"""

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from engine.core.tensor_names import lengths_of
from engine.inference.blocks import Column
from engine.inference.classes import class_columns
from engine.serving import inference_protocol, media_types, tensor_formats
from engine.serving.asked import JSON, NPY, Asked
from engine.serving.field_arrays import Given
from engine.serving.model_inputs import ModelInputs
from engine.serving.raw_rows import columns_by_key, image_data
from engine.serving.redaction import Redaction
from glasshouse import jsonio
from glasshouse.spec import IntegerField, IntegerSequenceField

SMALL_VALUES = 1024
"""A value of one row with more numbers is recorded as its shape and digest."""
_SMALL_IMAGE = 1024
"""The most characters of the base64 of an image that is recorded whole."""


class Sent(NamedTuple):
    """The values of a request by field, or by column."""

    form: str
    """``inputs``: by field. ``rows``: by column."""
    values: dict[str, Any]
    """For each name an entry for each row; a column that a row has not is null."""
    redacted: list[str]
    """The names whose values are not recorded."""


def sent_values(
    head: Mapping[str, Any],
    body: bytes | memoryview,
    asked: Asked,
    inputs: ModelInputs,
    redaction: Redaction,
) -> Sent:
    """Return what a client sent of the fields that the wanted outputs depend on.

    ``head`` and ``body``: of a request that was accepted as ``asked``.
    """
    needed = inputs.needed(asked.outputs)
    if head.get("protocol") == "v2":
        arrays = inference_protocol.arrays_of(head, body)
    elif (content_type := media_types.base_of(head.get("content_type"))) in ("", JSON):
        document = orjson.loads(body)
        if "rows" in document:
            return _by_column(document["rows"], needed, inputs, redaction)
        return _by_field(document["inputs"], needed, inputs, redaction)
    elif content_type == NPY:
        name = (head.get("query") or {}).get("input", needed[0])
        arrays: dict[str, Given] = {name: tensor_formats.read_npy(body)}
    else:
        arrays = {**tensor_formats.read_safetensors(body)}
    return _by_field(arrays, needed, inputs, redaction)


def _by_column(
    rows: Sequence[Mapping[str, Any]],
    needed: Sequence[str],
    inputs: ModelInputs,
    redaction: Redaction,
) -> Sent:
    fields = {name: inputs.trained_by.data.fields[name] for name in needed}
    owners = {
        column: name
        for name, field in fields.items()
        for column in (field.source_columns or (name,))
    }
    keys = columns_by_key(inputs)
    given = [{keys[key]: value for key, value in row.items()} for row in rows]
    names = [name for name in owners if any(name in row for row in given)]
    kept = [name for name in names if name not in redaction.columns]
    values = {
        name: [_of_row(row.get(name), _is_integer(inputs, owners[name])) for row in given]
        for name in kept
    }
    return Sent("rows", values, [name for name in names if name in redaction.columns])


def _by_field(
    given: Mapping[str, Any], needed: Sequence[str], inputs: ModelInputs, redaction: Redaction
) -> Sent:
    values: dict[str, Any] = {}
    for name in needed:
        if name in redaction.fields:
            continue
        own, is_integer = given[name], _is_integer(inputs, name)
        if isinstance(own, np.ndarray):
            values[name] = _of_array(own)
        else:
            values[name] = [_of_row(value, is_integer) for value in own]
        if (lengths := given.get(lengths_of(name))) is not None:
            values[lengths_of(name)] = lengths
    return Sent("inputs", values, [name for name in needed if name in redaction.fields])


def _is_integer(inputs: ModelInputs, name: str) -> bool:
    return isinstance(inputs.fields[name], IntegerField | IntegerSequenceField)


def _of_row(value: Any, is_integer: bool) -> Any:
    """Return what is recorded of one value in JSON."""
    if isinstance(value, dict | str):
        return value if is_integer else _of_text(value)
    if not isinstance(value, list) or _num_values(value, SMALL_VALUES) <= SMALL_VALUES:
        return value
    try:
        array = np.asarray(value, np.int64 if is_integer else np.float32)
    except (ValueError, TypeError, OverflowError):  # lists of different lengths, or texts
        return {"num_values": _num_values(value, math.inf)}
    return _summary(array)


def _of_text(value: Any) -> Any:
    data = image_data(value)
    if data is None or len(data) <= _SMALL_IMAGE:
        return value
    content = base64.b64decode(data)
    return {"image": {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}


def _num_values(value: Any, most: float) -> int:
    """Return the number of values in nested lists; it may stop counting above ``most``."""
    if not isinstance(value, list):
        return 1
    found = 0
    for item in value:
        found += _num_values(item, most - found)
        if found > most:
            break
    return found


def _of_array(array: NDArray[Any]) -> Any:
    """Return what is recorded of [rows, …]: the array, or an object for each row."""
    if math.prod(array.shape[1:]) <= SMALL_VALUES:
        return array
    return [_summary(row) for row in array]


def _summary(array: NDArray[Any]) -> dict[str, Any]:
    content = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    digest = hashlib.sha256(content.tobytes()).hexdigest()
    return {"shape": [*array.shape], "dtype": array.dtype.name, "sha256": digest}


# --- outputs ---------------------------------------------------------------------------------


class LargeOutput(NamedTuple):
    """An output whose values are not recorded."""

    shape: tuple[int, ...]


Kept = Column | LargeOutput


def kept_outputs(columns: Mapping[str, Column], max_bytes: int) -> dict[str, Kept]:
    """Copy small outputs; the others are views of the outputs of a whole batch."""
    found: dict[str, Kept] = {}
    for name, column in columns.items():
        values = column.values
        if values.nbytes > max_bytes or math.prod(values.shape[1:]) > SMALL_VALUES:
            found[name] = LargeOutput(tuple(values.shape))
        else:
            found[name] = Column(values.clone(), column.lengths)
    return found


def output_values(
    kept: Mapping[str, Kept], inputs: ModelInputs, redaction: Redaction
) -> tuple[dict[str, Any], list[str]]:
    """Return outputs by ``<layer>/<field>``, as a prediction has them, and the redacted ones."""
    values: dict[str, Any] = {}
    redacted: list[str] = []
    for name, column in kept.items():
        if redaction.is_redacted(name.rpartition("/")[0]):
            redacted.append(name)
            continue
        if isinstance(column, LargeOutput):
            values[name] = {"shape": [*column.shape]}
            continue
        array = column.values.numpy()
        rows = array if column.lengths is None else _steps(array, column)
        values[name] = rows
        for title, classes in class_columns(name, inputs.classes).items():
            parts = [array] if column.lengths is None else _steps(array, column)
            named = [classes.names(part.tolist()) for part in parts]
            values[title] = named[0] if column.lengths is None else named
    return values, redacted


def _steps(array: NDArray[Any], column: Column) -> list[NDArray[Any]]:
    """Return the steps of each row."""
    assert column.lengths is not None  # noqa: S101 (the callers looked)
    return np.split(array, column.lengths.cumsum(0).numpy()[:-1])


def as_json(values: Mapping[str, Any]) -> bytes:
    """Return values as JSON, in which NaN and Inf are texts."""
    plain = {name: _plain(value) for name, value in values.items()}
    return orjson.dumps(plain, option=orjson.OPT_SERIALIZE_NUMPY)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) if isinstance(item, np.ndarray) else item for item in value]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(value, np.ndarray):
        return value
    array: NDArray[Any] = value
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return jsonio.named(array.tolist())
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
