"""Read parquet files, one row group at a time and without threads. Uses numpy and pyarrow."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.compute as pc  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray

from engine.datasets.writer import (
    MAX_COLUMNS,
    MAX_NAME_LENGTH,
    Column,
    DatasetWriter,
    RaggedColumnWriter,
    TextColumnWriter,
)
from glasshouse.errors import InvalidDataset

_BATCH_BYTES = 2 << 20
_MAX_BATCH_ROWS = 65_536
_BUFFER_BYTES = 1 << 20
_MAX_METADATA_BYTES = 100 << 20
_MAX_METADATA_ITEMS = 1_000_000


@dataclass(frozen=True, slots=True)
class _Kind:
    dtype: np.dtype[Any] | None
    """None: texts."""
    is_list: bool = False
    inner: tuple[int, ...] | None = ()
    """For a list, the shape of one value; None: its values are lists of unknown length."""


def read_file(path: Path, writer: DatasetWriter) -> None:
    """Read a file as the split ``all``; columns of lists are ragged if their lengths differ.

    Raises:
        InvalidDataset: it is damaged, or a column has an unsupported type.
    """
    pa.set_memory_pool(pa.system_memory_pool())  # the others reserve more than the memory limit
    with (
        _explaining(),
        pq.ParquetFile(
            path,
            memory_map=False,
            pre_buffer=False,
            buffer_size=_BUFFER_BYTES,
            thrift_string_size_limit=_MAX_METADATA_BYTES,
            thrift_container_size_limit=_MAX_METADATA_ITEMS,
        ) as file,
    ):
        schema = file.schema_arrow
        if len(schema) > MAX_COLUMNS:
            raise InvalidDataset(
                f"the file has {len(schema):,} columns; {MAX_COLUMNS:,} is the limit"
            )
        kinds = {item.name: _kind_of(item) for item in schema}
        kinds = {name: _completed(file, name, kind) for name, kind in kinds.items()}
        made = {name: _begin(writer, name, kind) for name, kind in kinds.items()}
        for first, batch in _batches(file):
            for name, column in made.items():
                _write(_plain(batch.column(name)), column, name, first)


@contextmanager
def _explaining() -> Generator[None]:
    """Convert Arrow's errors into problems of the file."""
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError) as error:
        raise InvalidDataset(_why(error)) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise InvalidDataset(_why(error)) from error


def _why(error: BaseException) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:200].rstrip(" .;")
    return f"the file cannot be read as parquet: {text}; it may be cut short or damaged"


# --- types -----------------------------------------------------------------------------------


def _kind_of(field: Any) -> _Kind:
    kind = field.type
    if _is_text(kind):
        return _Kind(None)
    if not _is_list(kind):
        return _Kind(_dtype_of(kind, field))
    inner: tuple[int, ...] | None = ()
    kind = kind.value_type
    while _is_list(kind):
        fixed = pa.types.is_fixed_size_list(kind)
        inner = (*inner, kind.list_size) if fixed and inner is not None else None
        kind = kind.value_type
    return _Kind(_dtype_of(kind, field), is_list=True, inner=inner)


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_list(kind: Any) -> bool:
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _dtype_of(kind: Any, field: Any) -> np.dtype[Any]:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_null(kind):
        return np.dtype(np.float64)
    if not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise InvalidDataset(
            f"column {field.name[:MAX_NAME_LENGTH]!r} has the type {str(field.type)[:100]}; "
            "numbers, booleans, texts, and lists of numbers are read: convert it or leave it out"
        )
    return np.dtype(kind.to_pandas_dtype())


def _completed(file: Any, name: str, kind: _Kind) -> _Kind:
    """Read a column whose type alone does not determine how it is stored."""
    if kind.dtype is None or (kind.is_list and kind.inner is not None):
        return kind
    if kind.is_list:
        return _Kind(kind.dtype, is_list=True, inner=_inner_shape(file, name))
    if kind.dtype.kind != "f" and any(
        batch.column(name).null_count for _, batch in _batches(file, [name])
    ):
        return _Kind(np.dtype(np.float64))
    return kind


def _inner_shape(file: Any, name: str) -> tuple[int, ...]:
    """Return the shape of the values of a column of nested lists, which all must share."""
    found: tuple[int, ...] | None = None
    for first, batch in _batches(file, [name]):
        array = _plain(batch.column(name))
        shape: list[int] = []
        items = array.flatten()
        while _is_list(items.type):
            widths = np.unique(_lengths(items))
            if len(widths) > 1 or 0 in widths or items.null_count:
                _refuse_rows(name, first, len(array))
            shape += widths.tolist()
            items = items.flatten()
        if len(items) and found not in (None, tuple(shape)):
            _refuse_rows(name, first, len(array))
        found = tuple(shape) if len(items) else found
    return found or ()


def _refuse_rows(name: str, first: int, count: int) -> None:
    raise InvalidDataset(
        f"column {name[:MAX_NAME_LENGTH]!r}: among the rows {first} to {first + count - 1} there "
        "are lists of different lengths inside of a row's list; only the outermost may differ"
    )


# --- values ----------------------------------------------------------------------------------


def _begin(writer: DatasetWriter, name: str, kind: _Kind) -> Column:
    if kind.dtype is None:
        return writer.texts("all", name)
    if kind.is_list:
        return writer.ragged("all", name, kind.dtype, kind.inner or ())
    return writer.numbers("all", name, kind.dtype)


def _batches(file: Any, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Yield some rows at a time, with the number of the first row."""
    first = 0
    for group in range(file.metadata.num_row_groups):
        described = file.metadata.row_group(group)
        width = max(1, described.total_byte_size // max(1, described.num_rows))
        size = min(max(1, _BATCH_BYTES // width), _MAX_BATCH_ROWS)
        for batch in file.iter_batches(size, [group], columns, use_threads=False):
            yield first, batch
            first += batch.num_rows


def _plain(array: Any) -> Any:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _write(array: Any, column: Column, name: str, first: int) -> None:
    if isinstance(column, TextColumnWriter):
        texts = array.to_pylist()
        column.append([b"" if text is None else text.encode() for text in texts])
    elif isinstance(column, RaggedColumnWriter):
        if array.null_count:
            what = "no list, and other rows have one; write an empty list"
            _refuse(name, first + int(np.flatnonzero(array.is_null())[0]), what)
        lengths = _lengths(array)
        items = array
        while _is_list(items.type):
            items = items.flatten()
        if items.null_count and not pa.types.is_floating(items.type):
            at = int(np.flatnonzero(items.is_null())[0])
            step = at // max(1, len(items) // max(1, int(lengths.sum())))
            row = int(np.searchsorted(np.cumsum(lengths), step, side="right"))
            _refuse(name, first + row, "a null inside of its list")
        column.append(_numbers(items, np.dtype(items.type.to_pandas_dtype())), lengths)
    else:
        column.append(_numbers(array, column.dtype))


def _lengths(array: Any) -> NDArray[np.int64]:
    lengths = pc.list_value_length(array)  # pyright: ignore[reportAttributeAccessIssue]
    return lengths.to_numpy(zero_copy_only=False).astype(np.int64)


def _numbers(array: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    if pa.types.is_null(array.type):
        return np.full(len(array), np.nan, dtype)
    return array.to_numpy(zero_copy_only=False).astype(dtype)


def _refuse(name: str, row: int, what: str) -> None:
    raise InvalidDataset(f"row {row}: column {name[:MAX_NAME_LENGTH]!r} has {what}")
