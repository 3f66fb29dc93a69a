"""Inference requests of gRPC as those of HTTP with binary tensors, and their responses back."""

import struct
from collections.abc import Mapping
from typing import Any

import orjson

from api.serving.connection import Reply
from glasshouse import jsonio
from glasshouse.errors import BadRequest

_CONTENTS = {
    "BOOL": ("bool_contents", "?"),
    "INT8": ("int_contents", "b"),
    "INT16": ("int_contents", "h"),
    "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"),
    "UINT8": ("uint_contents", "B"),
    "UINT16": ("uint_contents", "H"),
    "UINT32": ("uint_contents", "I"),
    "UINT64": ("uint64_contents", "Q"),
    "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"),
}
"""By datatype: the field of ``contents`` with its values, and their code of `struct`."""
_OF_HTTP = ("binary_data", "binary_data_output", "binary_data_size")


def body_of(request: Any) -> tuple[bytes, int]:
    """Return the HTTP body of a ``ModelInferRequest``, and the number of bytes of its JSON.

    Raises:
        BadRequest: its tensors are not complete.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        detail = f"raw_input_contents has {len(raw)} entries, and inputs has {len(request.inputs)}"
        raise BadRequest(f"{detail}: give one for each, or contents in all inputs.")
    inputs: list[dict[str, Any]] = []
    contents: list[bytes] = []
    for number, given in enumerate(request.inputs):
        if raw and given.HasField("contents"):
            detail = f"Input {given.name[:100]!r} has contents, and raw_input_contents is given"
            raise BadRequest(f"{detail}: give one of them.")
        content: bytes = raw[number] if raw else _packed(given)
        parameters = _parameters(given) | {"binary_data_size": len(content)}
        about = {"name": given.name, "datatype": given.datatype, "shape": [*given.shape]}
        inputs.append(about | {"parameters": parameters})
        contents.append(content)
    document: dict[str, Any] = {
        "parameters": _parameters(request) | {"binary_data_output": True},
        "inputs": inputs,
        "outputs": [
            {"name": wanted.name, "parameters": _parameters(wanted)} for wanted in request.outputs
        ],
    }
    if request.id:
        document["id"] = request.id
    text = jsonio.dumps(document).encode()
    return b"".join([text, *contents]), len(text)


def fill_response(response: Any, reply: Reply) -> None:
    """Write the reply of a replica into a ``ModelInferResponse``."""
    size = int(reply.head.get("json_bytes", len(reply.body)))
    document: dict[str, Any] = orjson.loads(reply.body[:size])
    response.model_name = document["model_name"]
    response.model_version = document["model_version"]
    response.id = document.get("id", "")
    for name, value in document.get("parameters", {}).items():
        text = ", ".join(value) if isinstance(value, list) else str(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        response.parameters[name].string_param = text
    for output in document["outputs"]:
        response.outputs.add(
            name=output["name"], datatype=output["datatype"], shape=output["shape"]
        )
        end = size + int(output["parameters"]["binary_data_size"])
        response.raw_output_contents.append(reply.body[size:end])
        size = end


def fill_metadata(response: Any, document: Mapping[str, Any]) -> None:
    """Write the metadata of a model into a ``ModelMetadataResponse``."""
    response.name, response.platform = document["name"], document["platform"]
    response.versions.extend(document["versions"])
    for kind in ("inputs", "outputs"):
        for tensor in document[kind]:
            getattr(response, kind).add(**tensor)


def _packed(given: Any) -> bytes:
    """Return the typed contents of an input as the bytes of a tensor."""
    found, datatype = given.contents, given.datatype
    if datatype == "BYTES":
        texts = found.bytes_contents
        return b"".join(part for text in texts for part in (struct.pack("<I", len(text)), text))
    if datatype not in _CONTENTS:
        listed = ", ".join([*_CONTENTS, "BYTES"])
        detail = f"Input {given.name[:100]!r} has the datatype {datatype[:20]!r}: as contents send"
        raise BadRequest(f"{detail} {listed}, or use raw_input_contents.")
    field, code = _CONTENTS[datatype]
    values = getattr(found, field)
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except struct.error as error:
        raise BadRequest(f"Input {given.name[:100]!r} as {datatype}: {error}.") from None


def _parameters(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in message.parameters.items():
        if name in _OF_HTTP:
            raise BadRequest(f"{name} is a parameter of HTTP: remove it. gRPC is always binary.")
        kind = value.WhichOneof("parameter_choice")
        found[name] = None if kind is None else getattr(value, kind)
    return found
