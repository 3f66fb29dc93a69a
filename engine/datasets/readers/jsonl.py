"""Read jsonl files: one JSON object per line, whose lists may differ in length between rows.

There are two passes: the first finds every column's type and shape, the second writes. Both keep a
few megabytes of the file in memory. Uses numpy only.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from engine.datasets.readers.text import Lines
from engine.datasets.reading import Format, ReadOptions
from engine.datasets.writer import (
    MAX_COLUMNS,
    MAX_NAME_LENGTH,
    MAX_RANK,
    Column,
    DatasetWriter,
    RaggedColumnWriter,
    TextColumnWriter,
)
from glasshouse.errors import InvalidDataset
from glasshouse.jsonio import NONFINITE

_CHUNK_BYTES = 1 << 20
_CHUNK_ROWS = 20_000


class _Kind(IntEnum):
    UNKNOWN = 0
    BOOL = 1
    INTEGER = 2
    FLOAT = 3
    TEXT = 4


_WORDS = {
    _Kind.BOOL: "true or false",
    _Kind.INTEGER: "numbers",
    _Kind.FLOAT: "numbers",
    _Kind.TEXT: "texts",
}
_TYPES = {_Kind.BOOL: np.bool_, _Kind.INTEGER: np.int64, _Kind.FLOAT: np.float64}


class _Unfit(Exception):
    """Some rows of a column do not agree. The row that causes it is found separately."""


@dataclass(slots=True)
class _Found:
    """The type and shape of some rows of a column."""

    kind: _Kind
    is_list: bool | None
    """None: all rows are missing."""
    inner: tuple[int, ...] | None = None
    """For lists, the shape of one value; None: all lists are empty."""
    has_names: bool = False
    """Whether a value is the name of a non-finite number, which may also be a text."""


@dataclass(slots=True)
class _Column(_Found):
    null_line: int | None = None
    """The first line without a value."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    lines: list[int]
    texts: list[str]
    rows: list[dict[str, Any]]

    def names(self) -> Iterable[str]:
        return dict.fromkeys(chain.from_iterable(self.rows))

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self.rows]


def read_jsonl(path: Path, writer: DatasetWriter, _: ReadOptions) -> None:
    """Read one object per line as the split ``all``; its keys are the columns.

    A list becomes a column of tensors if all rows have one shape, and a ragged column if they
    differ in the length of the outermost axis. A missing key equals null.
    """
    with path.open("rb") as file:
        columns = _survey(file)
        made = {name: _begin(writer, name, column) for name, column in columns.items()}
        for chunk in _chunks(file):
            for name, column in made.items():
                _write(chunk.column(name), column)


def _begin(writer: DatasetWriter, name: str, column: _Column) -> Column:
    kind = column.kind
    if column.has_names and kind is _Kind.UNKNOWN and not column.is_list:
        kind = _Kind.TEXT
    if kind is _Kind.TEXT:
        return writer.texts("all", name)
    if kind is _Kind.UNKNOWN or column.has_names:
        kind = _Kind.FLOAT
    if column.is_list:
        return writer.ragged("all", name, np.dtype(_TYPES[kind]), column.inner or ())
    if column.null_line is not None:
        kind = _Kind.FLOAT
    return writer.numbers("all", name, np.dtype(_TYPES[kind]))


def _write(values: list[Any], column: Column) -> None:
    if isinstance(column, TextColumnWriter):
        column.append([b"" if value is None else value.encode() for value in values])
    elif isinstance(column, RaggedColumnWriter):
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        for _ in range(1 + len(column.shape)):
            values = list(chain.from_iterable(values))
        column.append(_numbers(values, column.dtype), lengths)
    else:
        column.append(_numbers(values, column.dtype))


