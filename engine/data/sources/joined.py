"""Concatenate the rows of several sources into one table."""

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.columns.fields import at_least
from engine.data.columns.ragged import RaggedColumn
from engine.data.columns.table import Runs, StoredTable, Table, TextColumn
from engine.datasets.column_stats import MAX_MIN_COUNT
from glasshouse import jsonio
from glasshouse.spec import Source

_LENGTHS = {"min": min, "max": max, "total": sum}


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

    def __init__(self, parts: Sequence[TablePart], meta: dict[str, Any] | None = None) -> None:
        self.directory = parts[0].table.directory
        self.meta = meta or joined_meta([(part.source, part.table.meta) for part in parts])
        self._parts = parts
        self.ends = np.cumsum([0, *(part.table.num_rows(part.source.split) for part in parts)])

    def num_rows(self, split: str) -> int:
        """Return the number of rows of all parts."""
        return int(self.ends[-1])

    def taken(self, seed: int) -> tuple[Tensor | None, list[int]]:
        """Return the rows that the sources use (None: all), and how many each has."""
        if all(part.source.fraction is None for part in self._parts):
            return None, np.diff(self.ends).tolist()
        rows: list[Tensor] = []
        for (start, end), part in zip(pairwise(self.ends.tolist()), self._parts, strict=True):
            some = source_rows(end - start, part.source.fraction, seed)
            rows.append(torch.arange(start, end) if some is None else start + some)
        return torch.cat(rows), [len(item) for item in rows]

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
        offsets = _offsets([item.offsets for item in found])
        return RaggedColumn(name, split, values, offsets, self.where)

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
        for place, group in groupby(self._split_up(runs), key=itemgetter(0)):
            part, mine = self._parts[place], [run for _, run in group]
            window = self._stored[place].window(part.source.split, mine)
            found.append(TablePart(window, part.source))
            numbers.append(window.numbers + self.ends[place])
        return JoinedWindow(found, np.concatenate(numbers), self.meta)

    def _split_up(self, runs: Runs) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the runs within each part: the part's index, and the run by the part's rows."""
        for first, last in runs:
            start = first
            while start < last:
                place = int(np.searchsorted(self.ends, start, side="right")) - 1
                begin, end = int(self.ends[place]), min(last, int(self.ends[place + 1]))
                yield place, (start - begin, end - begin)
                start = end


class JoinedWindow(Joined):
    """Rows that were read from several tables."""

    def __init__(
        self, parts: Sequence[TablePart], numbers: NDArray[np.int64], meta: dict[str, Any]
    ) -> None:
        super().__init__(parts, meta)
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
    num_rows = sum(int(meta["splits"][split]) for meta, split in zip(metas, splits, strict=True))
    by_name = [{item["name"]: item for item in meta["columns"]} for meta in metas]
    columns: list[dict[str, Any]] = []
    for column in metas[0]["columns"]:
        alike = [column]
        for number, others in enumerate(by_name[1:], start=1):
            problem = _differs(column, other := others.get(column["name"], {}))
            if problem is not None and column["name"] in wanted:
                raise Disagree(number, problem)
            alike += [] if problem is not None else [other]
        if len(alike) == len(parts):
            columns.append(_merged(name, splits, alike))
    return {"columns": columns, "splits": {name: num_rows}}


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

    def of_splits(found: Iterable[Any], merge: Callable[[list[Any]], Any]) -> dict[str, Any]:
        return {name: merge([(x or {}).get(s) for s, x in zip(splits, found, strict=True)])}

    if "missing" in made:
        made["missing"] = sum(item.get("missing", 0) for item in items)
    if "values" in made:
        values = [item["values"] for item in items]
        all_known = all(known is not None for known in values)
        made["values"] = sorted({*chain.from_iterable(values)}) if all_known else None
    for key, merge in (("lengths", _ends), ("length_counts", _counts)):
        if key in made:
            made[key] = of_splits((item.get(key) for item in items), merge)
    if "tokens" in made:
        made["tokens"] = {
            unit: of_splits((item["tokens"][unit] for item in items), _tokens)
            for unit in made["tokens"]
        }
    return made


def _ends(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: make(item[key] for item in items) for key, make in _LENGTHS.items()}


def _counts(items: Sequence[Any]) -> list[list[int]] | None:
    if any(item is None for item in items):
        return None
    found: Counter[int] = Counter()
    for item in items:
        found.update(dict(item))
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
