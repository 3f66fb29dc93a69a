"""A dataset directory: ``meta.json`` and plain ``.npy`` files, mapped and not read. Knows numpy."""

from pathlib import Path
from typing import Any

import numpy as np

from engine.data.ragged import RaggedColumn
from glasshouse import jsonio
from glasshouse.errors import DataFailed


class Table:
    """A dataset directory; columns are mapped, not read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self.meta: dict[str, Any] = jsonio.loads((directory / "meta.json").read_bytes())
        except (OSError, ValueError) as cause:
            raise DataFailed(f"the dataset cannot be read: {cause}") from cause

    def num_rows(self, split: str) -> int:
        """Rows of a split.

        Raises:
            DataFailed: there is no such split.
        """
        if split not in self.meta["splits"]:
            listed = ", ".join(self.meta["splits"])
            raise DataFailed(f"the dataset has no split {split!r}; it has: {listed}")
        return int(self.meta["splits"][split])

    def row_number(self, row: int) -> int:
        """The number, in the split, of a row of the columns that are read."""
        return row

    def column(self, split: str, name: str) -> np.ndarray[Any, Any]:
        """One column of a split, mapped read-only."""
        found = next(item for item in self.meta["columns"] if item["name"] == name)
        return self._map(self.directory / split / found["file"], name, split)

    @staticmethod
    def _map(path: Path, name: str, split: str) -> np.ndarray[Any, Any]:
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as cause:
            raise DataFailed(
                f"column {name!r} of split {split!r} cannot be read: {cause}"
            ) from cause

    def ragged(self, split: str, name: str) -> RaggedColumn:
        """A column as lists, mapped read-only; one of tensors as lists of the same length.

        Raises:
            DataFailed: its files cannot be read, or do not belong together.
        """
        found = next(item for item in self.meta["columns"] if item["name"] == name)
        values = self.column(split, name)
        if found["shape"][0] is None:
            path = self.directory / split / found["file"]
            offsets = self._map(path.with_suffix(".offsets.npy"), name, split)
        else:
            offsets = np.arange(len(values) + 1, dtype=np.int64) * values.shape[1]
            values = values.reshape(-1, *values.shape[2:])
        column = RaggedColumn(name, split, values, offsets)
        column.check(self.num_rows(split))
        return column
