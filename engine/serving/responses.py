"""Write the answers of requests: JSON, npy, safetensors, and the Open Inference Protocol.

An answer says which of its tensors hold NaN or Inf: as ``non_finite`` in JSON, in ``parameters`` of
the Open Inference Protocol, and in the header ``Glasshouse-Non-Finite`` of other formats.
"""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from engine.inference.blocks import Column
from engine.inference.classes import CLASS_FIELDS, class_columns, names_in
from engine.serving import tensor_formats
from engine.serving.asked import BINARY, JSON, NPY, Asked, AskedTensor, ProtocolForm
from engine.serving.inference_protocol import DATATYPES, metadata
from engine.serving.model_inputs import ModelInputs
from engine.serving.tensor_formats import padded

__all__ = ["metadata", "write"]

NON_FINITE_HEADER = "Glasshouse-Non-Finite"
_NAMES = {True: b'"Infinity"', False: b'"-Infinity"'}
_NAN = b'"NaN"'
Answer = tuple[dict[str, Any], bytes]


def write(
    asked: Asked,
    columns: Mapping[str, Column],
    inputs: ModelInputs,
    origin: Mapping[str, str | int],
) -> Answer:
    """Write the answer of a request: the head and the body.

    The head has ``content_type``, and ``json_bytes`` or ``headers`` if there are any.

    Args:
        asked: the request.
        columns: its outputs, by ``<layer>/<field>``.
        inputs: what the model reads.
        origin: what computed them: ``model`` and ``version``, or ``job`` and ``step``.
    """
    form = asked.form
    if isinstance(form, ProtocolForm):
        return _write_protocol(form, columns, inputs, origin)
    if form.media_type == JSON:
        return _write_json(columns, inputs, origin)
    arrays = {name: padded(column) for name, column in columns.items()}
    head: dict[str, Any] = {"content_type": form.media_type}
    if non_finite := _non_finite(columns):
        head["headers"] = {NON_FINITE_HEADER: ", ".join(non_finite)}
    if form.media_type == NPY:
        (array,) = arrays.values()
        return head, tensor_formats.npy(array)
    for name, column in columns.items():
        if column.lengths is not None:
            arrays[f"{name.rpartition('/')[0]}/lengths"] = column.lengths.numpy()
    said = {key: str(value) for key, value in origin.items()}
    about = {**said, **names_in(inputs.classes, columns)}
    return head, tensor_formats.safetensors(arrays, about)


def _non_finite(columns: Mapping[str, Column]) -> list[str]:
    return [name for name, column in columns.items() if not _is_finite(column.values.numpy())]


def _is_finite(array: NDArray[Any]) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


# --- JSON ------------------------------------------------------------------------------------


def _write_json(
    columns: Mapping[str, Column], inputs: ModelInputs, origin: Mapping[str, str | int]
) -> Answer:
    outputs: dict[str, Any] = {}
    non_finite: list[str] = []
    for name, column in columns.items():
        array = column.values.numpy()
        if _is_finite(array):
            outputs[name] = array if column.lengths is None else _rows(array, column)
        else:
            non_finite.append(name)
            parts = [array] if column.lengths is None else _rows(array, column)
            texts = [_with_names(part) for part in parts]
            text = texts[0] if column.lengths is None else b"[" + b",".join(texts) + b"]"
            outputs[name] = orjson.Fragment(text)
        for title, classes in class_columns(name, inputs.classes).items():
            rows = [array] if column.lengths is None else _rows(array, column)
            named = [classes.names(row.tolist()) for row in rows]
            outputs[title] = named[0] if column.lengths is None else named
    document: dict[str, Any] = {"outputs": outputs, **origin}
    if non_finite:
        document["non_finite"] = non_finite
    return {"content_type": JSON}, orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def _rows(array: NDArray[Any], column: Column) -> list[NDArray[Any]]:
    """Return the steps of each row."""
    assert column.lengths is not None  # noqa: S101 (the callers looked)
    return np.split(array, column.lengths.cumsum(0).numpy()[:-1])


def _with_names(array: NDArray[Any]) -> bytes:
    """Return an array as JSON in which NaN and Inf are texts, as in `glasshouse.jsonio`.

    orjson writes them as null, in their order.
    """
    text = orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY)
    flat = array.reshape(-1)
    names = [
        _NAN if np.isnan(value) else _NAMES[bool(value > 0)] for value in flat[~np.isfinite(flat)]
    ]
    first, *others = text.split(b"null")
    pairs = zip(names, others, strict=True)
    return b"".join([first, *(part for pair in pairs for part in pair)])


