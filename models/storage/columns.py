"""Reads a dataset directory: what its columns hold, row by row. Knows numpy only.

``engine.datasets.ingest`` writes these directories. ``docs/concepts/datasets.md`` describes them.
"""

from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasshouse import jsonio

MAX_ROW_VALUES = 1000
MAX_TEXT_LENGTH = 1000


class DatasetColumns:
    """One dataset on disk. Opening it reads ``meta.json``; columns are mapped when asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.meta: dict[str, Any] = jsonio.loads((directory / "meta.json").read_bytes())

    @cached_property
    def _by_name(self) -> dict[str, dict[str, Any]]:
        return {column["name"]: column for column in self.meta["columns"]}

    def stats(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Per split and column: count, missing, infinite, min, max, mean, std, distinct, counts.

        Moments and extremes are over the finite values, ``std`` is that of the population.
        """
        return jsonio.loads((self._directory / "stats.json").read_bytes())

    def array(self, split: str, column: str) -> NDArray[Any]:
        """A column of numbers, mapped and not read: its first axis is the rows.

        Raises:
            KeyError: the dataset has no such split or column.
            TypeError: the column holds texts or lists; see ``texts`` and ``lists``.
        """
        described = self._described(split, column)
        if described["dtype"] == "string":
            raise TypeError(f"column {column!r} holds texts, not numbers")
        if _is_ragged(described):
            raise TypeError(f"column {column!r} holds lists of different lengths")
        return _map(self._directory / split / described["file"])

    def lists(
        self, split: str, column: str, start: int = 0, stop: int | None = None
    ) -> list[NDArray[Any]]:
        """The rows ``start`` to ``stop`` (excluded) of a ragged column, mapped and not read.

        Raises:
            KeyError: the dataset has no such split or column.
            TypeError: the column is not ragged; see ``array`` and ``texts``.
        """
        described = self._described(split, column)
        if not _is_ragged(described):
            raise TypeError(f"column {column!r} holds no lists of different lengths")
        path = self._directory / split / described["file"]
        begin, end, _ = slice(start, stop).indices(self.meta["splits"][split])
        offsets = _map(path.with_suffix(".offsets.npy"))[begin : max(begin, end) + 1].tolist()
        values = _map(path)
        return [values[first:last] for first, last in pairwise(offsets)]

    def texts(self, split: str, column: str, start: int = 0, stop: int | None = None) -> list[str]:
        """The texts of the rows ``start`` to ``stop`` (excluded) of a string column.

        Raises:
            KeyError: the dataset has no such split or column.
            TypeError: the column holds numbers; see ``array``.
        """
        described = self._described(split, column)
        if described["dtype"] != "string":
            raise TypeError(f"column {column!r} holds numbers, not texts")
        path = self._directory / split / described["file"]
        rows = self.meta["splits"][split]
        begin, end, _ = slice(start, stop).indices(rows)
        offsets = _map(path)[begin : max(begin, end) + 1].tolist()
        data = _map(path.with_suffix(".bytes.npy"))
        return [data[first:last].tobytes().decode() for first, last in pairwise(offsets)]

    def rows(
        self, split: str, offset: int, limit: int, num_values: int = MAX_ROW_VALUES
    ) -> list[dict[str, Any]]:
        """Rows as JSON-ready values, nested as their shapes; NaN and infinities stay floats.

        A row shows at most ``num_values`` values, those of a ragged column counted by its
        longest row. The column in which they run out becomes ``{"truncated": true,
        "shape": [...], "values": [first values, flat]}``, columns after it are left out, and
        ``note`` says so. A text longer than ``MAX_TEXT_LENGTH`` becomes
        ``{"truncated": true, "length": n, "value": its beginning}``.

        Raises:
            KeyError: the dataset has no such split.
        """
        total = self.meta["splits"][split]
        start = min(max(offset, 0), total)
        stop = min(start + max(limit, 0), total)
        shown: list[dict[str, Any]] = [{} for _ in range(start, stop)]
        left = num_values
        for column in self.meta["columns"]:
            if left <= 0:
                break
            values = self._preview(split, column, (start, stop), left)
            for row, value in zip(shown, values, strict=True):
                row[column["name"]] = value
            left -= _most_values(column)
        return shown

    def note(self, num_values: int = MAX_ROW_VALUES) -> str | None:
        """What such rows leave out, for whoever looks at them."""
        values = sum(_most_values(column) for column in self.meta["columns"])
        if values <= num_values:
            return None
        has = "may have" if any(map(_is_ragged, self.meta["columns"])) else "has"
        return f"A row {has} {values:,} values; the first {num_values:,} are shown."

    def _preview(
        self, split: str, column: dict[str, Any], rows: tuple[int, int], left: int
    ) -> list[Any]:
        name, shape = column["name"], column["shape"]
        if column["dtype"] == "string":
            return [_shorten(text) for text in self.texts(split, name, *rows)]
        if _is_ragged(column):
            return [_head(values, left) for values in self.lists(split, name, *rows)]
        block = self.array(split, name)[slice(*rows)]
        if prod(shape) <= left:
            return block.tolist()
        heads: list[Any] = block.reshape(len(block), -1)[:, :left].tolist()
        return [{"truncated": True, "shape": shape, "values": head} for head in heads]

    def _described(self, split: str, column: str) -> dict[str, Any]:
        if split not in self.meta["splits"]:
            raise KeyError(split)
        return self._by_name[column]


def _is_ragged(column: dict[str, Any]) -> bool:
    return None in column["shape"]


def _most_values(column: dict[str, Any]) -> int:
    """The values of the longest row."""
    if not _is_ragged(column):
        return prod(column["shape"])
    longest = max(lengths["max"] for lengths in column["lengths"].values())
    return longest * prod(column["shape"][1:])


def _head(values: NDArray[Any], left: int) -> Any:
    if values.size <= left:
        return values.tolist()
    head: list[Any] = values[:left].reshape(-1)[:left].tolist()
    return {"truncated": True, "shape": list(values.shape), "values": head}


def _map(path: Path) -> NDArray[Any]:
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _shorten(text: str) -> str | dict[str, Any]:
    if len(text) <= MAX_TEXT_LENGTH:
        return text
    return {"truncated": True, "length": len(text), "value": text[:MAX_TEXT_LENGTH]}
