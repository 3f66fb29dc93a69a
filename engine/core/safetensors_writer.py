"""Write safetensors files in pieces, with their digest, without blocking other threads; read them.

The safetensors library's writer holds the GIL until the whole file is written, which would block
training steps. The library reads the files written here like any others. `read_tensors` allocates
memory for what it reads; the library maps the file, so a tensor to keep would have to be copied.
"""

import hashlib
import itertools
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from engine.core.precision import dtype_name
from engine.core.safetensors_header import DTYPE_NAMES, header
from glasshouse.failpoints import failpoint

PIECE = 4 * 2**20
"""The bytes that are written at once."""
_DTYPES = {short: getattr(torch, name) for name, short in DTYPE_NAMES.items()}


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write tensors of any device, and texts by name; not durably: for what may be lost.

    Raises:
        OSError: the file cannot be written.
    """
    on_host = {name: item.detach().cpu().contiguous() for name, item in tensors.items()}
    with path.open("wb") as file:
        file.writelines(pieces_of(on_host, metadata))


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file durably; return its ``size_bytes`` and ``sha256``.

    Raises:
        OSError: the file cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        failpoint("checkpoint.sync")
        os.fsync(file.fileno())
    return {"size_bytes": size, "sha256": digest.hexdigest()}


def described(path: Path) -> dict[str, Any]:
    """Return a file's ``size_bytes`` and ``sha256``."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size_bytes": path.stat().st_size, "sha256": digest}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file into newly allocated memory.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a safetensors file.
    """
    found: dict[str, Tensor] = {}
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            tensor = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
            if tensor.nbytes != end - begin:
                raise ValueError(f"{name} has {end - begin} bytes, and its shape {tensor.nbytes}")
            file.seek(8 + length + begin)
            for piece in _bytes_of(tensor):
                if file.readinto(piece) != len(piece):
                    raise ValueError(f"the file ends within {name}")
            found[name] = tensor
    return found


def pieces_of(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = MappingProxyType({})
) -> Iterator[memoryview]:
    """Yield the contents of a file of contiguous CPU tensors, piece by piece."""
    layout = layout_of(
        {name: (dtype_name(x.dtype), x.shape) for name, x in tensors.items()}, metadata
    )
    yield memoryview(layout.header)
    for name in layout.offsets:
        yield from _bytes_of(tensors[name])


@dataclass(frozen=True, slots=True)
class Layout:
    """What is where in a safetensors file."""

    header: bytes
    offsets: dict[str, int]
    """The first byte of each tensor, counted from the start of the file; in ascending order."""
    num_bytes: int
    """The size of the file."""


def layout_of(
    kinds: Mapping[str, tuple[str, Sequence[int]]],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> Layout:
    """Return the layout of a file of tensors; ``kinds``: torch's name of each dtype, the shape."""
    sizes = {name: getattr(torch, dtype).itemsize for name, (dtype, _) in kinds.items()}
    order = sorted(kinds, key=lambda name: (-sizes[name], name))
    num_bytes = {name: sizes[name] * math.prod(kinds[name][1]) for name in order}
    head = header(((name, *kinds[name], num_bytes[name]) for name in order), metadata)
    ends = [*itertools.accumulate(num_bytes.values(), initial=len(head))]
    return Layout(head, dict(zip(order, ends, strict=False)), ends[-1])


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the memory of a contiguous CPU tensor, piece by piece."""
    whole = memory_of(tensor)
    for start in range(0, len(whole), PIECE):
        yield whole[start : start + PIECE]
