"""Read idx files (the format of MNIST): plain, gzip-compressed, or several in a zip archive.

Images are the column ``image``, labels are ``label``. Names of archive members give their split.
"""

import math
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from engine.datasets.reading import Format, ReadOptions
from engine.datasets.unpacking import (
    BLOCK_BYTES,
    ArchiveMember,
    ByteSource,
    Inflated,
    declared_blocks,
    list_members,
    open_member,
    read_up_to,
)
from engine.datasets.writer import MAX_RANK, SPLITS, DatasetWriter
from glasshouse.errors import InvalidDataset

_DTYPES = {
    0x08: np.dtype(np.uint8),
    0x09: np.dtype(np.int8),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
_SPLIT_WORDS = {
    "train": ("train",),
    "validation": ("valid", "val-", "val_"),
    "test": ("t10k", "test"),
}
_COLUMN_ORDER = ("image", "label", "value")


@dataclass(frozen=True, slots=True)
class _Header:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def column(self) -> str:
        if len(self.shape) == 3 and self.dtype == np.uint8:
            return "image"
        return "label" if len(self.shape) == 1 else "value"


def _read_one(path: Path, writer: DatasetWriter, _: ReadOptions, *, gzip: bool) -> None:
    """Read one file as the split ``all``."""
    with path.open("rb") as file:
        _copy(Inflated(file, "the file", gzip=True) if gzip else file, "the file", writer)


def read_idx_zip(path: Path, writer: DatasetWriter, options: ReadOptions) -> None:
    """Read the idx files of a zip archive, such as MNIST's four, each gzip-compressed or not."""
    with path.open("rb") as file:
        members = list_members(file, max_bytes=options.max_bytes)
        if not members:
            raise InvalidDataset("the zip archive holds no files; put idx files in it")
        found: dict[tuple[str, str], ArchiveMember] = {}
        for member in members:
            header = _read_header(_opened(file, member), repr(member.name))
            split, column = _place(member.name, header)
            if (split, column) in found:
                raise InvalidDataset(
                    f"{found[split, column].name!r} and {member.name!r} are both column "
                    f"{column!r} of split {split!r}; leave one out"
                )
            found[split, column] = member
        for split in SPLITS:
            for column in _COLUMN_ORDER:
                if member := found.get((split, column)):
                    _copy(_opened(file, member), repr(member.name), writer, (split, column))


def _opened(file: BinaryIO, member: ArchiveMember) -> ByteSource:
    content = open_member(file, member)
    is_packed = member.name.lower().endswith(".gz")
    return Inflated(content, repr(member.name), gzip=True) if is_packed else content


def _place(name: str, header: _Header) -> tuple[str, str]:
    """Return the split and the column that an archive member's name stands for."""
    word = name.rsplit("/", maxsplit=1)[-1].lower()
    split = next(
        (split for split, marks in _SPLIT_WORDS.items() if any(mark in word for mark in marks)),
        "all",
    )
    if "image" in word:
        return split, "image"
    return split, "label" if "label" in word else header.column


def _read_header(source: ByteSource, name: str) -> _Header:
    magic = read_up_to(source, 4)
    if magic[:2] == b"\x1f\x8b":
        raise InvalidDataset(f"{name} is gzip-compressed; use the format idx.gz (or end it in .gz)")
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES:
        raise InvalidDataset(
            f"{name} begins with {magic.hex(' ') or 'nothing'}, which no idx file does: 00 00, a "
            "type from 08 to 0e and the number of axes; name the format that it has"
        )
    rank = magic[3]
    if not 1 <= rank <= MAX_RANK + 1:
        raise InvalidDataset(f"{name} declares {rank} axes; 1 to {MAX_RANK + 1} can be read")
    sizes = read_up_to(source, 4 * rank)
    if len(sizes) < 4 * rank:
        raise InvalidDataset(f"{name} ends inside its header; upload the whole file again")
    header = _Header(_DTYPES[magic[2]], struct.unpack(f">{rank}I", sizes))
    if 0 in header.shape:
        raise InvalidDataset(f"{name} declares the shape {list(header.shape)}, which is empty")
    return header


def _copy(
    source: ByteSource, name: str, writer: DatasetWriter, place: tuple[str, str] | None = None
) -> None:
    header = _read_header(source, name)
    writer.expect(header.num_bytes)
    column = writer.numbers(*(place or ("all", header.column)), header.dtype, header.shape[1:])
    shape = list(header.shape)
    blocks = declared_blocks(
        source,
        name,
        header.num_bytes,
        BLOCK_BYTES,
        takes=f"its header declares {shape} =",
        beyond=f"of the shape {shape} that its header declares; correct the header, or remove "
        "what follows",
    )
    for block in blocks:
        column.append(np.frombuffer(block, header.dtype))


FORMATS = (
    Format(
        name="idx",
        summary="One file of the MNIST kind.",
        read=partial(_read_one, gzip=False),
        suffixes=(".idx", "-ubyte"),
    ),
    Format(
        name="idx.gz",
        summary="One file of the MNIST kind, compressed with gzip.",
        read=partial(_read_one, gzip=True),
        suffixes=(".idx.gz", "-ubyte.gz"),
    ),
    Format(
        name="idx.zip",
        summary="Several idx files in a zip archive, such as MNIST's four.",
        read=read_idx_zip,
        suffixes=(".idx.zip", ".zip"),
    ),
)