# --- the Open Inference Protocol -------------------------------------------------------------


def _write_protocol(
    form: ProtocolForm,
    columns: Mapping[str, Column],
    inputs: ModelInputs,
    origin: Mapping[str, str | int],
) -> Answer:
    outputs: list[dict[str, Any]] = []
    binary: list[bytes] = []
    non_finite: list[str] = []
    for tensor in form.tensors:
        array = _array(tensor, columns, inputs)
        datatype = "BYTES" if array.dtype == np.object_ else DATATYPES[dtype_of(array)]
        entry: dict[str, Any] = {"name": tensor.name, "datatype": datatype, "shape": array.shape}
        if not _is_finite(array):
            non_finite.append(tensor.name)
        if tensor.is_binary:
            content = _bytes_of(array)
            entry["parameters"] = {"binary_data_size": len(content)}
            binary.append(content)
        else:
            entry["data"] = _data_of(array)
        outputs.append(entry)
    named = {"model_name": origin["model"], "model_version": str(origin["version"])}
    document: dict[str, Any] = dict(named)
    if form.request_id is not None:
        document["id"] = form.request_id
    if non_finite:
        document["parameters"] = {"non_finite": non_finite}
    document["outputs"] = outputs
    text = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    if not binary:
        return {"content_type": JSON}, text
    return {"content_type": BINARY, "json_bytes": len(text)}, b"".join([text, *binary])


def dtype_of(array: NDArray[Any]) -> torch.dtype:
    """Return torch's dtype of an array."""
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def _bytes_of(array: NDArray[Any]) -> bytes:
    if array.dtype != np.object_:
        return array.tobytes()
    texts = [str(text).encode() for text in array.reshape(-1)]
    return b"".join(part for text in texts for part in (struct.pack("<I", len(text)), text))


def _data_of(array: NDArray[Any]) -> Any:
    """Return what orjson writes for the values of an array, row by row."""
    flat = array.reshape(-1)
    if array.dtype == np.object_:
        return flat.tolist()
    return np.ascontiguousarray(flat) if _is_finite(flat) else orjson.Fragment(_with_names(flat))


def _array(tensor: AskedTensor, columns: Mapping[str, Column], inputs: ModelInputs) -> NDArray[Any]:
    """Return an output; texts are objects."""
    layer = tensor.layer
    if tensor.field == "lengths":
        column = next(item for name, item in columns.items() if name.rpartition("/")[0] == layer)
        assert column.lengths is not None  # noqa: S101 (the request was checked)
        return column.lengths.numpy()
    if tensor.num_classes is not None:
        column = columns[f"{layer}/value"]
        return _padded(_classified(column, layer, tensor.num_classes, inputs), column, "")
    for field, title in CLASS_FIELDS.items():
        if tensor.field == title:
            column, classes = columns[f"{layer}/{field}"], inputs.classes[layer]
            names = np.array(classes.names(column.values.tolist()), dtype=object)
            if isinstance((classes.named or ("",))[0], str):
                return _padded(names, column, "")
            return _padded(names.astype(np.int64), column, 0)
    return padded(columns[f"{layer}/{tensor.field}"])


def _classified(column: Column, layer: str, most: int, inputs: ModelInputs) -> NDArray[Any]:
    """Return texts ``<value>:<index>[:<name>]`` of the largest entries, as Triton writes them."""
    k = min(most, column.values.shape[-1])
    found = column.values.topk(k, dim=-1)
    classes = inputs.classes.get(layer)
    named = None if classes is None else classes.named
    values, places = found.values.numpy(), found.indices.numpy()
    made = np.empty(values.shape, dtype=object)
    for place in np.ndindex(values.shape):
        number = int(places[place])
        end = "" if named is None else f":{named[number]}"
        made[place] = f"{values[place]!s}:{number}{end}"
    return made


def _padded(array: NDArray[Any], column: Column, fill: Any) -> NDArray[Any]:
    """Return [rows, …]; of a value per step [rows, longest, …], with ``fill`` after the end."""
    if column.lengths is None:
        return array
    lengths = column.lengths.numpy()
    is_step = np.arange(max(1, int(lengths.max()))) < lengths[:, None]
    made = np.full((*is_step.shape, *array.shape[1:]), fill, array.dtype)
    made[is_step] = array
    return made
