"""Concatenate the rows of several sources into one table."""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.columns.fields import at_least
from engine.data.columns.ragged import RaggedColumn
from engine.data.columns.table import Table, TextColumn
from engine.data.sources.row_files import Runs, StoredTable
from engine.datasets.token_counts import MAX_MIN_COUNT
from glasshouse import jsonio
from glasshouse.spec import Source

_SUMS = ("missing",)
_LENGTHS = {"min": min, "max": max, "total": lambda *counts: sum(counts)}


class TablePart(NamedTuple):
    """A table, and the source that says which of its rows are used."""

    table: Table
    source: Source


def name_of(sources: Sequence[Source]) -> str:
    """Return the name of the joined split: that of all sources' splits if they are equal."""
    return sources[0].split if len({item.split for item in sources}) == 1 else "all"


class Disagree(Exception):
    """A source lacks a column that the first one has. ``number`` is the source's index."""

    def __init__(self, number: int, detail: str) -> None:
        super().__init__(detail)
        self.number = number


class ConcatenatedColumn:
    """Concatenated columns, indexed as one array, without copying them."""

    def __init__(self, parts: Sequence[NDArray[Any]]) -> None:
        self.parts = parts
        self._ends = np.cumsum([0, *(len(part) for part in parts)])
        self.dtype = parts[0].dtype
        self.shape = (int(self._ends[-1]), *parts[0].shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def reshape(self, *shape: int) -> "ConcatenatedColumn":
        """Return the same values with other axes; the first axis is -1."""
        return ConcatenatedColumn([part.reshape(*shape) for part in self.parts])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self[:].astype(dtype or self.dtype, copy=False)

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        if isinstance(rows, slice):
            first, last, _ = rows.indices(len(self))
            found = [
                part[max(first - start, 0) : max(last - start, 0)]
                for part, (start, _) in zip(self.parts, pairwise(self._ends), strict=True)
            ]
            return np.concatenate(found)
        if np.ndim(rows) == 0:
            return self[int(rows) : int(rows) + 1][0]
        flat = np.asarray(rows).reshape(-1)
        made = np.empty((len(flat), *self.shape[1:]), self.dtype)
        number = np.searchsorted(self._ends, flat, side="right") - 1
        for place, part in enumerate(self.parts):
            mine = number == place
            if mine.any():
                made[mine] = part[flat[mine] - self._ends[place]]
        return made.reshape(*np.shape(rows), *self.shape[1:])


class Joined(Table):
    """Splits of several tables as one split."""

    def __init__(self, parts: Sequence[TablePart]) -> None:
        self.directory = parts[0].table.directory
        self.meta = joined_meta([(part.source, part.table.meta) for part in parts])
        self._parts = parts
        self.ends = np.cumsum([0, *(part.table.num_rows(part.source.split) for part in parts)])

    def num_rows(self, split: str) -> int:
        """Return the number of rows of all parts."""
        return int(self.ends[-1])

    def taken(self, seed: int) -> tuple[Tensor | None, list[int]]:
        """Return the rows that the sources use (None: all), and how many each has."""
        counts = np.diff(self.ends).tolist()
        found = [
            source_rows(count, part.source.fraction, seed)
            for count, part in zip(counts, self._parts, strict=True)
        ]
        sizes = [
            count if rows is None else len(rows) for count, rows in zip(counts, found, strict=True)
        ]
        if all(rows is None for rows in found):
            return None, sizes
        starts = self.ends[:-1].tolist()
        both = zip(counts, found, starts, strict=True)
        return torch.cat(
            [start + (torch.arange(n) if r is None else r) for n, r, start in both]
        ), sizes

    def where(self, split: str, row: int) -> str:
        """Return where a row is, in words, by its number in its own split."""
        number = int(np.searchsorted(self.ends, row, side="right")) - 1
        part = self._parts[number]
        found = part.table.where(part.source.split, row - int(self.ends[number]))
        return f"{found} of dataset {part.source.dataset!r}"

    def column(self, split: str, name: str) -> Any:
        """Return the concatenated column of all parts."""
        return ConcatenatedColumn(
            [part.table.column(part.source.split, name) for part in self._parts]
        )

    def ragged(self, split: str, name: str) -> RaggedColumn:
        """Return a column as lists."""
        found = [part.table.ragged(part.source.split, name) for part in self._parts]
        values: Any = ConcatenatedColumn([item.values for item in found])
        return RaggedColumn(
            name, split, values, _offsets([item.offsets for item in found]), self.where
        )

    def texts(self, split: str, name: str) -> TextColumn:
        """Return a text column, as a copy."""
        found = [part.table.texts(part.source.split, name) for part in self._parts]
        data = np.concatenate([item.data for item in found])
        return TextColumn(name, split, data, _offsets([item.offsets for item in found]))


class JoinedStored(Joined):
    """Splits of several tables as one split, read in parts."""

    def __init__(self, parts: Sequence[TablePart]) -> None:
        super().__init__(parts)
        self._stored = [StoredTable(part.table.directory) for part in parts]

    def offsets(self, split: str, name: str) -> NDArray[np.int64]:
        """Return the offsets of all rows of a column of lists."""
        both = zip(self._stored, self._parts, strict=True)
        return _offsets([table.offsets(part.source.split, name) for table, part in both])

    def window(self, split: str, runs: Runs) -> "JoinedWindow":
        """Read some of the rows; a run may cross the end of a part."""
        found: list[TablePart] = []
        numbers: list[NDArray[np.int64]] = []
        mine: list[tuple[int, int]] = []
        at = -1
        for place, run in self._split_up(runs):
            if place != at and mine:
                found.append(self._window(at, mine))
                mine = []
            at = place
            mine.append(run)
            numbers.append(np.arange(*run) + self.ends[place])
        found.append(self._window(at, mine))
        return JoinedWindow(found, np.concatenate(numbers), self.meta)

    def _window(self, place: int, runs: Runs) -> TablePart:
        part = self._parts[place]
        window = self._stored[place].window(part.source.split, runs)
        return TablePart(window, part.source)

    def _split_up(self, runs: Runs) -> list[tuple[int, tuple[int, int]]]:
        found: list[tuple[int, tuple[int, int]]] = []
        for first, last in runs:
            start = first
            while start < last:
                place = int(np.searchsorted(self.ends, start, side="right")) - 1
                begin, end = int(self.ends[place]), min(last, int(self.ends[place + 1]))
                found.append((place, (start - begin, end - begin)))
                start = end
        return found


class JoinedWindow(Joined):
    """Rows that were read from several tables."""

    def __init__(
        self, parts: Sequence[TablePart], numbers: NDArray[np.int64], meta: dict[str, Any]
    ) -> None:
        self.directory = parts[0].table.directory
        self.meta = meta
        self._parts = parts
        self.ends = np.cumsum([0, *(part.table.num_rows(part.source.split) for part in parts)])
        self.numbers = numbers
        """Each row's number in all sources together."""

    def column(self, split: str, name: str) -> NDArray[Any]:
        """Return the rows of a column."""
        return np.concatenate([part.table.column(part.source.split, name) for part in self._parts])

    def ragged(self, split: str, name: str) -> RaggedColumn:
        """Return the rows of a column as lists."""
        found = super().ragged(split, name)
        return replace(found, values=np.asarray(found.values))


def _offsets(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    lengths = [np.diff(part) for part in parts]
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])


