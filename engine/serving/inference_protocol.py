"""Requests and metadata of the Open Inference Protocol (KServe v2), as Triton reads and gives them.

With the binary tensor data extension, the body is JSON of ``json_bytes`` bytes, then the tensors
in their order: little-endian, row-major, ``BYTES`` as texts with their lengths before them (u32).
https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol

Outputs are named ``<layer>/<field>``; ``<layer>`` alone is its value. Values of inputs mean the
same as those of JSON ``inputs`` of ``predict``. A sequence field takes [rows, steps, …], and the
steps of each row as ``<field>.lengths``; without them all steps count.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.tensor_names import lengths_of
from engine.data.sources.inline import jsonio_numbers
from engine.inference.classes import CLASS_FIELDS
from engine.serving.asked import (
    Asked,
    AskedTensor,
    Problems,
    ProtocolForm,
    bad,
    parsed,
    similar,
    token,
)
from engine.serving.field_arrays import Given, from_arrays
from engine.serving.model_inputs import ModelInputs
from engine.serving.tensor_formats import MAX_AXES, array_of, from_bfloat16, is_sizes
from engine.serving.wanted import MAX_OUTPUTS, MAX_TOP_K, check_output, entries
from glasshouse.spec import IntegerField

PLATFORM = "glasshouse_torch"
_NUMPY = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1",
    "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
    "BF16": "<u2",
}  # fmt: skip
"""Numpy's dtypes of the protocol's; that of BF16 has its bits."""
_TEXTS = "BYTES"
DATATYPES = {
    torch.bool: "BOOL", torch.uint8: "UINT8", torch.int8: "INT8", torch.int16: "INT16",
    torch.int32: "INT32", torch.int64: "INT64", torch.float16: "FP16", torch.float32: "FP32",
    torch.float64: "FP64",
}  # fmt: skip
"""The protocol's names of torch's dtypes."""
FIELDS = ("value", "id", "prob", "top_k", "top_k_prob", "class", "top_k_class", "lengths")
_COMPUTED = {
    "value": "value",
    "id": "id",
    "prob": "prob",
    "top_k": "top_k",
    "top_k_prob": "top_k",
    "class": "id",
    "top_k_class": "top_k",
    "lengths": "value",
}
"""What must be computed of a layer to return a field of it."""
_REQUEST = ("id", "inputs", "outputs", "parameters")
_PARAMETERS = ("binary_data_output", "top_k", "priority", "timeout")
_INPUT = ("name", "shape", "datatype", "data", "parameters")
_OUTPUT = ("name", "parameters")
_OUTPUT_PARAMETERS = ("binary_data", "classification")
MAX_INPUTS = 2000
MAX_ID_LENGTH = 1000
MAX_PRIORITY = 2000
USUAL_PRIORITY = 1000
"""That of a request that names none. In this protocol 1 is the highest priority."""
_MAX_TIMEOUT_US = (1 << 63) - 1


class _Options(NamedTuple):
    is_binary: bool = False
    top_k: int | None = None
    priority: int | None = None
    timeout_s: float | None = None


def read(
    head: Mapping[str, Any], body: bytes | memoryview, inputs: ModelInputs, max_rows: int
) -> Asked:
    """Read an inference request.

    Raises:
        BadRequest: it is malformed, or does not fit the model.
    """
    document, binary = _divided(head, body)
    problems = Problems()
    _known_keys(document, _REQUEST, problems, "")
    request_id = document.get("id")
    if request_id is not None and not _is_text(request_id, MAX_ID_LENGTH):
        detail = f"id is not a text of at most {MAX_ID_LENGTH} characters"
        problems.problem("/id", detail, "type")
    options = _options(document.get("parameters"), problems)
    tensors = _outputs(document.get("outputs"), inputs, options, problems)
    outputs, fields = _to_compute(tensors)
    top_k = options.top_k if any("top_k" in own for own in fields) else None
    if options.top_k is not None and top_k is None:
        detail = f"top_k ({options.top_k}) is the size of <layer>/top_k, which no output is:"
        problems.problem("/parameters/top_k", f"{detail} ask for it, or remove top_k", "unused")
    given, pointers = _arrays(document.get("inputs"), binary, problems)
    needed = inputs.needed(outputs)
    rows, num_rows = from_arrays(given, needed, inputs, max_rows, problems, pointers)
    form = ProtocolForm(request_id, tensors)
    scheduling = (options.priority, options.timeout_s)
    return Asked(rows, num_rows, outputs, fields, top_k, form, *scheduling)


def arrays_of(head: Mapping[str, Any], body: bytes | memoryview) -> dict[str, Given]:
    """Return the tensors of an inference request by name.

    Raises:
        BadRequest: it is malformed.
    """
    document, binary = _divided(head, body)
    return _arrays(document.get("inputs"), binary, Problems())[0]


def _divided(
    head: Mapping[str, Any], body: bytes | memoryview
) -> tuple[dict[str, Any], memoryview]:
    """Return the JSON of a request, and the bytes after it."""
    size, data = head.get("json_bytes"), memoryview(body)
    if size is None:
        size = len(data)
    elif type(size) is not int or not 0 <= size <= len(data):
        detail = f"Inference-Header-Content-Length is {str(size)[:40]}, and the body has"
        raise bad(f"{detail} {len(data):,} bytes", "header", status=400)
    document = parsed(data[:size])
    if not isinstance(document, dict):
        raise bad("the request is not a JSON object", "type", status=400)
    return document, data[size:]


def _options(given: Any, problems: Problems) -> _Options:
    if given is None:
        return _Options()
    if not isinstance(given, dict):
        problems.problem("/parameters", "parameters is not an object", "type")
        return _Options()
    _known_keys(given, _PARAMETERS, problems, "/parameters")
    is_binary = _flag(given, "binary_data_output", problems, "/parameters")
    top_k = _number(given, "top_k", problems, "/parameters")
    priority = _scheduling(given, "priority", MAX_PRIORITY, problems)
    timeout_us = _scheduling(given, "timeout", _MAX_TIMEOUT_US, problems)
    return _Options(
        bool(is_binary),
        top_k,
        None if priority is None else USUAL_PRIORITY - priority,
        None if timeout_us is None else timeout_us / 1e6,
    )


def _scheduling(given: Mapping[str, Any], key: str, most: int, problems: Problems) -> int | None:
    """Return a number of the schedule policy extension; None: the default (0)."""
    found = given.get(key, 0)
    if type(found) is not int or not 0 <= found <= most:
        detail = f"{key} is {str(found)[:40]!r}, and not an integer from 0 to {most:,}"
        problems.problem(f"/parameters/{key}", detail, "out_of_range")
        return None
    return found or None


# --- outputs ---------------------------------------------------------------------------------


def _outputs(
    given: Any, inputs: ModelInputs, options: _Options, problems: Problems
) -> tuple[AskedTensor, ...]:
    if given is None or given == []:
        return tuple(default_tensors(inputs, options.top_k, is_binary=options.is_binary))
    if not isinstance(given, list) or len(given) > MAX_OUTPUTS:
        detail = f"outputs is not a list of at most {MAX_OUTPUTS:,} objects"
        problems.problem("/outputs", detail, "type")
        return ()
    found: dict[str, AskedTensor] = {}
    for number, item in enumerate(given):
        tensor = _output(number, item, inputs, options, problems)
        if tensor is None:
            continue
        if tensor.name in found:
            detail = f"{tensor.name!r} is listed twice: remove one"
            problems.problem(f"/outputs/{number}", detail, "repeated")
        found[tensor.name] = tensor
    for tensor in [*found.values()]:  # only they distinguish padding from values
        name = f"{tensor.layer}/lengths"
        if tensor.layer in inputs.steps and name not in found:
            found[name] = AskedTensor(name, tensor.layer, "lengths", tensor.is_binary)
    return tuple(found.values())


def _output(
    number: int, item: Any, inputs: ModelInputs, options: _Options, problems: Problems
) -> AskedTensor | None:
    pointer = f"/outputs/{number}"
    name = item.get("name") if isinstance(item, dict) else None
    if not isinstance(name, str):
        problems.problem(pointer, "an output is an object with a name", "type")
        return None
    _known_keys(item, _OUTPUT, problems, pointer)
    given = item.get("parameters")
    if given is not None and not isinstance(given, dict):
        problems.problem(f"{pointer}/parameters", "parameters is not an object", "type")
        given = None
    given = given or {}
    _known_keys(given, _OUTPUT_PARAMETERS, problems, f"{pointer}/parameters")
    layer, slash, field = name.partition("/")
    field = field if slash else "value"
    if field not in FIELDS:
        detail = f"there is no field {field[:100]!r}; there are: {', '.join(FIELDS)}"
        detail += similar(field, FIELDS)
        problems.problem(f"{pointer}/name", detail, "unknown_field")
        return None
    is_binary = _flag(given, "binary_data", problems, f"{pointer}/parameters")
    num_classes = _number(given, "classification", problems, f"{pointer}/parameters")
    computed = _COMPUTED[field] if num_classes is None else "top_k"
    pointers = (f"{pointer}/name", f"{pointer}/name", "/parameters")
    before = len(problems.problems)
    check_output(inputs, layer, (computed,), options.top_k, problems, pointers)
    if len(problems.problems) > before:
        return None
    problem = _misfit(layer, field, num_classes, inputs)
    if problem is not None:
        problems.problem(f"{pointer}/{problem[0]}", problem[1], "no_such_output")
        return None
    binary = options.is_binary if is_binary is None else is_binary
    return AskedTensor(name, layer, field, binary, num_classes)


def _misfit(
    layer: str, field: str, num_classes: int | None, inputs: ModelInputs
) -> tuple[str, str] | None:
    """Return what does not exist for a layer, and why; None: all does."""
    if field == "lengths" and layer not in inputs.steps:
        return "name", f"{layer!r} has one value for each row, and no lengths"
    if field in CLASS_FIELDS.values() and not has_names(layer, inputs):
        return "name", f"the classes of {layer!r} have no names: ask for {layer}/id"
    if num_classes is None:
        return None
    if field != "value":
        detail = f"classification is of the value of a layer, and this is its {field}"
        return "parameters/classification", f"{detail}: ask for {layer}/value"
    size = inputs.outputs[layer].num_classes or 0
    if 0 <= size < num_classes:
        detail = f"classification is {num_classes}, and the last axis of {layer!r} has {size}"
        return "parameters/classification", f"{detail} entries: set at most {size}"
    return None


def has_names(layer: str, inputs: ModelInputs) -> bool:
    """Return whether the classes that an output scores have names."""
    return layer in inputs.classes and inputs.classes[layer].named is not None


def default_tensors(
    inputs: ModelInputs, top_k: int | None = None, *, is_binary: bool = False
) -> list[AskedTensor]:
    """Return what is returned if a request names no outputs."""
    found: list[AskedTensor] = []
    for layer in inputs.default_outputs:
        fields: list[str] = []
        for field in inputs.default_fields(layer, top_k):
            fields += [field, "top_k_prob"] if field == "top_k" else [field]
            if field in CLASS_FIELDS and has_names(layer, inputs):
                fields.append(CLASS_FIELDS[field])
        fields += ["lengths"] if layer in inputs.steps else []
        found += [AskedTensor(f"{layer}/{field}", layer, field, is_binary) for field in fields]
    return found


def _to_compute(
    tensors: Sequence[AskedTensor],
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the layers to compute, and what of each."""
    found: dict[str, set[str]] = {}
    for tensor in tensors:
        own = found.setdefault(tensor.layer, set())
        if tensor.field != "lengths":
            own.add(_COMPUTED[tensor.field])
    order = ("value", "id", "prob", "top_k")
    return tuple(found), tuple(
        tuple(field for field in order if field in own) or ("value",) for own in found.values()
    )


