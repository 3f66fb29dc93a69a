"""Rows of different lengths: read from a dataset directory, kept in memory, padded in batches.

A column is the concatenated values of all rows, and the offsets at which rows begin. Values stay on
the device that batches are created on. Starts and lengths stay in host memory, so the width of a
batch is known without waiting for a device. Depends on torch and numpy, not on networks.

Shape suffixes: B = rows of a batch, T = steps of its longest row, N = rows, S = the steps of all
rows together.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.columns.staging import gathered, moved
from glasshouse.errors import DataFailed
from glasshouse.spec import (
    DenseSequenceField,
    IntegerSequenceField,
    Sequences,
    SparseBinaryField,
    SparseField,
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

    def check(self, num_rows: int) -> None:
        """Refuse offsets outside of the values.

        Raises:
            DataFailed: the files do not belong together.
        """
        ends = self.offsets
        good = len(ends) == num_rows + 1 and ends[0] == 0 and ends[-1] == len(self.values)
        if not good or bool((np.diff(ends) < 0).any()):
            detail = f"column {self.name!r} of split {self.split!r} cannot be read:"
            raise DataFailed(f"{detail} its offsets do not fit its values")

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


@dataclass(frozen=True)
class Limited:
    """The rows of a source that remain under a length limit, and what is cut off or dropped."""

    rows: Tensor | None
    """Row numbers, ascending; None: all rows of the split."""
    left_out: dict[str, int]
    """What is cut off or dropped, in words, and how much of it."""


def limited(columns: Mapping[str, RaggedColumn], rows: Tensor | None, limit: Sequences) -> Limited:
    """Apply the length limit to the rows of a source; ``columns`` are by field.

    Raises:
        DataFailed: a row is longer than allowed, and ``overflow`` is ``error``.
    """
    most = limit.max_length
    if most is None or not columns:
        return Limited(rows, {})
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
        return Limited(torch.from_numpy(numbers[~is_long]), left_out)
    return Limited(rows, left_out)


@dataclass(frozen=True)
class LoadedSequence:
    """A sequence field's rows in memory, as stored, and how to create a batch from them."""

    values: Tensor
    """The concatenated values of all rows, [S] or [S, dim], on the device for batches."""
    starts: Tensor
    """Where each row begins, in host memory."""
    lengths: Tensor
    """In host memory."""
    divide_by: float | None = None
    scale: float | None = None
    is_integer: bool = False
    padding_value: int = 0
    weights: Tensor | None = None
    """For a sparse field: the values of its indices, [S, 1]."""
    around: Tensor | None = None
    """Offsets of a window's steps from its start, on the device of the values; None: consecutive
    steps."""

    def to(self, device: torch.device) -> "LoadedSequence":
        """Return a copy with the values on a device."""
        weights = None if self.weights is None else self.weights.to(device)
        around = None if self.around is None else self.around.to(device)
        return replace(self, values=self.values.to(device), weights=weights, around=around)

    def ready(self, device: torch.device) -> "LoadedSequence":
        """Return this object: a batch needs nothing but the values."""
        return self

    def cut(self, most: int) -> "LoadedSequence":
        """Return the same rows, truncated to the first ``most`` steps."""
        return replace(self, lengths=self.lengths.clamp(max=most))

    @property
    def nbytes(self) -> int:
        """Bytes to move to a device."""
        return self.values.nbytes + (0 if self.weights is None else self.weights.nbytes)

    def batch(self, rows_B: Tensor | slice, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return rows, padded to the longest of them, and their lengths, in host memory.

        ``rows_B`` are in host memory. The batch has at least one step.
        """
        starts_B, lengths_B = self.starts[rows_B], self.lengths[rows_B]
        num_steps = max(1, int(lengths_B.max()))
        home = self.values.device
        steps_T = torch.arange(num_steps, device=home)
        around_T = steps_T if self.around is None else self.around[:num_steps]
        index_BT = moved(starts_B, home)[:, None] + around_T
        if int(lengths_B.min()) == num_steps:
            return self._read(self._stored(index_BT, device)), lengths_B
        is_padding_BT = steps_T >= moved(lengths_B, home)[:, None]
        x = self._read(self._stored(index_BT.masked_fill_(is_padding_BT, 0), device))
        is_padding_BT = moved(is_padding_BT, device)
        if self.is_integer:
            return x.masked_fill_(is_padding_BT, self.padding_value), lengths_B
        return x.masked_fill_(is_padding_BT[..., None], 0.0), lengths_B

    def _stored(self, index_BT: Tensor, device: torch.device) -> Tensor:
        """Return the values at some indices, on a device, newly allocated; zeros without values.

        To CUDA they are copied in the stored dtype, through pinned memory.
        """
        shape = (*index_BT.shape, *self.values.shape[1:])
        if not len(self.values):
            return torch.zeros(shape, dtype=self.values.dtype, device=device)
        return gathered(self.values, index_BT.reshape(-1), device).reshape(shape)

    def _read(self, stored: Tensor) -> Tensor:
        """Convert stored values to what the network takes."""
        if self.is_integer:
            return stored.to(torch.int64)
        x = stored.to(torch.float32)
        if self.divide_by is not None:
            x.div_(self.divide_by)
        elif self.scale is not None:
            x.mul_(self.scale)
        return x


def steps_of(
    column: RaggedColumn, rows: Tensor | None, limit: Sequences, dtype: Any
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the steps of the given rows, truncated to the limit, and their lengths."""
    starts, lengths = column.offsets[:-1], column.lengths
    if rows is not None:
        starts, lengths = starts[rows.numpy()], lengths[rows.numpy()]
    if limit.max_length is not None:
        lengths = np.minimum(lengths, limit.max_length)
    return _taken(column.values, starts, lengths, dtype), lengths


def load_integers(
    field: IntegerSequenceField, column: RaggedColumn, rows: Tensor | None, limit: Sequences
) -> LoadedSequence:
    """Read the given rows of a column of integers into memory."""
    dtype = np.int32 if (field.dim or 0) <= 2**31 else np.int64
    flat = replace(column, values=column.values.reshape(-1))
    values, lengths = steps_of(flat, rows, limit, dtype)
    return in_memory(values, lengths, is_integer=True, padding_value=field.padding_value)


def load_vectors(
    field: DenseSequenceField, column: RaggedColumn, rows: Tensor | None, limit: Sequences
) -> LoadedSequence:
    """Read the given rows of a column of vectors into memory."""
    stays = column.values.dtype.name in ("uint8", "float32")
    dtype = column.values.dtype if stays else np.dtype(np.float32)
    wide = replace(column, values=column.values.reshape(-1, field.dim))
    values, lengths = steps_of(wide, rows, limit, dtype)
    divides = dtype.name == "uint8" and field.scale is None
    return replace(
        in_memory(values, lengths), divide_by=255.0 if divides else None, scale=field.scale
    )


def in_memory(
    values: NDArray[Any],
    lengths: NDArray[np.int64],
    *,
    is_integer: bool = False,
    padding_value: int = 0,
) -> LoadedSequence:
    """Create a field from concatenated rows."""
    starts = torch.from_numpy(np.cumsum(lengths) - lengths)
    return LoadedSequence(
        torch.from_numpy(values),
        starts,
        torch.from_numpy(np.ascontiguousarray(lengths)),
        is_integer=is_integer,
        padding_value=padding_value,
    )


def places_of(field: SparseField, column: RaggedColumn) -> RaggedColumn:
    """Return the indices of a sparse field, without values."""
    if isinstance(field, SparseBinaryField):
        return column
    return replace(column, values=np.asarray(column.values.reshape(-1, 2))[:, 0])


def load_sparse(field: SparseField, column: RaggedColumn, rows: Tensor | None) -> LoadedSequence:
    """Read the indices, and the values, of the given rows."""
    plain = IntegerSequenceField(type="integer_sequence", dim=field.dim)
    found = load_integers(plain, places_of(field, column), rows, Sequences())
    if isinstance(field, SparseBinaryField):
        return found
    pair = DenseSequenceField(type="dense_sequence", dim=2, scale=1.0)
    weights = load_vectors(pair, column, rows, Sequences()).values[:, 1:]
    return replace(found, weights=weights.to(torch.float32).contiguous())


def split_pairs(pairs: LoadedSequence, name: str, dim: int) -> LoadedSequence:
    """Split lists of pairs [index, value] into indices and values.

    Raises:
        DataFailed: an index is outside [0, dim), or is not an integer.
    """
    places = pairs.values[:, 0]
    if bool(((places != places.floor()) | (places < 0) | (places >= dim)).any()):
        raise DataFailed(f"input {name!r} takes places in [0, {dim})")
    return replace(
        pairs,
        values=places.to(torch.int64),
        weights=pairs.values[:, 1:].to(torch.float32).contiguous(),
        is_integer=True,
    )


def forget_pages(array: NDArray[Any]) -> None:
    """Release the read pages of a mapped file, which would count as memory of the process."""
    for part in getattr(array, "parts", (array,)):
        mapped = getattr(part, "_mmap", None)
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)


def _taken(
    values: NDArray[Any], starts: NDArray[np.int64], lengths: NDArray[np.int64], dtype: Any
) -> NDArray[Any]:
    """Return the concatenated steps of some rows."""
    taken = np.empty((int(lengths.sum()), *values.shape[1:]), dtype)
    filled = 0
    for part in _parts(lengths):
        counts = lengths[part]
        ends = np.cumsum(counts)
        index = np.repeat(starts[part] - (ends - counts), counts) + np.arange(int(ends[-1]))
        taken[filled : filled + len(index)] = values[index]
        filled += len(index)
        forget_pages(values)
    return taken


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


def from_lists(rows: list[NDArray[Any]], *, is_integer: bool, padding_value: int) -> LoadedSequence:
    """Create a field from rows in memory whose values are those that the network takes."""
    lengths = np.array([len(row) for row in rows], np.int64)
    values = np.concatenate(rows)
    return in_memory(values, lengths, is_integer=is_integer, padding_value=padding_value)
