"""Read idx files (the format of MNIST): plain, gzip-compressed, or several in a zip archive.

Images are the column ``image``, labels are ``label``. Names of archive members give their split.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.datasets.archive import list_members, open_member
from engine.datasets.reading import Format, ReadOptions
from engine.datasets.unpacking import BLOCK_BYTES, ByteSource, Inflated, read_up_to
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


def read_idx(path: Path, writer: DatasetWriter, _: ReadOptions) -> None:
    """Read one plain idx file as the split ``all``."""
    with path.open("rb") as file:
        header = _read_header(file, "the file")
        _copy(file, "the file", header, writer, ("all", header.column))


def read_idx_gz(path: Path, writer: DatasetWriter, _: ReadOptions) -> None:
    """Read one gzip-compressed idx file as the split ``all``."""
    with path.open("rb") as file:
        source = Inflated(file, "the file", gzip=True)
        header = _read_header(source, "the file")
        _copy(source, "the file", header, writer, ("all", header.column))


def read_idx_zip(path: Path, writer: DatasetWriter, options: ReadOptions) -> None:
    """Read the idx files of a zip archive, such as MNIST's four, each gzip-compressed or not."""
    with path.open("rb") as file:
        members = list_members(file, max_bytes=options.max_bytes)
        if not members:
            raise InvalidDataset("the zip archive holds no files; put idx files in it")

        def opener(index: int) -> Callable[[], ByteSource]:
            def reopen() -> ByteSource:
                content = open_member(file, members[index])
                zipped = members[index].name.lower().endswith(".gz")
                return (
                    Inflated(content, repr(members[index].name), gzip=True) if zipped else content
                )

            return reopen

        found: dict[tuple[str, str], tuple[str, Callable[[], ByteSource]]] = {}
        for index, member in enumerate(members):
            place = _place(member.name, _read_header(opener(index)(), repr(member.name)))
            if place in found:
                raise InvalidDataset(
                    f"{found[place][0]!r} and {member.name!r} are both column {place[1]!r} of "
                    f"split {place[0]!r}; leave one out"
                )
            found[place] = (member.name, opener(index))
        for place in sorted(found, key=_order):
            name, reopen = found[place]
            source = reopen()
            _copy(source, repr(name), _read_header(source, repr(name)), writer, place)


def _order(place: tuple[str, str]) -> tuple[int, int]:
    return SPLITS.index(place[0]), _COLUMN_ORDER.index(place[1])


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
    source: ByteSource, name: str, header: _Header, writer: DatasetWriter, place: tuple[str, str]
) -> None:
    expected = header.num_bytes
    writer.expect(expected)
    column = writer.numbers(*place, header.dtype, header.shape[1:])
    left = expected
    while left > 0:
        block = read_up_to(source, min(left, BLOCK_BYTES))
        if not block:
            raise InvalidDataset(
                f"{name} is cut short: its header declares {list(header.shape)} = {expected:,} "
                f"bytes, but {expected - left:,} are there; upload the whole file again"
            )
        left -= len(block)
        whole = len(block) - len(block) % header.dtype.itemsize
        column.append(np.frombuffer(block[:whole], header.dtype))
    if source.read(1):
        raise InvalidDataset(
            f"{name} has more data than the {expected:,} bytes of the shape {list(header.shape)} "
            "that its header declares; correct the header, or remove what follows"
        )


FORMATS = (
    Format(
        name="idx",
        summary="One file of the MNIST kind.",
        read=read_idx,
        suffixes=(".idx", "-ubyte"),
    ),
    Format(
        name="idx.gz",
        summary="One file of the MNIST kind, compressed with gzip.",
        read=read_idx_gz,
        suffixes=(".idx.gz", "-ubyte.gz"),
    ),
    Format(
        name="idx.zip",
        summary="Several idx files in a zip archive, such as MNIST's four.",
        read=read_idx_zip,
        suffixes=(".idx.zip", ".zip"),
    ),
)
