"""Read csv and tsv files: header, column types, missing values. Uses numpy only.

There are two passes: the first finds every column's type, the second writes. Both keep a few
thousand rows in memory.
"""

import csv
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from engine.datasets.header import is_gap, why_no_names
from engine.datasets.reading import Format, ReadOptions
from engine.datasets.writer import MAX_COLUMNS, DatasetWriter, NumberColumnWriter, TextColumnWriter
from glasshouse.errors import InvalidDataset

MAX_CELL_BYTES = 1 << 20
MAX_ROW_BYTES = 8 << 20
_CHUNK_BYTES = 2 << 20
_CHUNK_CELLS = 50_000
_LISTED = 8
MAX_SHOWN = 40
"""The number of characters of a cell that a message shows."""
_BOM = b"\xef\xbb\xbf"


class _Kind(IntEnum):
    """The type that fits all cells of a column. While reading it can only increase."""

    EMPTY = 0
    INTEGER = 1
    FLOAT = 2
    TEXT = 3


_NUMBERS = (_Kind.INTEGER, _Kind.FLOAT)


@dataclass(slots=True)
class _Column:
    kind: _Kind = _Kind.EMPTY
    has_empty: bool = False
    no_number: tuple[int, str] | None = None
    """Line and text of the first cell that is not a number."""


@dataclass(slots=True)
class _Survey:
    """The result of the first pass. The first row is separate, because it may be a header."""

    line: int = 0
    first: list[str] = field(default_factory=list[str])
    columns: list[_Column] = field(default_factory=list[_Column])
    recurring: list[bool] = field(default_factory=list[bool])
    """For each cell of the first row, whether its column contains it again."""
    num_rows: int = 0
    """Without the first row."""