# --- inputs ----------------------------------------------------------------------------------


def _arrays(
    given: Any, binary: memoryview, problems: Problems
) -> tuple[dict[str, Given], dict[str, str]]:
    """Return the tensors of a request by name, and the pointers to them."""
    pointers = {"": "/inputs"}
    if not isinstance(given, list) or len(given) > MAX_INPUTS:
        detail = f"inputs is not a list of at most {MAX_INPUTS:,} objects"
        problems.problem("/inputs", detail, "type")
        problems.refuse()
        raise AssertionError
    found: dict[str, Given] = {}
    start = 0
    for number, item in enumerate(given):
        pointer = f"/inputs/{number}"
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str):
            problems.problem(pointer, "an input is an object with a name", "type")
            continue
        if name in found:
            detail = f"{name[:100]!r} is given twice: remove one"
            problems.problem(pointer, detail, "repeated")
        before = len(problems.problems)
        size = _binary_size(item, len(binary) - start, pointer, problems)
        if len(problems.problems) > before:
            problems.refuse()  # where the next tensors begin is not known
        content = None if size is None else binary[start : start + size]
        start += size or 0
        pointers[name] = pointer
        try:
            found[name] = _tensor(item, content)
        except ValueError as cause:
            problems.problem(pointer, f"input {name[:100]!r}: {cause}", "tensor")
    if start != len(binary):
        detail = f"the binary_data_size of all inputs is {start:,}, and after the JSON there are"
        problems.problem("/inputs", f"{detail} {len(binary):,} bytes", "binary_data_size")
    problems.refuse()
    return found, pointers


