"""Write safetensors files in pieces, with their digest, without blocking other threads; read them.

The safetensors library's writer holds the GIL until the whole file is written, which would block
training steps. The library reads the files written here like any others. `read_tensors` allocates
memory for what it reads; the library maps the file, so a tensor to keep would have to be copied.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from engine.core.precision import dtype_name
from engine.core.safetensors_header import DTYPE_NAMES, header
from glasshouse.failpoints import failpoint

_PIECE = 4 * 2**20
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
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries = [(name, tensors[name]) for name in order]
    yield memoryview(
        header(((n, dtype_name(x.dtype), x.shape, x.nbytes) for n, x in entries), metadata)
    )
    for _, tensor in entries:
        yield from _bytes_of(tensor)


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the memory of a contiguous CPU tensor, piece by piece."""
    if tensor.numel():
        whole = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
        for start in range(0, len(whole), _PIECE):
            yield whole[start : start + _PIECE]