@dataclass(frozen=True, slots=True)
class _Table:
    """How the second pass reads the file."""

    delimiter: str
    names: list[str]
    columns: list[_Column]
    has_header: bool
    guess: str | None
    """The note about the header if nothing in the file determines it."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    lines: list[int]
    rows: list[list[str]]


def read_csv(path: Path, writer: DatasetWriter, options: ReadOptions) -> None:
    """Read comma-separated text as the split ``all``; semicolons and tabs are detected."""
    _read(path, writer, ",", options.header)


def read_tsv(path: Path, writer: DatasetWriter, options: ReadOptions) -> None:
    """Read tab-separated text as the split ``all``."""
    _read(path, writer, "\t", options.header)


def _read(path: Path, writer: DatasetWriter, delimiter: str, header: bool | None) -> None:
    """Read a table. If the header is detected and that is a guess, add a note to the dataset."""
    csv.field_size_limit(MAX_CELL_BYTES)
    with path.open("rb") as file:
        if delimiter == ",":
            delimiter = _find_delimiter(file)
        table = _settled(_survey(file, delimiter), delimiter, header)
        if table.guess is not None:
            writer.note("header_guessed", table.guess)
        columns = [
            _begin(writer, name, column)
            for name, column in zip(table.names, table.columns, strict=True)
        ]
        for chunk in _chunks(file, table.delimiter, skip=int(table.has_header)):
            for column, cells in zip(columns, zip(*chunk.rows, strict=True), strict=True):
                if isinstance(column, NumberColumnWriter):
                    column.append(_numbers(cells, column, chunk.lines))
                else:
                    column.append([cell.encode() for cell in cells])


def _begin(
    writer: DatasetWriter, name: str, column: _Column
) -> NumberColumnWriter | TextColumnWriter:
    if column.kind is not _Kind.TEXT:
        whole = column.kind is _Kind.INTEGER and not column.has_empty
        return writer.numbers("all", name, np.dtype(np.int64 if whole else np.float64))
    made = writer.texts("all", name)
    if column.no_number is not None:
        line, cell = column.no_number
        writer.describe(name, no_number={"line": line, "value": cell[:MAX_SHOWN]})
    return made


def _survey(file: BinaryIO, delimiter: str) -> _Survey:
    """Find the types of all rows except the first."""
    found: _Survey | None = None
    for chunk in _chunks(file, delimiter):
        rows, lines = chunk.rows, chunk.lines
        if found is None:
            first, rows = rows[0], rows[1:]
            columns = [_Column() for _ in first]
            found = _Survey(lines[0], first, columns, [False] * len(first))
            lines = lines[1:]
        found.num_rows += len(rows)
        for number, cells in enumerate(zip(*rows, strict=True)):
            _widen(found.columns[number], cells, lines)
            if found.columns[number].kind is _Kind.TEXT and not found.recurring[number]:
                found.recurring[number] = found.first[number] in cells
    if found is None:
        raise InvalidDataset("the file holds no rows")
    return found


def _settled(found: _Survey, delimiter: str, header: bool | None) -> _Table:
    """Determine whether the first row is a header, and the columns that follow from that."""
    has_header, guess = (header, None) if header is not None else _has_header(found)
    if not has_header:
        for cell, column in zip(found.first, found.columns, strict=True):
            _widen(column, [cell], [found.line])
    names = _name(found.first if has_header else [""] * len(found.first), found.line)
    return _Table(delimiter, names, found.columns, has_header, guess)


def _has_header(found: _Survey) -> tuple[bool, str | None]:
    """Return whether the first row names the columns, and a note if that is a guess."""
    kinds = [_kind_of([cell], _Kind.EMPTY) for cell in found.first]
    if any(
        kind is _Kind.TEXT and column.kind in _NUMBERS and not is_gap(cell)
        for cell, kind, column in zip(found.first, kinds, found.columns, strict=True)
    ):
        return True, None
    if any(kind in _NUMBERS for kind in kinds):
        return False, None
    if not found.num_rows:
        return True, None
    why = why_no_names(found.first, found.recurring)
    told = f"No column has numbers only, and line {found.line} was read as"
    if why is not None:
        told += f" a row of data, since {why}. If it names the columns, upload the file again with"
        return False, f"{told} header=true."
    names = ", ".join(cell.strip()[:MAX_SHOWN] for cell in found.first[:_LISTED])
    names += ", …" if len(found.first) > _LISTED else ""
    told += f" the column names: {names}. If it is a row of data, upload the file again with"
    return True, f"{told} header=false."


def _name(cells: list[str], line: int) -> list[str]:
    names = [cell.strip() or f"c{index}" for index, cell in enumerate(cells)]
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in seen:
            raise InvalidDataset(
                f"line {line} names columns {seen[name]} and {index} both {name!r} (counted from "
                "0); give each its own name"
            )
        seen[name] = index
    return names


def _widen(column: _Column, cells: Sequence[str], lines: Sequence[int]) -> None:
    known = column.no_number
    if known is not None and lines[0] > known[0]:
        return
    present = [cell for cell in cells if cell and not cell.isspace()]
    column.has_empty |= len(present) < len(cells)
    column.kind = max(column.kind, _kind_of(present, column.kind))
    if column.kind is _Kind.TEXT:
        texts = zip(lines, cells, strict=True)
        column.no_number = next((item for item in texts if _is_text(item[1])), known)


def _is_text(cell: str) -> bool:
    return _kind_of([cell], _Kind.EMPTY) is _Kind.TEXT


def _kind_of(cells: Sequence[str], at_least: _Kind) -> _Kind:
    """Return the kind of a column whose earlier cells are of kind ``at_least``."""
    joined = "".join(cells)
    if not joined or joined.isspace():
        return at_least
    if "_" in joined or not joined.isascii():  # Python parses 1_000 and Arabic digits as numbers
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
    cells: Sequence[str], column: NumberColumnWriter, lines: Sequence[int]
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
    """Return the delimiter: without commas in its first row it may be a semicolon or a tab."""
    _, cells, _ = next(_records(file, ","), (0, [], 0))
    if len(cells) == 1:
        return next((mark for mark in ";\t" if mark in cells[0]), ",")
    return ","


def _chunks(file: BinaryIO, delimiter: str, *, skip: int = 0) -> Iterator[_Chunk]:
    """Yield all rows after the first ``skip``, some thousand at a time."""
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
    """Yield line, cells and size of every row that is not blank; all rows have equal width."""
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
    if "unexpected end" in text:
        return f"line {line}: a quoted cell is never closed; add the closing quote"
    return f"line {line}: {text}; put quotes around the whole cell and double those inside"


class Lines:
    """The lines of a text file, each decoded and checked separately.

    A line ends with a line feed, a carriage return, or both.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._cut: deque[bytes] = deque()
        self._rest = b""
        self.number = 0
        self.row_bytes = 0

    def __iter__(self) -> "Lines":
        return self

    def __next__(self) -> str:
        data = self._cut.popleft() if self._cut else self._read()
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

    def _read(self) -> bytes:
        """Return the next line; lines that carriage returns end before the next LF are queued."""
        data = self._rest + self._file.readline(MAX_ROW_BYTES + 1 - len(self._rest))
        self._rest = b""
        if not data:
            raise StopIteration
        if data.find(b"\r", 0, -2 if data.endswith(b"\n") else -1) < 0:
            return data
        lines = data.splitlines(keepends=True)
        if len(lines) > 1 and len(data) > MAX_ROW_BYTES and not data.endswith(b"\n"):
            self._rest = lines.pop()
        self._cut.extend(lines)
        return self._cut.popleft()

    def _without_mark(self, data: bytes) -> bytes:
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise InvalidDataset("the file is UTF-16; save it as UTF-8")
        return data.removeprefix(_BOM)


FORMATS = (
    Format(
        name="csv",
        summary="A table of text, with cells separated by commas.",
        read=read_csv,
        suffixes=(".csv",),
        media_types=("text/csv",),
        options=("header",),
    ),
    Format(
        name="tsv",
        summary="A table of text, with cells separated by tabs.",
        read=read_tsv,
        suffixes=(".tsv",),
        media_types=("text/tab-separated-values",),
        options=("header",),
    ),
)