def _numbers(values: list[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.kind == "f" and not {str, type(None)}.isdisjoint(map(type, values)):
        values = [_number(value) for value in values]
    return np.array(values, dtype)


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    return NONFINITE[value] if isinstance(value, str) else value


# --- the first pass --------------------------------------------------------------------------


def _survey(file: BinaryIO) -> dict[str, _Column]:
    columns: dict[str, _Column] = {}
    first_line: int | None = None
    for chunk in _chunks(file):
        for name in chunk.names():
            if name not in columns:
                if len(columns) >= MAX_COLUMNS:
                    raise InvalidDataset(
                        f"more than {MAX_COLUMNS:,} columns: give all lines the same keys"
                    )
                columns[name] = _Column(_Kind.UNKNOWN, None, null_line=first_line)
        first_line = chunk.lines[0] if first_line is None else first_line
        for name, column in columns.items():
            _look(column, name, chunk)
    if first_line is None:
        raise InvalidDataset("the file holds no rows")
    for name, column in columns.items():
        if column.is_list and column.null_line is not None:
            _refuse(column.null_line, name, "no list, and other rows have one; write [] if empty")
    return columns


def _look(column: _Column, name: str, chunk: _Chunk) -> None:
    """Update the type of a column from a chunk.

    Raises:
        InvalidDataset: it is not a valid column; names the line.
    """
    values = chunk.column(name)
    if column.null_line is None and None in values:
        column.null_line = chunk.lines[values.index(None)]
    before = _Found(column.kind, column.is_list, column.inner, column.has_names)
    try:
        _merge(column, _find(values))
    except _Unfit:
        column.kind, column.is_list, column.inner = before.kind, before.is_list, before.inner
        for line, value in zip(chunk.lines, values, strict=True):
            try:
                _merge(column, _find([value]))
            except _Unfit as reason:
                _refuse(line, name, str(reason))
        raise
    if column.kind is _Kind.FLOAT:
        _check_written(name, values, chunk)


def _find(values: Sequence[Any]) -> _Found:
    """Return the type and shape of some rows.

    Raises:
        _Unfit: they do not agree.
    """
    present = [value for value in values if value is not None]
    types = set(map(type, present))
    if list not in types:
        kind, has_names = _kind_of(present, types)
        return _Found(kind, False if present else None, None, has_names)
    if len(types) > 1:
        raise _Unfit("a list, and other rows have a single value, or the other way round")
    lengths: list[int] = []
    items = list(chain.from_iterable(present))
    while list in (types := set(map(type, items))):
        if len(types) > 1:
            raise _Unfit("lists and single values side by side in its list")
        widths = set(map(len, items))
        if len(widths) > 1 or 0 in widths:
            raise _Unfit(
                "lists of different lengths inside of its list; only the outermost may differ"
            )
        lengths.append(widths.pop())
        if len(lengths) >= MAX_RANK:
            raise _Unfit(f"more than {MAX_RANK} axes")
        items = list(chain.from_iterable(items))
    if type(None) in types:
        raise _Unfit("a null inside of a list")
    kind, has_names = _kind_of(items, types)
    if kind is _Kind.TEXT:
        raise _Unfit("a list of texts; lists hold numbers: give each text its number")
    return _Found(kind, True, tuple(lengths) if items else None, has_names)


def _kind_of(values: Sequence[Any], types: set[type]) -> tuple[_Kind, bool]:
    """Return the kind of single values, and whether names of non-finite numbers are among them."""
    if dict in types:
        raise _Unfit("an object; values are numbers, texts, or lists of numbers")
    has_names = False
    if str in types:
        if not all(value in NONFINITE for value in values if isinstance(value, str)):
            if len(types) > 1:
                raise _Unfit("a text, and other values are numbers, or the other way round")
            _check_characters(values)
            return _Kind.TEXT, False
        has_names = True
    kinds = types - {str}
    if bool in kinds:
        if len(kinds) > 1 or has_names:
            raise _Unfit("true or false among numbers")
        return _Kind.BOOL, False
    if not kinds:
        return _Kind.UNKNOWN, has_names
    if kinds == {int} and not has_names:
        return _size_of(values), False
    return _Kind.FLOAT, has_names


def _check_characters(texts: Sequence[str]) -> None:
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise _Unfit("half a character (a lone surrogate), which is not Unicode text") from None


def _size_of(values: Sequence[int]) -> _Kind:
    low, high = min(values), max(values)
    if low >= -(2**63) and high < 2**63:
        return _Kind.INTEGER
    try:
        np.array([low, high], np.float64)
    except OverflowError:
        raise _Unfit("a number that does not fit 64 bits") from None
    return _Kind.FLOAT


def _merge(column: _Column, found: _Found) -> None:
    """Merge the type of some rows into that of the column.

    Raises:
        _Unfit: they do not agree.
    """
    if found.is_list is None:
        return
    if column.is_list is not None and column.is_list is not found.is_list:
        raise _Unfit("a list, and other rows have a single value, or the other way round")
    if found.inner is not None and column.inner is not None and found.inner != column.inner:
        shapes = f"{list(found.inner)} and in rows before {list(column.inner)}"
        raise _Unfit(f"a list of values of the shape {shapes}; only the outermost axis may differ")
    kinds = {column.kind, found.kind} - {_Kind.UNKNOWN}
    numbers = {_Kind.INTEGER, _Kind.FLOAT}
    if len(kinds) > 1 and kinds != numbers:
        theirs, ours = _WORDS[found.kind], _WORDS[column.kind]
        raise _Unfit(f"{theirs}, and rows before have {ours}")
    column.is_list = found.is_list
    column.inner = found.inner if column.inner is None else column.inner
    column.kind = max(column.kind, found.kind)
    column.has_names = column.has_names or found.has_names
    if column.has_names and column.kind is _Kind.BOOL:
        raise _Unfit("true or false among numbers")


def _check_written(name: str, values: Sequence[Any], chunk: _Chunk) -> None:
    """Refuse numbers that overflow to infinity, such as 1e999; a written Infinity is accepted."""
    if not _has_infinity(values):
        return
    for line, text, value in zip(chunk.lines, chunk.texts, values, strict=True):
        if "Infinity" not in text and _has_infinity([value]):
            _refuse(line, name, "a number that does not fit a 64-bit float")


def _has_infinity(values: Sequence[Any]) -> bool:
    flat = list(values)
    while any(isinstance(value, list) for value in flat[:1]):
        flat = list(chain.from_iterable(flat))
    return math.inf in flat or -math.inf in flat


def _refuse(line: int, name: str, what: str) -> NoReturn:
    raise InvalidDataset(f"line {line}: column {name[:MAX_NAME_LENGTH]!r} has {what}")


# --- lines -----------------------------------------------------------------------------------


def _chunks(file: BinaryIO) -> Iterator[_Chunk]:
    """Yield the objects of all lines that are not blank, about a megabyte at a time."""
    file.seek(0)
    chunk, num_bytes = _Chunk([], [], []), 0
    lines = Lines(file)
    for text in lines:
        num_bytes += lines.row_bytes
        lines.row_bytes = 0
        if text.isspace():
            continue
        chunk.lines.append(lines.number)
        chunk.texts.append(text)
        chunk.rows.append(_object(text, lines.number))
        if num_bytes >= _CHUNK_BYTES or len(chunk.rows) >= _CHUNK_ROWS:
            yield chunk
            chunk, num_bytes = _Chunk([], [], []), 0
    if chunk.rows:
        yield chunk


def _object(text: str, line: int) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_pairs)
    except json.JSONDecodeError as error:
        raise InvalidDataset(
            f"line {line}, character {error.colno}: this is not JSON ({error.msg}); each line is "
            "one whole JSON object"
        ) from error
    except _Unfit as error:
        raise InvalidDataset(f"line {line}: {error}") from error
    except RecursionError as error:
        raise InvalidDataset(f"line {line} is nested too deeply") from error
    except ValueError as error:  # too many digits
        raise InvalidDataset(f"line {line} has a number that is too long") from error
    if not isinstance(found, dict):
        what = "a list" if isinstance(found, list) else "a single value"
        raise InvalidDataset(
            f"line {line} holds {what}; each line is one JSON object with the columns as its keys"
        )
    return found


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Unfit(f"the key {twice[:MAX_NAME_LENGTH]!r} is given twice; remove one")
    return made


FORMATS = (
    Format(
        name="jsonl",
        summary="One JSON object per line.",
        read=read_jsonl,
        suffixes=(".jsonl",),
        media_types=("application/jsonl", "application/x-ndjson"),
    ),
)