def _binary_size(
    item: Mapping[str, Any], left: int, pointer: str, problems: Problems
) -> int | None:
    """Return the number of bytes of an input after the JSON; None: it is in the JSON."""
    _known_keys(item, _INPUT, problems, pointer)
    given = item.get("parameters")
    if given is None:
        return None
    if not isinstance(given, dict):
        problems.problem(f"{pointer}/parameters", "parameters is not an object", "type")
        return None
    _known_keys(given, ("binary_data_size",), problems, f"{pointer}/parameters")
    size = given.get("binary_data_size")
    if size is None:
        return None
    if type(size) is not int or not 0 <= size <= left:
        detail = f"binary_data_size is {str(size)[:40]}, and {left:,} bytes are left"
        problems.problem(f"{pointer}/parameters/binary_data_size", detail, "binary_data_size")
        return 0
    if "data" in item:
        detail = "data and binary_data_size are two forms of the same: give one of them"
        problems.problem(f"{pointer}/data", detail, "repeated")
    return size


def _tensor(item: Mapping[str, Any], content: memoryview | None) -> Given:
    """Return the tensor of an input.

    Raises:
        ValueError: it does not fit its shape or datatype.
    """
    shape, datatype = item.get("shape"), item.get("datatype")
    if not is_sizes(shape):
        raise ValueError(f"shape is not a list of at most {MAX_AXES} sizes")
    if datatype != _TEXTS and (not isinstance(datatype, str) or datatype not in _NUMPY):
        shown = datatype[:20] if isinstance(datatype, str) else "missing"
        raise ValueError(f"datatype is {shown}; there are: {', '.join([*_NUMPY, _TEXTS])}")
    if content is None and "data" not in item:
        raise ValueError("data is missing")
    if datatype == _TEXTS:
        texts = _flat(item["data"], shape) if content is None else _texts(content)
        return _checked_texts(texts, shape)
    if content is None:
        return _numbers(item["data"], datatype, shape)
    array = array_of(content, np.dtype(_NUMPY[datatype]), shape)
    return from_bfloat16(array) if datatype == "BF16" else array


