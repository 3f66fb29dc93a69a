"""Arrays as bytes: npy and safetensors, read without trust in what they say of themselves.

Headers are read by parsers of our own, which know numbers only; nothing is unpickled. An array is
created only after its shape was compared with the bytes that are there.
"""

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from engine.core.safetensors_header import header
from engine.inference.blocks import Column
from engine.serving.asked import bad, token

Bytes = bytes | memoryview
MAX_AXES = 16
_MAX_HEADER_BYTES = 1 << 20
_MAX_NPY_HEADER_BYTES = 4096
_MAGIC = b"\x93NUMPY"
_NPY_HEADER = re.compile(
    rb"\{\s*'descr':\s*'([<>|=]?)([A-Za-z])(\d{0,3})',\s*'fortran_order':\s*(True|False),"
    rb"\s*'shape':\s*\(([\d\s,]*)\),?\s*\}\s*"
)
_KINDS = frozenset(
    {"f2", "f4", "f8", "b1", *(f"{sign}{size}" for sign in "iu" for size in (1, 2, 4, 8))}
)
BFLOAT16 = "BF16"
_SAFETENSORS = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4",
    "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", BFLOAT16: "<u2",
}  # fmt: skip


def array_of(data: Bytes, dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
    """Return an array over bytes.

    Raises:
        ValueError: the shape does not have as many bytes.
    """
    if len(shape) > MAX_AXES:
        raise ValueError(f"it has {len(shape)} axes, and at most {MAX_AXES} are read")
    wanted = math.prod(shape) * dtype.itemsize
    if wanted != len(data):
        size = f"{wanted:,} bytes" if wanted < 2**63 else "more bytes than any memory"
        shown = str([*shape])[:200]
        raise ValueError(f"its shape {shown} has {size}, and there are {len(data):,}")
    if not wanted:
        return np.empty([min(size, 2**31) for size in shape], dtype)
    return np.frombuffer(data, dtype).reshape([*shape])


def from_bfloat16(bits: NDArray[Any]) -> NDArray[np.float32]:
    """Return values whose upper 16 bits are given, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


# --- npy -------------------------------------------------------------------------------------


def read_npy(body: Bytes) -> NDArray[Any]:
    """Read one array of numbers, as ``numpy.save`` writes it.

    Raises:
        BadRequest: it is something else.
    """
    try:
        return _read_npy(memoryview(body))
    except ValueError as cause:
        detail = f"the body is not an array in npy format: {cause}"
        raise bad(detail, "npy", status=400) from None


def _read_npy(data: memoryview) -> NDArray[Any]:
    if bytes(data[:6]) != _MAGIC or len(data) < 12:
        raise ValueError("it does not start with the magic of npy")
    size_bytes = 2 if data[6] == 1 else 4
    start = 8 + size_bytes
    length = int.from_bytes(data[8:start], "little")
    if data[6] not in {1, 2, 3} or length > _MAX_NPY_HEADER_BYTES or start + length > len(data):
        raise ValueError("its header is damaged")
    found = _NPY_HEADER.fullmatch(bytes(data[start : start + length]))
    if found is None:
        raise ValueError("its header does not describe one array of numbers")
    order, kind, size, is_fortran, sizes = (part.decode() for part in found.groups())
    if f"{kind}{size}" not in _KINDS:
        detail = f"its dtype is {order}{kind}{size}, and integers, booleans and floats of 16, 32"
        raise ValueError(f"{detail} or 64 bits are read")
    shape = [int(part) for part in re.findall(r"\d{1,20}", sizes)]
    dtype = np.dtype(f"{'<' if order in {'', '='} else order}{kind}{size}")
    content = data[start + length :]
    if is_fortran == "True":
        return array_of(content, dtype, shape[::-1]).transpose()
    return array_of(content, dtype, shape)


def npy(array: NDArray[Any]) -> bytes:
    """Return an array as ``numpy.save`` writes it."""
    text = repr({"descr": array.dtype.str, "fortran_order": False, "shape": array.shape})
    padded = text + " " * (-(11 + len(text)) % 64) + "\n"
    size = struct.pack("<H", len(padded))
    return b"".join((_MAGIC, b"\x01\x00", size, padded.encode("latin-1"), array.tobytes()))


# --- safetensors -----------------------------------------------------------------------------


def read_safetensors(body: Bytes) -> dict[str, NDArray[Any]]:
    """Read arrays of numbers by their names.

    Raises:
        BadRequest: it is something else.
    """
    data = memoryview(body)
    (length,) = struct.unpack("<Q", data[:8]) if len(data) >= 8 else (-1,)
    if not 0 < length <= min(len(data) - 8, _MAX_HEADER_BYTES):
        raise _not_safetensors("its header is cut short, damaged or larger than a megabyte")
    try:
        entries = json.loads(bytes(data[8 : 8 + length]), object_pairs_hook=_unique)
    except ValueError as cause:
        raise _not_safetensors(f"its header cannot be read: {str(cause)[:200]}") from None
    if not isinstance(entries, dict):
        raise _not_safetensors("its header is not an object")
    entries.pop("__metadata__", None)
    found: dict[str, NDArray[Any]] = {}
    end = 0
    content = data[8 + length :]
    for name, entry in sorted(entries.items(), key=lambda item: _offsets(*item)):
        begin, last = _offsets(name, entry)
        if begin != end or last > len(content):
            raise _not_safetensors("its tensors overlap, have gaps, or end after the body")
        found[name] = _tensor(name, entry, content[begin:last])
        end = last
    if end != len(content):
        raise _not_safetensors(f"{len(content) - end:,} bytes after its last tensor")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _offsets(name: str, entry: Any) -> tuple[int, int]:
    found = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not is_sizes(found) or len(found) != 2 or found[0] > found[1]:
        raise _not_safetensors(f"tensor {name[:100]!r} has no offsets")
    return found[0], found[1]


def _tensor(name: str, entry: Mapping[str, Any], content: memoryview) -> NDArray[Any]:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in _SAFETENSORS:
        shown = dtype[:20] if isinstance(dtype, str) else "missing"
        detail = f"the dtype of tensor {name[:100]!r} is {shown}; these are read:"
        raise bad(f"{detail} {', '.join(_SAFETENSORS)}", "dtype", f"/{token(name)}")
    if not is_sizes(shape):
        raise _not_safetensors(f"tensor {name[:100]!r} has no shape")
    try:
        array = array_of(content, np.dtype(_SAFETENSORS[dtype]), shape)
    except ValueError as cause:
        raise _not_safetensors(f"tensor {name[:100]!r}: {cause}") from None
    return from_bfloat16(array) if dtype == BFLOAT16 else array


def _not_safetensors(why: str) -> Exception:
    return bad(f"the body is not a safetensors file: {why}", "safetensors", status=400)


def is_sizes(found: Any) -> TypeGuard[list[int]]:
    """Return whether a value is a list of integers that can be sizes, few enough to multiply."""
    return (
        isinstance(found, list)
        and len(found) <= MAX_AXES
        and all(type(size) is int and 0 <= size < 2**63 for size in found)
    )


def safetensors(arrays: Mapping[str, NDArray[Any]], about: Mapping[str, str]) -> bytes:
    """Return a safetensors file, widest elements first, so that every tensor is aligned."""
    order = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    kinds = (
        (name, arrays[name].dtype.name, arrays[name].shape, arrays[name].nbytes) for name in order
    )
    return b"".join([header(kinds, about), *(arrays[name].tobytes() for name in order)])


def padded(column: Column) -> NDArray[Any]:
    """Return [rows, …]; of a value per step [rows, longest, …], with zeros after the end."""
    if column.lengths is None:
        return column.values.numpy()
    return column.padded(max(1, int(column.lengths.max()))).numpy()
