"""Read a dataset directory: ``meta.json`` and memory-mapped ``.npy`` files. Uses numpy."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
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
        path = (self.directory / split / self.described(name)["file"]).with_suffix(suffix)
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as cause:
            raise DataFailed(
                f"column {name!r} of split {split!r} cannot be read: {cause}"
            ) from cause

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
