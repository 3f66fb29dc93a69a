"""The header of safetensors files, and their names of dtypes; without torch, for the worker."""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

DTYPE_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32",
    "uint32": "U32", "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "complex64": "C64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""safetensors' names of the dtypes that a capture may have."""


def header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], about: Mapping[str, str]
) -> bytes:
    """Return the start of a file that stores tensors one after another; ``about`` is its metadata.

    A tensor is its name, torch's name of its dtype, its shape, and its size in bytes.
    """
    entries: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    end = 0
    for name, dtype, shape, size in tensors:
        begin, end = end, end + size
        entries[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
