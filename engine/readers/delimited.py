"""Reads csv and tsv files: header, column types, missing values. Knows numpy only.

Two passes: the first finds every column's type, the second writes. Both hold a few thousand rows.
"""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from engine.dataset_writer import MAX_COLUMNS, DatasetWriter, NumberColumn
from glasshouse.errors import InvalidDataset

MAX_CELL_BYTES = 1 << 20
MAX_ROW_BYTES = 8 << 20
_CHUNK_BYTES = 2 << 20
_CHUNK_CELLS = 50_000
_BOM = b"\xef\xbb\xbf"


class _Kind(IntEnum):
    """What all cells of a column can be read as; a column only ever moves up."""

    EMPTY = 0
    INTEGER = 1
    FLOAT = 2
    TEXT = 3


@dataclass(slots=True)
class _Column:
    kind: _Kind = _Kind.EMPTY
    has_empty: bool = False


@dataclass(frozen=True, slots=True)
class _Table:
    """What the first pass found out."""

    delimiter: str
    names: list[str]
    columns: list[_Column]
    has_header: bool


@dataclass(frozen=True, slots=True)
class _Chunk:
    lines: list[int]
    rows: list[list[str]]


def read_delimited(path: Path, writer: DatasetWriter, *, delimiter: str) -> None:
    """Read a table of text as the split ``all``."""
    csv.field_size_limit(MAX_CELL_BYTES)
    with path.open("rb") as file:
        if delimiter == ",":
            delimiter = _find_delimiter(file)
        table = _survey(file, delimiter)
        columns = [
            writer.texts("all", name)
            if column.kind is _Kind.TEXT
            else writer.numbers("all", name, np.dtype(_number_type(column)))
            for name, column in zip(table.names, table.columns, strict=True)
        ]
        for chunk in _chunks(file, table.delimiter, skip=int(table.has_header)):
            for column, cells in zip(columns, zip(*chunk.rows, strict=True), strict=True):
                if isinstance(column, NumberColumn):
                    column.append(_numbers(cells, column, chunk.lines))
                else:
                    column.append([cell.encode() for cell in cells])


def _number_type(column: _Column) -> type[np.int64 | np.float64]:
    whole = column.kind is _Kind.INTEGER and not column.has_empty
    return np.int64 if whole else np.float64


def _survey(file: BinaryIO, delimiter: str) -> _Table:
    """Find the types, and whether the first row is a header."""
    first: list[str] | None = None
    columns: list[_Column] = []
    for chunk in _chunks(file, delimiter):
        rows = chunk.rows
        if first is None:
            first, rows = rows[0], rows[1:]
            columns = [_Column() for _ in first]
        for column, cells in zip(columns, zip(*rows, strict=True), strict=False):
            _widen(column, cells)
    if first is None:
        raise InvalidDataset("the file holds no rows")
    has_header = any(
        column.kind is not _Kind.TEXT and _kind_of([cell], _Kind.EMPTY) is _Kind.TEXT
        for cell, column in zip(first, columns, strict=True)
    )
    if not has_header:
        for cell, column in zip(first, columns, strict=True):
            _widen(column, [cell])
    return _Table(delimiter, _name(first if has_header else [""] * len(first)), columns, has_header)


def _name(cells: list[str]) -> list[str]:
    names = [cell.strip() or f"c{index}" for index, cell in enumerate(cells)]
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in seen:
            raise InvalidDataset(
                f"line 1 names columns {seen[name]} and {index} both {name!r} (counted from 0); "
                "give each its own name"
            )
        seen[name] = index
    return names


def _widen(column: _Column, cells: Sequence[str]) -> None:
    if column.kind is not _Kind.TEXT:
        present = [cell for cell in cells if cell and not cell.isspace()]
        column.has_empty |= len(present) < len(cells)
        column.kind = _kind_of(present, column.kind)


def _kind_of(cells: Sequence[str], at_least: _Kind) -> _Kind:
    """The kind of a column that already holds cells of kind ``at_least``."""
    joined = "".join(cells)
    if not joined or joined.isspace():
        return at_least
    if "_" in joined or not joined.isascii():  # Python reads 1_000 and Arabic digits as numbers
        return _Kind.TEXT
    if at_least <= _Kind.INTEGER:
        try:
            numbers = list(map(int, cells))
        except ValueError:
            pass
        else:
            fits = min(numbers) >= -(2**63) and max(numbers) < 2**63
            return _Kind.INTEGER if fits else _Kind.FLOAT
    try:
        list(map(float, cells))
    except ValueError:
        return _Kind.TEXT
    return _Kind.FLOAT


