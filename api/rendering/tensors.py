"""Captured tensors: read only the requested part of their files, and write it in pieces.

A capture is one tensor of a safetensors file. It is memory-mapped; a slice is a view. Statistics
are computed and bytes are sent piece by piece. Uses only numpy, with bfloat16 and the 8-bit float
types from ml_dtypes.
"""

import io
import json
import math
import struct
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from starlette.concurrency import run_in_threadpool

from glasshouse import histogram_bins

Array = NDArray[Any]
MAX_HEADER_BYTES = 1 << 20
MAX_VALUES = 1000
PIECE = 1 << 18
"""Elements that are processed at once."""

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorDamaged(Exception):
    """The file of a capture is damaged."""


def open_tensor(path: Path, name: str = "tensor") -> Array:
    """Map one tensor of a safetensors file.

    Raises:
        FileNotFoundError: The file is gone.
        TensorDamaged: It is not a safetensors file, or has no such tensor.
    """
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > MAX_HEADER_BYTES:
                raise TensorDamaged(path.name)
            entry = json.loads(file.read(size))[name]
        dtype, shape = DTYPES[entry["dtype"]], tuple(int(length) for length in entry["shape"])
        begin, end = entry["data_offsets"]
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise TensorDamaged(path.name)
        if begin == end:
            return np.zeros(shape, dtype)
        return np.memmap(path, dtype, "r", offset=8 + size + begin, shape=shape)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise TensorDamaged(path.name) from error