def source_rows(num_rows: int, fraction: tuple[float, float] | None, seed: int) -> Tensor | None:
    """Return the rows of a split that a source uses, ascending; None: all.

    The same seed and complementary fractions give disjoint parts that cover all rows.
    """
    if fraction is None:
        return None
    order_N = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    first, last = (math.floor(part * num_rows) for part in fraction)
    return order_N[first:last].sort().values


def taken_rows(table: Table, source: Source, seed: int) -> tuple[Tensor | None, list[int]]:
    """Return the rows of a source (None: all of its split), and how many each joined source has."""
    if isinstance(table, Joined):
        return table.taken(seed)
    num_rows = table.num_rows(source.split)
    rows = source_rows(num_rows, source.fraction, seed)
    return rows, [num_rows if rows is None else len(rows)]


# --- metadata --------------------------------------------------------------------------------


def joined_meta(
    parts: Sequence[tuple[Source, Mapping[str, Any]]], wanted: Container[str] = ()
) -> dict[str, Any]:
    """Return the metadata of several splits as one, with the columns that are the same in all.

    Raises:
        Disagree: a column in ``wanted`` differs from the first source's, or is missing.
    """
    splits, metas = [source.split for source, _ in parts], [meta for _, meta in parts]
    name = name_of([source for source, _ in parts])
    columns: list[dict[str, Any]] = []
    for column in metas[0]["columns"]:
        alike = [column]
        for number, meta in enumerate(metas[1:], start=1):
            problem = _differs(column, other := _find(meta, column["name"]))
            if problem is not None and column["name"] in wanted:
                raise Disagree(number, problem)
            alike += [] if problem is not None else [other]
        if len(alike) == len(parts):
            columns.append(_merged(name, splits, alike))
    return {"columns": columns, "splits": {name: sum(map(_rows, metas, splits))}}