def _numbers(
    cells: Sequence[str], column: NumberColumn, lines: Sequence[int]
) -> NDArray[np.int64] | NDArray[np.float64]:
    if column.dtype.kind == "i":
        return np.array(list(map(int, cells)), np.int64)
    try:
        values = np.array(list(map(float, cells)))
    except ValueError:  # an empty cell
        values = np.array([float(c) if c and not c.isspace() else math.nan for c in cells])
    for index in np.flatnonzero(np.isinf(values)).tolist():
        if "inf" not in cells[index].lower():
            raise InvalidDataset(
                f"line {lines[index]}: {cells[index][:40]!r} does not fit a 64-bit float; write "
                "a smaller number, or inf"
            )
    return values


def _find_delimiter(file: BinaryIO) -> str:
    """A file without commas in its first row may use semicolons or tabs."""
    _, cells, _ = next(_records(file, ","), (0, [], 0))
    if len(cells) == 1:
        return next((mark for mark in ";\t" if mark in cells[0]), ",")
    return ","


def _chunks(file: BinaryIO, delimiter: str, *, skip: int = 0) -> Iterator[_Chunk]:
    """All rows but the first few, some thousand at a time."""
    chunk = _Chunk([], [])
    num_bytes = 0
    for number, (line, cells, size) in enumerate(_records(file, delimiter)):
        if number < skip:
            continue
        chunk.lines.append(line)
        chunk.rows.append(cells)
        num_bytes += size
        if num_bytes >= _CHUNK_BYTES or len(chunk.rows) * len(cells) >= _CHUNK_CELLS:
            yield chunk
            chunk, num_bytes = _Chunk([], []), 0
    if chunk.rows:
        yield chunk


def _records(file: BinaryIO, delimiter: str) -> Iterator[tuple[int, list[str], int]]:
    """Line, cells and size of every row that is not blank; all rows are equally wide."""
    file.seek(0)
    lines = Lines(file)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    width = 0
    line = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise InvalidDataset(_explain(error, line)) from error
        if cells is None:
            return
        if cells:
            width = width or len(cells)
            if len(cells) > MAX_COLUMNS:
                raise InvalidDataset(
                    f"line {line} has {len(cells):,} columns; {MAX_COLUMNS:,} is the limit, so "
                    "put the numbers side by side in one array (npz) instead"
                )
            if len(cells) != width:
                raise InvalidDataset(
                    f"line {line} has {len(cells):,} cells, the first row has {width:,}; give "
                    "every row as many cells, and quote a cell that holds the delimiter"
                )
            yield line, cells, lines.row_bytes
        line = lines.number + 1
        lines.row_bytes = 0


def _explain(error: csv.Error, line: int) -> str:
    text = str(error)
    if "field larger" in text:
        return f"line {line}: a cell is larger than {MAX_CELL_BYTES:,} bytes; make it shorter"
    if "new-line character" in text:
        return (
            f"line {line}: a carriage return ends a line alone; use line feeds, or quote the cell"
        )
    if "unexpected end" in text:
        return f"line {line}: a quoted cell is never closed; add the closing quote"
    return f"line {line}: {text}; put quotes around the whole cell and double those inside"


class Lines:
    """The lines of a text file, each decoded and checked on its own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.number = 0
        self.row_bytes = 0

    def __iter__(self) -> "Lines":
        return self

    def __next__(self) -> str:
        data = self._file.readline(MAX_ROW_BYTES + 1)
        if not data:
            raise StopIteration
        self.number += 1
        self.row_bytes += len(data)
        if self.number == 1:
            data = self._without_mark(data)
        if self.row_bytes > MAX_ROW_BYTES:
            raise InvalidDataset(
                f"line {self.number}: the row is larger than {MAX_ROW_BYTES:,} bytes; check "
                "whether a quote is never closed, or make the row shorter"
            )
        if b"\0" in data:
            raise InvalidDataset(
                f"line {self.number} holds a NUL byte: this is not a text file; save it as UTF-8 "
                "text"
            )
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise InvalidDataset(
                f"line {self.number}, byte {error.start + 1} is not UTF-8 "
                f"({data[error.start]:#04x}); save the file as UTF-8"
            ) from error

    def _without_mark(self, data: bytes) -> bytes:
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise InvalidDataset("the file is UTF-16; save it as UTF-8")
        return data.removeprefix(_BOM)
