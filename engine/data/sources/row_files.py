"""Read some rows of a dataset directory from its files on demand.

Nothing is memory-mapped, because mapped pages count as memory of the process, and stay. Files are
opened for each read, because a wide table has more columns than a process has file descriptors.
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from engine.data.columns.table import Table
from glasshouse.errors import DataFailed

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
        path = (self.directory / split / self.described(name)["file"]).with_suffix(suffix)
        try:
            if path not in self._headers:
                self._headers[path] = _read_header(path)
            return _read_rows(path, self._headers[path], runs)
        except (OSError, ValueError) as cause:
            detail = f"column {name!r} of split {split!r} cannot be read: {cause}"
            raise DataFailed(detail) from cause

    def offsets(self, split: str, name: str) -> NDArray[np.int64]:
        """Return the offsets of all rows of a column of lists."""
        num_rows, (length, *_) = self.num_rows(split), self.described(name)["shape"]
        if length is not None:
            return np.arange(num_rows + 1, dtype=np.int64) * int(length)
        return self.read(split, name, [(0, num_rows + 1)], ".offsets.npy")


def _read_rows(path: Path, header: _Header, runs: Runs) -> NDArray[Any]:
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
