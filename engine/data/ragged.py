"""Rows of different lengths: read from a dataset directory, kept in memory, padded to batches.

A column is its values, those of all rows one after the other, and the offsets at which rows begin.
Values stay where batches are made; starts and lengths stay in host memory, so that how wide a batch
becomes is known without waiting for a device. Knows torch and numpy; knows nothing of networks.

Shape suffixes: B = rows of a batch, T = steps of its longest row, N = rows, S = the steps of all
rows together.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glasshouse.errors import DataFailed
from glasshouse.spec import (
    DenseSequenceField,
    IntegerSequenceField,
    SequenceField,
    Sequences,
    SparseBinaryField,
    SparseField,
)

_CHUNK_STEPS = 1 << 22


@dataclass(frozen=True)
class RaggedColumn:
    """One column of one split, mapped and not read."""

    name: str
    split: str
    values: NDArray[Any]
    offsets: NDArray[np.int64]
    numbers: NDArray[np.int64] | None = None
    """Of each row, its number in the split; None: they are all of its rows."""

    def check(self, num_rows: int) -> None:
        """Refuse offsets that lead outside of the values.

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
        """Of every row."""
        return np.diff(self.offsets)

    def place(self, step: int) -> tuple[int, int]:
        """The number of the row of one of the values, and which of its steps it is."""
        row = int(np.searchsorted(self.offsets, step, side="right")) - 1
        number = row if self.numbers is None else int(self.numbers[row])
        return number, step - int(self.offsets[row])


def check_range(name: str, field: IntegerSequenceField, column: RaggedColumn) -> None:
    """Refuse integers outside [0, dim), naming row and step.

    Raises:
        DataFailed: there is one.
    """
    values = column.values.reshape(-1)
    for start in range(0, len(values), _CHUNK_STEPS):
        part = values[start : start + _CHUNK_STEPS]
        outside = (part < 0) | (part >= field.dim)
        if part.dtype.kind == "f":
            outside |= part != np.floor(part)  # NaN too
        wrong = np.flatnonzero(outside)
        if wrong.size:
            at = start + int(wrong[0])
            row, step = column.place(at)
            detail = f"row {row} of split {column.split!r} has {values[at]:.17g} as value {step} of"
            detail += f" column {column.name!r};"
            raise DataFailed(
                f"{detail} field {name!r} takes integers in [0, {field.dim})",
                hint=f"Raise data.fields.{name}.dim, or correct the data.",
            )


@dataclass(frozen=True)
class Limited:
    """Which rows remain of those that a source takes, and what that leaves out."""

    rows: Tensor | None
    """Ascending; None: all of the split."""
    left_out: dict[str, int]
    """What is left out, in words, and how much of it."""


def limited(columns: Mapping[str, RaggedColumn], rows: Tensor | None, limit: Sequences) -> Limited:
    """Apply the limit on lengths to the rows that a source takes; ``columns`` are by field.

    Raises:
        DataFailed: a row is longer than it may be, and ``overflow`` is ``error``.
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
            detail = (
                f"row {int(numbers[at])} of split {column.split!r} has {int(lengths[at])} steps"
            )
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
    """A sequence field's rows in memory, as they are stored, and how a batch of them is made."""

    values: Tensor
    """Of all rows one after the other, [S] or [S, dim]; where batches are made."""
    starts: Tensor
    """Where each row begins, in host memory."""
    lengths: Tensor
    """In host memory."""
    divide_by: float | None = None
    scale: float | None = None
    is_integer: bool = False
    padding_value: int = 0
    weights: Tensor | None = None
    """Of places of a sparse vector their values, [S, 1]."""

    def to(self, device: torch.device) -> "LoadedSequence":
        """The same with its values on a device."""
        weights = None if self.weights is None else self.weights.to(device)
        return replace(self, values=self.values.to(device), weights=weights)

    def cut(self, most: int) -> "LoadedSequence":
        """The same rows without the steps behind the first so many."""
        return replace(self, lengths=self.lengths.clamp(max=most))

    @property
    def nbytes(self) -> int:
        """What moves to a device."""
        return self.values.nbytes + (0 if self.weights is None else self.weights.nbytes)

    def batch(self, rows_B: Tensor | slice, device: torch.device) -> tuple[Tensor, Tensor]:
        """Some rows, padded to the longest of them; and their lengths, in host memory.

        ``rows_B`` are in host memory. The batch has at least one step.
        """
        starts_B, lengths_B = self.starts[rows_B], self.lengths[rows_B]
        num_steps = max(1, int(lengths_B.max()))
        home = self.values.device
        steps_T = torch.arange(num_steps, device=home)
        is_padding_BT = steps_T >= lengths_B.to(home, non_blocking=True)[:, None]
        index_BT = starts_B.to(home, non_blocking=True)[:, None] + steps_T
        index_BT.masked_fill_(is_padding_BT, 0)
        if not len(self.values):
            stored = self.values.new_zeros((index_BT.numel(), *self.values.shape[1:]))
        else:
            stored = self.values.index_select(0, index_BT.reshape(-1))
        stored = stored.reshape(*index_BT.shape, *self.values.shape[1:])
        if self.is_integer:
            ids_BT = stored.to(torch.int64).masked_fill_(is_padding_BT, self.padding_value)
            return ids_BT.to(device, non_blocking=True), lengths_B
        x = stored.to(device, non_blocking=True).to(torch.float32)
        x = x.masked_fill_(is_padding_BT.to(device)[..., None], 0.0)
        if self.divide_by is not None:
            x.div_(self.divide_by)
        elif self.scale is not None:
            x.mul_(self.scale)
        return x, lengths_B


