"""Read csv and tsv files: header, column types, missing values. Uses numpy only.

There are two passes: the first finds every column's type, the second writes. Both keep a few
thousand rows in memory.

A column of numbers settles whether the first row names the columns: a header has a name above the
numbers. In a table with texts only, the first row counts as names if each of its cells looks like a
name, all are unique, and none occurs again in its column.
"""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from engine.datasets.readers.text import Lines
from engine.datasets.reading import Format, ReadOptions
from engine.datasets.writer import MAX_COLUMNS, DatasetWriter, NumberColumnWriter, TextColumnWriter
from glasshouse.errors import InvalidDataset

MAX_CELL_BYTES = 1 << 20
_CHUNK_BYTES = 2 << 20
_CHUNK_CELLS = 50_000
_LISTED = 8
MAX_SHOWN = 40
"""The number of characters of a cell that a message shows."""
_MAX_NAME_LENGTH = 64
_MAX_NAME_WORDS = 4
_NAME = re.compile(r"[^\W\d](?:[\w .:/()\[\]%#&+-]*[\w)\]%])?")
"""Starts with a letter or an underscore, does not end like a sentence, has no comma, quote or @."""
_VALUES = frozenset(
    {"na", "n/a", "nan", "null", "none", "nil", "missing", "unknown", "true", "false", "yes", "no"}
)
"""Words that are values, even if they look like names."""
_GAPS = frozenset({"na", "n/a", "null", "none", "nil", "missing", "unknown", "?", "-", "."})
"""Words that mark a missing value, so they are not a name above a column of numbers."""


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

    line: int
    first: list[str]
    columns: list[_Column]
    recurring: list[bool]
    """For each cell of the first row, whether its column contains it again."""
    num_rows: int = 0
    """Without the first row."""


def _read(path: Path, writer: DatasetWriter, options: ReadOptions, *, delimiter: str) -> None:
    """Read a table as the split ``all``. Instead of commas there may be semicolons or tabs.

    If the header is detected and that is a guess, add a note to the dataset.
    """
    header = options.header
    csv.field_size_limit(MAX_CELL_BYTES)
    with path.open("rb") as file:
        if delimiter == ",":
            delimiter = _find_delimiter(file)
        found = _survey(file, delimiter)
        if header is None:
            header, guess = _has_header(found)
            if guess is not None:
                writer.note("header_guessed", guess)
        if not header:
            for cell, column in zip(found.first, found.columns, strict=True):
                _widen(column, [cell], [found.line])
        names = _name(found.first if header else [""] * len(found.first), found.line)
        made = [_begin(writer, *item) for item in zip(names, found.columns, strict=True)]
        for lines, rows in _chunks(file, delimiter, skip=int(header)):
            for column, cells in zip(made, zip(*rows, strict=True), strict=True):
                if isinstance(column, NumberColumnWriter):
                    column.append(_numbers(cells, column, lines))
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
    line, first, _ = next(_records(file, delimiter), (0, [], 0))
    if not first:
        raise InvalidDataset("the file holds no rows")
    found = _Survey(line, first, [_Column() for _ in first], [False] * len(first))
    for lines, rows in _chunks(file, delimiter, skip=1):
        found.num_rows += len(rows)
        for number, cells in enumerate(zip(*rows, strict=True)):
            _widen(found.columns[number], cells, lines)
            if found.columns[number].kind is _Kind.TEXT and not found.recurring[number]:
                found.recurring[number] = found.first[number] in cells
    return found


def _has_header(found: _Survey) -> tuple[bool, str | None]:
    """Return whether the first row names the columns, and a note if that is a guess."""
    kinds = [_kind_of([cell], _Kind.EMPTY) for cell in found.first]
    if any(
        kind is _Kind.TEXT and column.kind in _NUMBERS and cell.strip().casefold() not in _GAPS
        for cell, kind, column in zip(found.first, kinds, found.columns, strict=True)
    ):
        return True, None
    if any(kind in _NUMBERS for kind in kinds):
        return False, None
    if not found.num_rows:
        return True, None
    why = _why_no_names(found.first, found.recurring)
    told = f"No column has numbers only, and line {found.line} was read as"
    if why is not None:
        told += f" a row of data, since {why}. If it names the columns, upload the file again with"
        return False, f"{told} header=true."
    names = ", ".join(cell.strip()[:MAX_SHOWN] for cell in found.first[:_LISTED])
    names += ", …" if len(found.first) > _LISTED else ""
    told += f" the column names: {names}. If it is a row of data, upload the file again with"
    return True, f"{told} header=false."


def is_name(cell: str) -> bool:
    """Whether a cell looks like a column name: one or a few words, and not a sentence."""
    text = cell.strip()
    return (
        len(text) <= _MAX_NAME_LENGTH
        and len(text.split()) <= _MAX_NAME_WORDS
        and text.casefold() not in _VALUES
        and _NAME.fullmatch(text) is not None
    )


def _why_no_names(first: Sequence[str], recurring: Sequence[bool]) -> str | None:
    """Explain why the first row of a table of texts is data; None: it names the columns.

    Args:
        first: its cells. Empty ones are ignored, as above the index of a data frame.
        recurring: for each cell, whether its column contains the same text again.
    """
    named = [cell.strip() for cell in first if cell.strip()]
    if not named:
        return "it is empty"
    folded = [cell.casefold() for cell in named]
    for number, cell in enumerate(named):
        if not is_name(cell):
            return f"{cell[:40]!r} does not look like a column name"
        if folded.index(folded[number]) != number:
            return f"{cell[:40]!r} stands there twice"
    for cell, recurs in zip(first, recurring, strict=True):
        if recurs and cell.strip():
            return f"{cell.strip()[:40]!r} occurs again in its column"
    return None


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
        for line, cell in zip(lines, cells, strict=True):
            if _kind_of([cell], _Kind.EMPTY) is _Kind.TEXT:
                column.no_number = (line, cell)
                break


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


def _chunks(
    file: BinaryIO, delimiter: str, *, skip: int
) -> Iterator[tuple[list[int], list[list[str]]]]:
    """Yield lines and cells of all rows after the first ``skip``, some thousand at a time."""
    lines, rows, num_bytes = list[int](), list[list[str]](), 0
    for line, cells, size in islice(_records(file, delimiter), skip, None):
        lines.append(line)
        rows.append(cells)
        num_bytes += size
        if num_bytes >= _CHUNK_BYTES or len(rows) * len(cells) >= _CHUNK_CELLS:
            yield lines, rows
            lines, rows, num_bytes = [], [], 0
    if rows:
        yield lines, rows


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


FORMATS = (
    Format(
        name="csv",
        summary="A table of text, with cells separated by commas.",
        read=partial(_read, delimiter=","),
        suffixes=(".csv",),
        media_types=("text/csv",),
        options=("header",),
    ),
    Format(
        name="tsv",
        summary="A table of text, with cells separated by tabs.",
        read=partial(_read, delimiter="\t"),
        suffixes=(".tsv",),
        media_types=("text/tab-separated-values",),
        options=("header",),
    ),
)