def _checked_texts(texts: list[Any], shape: Sequence[int]) -> list[str]:
    if len(shape) != 1 or len(texts) != shape[0]:
        detail = f"shape is {[*shape]}, and there are {len(texts)} texts:"
        raise ValueError(f"{detail} {_TEXTS} has the shape [rows]")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"data of the datatype {_TEXTS} is a list of texts")
    return texts


def _texts(content: memoryview) -> list[str]:
    """Return texts that have their number of bytes before them."""
    found: list[str] = []
    at = 0
    while at < len(content):
        if at + 4 > len(content):
            raise ValueError("its last text is cut short")
        (size,) = struct.unpack_from("<I", content, at)
        at += 4
        if size > len(content) - at:
            raise ValueError(
                f"text {len(found)} has {size:,} bytes, and {len(content) - at:,} are left"
            )
        try:
            found.append(str(content[at : at + size], "utf-8"))
        except UnicodeDecodeError:
            raise ValueError(f"text {len(found)} is not UTF-8") from None
        at += size
    return found


def _flat(data: Any, shape: Sequence[int]) -> list[Any]:
    """Return a flattened list; nested ones are allowed, too."""
    if not isinstance(data, list):
        raise ValueError("data is not a list")
    for size in shape[1:]:
        if not data or not isinstance(data[0], list):
            break
        if not all(isinstance(part, list) and len(part) == size for part in data):
            raise ValueError(f"data is nested otherwise than its shape {[*shape]}")
        data = [item for part in data for item in part]
    return data


def _numbers(data: Any, datatype: str, shape: Sequence[int]) -> NDArray[Any]:
    """Return an array of numbers in JSON."""
    flat = _flat(data, shape)
    if len(flat) != math.prod(shape):
        raise ValueError(
            f"its shape {[*shape]} has {math.prod(shape):,} values, and data {len(flat):,}"
        )
    types = {*map(type, flat)}
    kind = np.dtype("f4" if datatype == "BF16" else _NUMPY[datatype])
    allowed = {bool, int} if kind.kind == "b" else {int} if kind.kind in "iu" else {int, float}
    if kind.kind == "f" and str in types:
        flat = _named(flat)
        types = {*map(type, flat)}
    if not types <= allowed:
        wrong = next(item for item in flat if type(item) not in allowed)
        shown = "a list" if isinstance(wrong, list | dict) else repr(wrong)[:40]
        raise ValueError(f"data has {shown}, which is no {datatype}")
    if kind.kind == "b" and not {*flat} <= {0, 1}:
        raise ValueError("data of the datatype BOOL is true, false, 0 or 1")
    try:
        with np.errstate(over="ignore"):
            return np.array(flat, kind).reshape([*shape])
    except OverflowError:
        limits = np.iinfo(kind)
        detail = f"data has an integer outside [{limits.min}, {limits.max}]"
        raise ValueError(f"{detail}, the range of {datatype}") from None


