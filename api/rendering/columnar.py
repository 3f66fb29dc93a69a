"""Series as tables in long form: Arrow, CSV, and columns in JSON. Pure functions; numpy only."""

import csv
import io
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import nanoarrow  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import orjson
from nanoarrow import ipc  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray
from starlette.concurrency import iterate_in_threadpool
from starlette.responses import Response, StreamingResponse

from api.http.answers import is_fresh, not_modified
from glasshouse import jsonio

ARROW = "application/vnd.apache.arrow.stream"
CSV = "text/csv"
FORMATS = {"application/json": "json", ARROW: "arrow", CSV: "csv"}
_arrow: Any = nanoarrow  # it has no type hints
_ipc: Any = ipc


class Column(NamedTuple):
    """Numbers. There is no value where ``present`` is false."""

    values: NDArray[Any]
    present: NDArray[np.bool_] | None = None


class RowGroup(NamedTuple):
    """Rows of a table with the same texts, such as the name of their layer."""

    texts: Mapping[str, str]
    columns: Mapping[str, Column]

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self.columns.values())).values)


def of_json(column: Column) -> Any:
    """Return a column as JSON: names for NaN and Inf, null for missing values."""
    values = np.ascontiguousarray(column.values)
    odd = ~np.isfinite(values)
    if column.present is None and not odd.any():
        return values
    found: list[Any] = values.tolist()
    for place in np.flatnonzero(odd).tolist():
        found[place] = jsonio.named(found[place])
    if column.present is not None:
        for place in np.flatnonzero(~column.present).tolist():
            found[place] = None
    return found


class ColumnarResponse(Response):
    """A JSON response with arrays. The arrays must be finite."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode as JSON."""
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def answer(content: Any, headers: Mapping[str, str]) -> Response:
    """Return a JSON response with arrays."""
    return ColumnarResponse(content, headers=dict(headers))


def fresh(request: Any, tag: str) -> Response | None:
    """Return 304 if the client already has this version; else None."""
    return not_modified(tag, {"Vary": "Accept"}) if is_fresh(request, tag) else None


def table(form: str, parts: Sequence[RowGroup], names: Sequence[str], **kept: Any) -> Response:
    """Return the table as ``arrow`` or ``csv``. ``names`` are its columns, even without rows."""
    headers: dict[str, str] = kept["headers"]
    if form == "arrow":
        return Response(arrow(parts, names), headers=headers, media_type=ARROW)
    return Response(as_csv(parts, names), headers=headers, media_type=f"{CSV}; charset=utf-8")


def streamed(
    form: str, parts: Iterator[RowGroup], names: Sequence[str], headers: Mapping[str, str]
) -> Response:
    """Return the table as ``arrow`` or ``csv``, streamed with one part in memory at a time.

    The first part must have every column of the others.
    """
    if form == "arrow":
        return StreamingResponse(
            _by_chunk(_arrow_chunks(parts, names)), headers=headers, media_type=ARROW
        )
    media = f"{CSV}; charset=utf-8"
    return StreamingResponse(
        _by_chunk(_csv_chunks(parts, names)), headers=headers, media_type=media
    )


# --- Arrow --------------------------------------------------------------------------------------


async def _by_chunk(chunks: Iterator[str] | Iterator[bytes]) -> AsyncGenerator[str | bytes]:
    """Create each chunk in a thread, and hold none while the client reads."""
    async for chunk in iterate_in_threadpool(chunks):
        yield chunk


def arrow(parts: Sequence[RowGroup], names: Sequence[str]) -> bytes:
    """Return an Arrow IPC stream with one batch per part."""
    types = _types(parts, names)
    return b"".join(_batches(parts or [_empty(types)], types))


def _arrow_chunks(parts: Iterator[RowGroup], names: Sequence[str]) -> Generator[bytes]:
    first = next(parts)
    yield from _batches(chain([first], parts), _types([first], names))


def _batches(parts: Iterable[RowGroup], types: Mapping[str, str]) -> Generator[bytes]:
    kinds = {"text": _arrow.string, "integer": _arrow.int64, "number": _arrow.float64}
    schema = _arrow.struct({name: kinds[kind]() for name, kind in types.items()})
    stream = io.BytesIO()
    with _ipc.StreamWriter.from_writable(stream) as writer:
        for part in parts:
            batch = [_arrow_column(part, name, kind) for name, kind in types.items()]
            writer.write_array(
                _arrow.c_array_from_buffers(schema, part.num_rows, [None], children=batch)
            )
            yield _drained(stream)
    yield _drained(stream)


def _drained(stream: io.BytesIO) -> bytes:
    written = stream.getvalue()
    stream.seek(0)
    stream.truncate()
    return written


def _types(parts: Sequence[RowGroup], names: Sequence[str]) -> dict[str, str]:
    """Return the type of each column, from the first part that has it."""
    found: dict[str, str] = {}
    for name in names:
        found[name] = "number"
        for part in parts:
            if name in part.texts:
                found[name] = "text"
                break
            if name in part.columns:
                kind = part.columns[name].values.dtype.kind
                found[name] = "integer" if kind in "iu" else "number"
                break
    return found


def _empty(types: Mapping[str, str]) -> RowGroup:
    none = Column(np.zeros(0))
    numbers = {name: none for name, kind in types.items() if kind != "text"}
    return RowGroup({name: "" for name, kind in types.items() if kind == "text"}, numbers)


def _arrow_column(part: RowGroup, name: str, kind: str) -> Any:
    num = part.num_rows
    if kind == "text":
        data = part.texts[name].encode()
        offsets = np.arange(num + 1, dtype=np.int32) * len(data)
        buffers = [None, offsets, data * num]
        return _arrow.c_array_from_buffers(_arrow.string(), num, buffers)
    column = part.columns.get(name) or Column(np.full(num, np.nan), np.zeros(num, bool))
    dtype = np.dtype(np.int64) if kind == "integer" else np.dtype(np.float64)
    schema = _arrow.int64() if kind == "integer" else _arrow.float64()
    values = np.ascontiguousarray(column.values, dtype)
    if column.present is None:
        return _arrow.c_array_from_buffers(schema, num, [None, values], null_count=0)
    bits = np.packbits(column.present, bitorder="little")
    nulls = int(num - column.present.sum())
    return _arrow.c_array_from_buffers(schema, num, [bits, values], null_count=nulls)


# --- csv ----------------------------------------------------------------------------------------


def as_csv(parts: Sequence[RowGroup], names: Sequence[str]) -> str:
    """Return a CSV with one header; cells without a value are empty."""
    return "".join(_csv_chunks(parts, names))


def _csv_chunks(parts: Iterable[RowGroup], names: Sequence[str]) -> Generator[str]:
    text = io.StringIO()
    csv.writer(text).writerow([safe(name) for name in names])
    yield text.getvalue()
    for part in parts:
        text = io.StringIO()
        num = part.num_rows
        columns = [
            [safe(part.texts[name])] * num
            if name in part.texts
            else _cells(part.columns.get(name), num)
            for name in names
        ]
        csv.writer(text).writerows(zip(*columns, strict=True))
        yield text.getvalue()


def _cells(column: Column | None, num: int) -> list[Any]:
    return (
        [""] * num
        if column is None
        else ["" if value is None else value for value in _listed(of_json(column))]
    )


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) else values.tolist()  # pyright: ignore[reportUnknownVariableType]


def safe(text: str) -> str:
    """Return a text that no spreadsheet interprets as a formula."""
    return f"'{text}" if text[:1] in "=+-@\t\r" else text