def _rows(meta: Mapping[str, Any], split: str) -> int:
    return int(meta["splits"][split])


def _find(meta: Mapping[str, Any], name: str) -> dict[str, Any]:
    return next((item for item in meta["columns"] if item["name"] == name), {})


def _differs(column: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Describe how a column differs from that of the first source; None: it does not."""
    name = column["name"]
    if not other:
        return f"its dataset has no column {name!r}, which the first source has"
    for key in ("dtype", "shape", "classes"):
        if column.get(key) != other.get(key):
            detail = f"column {name!r} has the {key} {jsonio.dumps(other.get(key))} there, and"
            return f"{detail} {jsonio.dumps(column.get(key))} in the first source"
    return None


def _merged(name: str, splits: Sequence[str], items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    made = {**items[0]}
    for key in _SUMS:
        if key in made:
            made[key] = sum(item.get(key, 0) for item in items)
    if "values" in made:
        values = [item["values"] for item in items]
        all_known = all(known is not None for known in values)
        made["values"] = sorted({*chain.from_iterable(values)}) if all_known else None
    if "lengths" in made:
        made["lengths"] = {
            name: _ends([i["lengths"][s] for s, i in zip(splits, items, strict=True)])
        }
    if "length_counts" in made:
        counts = [(i.get("length_counts") or {}).get(s) for s, i in zip(splits, items, strict=True)]
        made["length_counts"] = {name: _counts(counts)}
    if "tokens" in made:
        made["tokens"] = {
            unit: {
                name: _tokens([i["tokens"][unit][s] for s, i in zip(splits, items, strict=True)])
            }
            for unit in made["tokens"]
        }
    return made


def _ends(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: make(*(item[key] for item in items)) for key, make in _LENGTHS.items()}


def _counts(items: Sequence[Any]) -> list[list[int]] | None:
    if any(item is None for item in items):
        return None
    found: dict[int, int] = {}
    for length, rows in (pair for item in items for pair in item):
        found[length] = found.get(length, 0) + rows
    return [[length, found[length]] for length in sorted(found)]


def _tokens(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge token counts: at most as many unique tokens as the sources have in total."""
    lists = [item["at_least"] for item in items]
    counts: list[int] | None = None
    if all(item is not None for item in lists):  # a token reaches its mean count in one source
        counts = [
            sum(at_least(item, -(-least // len(lists))) if item else 0 for item in lists)
            for least in range(1, MAX_MIN_COUNT + 1)
        ]
    return _ends(items) | {"at_least": counts}