def pieces(tensor: Array) -> Generator[Array]:
    """Yield the elements in C order as one-dimensional arrays of limited size."""
    if tensor.flags.c_contiguous:
        flat = tensor.reshape(-1)
        for begin in range(0, flat.size, PIECE):
            yield flat[begin : begin + PIECE]
        return
    if tensor[0].size <= PIECE or tensor.ndim == 1:
        rows = max(1, PIECE // max(1, tensor[0].size))
        for begin in range(0, len(tensor), rows):
            yield np.ascontiguousarray(tensor[begin : begin + rows]).reshape(-1)
        return
    for row in tensor:
        yield from pieces(row)


def as_float64(piece: Array) -> NDArray[np.float64]:
    """Convert a piece to float64; complex numbers become magnitudes."""
    return np.asarray(np.abs(piece) if piece.dtype.kind == "c" else piece).astype(np.float64)


def figures(tensor: Array) -> dict[str, float | None]:
    """Return the statistics of a ``stats`` row: moments of finite values, counts of the others."""
    with np.errstate(all="ignore"):
        return _figures(tensor)


def _figures(tensor: Array) -> dict[str, float | None]:
    count = nans = infs = zeros = 0
    total = squares = 0.0
    low, high = math.inf, -math.inf
    for piece in pieces(tensor):
        values = as_float64(piece)
        finite = values[np.isfinite(values)]
        nans += int(np.isnan(values).sum())
        infs += int(np.isinf(values).sum())
        zeros += int((values == 0).sum())
        if finite.size:
            count += finite.size
            total += float(finite.sum())
            squares += float(np.square(finite).sum())
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    found: dict[str, float | None] = dict.fromkeys(
        ("mean", "std", "min", "max", "l2", "absmax", "zeros")
    )
    if count:
        mean = total / count
        deviation = sum(_deviation(piece, mean) for piece in pieces(tensor))
        found["mean"], found["std"] = mean, math.sqrt(deviation / count)
        found["min"], found["max"] = low, high
        found["l2"], found["absmax"] = math.sqrt(squares), max(abs(low), abs(high))
    if tensor.size:
        found["zeros"] = zeros / tensor.size
    return found | {"nan": nans, "inf": infs}


def _deviation(piece: Array, mean: float) -> float:
    values = as_float64(piece)
    return float(np.square(values[np.isfinite(values)] - mean).sum())


def histogram(tensor: Array, num: int) -> dict[str, Any]:
    """Return edges and counts of at most ``num`` bins."""
    counts = np.zeros(histogram_bins.NUM_BINS, np.int64)
    with np.errstate(all="ignore"):
        for piece in pieces(tensor) if tensor.size else ():
            counts += np.bincount(
                histogram_bins.bins_of(as_float64(piece)), minlength=histogram_bins.NUM_BINS
            )
    held = np.flatnonzero(counts)
    return histogram_bins.coarse(held.tolist(), counts[held].tolist(), num)._asdict()


def values_of(tensor: Array) -> tuple[Any, bool]:
    """Return at most 1,000 values, and whether these are all.

    All values come as nested lists in the tensor's shape; otherwise the first ones come as a flat
    list.
    """
    if tensor.size <= MAX_VALUES:
        return _plain(np.asarray(tensor)), True
    first = next(pieces(tensor))[:MAX_VALUES]
    return _plain(first), False


def _plain(array: Array) -> Any:
    if array.dtype.kind in "biu":
        return array.tolist()
    if array.dtype.kind == "c":
        return np.stack([np.real(array), np.imag(array)], axis=-1).astype(np.float64).tolist()
    return array.astype(np.float64).tolist()


@dataclass(frozen=True, slots=True)
class TensorBody:
    """Bytes of known length to send, created piece by piece in the thread pool."""

    size_bytes: int
    parts: Iterable[bytes]

    async def stream(self) -> AsyncGenerator[bytes]:
        """Yield the bytes."""
        parts = iter(self.parts)
        while (part := await run_in_threadpool(next, parts, None)) is not None:
            yield part


def npy(tensor: Array) -> TensorBody:
    """Return a ``.npy`` file. Float types that numpy does not have are converted to float32."""
    dtype = tensor.dtype if _is_numpys(tensor) else np.dtype("<f4")
    head = _npy_head(tensor, dtype)

    def parts() -> Generator[bytes]:
        yield head
        for piece in pieces(tensor):
            yield piece.astype(dtype).tobytes()

    return TensorBody(len(head) + tensor.size * dtype.itemsize, parts())


def _npy_head(tensor: Array, dtype: np.dtype[Any]) -> bytes:
    head = io.BytesIO()
    description = np.lib.format.dtype_to_descr(dtype)
    about = {"descr": description, "fortran_order": False, "shape": tensor.shape}
    np.lib.format.write_array_header_1_0(head, about)
    return head.getvalue()


def _is_numpys(tensor: Array) -> bool:
    return tensor.dtype.kind in "biufc"


def safetensors(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> TensorBody:
    """Return a safetensors file, widest elements first, so that every tensor is aligned."""
    order: Sequence[str] = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    head = _head(tensors, order, metadata)

    def parts() -> Generator[bytes]:
        yield head
        for name in order:
            for piece in pieces(tensors[name]):
                yield piece.tobytes()

    return TensorBody(len(head) + sum(tensor.nbytes for tensor in tensors.values()), parts())


class Single:
    """A file of one mapped tensor without conversion; any byte range of it is cheap."""

    @staticmethod
    def of(tensor: Array, form: str) -> "Single | None":
        """Return a safetensors file, named ``tensor`` in it, or an ``npy``; None: needs conversion.

        Only safetensors stores every dtype without conversion.
        """
        if form == "safetensors":
            return Single(tensor, _head({"tensor": tensor}, ["tensor"], {}))
        if form == "npy" and _is_numpys(tensor):
            return Single(tensor, _npy_head(tensor, tensor.dtype))
        return None

    def __init__(self, tensor: Array, head: bytes) -> None:
        self._head = head
        self._data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        self.size_bytes = len(self._head) + self._data.size

    def between(self, begin: int, end: int) -> TensorBody:
        """Return the bytes from ``begin`` to ``end`` (exclusive)."""

        def parts() -> Generator[bytes]:
            if shown := self._head[begin:end]:
                yield shown
            first = len(self._head)
            for at in range(max(begin, first), end, 4 * PIECE):
                yield self._data[at - first : min(end, at + 4 * PIECE) - first].tobytes()

        return TensorBody(end - begin, parts())


def _head(tensors: Mapping[str, Array], order: Sequence[str], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.size * tensor.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
