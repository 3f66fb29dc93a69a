"""Tensors as numpy arrays. bfloat16 and 8-bit floats have the dtypes of ml_dtypes."""

import json
from collections.abc import Mapping
from typing import Any, cast

import ml_dtypes
import numpy as np
import safetensors
from numpy.typing import NDArray

from glasshouse.errors import APIError

Array = NDArray[Any]

_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


def read_tensors(data: bytes) -> dict[str, Array]:
    """Read the bytes of a safetensors file into writable arrays."""
    try:
        entries = cast("list[tuple[str, dict[str, Any]]]", safetensors.deserialize(data))  # pyright: ignore[reportUnknownMemberType]
    except safetensors.SafetensorError as cause:
        raise APIError(f"the response is not a valid safetensors file: {cause}") from cause
    return {name: _array(name, entry) for name, entry in entries}


def read_outputs(data: bytes) -> dict[str, Array]:
    """Read the outputs of an inference; add the names of classes if they have any.

    These are ``<layer>/class`` of ``<layer>/id``, and ``<layer>/top_k_class`` of ``<layer>/top_k``.

    Raises:
        APIError: this is not a valid safetensors file.
    """
    tensors = read_tensors(data)
    size = int.from_bytes(data[:8], "little")
    metadata: dict[str, str] = json.loads(data[8 : 8 + size]).get("__metadata__") or {}
    for name, listed in metadata.items():
        layer, _, key = name.rpartition("/")
        for field, title in (("id", "class"), ("top_k", "top_k_class")):
            if key == "classes" and f"{layer}/{field}" in tensors:
                numbers = tensors[f"{layer}/{field}"]
                tensors[f"{layer}/{title}"] = np.array(json.loads(listed))[numbers]
    return dict(sorted(tensors.items()))


def _array(name: str, entry: dict[str, Any]) -> Array:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise APIError(
            f"tensor {name!r} has dtype {entry['dtype']}, which numpy does not support; "
            "open the file with torch"
        )
    return np.frombuffer(entry["data"], dtype=dtype).reshape(entry["shape"])


def as_torch(values: Array | Mapping[str, Array]) -> Any:
    """Convert an array, or each array of a dict, to a torch tensor of the same dtype.

    String arrays in a dict stay unchanged, because torch has no string tensors.

    Raises:
        ImportError: torch is not installed.
    """
    from glasshouse.client.modules.loading import as_tensors  # noqa: PLC0415 (imports torch)

    if isinstance(values, Mapping):
        texts = {name: array for name, array in values.items() if array.dtype.kind == "U"}
        numbers = {name: array for name, array in values.items() if name not in texts}
        return as_tensors(numbers) | texts
    return as_tensors({"": values})[""]


def write_tensors(tensors: dict[str, Array]) -> bytes:
    """Serialize tensors to the bytes of a safetensors file."""
    from safetensors.numpy import save  # noqa: PLC0415 - only for --save

    return save({name: np.ascontiguousarray(array) for name, array in tensors.items()})
