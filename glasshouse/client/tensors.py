"""Tensors as numpy arrays. bfloat16 and the 8-bit floats come in the dtypes of ml_dtypes."""

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
    """Read the bytes of a safetensors file; the arrays may be written to."""
    try:
        entries = cast("list[tuple[str, dict[str, Any]]]", safetensors.deserialize(data))  # pyright: ignore[reportUnknownMemberType]
    except safetensors.SafetensorError as cause:
        raise APIError(f"the service sent tensors that cannot be read: {cause}") from cause
    return {name: _array(name, entry) for name, entry in entries}


def _array(name: str, entry: dict[str, Any]) -> Array:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise APIError(
            f"tensor {name!r} has the dtype {entry['dtype']}, which numpy cannot hold; "
            "open the file with torch"
        )
    return np.frombuffer(entry["data"], dtype=dtype).reshape(entry["shape"])


def as_torch(values: Array | Mapping[str, Array]) -> Any:
    """An array as a tensor of torch in its own dtype; a dict of arrays as a dict of tensors.

    Raises:
        ImportError: there is no torch.
    """
    from glasshouse.client.modules.loading import as_tensors  # noqa: PLC0415 (imports torch)

    if isinstance(values, Mapping):
        return as_tensors(values)
    return as_tensors({"": values})[""]


def write_tensors(tensors: dict[str, Array]) -> bytes:
    """Make the bytes of a safetensors file."""
    from safetensors.numpy import save  # noqa: PLC0415 - only for --save

    return save({name: np.ascontiguousarray(array) for name, array in tensors.items()})