def load_sequence(
    name: str,
    field: SequenceField,
    column: RaggedColumn,
    rows: Tensor | None,
    limit: Sequences,
) -> LoadedSequence:
    """Read the rows that are taken of a column into memory, no longer than they may be.

    Raises:
        DataFailed: an integer lies outside [0, dim).
    """
    starts, lengths = column.offsets[:-1], column.lengths
    if isinstance(field, IntegerSequenceField):
        check_range(name, field, column)
    if rows is not None:
        starts, lengths = starts[rows.numpy()], lengths[rows.numpy()]
    if limit.max_length is not None:
        lengths = np.minimum(lengths, limit.max_length)
    wanted: Any = column.values.dtype
    scale = None
    if isinstance(field, IntegerSequenceField):
        wanted = np.int32 if field.dim <= 2**31 else np.int64
    else:
        scale = field.scale
        wanted = wanted if wanted in (np.uint8, np.float32) else np.float32
    width = () if isinstance(field, IntegerSequenceField) else (field.dim,)
    values = _taken(column.values.reshape(-1, *width), starts, lengths, wanted)
    divides = wanted == np.uint8 and scale is None
    return LoadedSequence(
        torch.from_numpy(values),
        torch.from_numpy(np.cumsum(lengths) - lengths),
        torch.from_numpy(np.ascontiguousarray(lengths)),
        255.0 if divides else None,
        scale,
        isinstance(field, IntegerSequenceField),
        getattr(field, "padding_value", 0),
    )


def load_sparse(
    name: str, field: SparseField, column: RaggedColumn, rows: Tensor | None
) -> LoadedSequence:
    """Read the places, and the values, of the rows that are taken.

    Raises:
        DataFailed: a place lies outside [0, dim), or is no whole number.
    """
    if isinstance(field, SparseBinaryField):
        plain = IntegerSequenceField(type="integer_sequence", dim=field.dim)
        return load_sequence(name, plain, column, rows, Sequences())
    places = replace(column, values=column.values.reshape(-1, 2)[:, 0])
    plain = IntegerSequenceField(type="integer_sequence", dim=field.dim)
    check_range(name, plain, places)
    found = load_sequence(name, plain, places, rows, Sequences())
    pair = DenseSequenceField(type="dense_sequence", dim=2, scale=1.0)
    weights = load_sequence(name, pair, column, rows, Sequences()).values[:, 1:]
    return replace(found, weights=weights.to(torch.float32).contiguous())


def split_pairs(pairs: LoadedSequence, name: str, dim: int) -> LoadedSequence:
    """Lists of pairs [place, value] as places and their values.

    Raises:
        DataFailed: a place lies outside [0, dim), or is no whole number.
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


def _taken(
    values: NDArray[Any], starts: NDArray[np.int64], lengths: NDArray[np.int64], dtype: Any
) -> NDArray[Any]:
    """The steps of some rows, one row after the other."""
    taken = np.empty((int(lengths.sum()), *values.shape[1:]), dtype)
    filled = 0
    for part in _parts(lengths):
        counts = lengths[part]
        ends = np.cumsum(counts)
        index = np.repeat(starts[part] - (ends - counts), counts) + np.arange(int(ends[-1]))
        taken[filled : filled + len(index)] = values[index]
        filled += len(index)
    return taken


def _parts(lengths: NDArray[np.int64]) -> Iterator[slice]:
    """Rows in order, so many at a time that their steps are not too many."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + _CHUNK_STEPS, side="right"))
        last = max(last, first + 1)
        yield slice(first, last)
        first = last


def from_lists(rows: list[NDArray[Any]], *, is_integer: bool, padding_value: int) -> LoadedSequence:
    """Rows that are in memory already, in the values that the network takes."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    values = torch.from_numpy(np.concatenate(rows))
    starts = lengths.cumsum(0) - lengths
    return LoadedSequence(
        values, starts, lengths, is_integer=is_integer, padding_value=padding_value
    )
