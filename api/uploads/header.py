"""Validate the header of an uploaded safetensors file. It does not read the tensors.

Eight bytes give the length of a JSON object. The object has each tensor's dtype, shape and offsets
into the bytes after it, and texts as ``__metadata__``. The tensors must cover these bytes exactly,
without gaps that could hide data and without overlaps.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

from glasshouse.errors import InvalidCheckpoint

MAX_TENSORS = 100_000
_MAX_NAME = 512
_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
"""Bytes of one value."""
_METADATA = "__metadata__"


class Header(NamedTuple):
    """The content of a header."""

    tensors: dict[str, dict[str, Any]]
    """``dtype`` and ``shape`` of each tensor."""
    metadata: dict[str, str]


def read_header(path: Path, max_bytes: int) -> Header:
    """Read and check the header of a file.

    Raises:
        InvalidCheckpoint: It is not a safetensors file, or its header does not match its content.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            _refuse("it is no safetensors file, or one that is cut short")
        if length > max_bytes:
            _refuse(f"its header has {length:,} bytes, and {max_bytes:,} are the most")
        text = file.read(length)
    entries = _decoded(text)
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        _refuse(f"{_METADATA} must be an object of texts")
    if len(entries) > MAX_TENSORS:
        _refuse(f"it has {len(entries):,} tensors, and {MAX_TENSORS:,} are the most")
    places = sorted(_place(name, entry) for name, entry in entries.items())
    end = 0
    for begins, ends, name in places:
        if begins != end:
            _refuse(f"the bytes of {name!r} begin at {begins}, and those before it end at {end}")
        end = ends
    if end != size - 8 - length:
        _refuse(f"its tensors end at {end}, and there are {size - 8 - length} bytes of them")
    tensors = {n: {"dtype": e["dtype"], "shape": e["shape"]} for n, e in entries.items()}
    return Header(tensors, metadata)  # pyright: ignore[reportUnknownArgumentType]


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_refuse)
    except RecursionError:
        _refuse("its header is nested too deeply")
    except ValueError as error:
        _refuse(f"its header is not JSON: {error}"[:300])
    if not isinstance(found, dict):
        _refuse("its header is no object")
    return found  # pyright: ignore[reportUnknownVariableType]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object without duplicate names, which readers could resolve differently."""
    found = dict(pairs)
    if len(found) != len(pairs):
        _refuse("its header has a name twice")
    return found


def _place(name: str, entry: Any) -> tuple[int, int, str]:
    """Return begin, end and name of a tensor."""
    shown = name[:100]
    if not name or len(name) > _MAX_NAME:
        _refuse(f"a tensor is named {shown!r}")
    known = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    if known.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(f"the entry of {shown!r} must have dtype, shape and data_offsets")
    dtype: Any = known["dtype"]
    if not isinstance(dtype, str) or dtype not in _BYTES:
        _refuse(f"{shown!r} has the type {str(dtype)[:40]!r}; known are {', '.join(_BYTES)}")
    shape, offsets = _sizes(known["shape"]), _sizes(known["data_offsets"])
    if shape is None or len(shape) > 64 or offsets is None or len(offsets) != 2:
        _refuse(f"shape and data_offsets of {shown!r} must be lists of whole numbers from 0 on")
    begins, ends = offsets
    if ends - begins != math.prod(shape) * _BYTES[dtype]:
        _refuse(f"{shown!r} of {dtype} and {shape} does not take {ends - begins} bytes")
    return begins, ends, name


def _sizes(value: Any) -> list[int] | None:
    """Return a list of non-negative integers; None if it is something else."""
    items = cast("list[Any]", value) if isinstance(value, list) else [None]
    is_good = all(type(item) is int and 0 <= item < 2**53 for item in items)
    return cast("list[int]", items) if is_good else None


def _refuse(reason: str) -> NoReturn:
    raise InvalidCheckpoint(f"The weights cannot be read: {reason}.")
