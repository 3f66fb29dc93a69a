"""The body of a request to a served model. Makes no requests."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from glasshouse import jsonio
from glasshouse.client.data.arrays import Column, as_column
from glasshouse.client.data.frames import is_frame
from glasshouse.client.data.tensors import Array, write_tensors

JSON = "application/json"
NPY = "application/x-npy"
SAFETENSORS = "application/vnd.safetensors"
_PNG_MODES = frozenset({"1", "L", "LA", "I", "P", "RGB", "RGBA", "I;16"})


class PredictBody(NamedTuple):
    """The body of a request, its media type, and what else the request has."""

    content: bytes
    media_type: str
    accept: str
    """The media type of the response."""
    params: dict[str, Any]


def needs_name(inputs: Any, rows: Any) -> bool:
    """Whether the name of the network's only input must be known to encode a request.

    An array of numbers needs none.
    """
    if rows is not None:
        return not is_frame(rows) and not all(isinstance(row, Mapping) for row in _rows(rows))
    return not isinstance(inputs, Mapping) and not _is_numeric(_column(inputs))


def predict_body(inputs: Any, rows: Any, name: str | None, options: dict[str, Any]) -> PredictBody:
    """Encode a request: arrays in binary form, all else as JSON.

    Args:
        inputs: arrays by field, or one array; or None.
        rows: instead of inputs: a list of rows, or a data frame.
        name: the network's only input, if `needs_name`.
        options: ``outputs``, ``fields`` and ``top_k``, those that are set.

    Raises:
        TypeError, ValueError: something cannot be sent.
    """
    if rows is not None:
        return _as_json({"rows": _encoded_rows(rows, name)}, options)
    if not isinstance(inputs, Mapping):
        column = _column(inputs)
        if name is None and isinstance(column, np.ndarray):
            buffer = io.BytesIO()
            np.save(buffer, column, allow_pickle=False)
            return _binary(buffer.getvalue(), NPY, options)
        inputs = {str(name): column}
    given = cast("Mapping[str, Any]", inputs)
    columns = {field: as_column(field, value) for field, value in given.items()}
    arrays = {field: column for field, column in columns.items() if _is_numeric(column)}
    if len(arrays) == len(columns):
        return _binary(write_tensors(cast("dict[str, Array]", arrays)), SAFETENSORS, options)
    return _as_json({"inputs": {field: listed(item) for field, item in columns.items()}}, options)


def _column(inputs: Any) -> Column:
    if is_frame(inputs):
        raise TypeError("inputs is a data frame: pass it as rows")
    return as_column("inputs", inputs)


def _is_numeric(column: Column) -> bool:
    return isinstance(column, np.ndarray) and column.dtype.kind in "biuf"


def _as_json(document: dict[str, Any], options: dict[str, Any]) -> PredictBody:
    return PredictBody(jsonio.dumps({**document, **options}).encode(), JSON, JSON, {})


def _binary(content: bytes, media_type: str, options: dict[str, Any]) -> PredictBody:
    params = {
        name: ",".join(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType]
        for name, value in options.items()
    }
    return PredictBody(content, media_type, SAFETENSORS, params)


def _rows(rows: Any) -> list[Any]:
    if not isinstance(rows, (list, tuple)):
        shown = type(rows).__name__
        raise TypeError(f"rows is of type {shown}: pass a list with an entry for each row")
    return list(cast("Sequence[Any]", rows))


def _encoded_rows(rows: Any, name: str | None) -> list[dict[str, Any]]:
    listed = _of_frame(rows) if is_frame(rows) else _rows(rows)
    found: list[dict[str, Any]] = []
    for number, row in enumerate(listed):
        values = cast("Mapping[Any, Any]", row if isinstance(row, Mapping) else {name: row})
        try:
            found.append({str(key): _value(value) for key, value in values.items()})
        except (TypeError, ValueError) as error:
            raise type(error)(f"row {number}: {error}") from None
    return found


def _of_frame(frame: Any) -> list[Any]:
    """The rows of a data frame. A missing value is None, as in a file."""
    if hasattr(frame, "to_pylist"):  # pyarrow
        rows: list[dict[str, Any]] = frame.to_pylist()
    else:
        rows = frame.to_dicts() if hasattr(frame, "to_dicts") else frame.to_dict("records")
    return [
        {
            key: None if isinstance(value, float) and np.isnan(value) else value
            for key, value in row.items()
        }
        for row in rows
    ]


def _value(value: Any) -> Any:
    """Convert one value of a row to JSON."""
    if isinstance(value, (bytes, bytearray)):
        return _image(bytes(value))
    if isinstance(value, Path):
        return _image(value.read_bytes())
    if type(value).__module__.partition(".")[0] == "PIL":
        return _image(_png(value))
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return cast("Any", value).tolist()
    if isinstance(value, (list, tuple)):
        return [_value(item) for item in cast("Sequence[Any]", value)]
    if value is None or isinstance(value, (str, bool, int, float, Mapping)):
        return cast("Any", value)
    kinds = "a number, a text, a list, an array, or an image (bytes, a Path, or a PIL image)"
    raise TypeError(f"a value is of type {type(value).__name__}: pass {kinds}")


def _image(data: bytes) -> dict[str, Any]:
    return {"image": {"base64": base64.b64encode(data).decode()}}


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    shown = image if image.mode in _PNG_MODES else image.convert("RGB")
    shown.save(buffer, "PNG")
    return buffer.getvalue()


def listed(found: Column) -> Any:
    """Convert an array, or an array for each row, to lists."""
    return [item.tolist() for item in found] if isinstance(found, list) else found.tolist()
