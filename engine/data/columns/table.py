"""Read a dataset directory: ``meta.json``, and ``.npy`` files as a whole or some of their rows.

A whole column is memory-mapped. Rows that are read on demand are not, because mapped pages count as
memory of the process, and stay. Their files are opened for each read, because a wide table has more
columns than a process has file descriptors. Uses numpy.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from engine.data.columns.ragged import RaggedColumn, check_offsets
from glasshouse import jsonio
from glasshouse.errors import DataFailed


@dataclass(frozen=True)
class TextColumn:
    """One text column of one split, memory-mapped and not read."""

    name: str
    split: str
    data: NDArray[np.uint8]
    """UTF-8, all rows concatenated."""
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def text(self, row: int) -> str:
        """Return the text of one row."""
        return self._decoded(self.data[self.offsets[row] : self.offsets[row + 1]].tobytes())

    def chunks(self, num_bytes: int) -> Iterator[list[str]]:
        """Yield all texts in order, in groups of rows with about ``num_bytes`` bytes."""
        first, last = 0, len(self)
        while first < last:
            begin = int(self.offsets[first])
            stop = int(np.searchsorted(self.offsets, begin + num_bytes, side="right")) - 1
            stop = min(max(stop, first + 1), last, first + num_bytes)
            ends = (self.offsets[first : stop + 1] - begin).tolist()
            block = self.data[begin : begin + ends[-1]].tobytes()
            yield [self._decoded(block[start:end]) for start, end in pairwise(ends)]
            first = stop

    def _decoded(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as cause:
            detail = f"column {self.name!r} of split {self.split!r} cannot be read: {cause}"
            raise DataFailed(detail) from cause


class Table:
    """A dataset directory. Columns are memory-mapped, not read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self.meta: dict[str, Any] = jsonio.loads((directory / "meta.json").read_bytes())
        except (OSError, ValueError) as cause:
            raise DataFailed(f"the dataset cannot be read: {cause}") from cause

    def num_rows(self, split: str) -> int:
        """Return the number of rows of a split.

        Raises:
            DataFailed: there is no such split.
        """
        if split not in self.meta["splits"]:
            listed = ", ".join(self.meta["splits"])
            raise DataFailed(f"the dataset has no split {split!r}; it has: {listed}")
        return int(self.meta["splits"][split])

    def where(self, split: str, row: int) -> str:
        """Return where a row is, in words."""
        return f"row {row} of split {split!r}"

    def column(self, split: str, name: str) -> np.ndarray[Any, Any]:
        """Return a column of a split, mapped read-only."""
        return self._map(split, name, ".npy")

    def _map(self, split: str, name: str, suffix: str) -> np.ndarray[Any, Any]:
        load = partial(np.load, mmap_mode="r", allow_pickle=False)
        return self._read_by(load, split, name, suffix)

    def _read_by(self, read: Callable[[Path], Any], split: str, name: str, suffix: str) -> Any:
        path = (self.directory / split / self.described(name)["file"]).with_suffix(suffix)
        try:
            return read(path)
        except (OSError, ValueError) as cause:
            detail = f"column {name!r} of split {split!r} cannot be read: {cause}"
            raise DataFailed(detail) from cause

    def lists(
        self, split: str, name: str, values: str, offsets: str
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the concatenated values of all rows, and the rows' offsets in them.

        ``values``, ``offsets``: the suffixes of their files.
        """
        return self._map(split, name, values), self._map(split, name, offsets)

    def texts(self, split: str, name: str) -> TextColumn:
        """Return a text column; its texts are not read.

        Raises:
            DataFailed: its files cannot be read, or do not belong together.
        """
        data, offsets = self.lists(split, name, ".bytes.npy", ".npy")
        check_offsets(offsets, len(data), self.num_rows(split), (name, split, "texts"))
        return TextColumn(name, split, data, offsets)

    def described(self, name: str) -> dict[str, Any]:
        """Return the description of a column in the dataset's metadata."""
        return next(item for item in self.meta["columns"] if item["name"] == name)

    def ragged(self, split: str, name: str) -> RaggedColumn:
        """Return a column as lists; rows of a tensor become lists of one length.

        Raises:
            DataFailed: its files cannot be read, or do not belong together.
        """
        if self.described(name)["shape"][0] is None:
            values, offsets = self.lists(split, name, ".npy", ".offsets.npy")
        else:
            values = self.column(split, name)
            offsets = np.arange(len(values) + 1, dtype=np.int64) * values.shape[1]
            values = values.reshape(-1, *values.shape[2:])
        check_offsets(offsets, len(values), self.num_rows(split), (name, split, "values"))
        return RaggedColumn(name, split, values, offsets, self.where)


# --- some rows -------------------------------------------------------------------------------

Runs = Sequence[tuple[int, int]]
"""Runs of adjacent rows in a file: the first row, and the one after the last."""


class _Header(NamedTuple):
    dtype: np.dtype[Any]
    row: tuple[int, ...]
    num_rows: int
    start: int
    """Offset of the values in the file."""


def _read_header(path: Path) -> _Header:
    with path.open("rb") as file:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        read_shape, is_fortran, dtype = read(file)
        shape = [int(size) for size in read_shape]
        start = file.tell()
    if dtype.hasobject or not shape or (is_fortran and len(shape) > 1):
        raise ValueError("it is no array of numbers, row by row")
    return _Header(dtype, tuple(shape[1:]), shape[0], start)


def _fill(descriptor: int, into: memoryview, start: int) -> None:
    while len(into):
        size = os.preadv(descriptor, [into], start)
        if not size:
            raise ValueError("it ends before its last row")
        into, start = into[size:], start + size


class StoredTable(Table):
    """A dataset directory that is read in parts."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._headers: dict[Path, _Header] = {}

    def window(self, split: str, runs: Runs) -> "Window":
        """Return some of the rows of a split."""
        return Window(self, split, runs)

    def read(self, split: str, name: str, runs: Runs, suffix: str = ".npy") -> NDArray[Any]:
        """Read rows of a column's file.

        Raises:
            DataFailed: it cannot be read.
        """
        return self._read_by(partial(self._read_rows, runs), split, name, suffix)

    def _read_rows(self, runs: Runs, path: Path) -> NDArray[Any]:
        if path not in self._headers:
            self._headers[path] = _read_header(path)
        header = self._headers[path]
        found = np.empty((sum(last - first for first, last in runs), *header.row), header.dtype)
        row_bytes = header.dtype.itemsize * int(np.prod(header.row, dtype=np.int64))
        if any(first < 0 or last > header.num_rows for first, last in runs):
            raise ValueError(f"it has {header.num_rows} rows, and more are asked for")
        if not found.nbytes:
            return found
        into = memoryview(found.reshape(-1).view(np.uint8).data)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            filled = 0
            for first, last in runs:
                size = (last - first) * row_bytes
                _fill(descriptor, into[filled : filled + size], header.start + first * row_bytes)
                filled += size
        finally:
            os.close(descriptor)
        return found

    def offsets(self, split: str, name: str) -> NDArray[np.int64]:
        """Return the offsets of all rows of a column of lists."""
        num_rows, (length, *_) = self.num_rows(split), self.described(name)["shape"]
        if length is not None:
            return np.arange(num_rows + 1, dtype=np.int64) * int(length)
        return self.read(split, name, [(0, num_rows + 1)], ".offsets.npy")


class Window(Table):
    """Some rows of a split, with the interface of a table."""

    def __init__(self, table: StoredTable, split: str, runs: Runs) -> None:
        self.directory, self.meta = table.directory, table.meta
        self._table = table
        self._split = split
        self._runs = runs
        self.numbers = np.concatenate([np.arange(*run) for run in runs])
        """Each row's number in the split."""

    def num_rows(self, split: str) -> int:
        """Return the number of rows."""
        return len(self.numbers)

    def where(self, split: str, row: int) -> str:
        """Return where a row is, in words, by its number in the split."""
        return super().where(split, int(self.numbers[row]))

    def column(self, split: str, name: str) -> NDArray[Any]:
        """Return the rows of a column."""
        return self._table.read(self._split, name, self._runs)

    def lists(
        self, split: str, name: str, values: str, offsets: str
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the concatenated values of the rows, and the rows' offsets in them."""
        runs = [(first, last + 1) for first, last in self._runs]
        ends = self._table.read(self._split, name, runs, offsets)
        at = np.cumsum([0, *(last - first for first, last in runs)])
        parts = [ends[first:last] for first, last in pairwise(at.tolist())]
        lengths = np.concatenate([np.diff(part) for part in parts])
        if len(lengths) and int(lengths.min()) < 0:
            detail = f"column {name!r} of split {self._split!r} cannot be read:"
            raise DataFailed(f"{detail} its offsets do not fit its values")
        places = [(int(part[0]), int(part[-1])) for part in parts]
        found = self._table.read(self._split, name, places, values)
        return found, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def runs_of(rows: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Group ascending, unique rows into runs."""
    if not len(rows):
        return []
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(rows, cuts)]