def _named(flat: list[Any]) -> list[Any]:
    try:
        return jsonio_numbers(flat)
    except TypeError:
        return flat


# --- keys ------------------------------------------------------------------------------------


def _known_keys(
    given: Mapping[str, Any], known: Sequence[str], problems: Problems, base: str
) -> None:
    for name in given:
        if name not in known:
            detail = f"there is no key {name[:100]!r}; there are: {', '.join(known)}"
            detail += similar(name, known)
            problems.problem(f"{base}/{token(name)}", detail, "unknown")


def _flag(given: Mapping[str, Any], key: str, problems: Problems, base: str) -> bool | None:
    found = given.get(key)
    if found is not None and not isinstance(found, bool):
        problems.problem(f"{base}/{key}", f"{key} is not true or false", "type")
        return None
    return found


def _number(given: Mapping[str, Any], key: str, problems: Problems, base: str) -> int | None:
    found = given.get(key)
    if found is not None and not (type(found) is int and 1 <= found <= MAX_TOP_K):
        problems.problem(
            f"{base}/{key}", f"{key} is not an integer from 1 to {MAX_TOP_K:,}", "type"
        )
        return None
    return found


def _is_text(value: Any, most: int) -> bool:
    return isinstance(value, str) and len(value) <= most


# --- metadata --------------------------------------------------------------------------------


def metadata(inputs: ModelInputs, model: str, versions: Sequence[int]) -> dict[str, Any]:
    """Return the metadata of a model: its versions, and the tensors that it takes and returns.

    An axis of -1 is the rows, or the steps of sequences. The outputs are those of a request that
    names none; any other layer may be named, too.
    """
    return {
        "name": model,
        "versions": [str(version) for version in versions],
        "platform": PLATFORM,
        "inputs": [
            tensor
            for name in inputs.needed(inputs.default_outputs)
            for tensor in _described_input(name, inputs)
        ],
        "outputs": [_described_output(tensor, inputs) for tensor in default_tensors(inputs)],
    }


def _described_input(name: str, inputs: ModelInputs) -> list[dict[str, Any]]:
    shape, field = inputs.shapes[name], inputs.fields[name]
    classes = field.classes if isinstance(field, IntegerField) else None
    takes_texts = inputs.meaning.unit(name) is not None if shape.is_sequence else False
    if takes_texts or (classes is not None and isinstance(classes[0], str)):
        return [{"name": name, "datatype": _TEXTS, "shape": [-1]}]
    datatype = "INT64" if shape.dim is not None and not shape.has_values else "FP32"
    if not shape.is_sequence:
        return [{"name": name, "datatype": datatype, "shape": [-1, *shape.shape]}]
    item = (2,) if shape.has_values else shape.shape[1:]
    lengths = {"name": lengths_of(name), "datatype": "INT64", "shape": [-1]}
    return [{"name": name, "datatype": datatype, "shape": [-1, -1, *item]}, lengths]


def _described_output(tensor: AskedTensor, inputs: ModelInputs) -> dict[str, Any]:
    output = inputs.outputs[tensor.layer]
    rows = [-1] if output.steps is None else [-1, -1]
    best = [*rows, *output.item[:-1]]
    most = [*best, entries(inputs, tensor.layer, None)]
    shapes = {
        "value": [*rows, *output.item],
        "top_k": most,
        "top_k_prob": most,
        "top_k_class": most,
        "lengths": [-1],
    }
    if tensor.field in CLASS_FIELDS.values():
        datatype = _TEXTS if isinstance(inputs.classes[tensor.layer].values[0], str) else "INT64"
    elif tensor.field in {"prob", "top_k_prob"}:
        datatype = "FP32"
    else:
        dtype = output.dtype if tensor.field == "value" else torch.int64
        datatype = DATATYPES.get(dtype, "FP32")
    return {"name": tensor.name, "datatype": datatype, "shape": shapes.get(tensor.field, best)}
