"""Columns of rows of different lengths: what remains under a length limit, read into memory.

A column is the concatenated values of all rows, and the offsets at which rows begin. Depends on
torch and numpy, not on networks.

Shape suffixes: N = rows, S = the steps of all rows together.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.columns.loaded import LoadedSequence
from glasshouse.errors import DataFailed
from glasshouse.spec import (
    Sequences,
)

_CHUNK_STEPS = 1 << 18


@dataclass(frozen=True)
class RaggedColumn:
    """One column of one split, memory-mapped and not read."""

    name: str
    split: str
    values: NDArray[Any]
    offsets: NDArray[np.int64]
    place: Callable[[str, int], str] | None = None
    """Returns where a row of a split is, in words; None: these are all rows of the split."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of every row."""
        return np.diff(self.offsets)

    def rows_of(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows that values, by index, belong to: unique and ascending."""
        return np.unique(np.searchsorted(self.offsets, steps, side="right") - 1)

    def where(self, row: int) -> str:
        """Return where a row is, in words."""
        if self.place is not None:
            return self.place(self.split, row)
        return f"row {row} of split {self.split!r}"


def check_offsets(
    ends: NDArray[np.int64], size: int, num_rows: int, of: tuple[str, str, str]
) -> None:
    """Refuse offsets of rows outside of ``size`` values; ``of``: column, split and what they are.

    Raises:
        DataFailed: the files do not belong together.
    """
    good = len(ends) == num_rows + 1 and ends[0] == 0 and ends[-1] == size
    if not good or bool((np.diff(ends) < 0).any()):
        name, split, what = of
        detail = f"column {name!r} of split {split!r} cannot be read:"
        raise DataFailed(f"{detail} its offsets do not fit its {what}")


@dataclass(frozen=True)
class Kept:
    """The rows of a source that remain, and what is cut off or dropped."""

    rows: Tensor | None
    """Row numbers, ascending; None: all rows of the split."""
    left_out: dict[str, int]
    """What is cut off or dropped, in words, and how much of it."""


def limited(columns: Mapping[str, RaggedColumn], rows: Tensor | None, limit: Sequences) -> Kept:
    """Apply the length limit to the rows of a source; ``columns`` are by field.

    Raises:
        DataFailed: a row is longer than allowed, and ``overflow`` is ``error``.
    """
    most = limit.max_length
    if most is None or not columns:
        return Kept(rows, {})
    some = next(iter(columns.values()))
    numbers = np.arange(len(some.offsets) - 1) if rows is None else rows.numpy()
    is_long = np.zeros(len(numbers), np.bool_)
    left_out: dict[str, int] = {}
    for name, column in columns.items():
        lengths = column.lengths[numbers]
        too_long = lengths > most
        if limit.overflow == "error" and too_long.any():
            at = int(np.flatnonzero(too_long)[0])
            detail = f"{column.where(int(numbers[at]))} has {int(lengths[at])} steps"
            raise DataFailed(
                f"{detail} in column {column.name!r}; data.sequence.max_length is {most}",
                hint="Raise data.sequence.max_length, or set overflow to truncate or drop.",
            )
        if limit.overflow == "truncate" and too_long.any():
            what = (
                f"steps behind max_length {most} of field {name!r}, in {int(too_long.sum())} rows"
            )
            left_out[f"{what} of split {column.split!r}"] = int((lengths - most)[too_long].sum())
        is_long |= too_long
    if limit.overflow == "drop" and is_long.any():
        left_out[f"rows longer than max_length {most} of split {some.split!r}"] = int(is_long.sum())
        return Kept(torch.from_numpy(numbers[~is_long]), left_out)
    return Kept(rows, left_out)


def steps_of(
    column: RaggedColumn, rows: Tensor | None, limit: Sequences, dtype: Any
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the steps of the given rows, truncated to the limit, and their lengths."""
    starts, lengths = column.offsets[:-1], column.lengths
    if rows is not None:
        starts, lengths = starts[rows.numpy()], lengths[rows.numpy()]
    if limit.max_length is not None:
        lengths = np.minimum(lengths, limit.max_length)
    taken = np.empty((int(lengths.sum()), *column.values.shape[1:]), dtype)
    filled = 0
    for part in _parts(lengths):
        counts = lengths[part]
        ends = np.cumsum(counts)
        index = np.repeat(starts[part] - (ends - counts), counts) + np.arange(int(ends[-1]))
        taken[filled : filled + len(index)] = column.values[index]
        filled += len(index)
        forget_pages(column.values)
    return taken, lengths


def in_memory(
    values: NDArray[Any],
    lengths: NDArray[np.int64],
    *,
    is_integer: bool = False,
    padding_value: int = 0,
) -> LoadedSequence:
    """Create a field from concatenated rows."""
    lengths_N = torch.from_numpy(np.ascontiguousarray(lengths))
    starts_N = lengths_N.cumsum(0) - lengths_N
    values_S = torch.from_numpy(values)
    return LoadedSequence(
        values_S, starts_N, lengths_N, is_integer=is_integer, padding_value=padding_value
    )


def forget_pages(array: NDArray[Any]) -> None:
    """Release the read pages of a mapped file, which would count as memory of the process."""
    for part in getattr(array, "parts", (array,)):
        mapped = getattr(part, "_mmap", None)
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)


def _parts(lengths: NDArray[np.int64]) -> Iterator[slice]:
    """Yield rows in order, in groups with a bounded number of steps."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + _CHUNK_STEPS, side="right"))
        last = max(last, first + 1)
        yield slice(first, last)
        first = last
