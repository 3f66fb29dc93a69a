"""Read the columns of a dataset directory, row by row. Needs only numpy.

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
    """One dataset on disk. Opening it reads ``meta.json``; columns are mapped on access."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.meta: dict[str, Any] = jsonio.loads((directory / "meta.json").read_bytes())

    @cached_property
    def _by_name(self) -> dict[str, dict[str, Any]]:
        return {column["name"]: column for column in self.meta["columns"]}

    def stats(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the statistics by split and column.

        They are count, missing, infinite, min, max, mean, std, distinct and counts. Moments and
        extremes are over the finite values; ``std`` is the population's.
        """
        return jsonio.loads((self._directory / "stats.json").read_bytes())

    def array(self, split: str, column: str) -> NDArray[Any]:
        """Return a numeric column, memory-mapped; its first axis is the rows.

        Raises:
            KeyError: The dataset has no such split or column.
            TypeError: The column holds texts or lists; see ``texts`` and ``lists``.
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
        """Return the rows ``start`` to ``stop`` (exclusive) of a ragged column, memory-mapped.

        Raises:
            KeyError: The dataset has no such split or column.
            TypeError: The column is not ragged; see ``array`` and ``texts``.
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
        """Return the texts of the rows ``start`` to ``stop`` (exclusive) of a string column.

        Raises:
            KeyError: The dataset has no such split or column.
            TypeError: The column holds numbers; see ``array``.
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
        """Return rows as JSON-ready values, nested like their shapes; NaN and Inf stay floats.

        A row shows at most ``num_values`` values; a ragged column counts as its longest row. The
        column that exceeds the limit becomes ``{"truncated": true, "shape": [...], "values": [first
        values, flat]}``, columns after it are omitted, and ``note`` says so. A text longer than
        ``MAX_TEXT_LENGTH`` becomes ``{"truncated": true, "length": n, "value": its beginning}``.

        Raises:
            KeyError: The dataset has no such split.
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
        """Return a note for users about what such rows omit."""
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
    """Return the number of values of the longest row."""
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
