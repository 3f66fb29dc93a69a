"""Read numpy's npy and npz files: numbers, booleans and fixed-width texts, never objects."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, cast
from warnings import catch_warnings, simplefilter

import numpy as np
from numpy.typing import NDArray

from engine.datasets.reading import Format, ReadOptions
from engine.datasets.unpacking import (
    BLOCK_BYTES,
    ArchiveMember,
    ByteSource,
    declared_blocks,
    list_members,
    open_member,
)
from engine.datasets.writer import SPLIT_WORDS, DatasetWriter, NumberColumnWriter
from glasshouse.errors import InvalidDataset

_MAX_HEADER_BYTES = 10_000
_MAX_TEXT_BYTES = 1 << 20
_TEXTS_PER_BLOCK = 1 << 14
_TRANSPOSED_BYTES = 32 << 20
_HEADER_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TokenError,
    TypeError,
    ValueError,
)
"""What numpy raises for malformed or malicious headers."""
_WORDS = "|".join(SPLIT_WORDS)
_AFTER = re.compile(rf"(?P<column>.+)_(?P<split>{_WORDS})", re.IGNORECASE | re.DOTALL)
_BEFORE = re.compile(rf"(?P<split>{_WORDS})(_(?P<column>.+))?", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Array:
    """One array of a file: its destination and how to read its bytes."""

    name: str
    split: str
    column: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    reopen: Callable[[], ByteSource]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def read_npy(path: Path, writer: DatasetWriter, _: ReadOptions) -> None:
    """Read one array as column ``value`` of the split ``all``."""
    with path.open("rb") as file:

        def reopen() -> ByteSource:
            file.seek(0)
            return file

        _copy(_describe("the file", ("all", "value"), reopen), writer)


def read_npz(path: Path, writer: DatasetWriter, options: ReadOptions) -> None:
    """Read each array of an archive as a column, in the split that its name says."""
    with path.open("rb") as file:
        members = list_members(file, max_bytes=options.max_bytes)
        arrays = [_of_member(file, member) for member in members]
        if not arrays:
            raise InvalidDataset("the npz file holds no arrays")
        split_off = [array.split != "all" for array in arrays]
        if any(split_off) and not all(split_off):
            odd = arrays[split_off.index(False)]
            raise InvalidDataset(
                f"{odd.name} names no split, but {arrays[split_off.index(True)].name} does; call "
                "it <column>_train, <column>_validation or <column>_test, or leave it out"
            )
        for array in arrays:
            _copy(array, writer)


def _of_member(file: BinaryIO, member: ArchiveMember) -> _Array:
    if not member.name.endswith(".npy"):
        raise InvalidDataset(
            f"{member.name!r} in the npz file is not an array (.npy); leave it out"
        )
    name = member.name.removesuffix(".npy")
    return _describe(f"array {name!r}", place(name), partial(open_member, file, member))


def place(name: str) -> tuple[str, str]:
    """Return split and column of an array: ``x_train`` and ``train_x`` give ``("train", "x")``."""
    match = _AFTER.fullmatch(name) or _BEFORE.fullmatch(name)
    if match is None:
        return "all", name
    return SPLIT_WORDS[match["split"].lower()], match["column"] or "value"


def _describe(name: str, where: tuple[str, str], reopen: Callable[[], ByteSource]) -> _Array:
    dtype, shape, fortran = _read_header(reopen(), name)
    _check_dtype(dtype, shape, name)
    if not shape or 0 in shape:
        raise InvalidDataset(
            f"{name} has the shape {list(shape)}; it needs at least one row and one value per row"
        )
    return _Array(name, *where, dtype, shape, fortran and len(shape) > 1, reopen)


def _read_header(source: ByteSource, name: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    file = cast("BinaryIO", source)  # numpy's readers only call read
    try:
        version = np.lib.format.read_magic(file)
    except ValueError as error:
        raise InvalidDataset(
            f"{name} is not a numpy array: it does not begin like a .npy file; write it with "
            "numpy.save or numpy.savez"
        ) from error
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise InvalidDataset(f"{name} has npy version {version[0]}.{version[1]}; use 1.0 or 2.0")
    try:
        with catch_warnings():
            simplefilter("ignore")  # about outdated headers that numpy still reads
            shape, fortran, dtype = readers[version](file, max_header_size=_MAX_HEADER_BYTES)
    except _HEADER_ERRORS as error:
        raise InvalidDataset(f"{name} has a damaged header; write it with numpy.save") from error
    if any(size < 0 for size in shape):
        raise InvalidDataset(f"{name} declares the shape {list(shape)}; sizes cannot be negative")
    return dtype, tuple(int(size) for size in shape), bool(fortran)


def _check_dtype(dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> None:
    if dtype.hasobject:
        raise InvalidDataset(
            f"{name} holds Python objects, which are stored as a program that could do anything; "
            "convert it to numbers or fixed-width texts (astype) and save it again"
        )
    if dtype.kind in "SU":
        if not 0 < dtype.itemsize <= _MAX_TEXT_BYTES or len(shape) != 1:
            raise InvalidDataset(
                f"{name} holds texts as {dtype.str} of shape {list(shape)}; one text per row of "
                f"1 to {_MAX_TEXT_BYTES:,} bytes can be read"
            )
    elif dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise InvalidDataset(
            f"{name} has the dtype {dtype}; convert it to integers, floats of at most 64 bits, "
            "booleans or texts"
        )


def _copy(array: _Array, writer: DatasetWriter) -> None:
    writer.expect(array.num_bytes)
    source = array.reopen()
    _read_header(source, array.name)
    if array.dtype.kind in "SU":
        _copy_texts(array, source, writer)
    else:
        column = writer.numbers(array.split, array.column, array.dtype, array.shape[1:])
        if array.fortran:
            _copy_transposed(array, source, writer, column)
        else:
            for block in _blocks(array, source):
                column.append(_values(block, array.dtype))


def _blocks(array: _Array, source: ByteSource, block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Yield the array's bytes in blocks of whole values."""
    item, shape = array.dtype.itemsize, list(array.shape)
    return declared_blocks(
        source,
        array.name,
        array.num_bytes,
        max(1, block_bytes // item) * item,
        takes=f"its shape {shape} takes",
        beyond=f"of its shape {shape}; write it with numpy.save",
    )


def _values(block: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.kind == "b":
        return np.frombuffer(block, np.uint8) != 0  # untrusted files may have bytes other than 0, 1
    return np.frombuffer(block, dtype)


def _copy_texts(array: _Array, source: ByteSource, writer: DatasetWriter) -> None:
    column = writer.texts(array.split, array.column)
    item = array.dtype.itemsize
    # Decoded from the bytes: numpy creates texts from numbers that are not valid characters.
    codec = {"|": "utf-8", "<": "utf-32-le", ">": "utf-32-be"}[array.dtype.str[0]]
    row = 0
    for block in _blocks(array, source, min(BLOCK_BYTES, _TEXTS_PER_BLOCK * item)):
        texts: list[bytes] = []
        try:
            for start in range(0, len(block), item):
                text = block[start : start + item].decode(codec).rstrip("\0")
                texts.append(text.encode())
        except UnicodeDecodeError as error:
            raise InvalidDataset(
                f"{array.name} is not valid Unicode in row {row + len(texts)}; store texts as U, "
                "or as S in UTF-8"
            ) from error
        column.append(texts)
        row += len(texts)


def _copy_transposed(
    array: _Array, source: ByteSource, writer: DatasetWriter, column: NumberColumnWriter
) -> None:
    """Convert Fortran order to C order through a temporary file, some rows at a time."""
    rows, row_size, item = array.shape[0], math.prod(array.shape[1:]), array.dtype.itemsize
    with writer.scratch() as file:
        for block in _blocks(array, source):
            file.write(block)
        step = max(1, _TRANSPOSED_BYTES // (row_size * item))
        for start in range(0, rows, step):
            count = min(step, rows - start)
            values = np.empty((row_size, count), _values(b"", array.dtype).dtype)
            for index in range(row_size):
                file.seek((index * rows + start) * item)
                values[index] = _values(file.read(count * item), array.dtype)
            # In the file's columns a row's values are in order, with the first axis fastest.
            column.append(values.T.reshape((count, *array.shape[1:]), order="F"))


FORMATS = (
    Format(name="npy", summary="One numpy array.", read=read_npy, suffixes=(".npy",)),
    Format(
        name="npz",
        summary="Several numpy arrays, by column and split.",
        read=read_npz,
        suffixes=(".npz",),
    ),
)
