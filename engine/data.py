"""Data: the columns of a dataset directory as tensors on the device, and the order of their rows.

A dataset directory holds ``meta.json`` and plain ``.npy`` files. Values reach the network as
float32 or int64:

- a uint8 column without ``scale`` is ``column.to(float32) / 255``, exactly that;
- any other column without ``scale`` is ``column.to(float32)``;
- with ``scale`` it is ``column.to(float32) * scale``.

Row order is a function of (seed, epoch) alone. Knows torch, numpy and the words of the data; knows
nothing of networks. Shape suffixes: B = rows of a batch, N = rows of the split.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.network import host_lengths_of, lengths_of, values_of
from engine.ragged import (
    LoadedSequence,
    RaggedColumn,
    from_lists,
    limited,
    load_sequence,
    load_sparse,
    split_pairs,
)
from engine.shapes import FieldShape
from glasshouse import jsonio
from glasshouse.errors import DataFailed
from glasshouse.spec import (
    DenseField,
    Field,
    IntegerField,
    IntegerSequenceField,
    RaggedField,
    SequenceField,
    Sequences,
    Source,
    SparseField,
    SparseFloatField,
)

_EPOCH_STRIDE = 1_000_003
_INTEGERS = {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "bool"}
_RANGE_CHUNK = 1 << 22
_EXACT_PLACES = 1 << 24
"""Whole numbers that float32 tells apart."""

Taken = Tensor | slice
"""Which rows a batch has, by their places in memory."""


class BadField(Exception):
    """A field cannot read the dataset; ``key`` is the part of the field to change, if one is."""

    def __init__(self, detail: str, key: str = "") -> None:
        super().__init__(detail)
        self.key = key


def field_shape(
    name: str, field: Field, meta: dict[str, Any], split: str | None = None
) -> FieldShape:
    """What a field gives the network, from the dataset's description alone.

    A sequence has the steps of the longest row of the split; of all splits if none is named.

    Raises:
        BadField: a column is missing, or is not of a kind or shape that the field can take.
    """
    columns = [_column(name, field, wanted, meta) for wanted in field_columns(name, field)]
    if isinstance(field, SparseField):
        return _sparse_shape(name, field, columns[0], split)
    if isinstance(field, SequenceField):
        return _sequence_shape(name, field, columns[0], split)
    if isinstance(field, IntegerField):
        column = columns[0]
        if column["dtype"] not in _INTEGERS or math.prod(column["shape"]) != 1:
            detail = f"field {name!r} needs one integer per row, and column {column['name']!r} is"
            raise BadField(f"{detail} {column['dtype']} of shape {column['shape']}")
        return FieldShape((), torch.int64, field.dim)
    if field.columns is not None:
        own: tuple[int, ...] = (sum(math.prod(column["shape"]) for column in columns),)
    else:
        own = tuple(columns[0]["shape"])
    if field.shape is not None and math.prod(field.shape) != math.prod(own):
        detail = f"field {name!r} wants rows of shape {list(field.shape)}, which the column's shape"
        raise BadField(f"{detail} {list(own)} cannot be seen as", "shape")
    return FieldShape(own if field.shape is None else field.shape, torch.float32)


def _sequence_shape(
    name: str, field: SequenceField, column: dict[str, Any], split: str | None
) -> FieldShape:
    shape = column["shape"]
    key = "column" if field.column is not None else ""
    of = f"column {column['name']!r} is {column['dtype']} of shape {jsonio.dumps(shape)}"
    if not shape:
        raise BadField(f"field {name!r} needs a list per row, and {of}", key)
    width, longest = math.prod(shape[1:]), _longest(column, split)
    if isinstance(field, IntegerSequenceField):
        if column["dtype"] not in _INTEGERS or width != 1:
            raise BadField(f"field {name!r} needs lists of integers, and {of}", key)
        padding = field.padding_value
        return FieldShape((longest,), torch.int64, field.dim, True, padding)
    if width != field.dim:
        raise BadField(
            f"field {name!r} needs lists of vectors of {field.dim} values, and {of}", "dim"
        )
    return FieldShape((longest, field.dim), torch.float32, is_sequence=True)


def _sparse_shape(
    name: str, field: SparseField, column: dict[str, Any], split: str | None
) -> FieldShape:
    shape = column["shape"]
    has_values = isinstance(field, SparseFloatField)
    width = 2 if has_values else 1
    if (
        not shape
        or math.prod(shape[1:]) != width
        or (not has_values and column["dtype"] not in _INTEGERS)
    ):
        wanted = "lists of pairs [place, value]" if has_values else "lists of integers"
        detail = f"field {name!r} needs {wanted}, and column {column['name']!r} is"
        detail += f" {column['dtype']} of shape {jsonio.dumps(shape)}"
        raise BadField(detail, "column" if field.column is not None else "")
    return FieldShape(
        (_longest(column, split),),
        torch.int64,
        field.dim,
        is_sequence=True,
        has_values=has_values,
        is_sparse=True,
    )


def _longest(column: dict[str, Any], split: str | None) -> int:
    """The steps of the longest row; at least one, since a batch has one."""
    if column["shape"][0] is not None:
        return int(column["shape"][0])
    found: dict[str, dict[str, int]] = column["lengths"]
    wanted = [found[split]] if split in found else found.values()
    return max(1, *(int(lengths["max"]) for lengths in wanted))


def num_steps(column: dict[str, Any], split: str, num_rows: int) -> int:
    """The steps of all rows of a split."""
    if column["shape"][0] is not None:
        return int(column["shape"][0]) * num_rows
    return int(column["lengths"][split]["total"])


def field_columns(name: str, field: Field) -> tuple[str, ...]:
    """The columns that a field reads, in order."""
    return field.source_columns or (name,)


def _column(name: str, field: Field, wanted: str, meta: dict[str, Any]) -> dict[str, Any]:
    key = "column" if field.column is not None else ""
    if isinstance(field, DenseField) and field.columns is not None:
        key = f"columns/{field.columns.index(wanted)}"
    for column in meta["columns"]:
        if column["name"] == wanted:
            if column["dtype"] == "string":
                detail = f"field {name!r} needs numbers, and column {wanted!r} holds text"
                raise BadField(detail, key)
            if None in column["shape"] and not isinstance(field, RaggedField):
                ends = [item[end] for item in column["lengths"].values() for end in ("min", "max")]
                detail = f"field {name!r} needs rows of one shape, and those of column {wanted!r}"
                detail += f" have {min(ends)} to {max(ends)} steps; use the type integer_sequence"
                raise BadField(f"{detail} or dense_sequence", key)
            return column
    listed = ", ".join(column["name"] for column in meta["columns"][:50])
    raise BadField(f"the dataset has no column {wanted!r}; it has: {listed}", key)


class Table:
    """A dataset directory; columns are mapped, not read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
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

    def column(self, split: str, name: str) -> np.ndarray[Any, Any]:
        """One column of a split, mapped read-only."""
        found = next(item for item in self.meta["columns"] if item["name"] == name)
        return self._map(self._directory / split / found["file"], name, split)

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
            path = self._directory / split / found["file"]
            offsets = self._map(path.with_suffix(".offsets.npy"), name, split)
        else:
            offsets = np.arange(len(values) + 1, dtype=np.int64) * values.shape[1]
            values = values.reshape(-1, *values.shape[2:])
        column = RaggedColumn(name, split, values, offsets)
        column.check(self.num_rows(split))
        return column


def source_rows(num_rows: int, fraction: tuple[float, float] | None, seed: int) -> Tensor | None:
    """The rows of a split that a source takes, ascending; None for all of them.

    The same seed and complementary fractions give disjoint parts that miss no row.
    """
    if fraction is None:
        return None
    order_N = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    first, last = (math.floor(part * num_rows) for part in fraction)
    return order_N[first:last].sort().values


@dataclass(frozen=True)
class LoadedField:
    """A field's values in memory, as they are stored, and how a batch of them is made."""

    values: Tensor
    divide_by: float | None = None
    scale: float | None = None
    is_integer: bool = False

    def to(self, device: torch.device) -> "LoadedField":
        """The same with its values on a device."""
        return replace(self, values=self.values.to(device))

    @property
    def nbytes(self) -> int:
        """What moves to a device."""
        return self.values.nbytes

    def batch(self, rows_B: Tensor | slice, device: torch.device) -> Tensor:
        """The rows as the network takes them; always memory of its own."""
        if isinstance(rows_B, slice):
            stored = self.values[rows_B].clone()
        else:
            stored = self.values.index_select(0, rows_B)
        stored = stored.to(device, non_blocking=True)
        if self.is_integer:
            return stored
        x = stored.to(torch.float32)
        if self.divide_by is not None:
            return x.div_(self.divide_by)
        return x if self.scale is None else x.mul_(self.scale)


Loaded = LoadedField | LoadedSequence


def load_field(
    name: str, field: DenseField | IntegerField, table: Table, source: tuple[str, Tensor | None]
) -> LoadedField:
    """Read a field's columns into memory.

    Raises:
        DataFailed: a column is missing or misshapen, or an integer lies outside [0, dim).
    """
    split, rows = source
    shape = _checked_shape(name, field, table)
    arrays = [table.column(split, column) for column in field_columns(name, field)]
    if isinstance(field, IntegerField):
        _check_range(name, field, arrays[0], split)
        values = _tensor(arrays[0], rows).to(torch.int64).reshape(-1)
        return LoadedField(values, is_integer=True)
    tensors = [_tensor(array, rows) for array in arrays]
    if len(tensors) > 1:
        flat = [item.reshape(item.shape[0], -1) for item in tensors]
        kinds = {item.dtype for item in flat}
        values = torch.cat(
            flat if len(kinds) == 1 else [_wide(item, field) for item in flat], dim=1
        )
    else:
        values = tensors[0]
    values = values.reshape(values.shape[0], *shape.shape)
    divide_by = 255.0 if values.dtype == torch.uint8 and field.scale is None else None
    if values.dtype not in {torch.uint8, torch.float32}:
        values = values.to(torch.float32)
    return LoadedField(values, divide_by, field.scale)


def _checked_shape(name: str, field: Field, table: Table) -> FieldShape:
    try:
        return field_shape(name, field, table.meta)
    except BadField as cause:
        raise DataFailed(str(cause)) from cause


def _wide(item: Tensor, field: DenseField) -> Tensor:
    """A column beside columns of other types: scaled on its own when it is uint8."""
    if item.dtype == torch.uint8 and field.scale is None:
        return item.to(torch.float32) / 255.0
    return item.to(torch.float32)


def _tensor(array: np.ndarray[Any, Any], rows: Tensor | None) -> Tensor:
    taken = array[rows.numpy()] if rows is not None else np.array(array)
    if taken.dtype.kind == "u" and taken.dtype != np.uint8:
        taken = taken.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(taken))


def _check_range(name: str, field: IntegerField, array: np.ndarray[Any, Any], split: str) -> None:
    values = array.reshape(-1)
    for start in range(0, len(values), _RANGE_CHUNK):
        part = values[start : start + _RANGE_CHUNK]
        wrong = np.flatnonzero((part < 0) | (part >= field.dim))
        if wrong.size:
            row = start + int(wrong[0])
            column = field_columns(name, field)[0]
            detail = f"row {row} of split {split!r} has {int(values[row])} in column {column!r};"
            raise DataFailed(
                f"{detail} field {name!r} takes integers in [0, {field.dim})",
                hint=f"Raise data.fields.{name}.dim, or correct the data.",
            )


class Rows:
    """The rows of one source with all their fields, in memory."""

    def __init__(
        self,
        fields: Mapping[str, Loaded],
        num_rows: int,
        device: torch.device,
        numbers: Tensor | None = None,
    ) -> None:
        self.left_out: dict[str, int] = {}
        """What was cut off or left out while reading, in words, and how much of it."""
        self.fields = fields
        self.num_rows = num_rows
        self.device = device
        self._taken: Taken = slice(0, 0)
        self._home = next(iter(fields.values())).values.device if fields else device
        self._numbers = None if numbers is None else numbers.to(self._home)
        """Of each row, its number in the split; None: they are all of its rows."""

    @property
    def newest(self) -> Tensor:
        """The numbers, in the split, of the rows of the batch that was made last."""
        return self.numbers(self._taken)

    @property
    def taken(self) -> Taken:
        """The rows of the batch that was made last: `again` makes the same one."""
        return self._taken

    def numbers(self, taken: Taken) -> Tensor:
        """The numbers, in the split, of the rows of a batch."""
        if self._numbers is not None:
            return self._numbers[taken]
        return torch.arange(taken.start, taken.stop) if isinstance(taken, slice) else taken

    def num_batches(self, batch_size: int) -> int:
        """Batches of all rows."""
        return -(-self.num_rows // batch_size)

    def in_order(self, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """All rows once, as stored."""
        for start in range(0, self.num_rows, batch_size):
            yield self.batch(slice(start, min(start + batch_size, self.num_rows)))

    def batch(
        self, rows_B: Tensor | slice, host_B: Tensor | slice | None = None
    ) -> dict[str, Tensor]:
        """One batch: each field's tensor by name, and the lengths of sequences.

        ``host_B``: the same rows in host memory, where they are known there.
        """
        self._taken = rows_B
        if host_B is None:
            host_B = rows_B.cpu() if isinstance(rows_B, Tensor) else rows_B
        made: dict[str, Tensor] = {}
        for name, item in self.fields.items():
            if isinstance(item, LoadedField):
                made[name] = item.batch(rows_B, self.device)
                continue
            made[name], lengths_B = item.batch(host_B, self.device)
            made[lengths_of(name)] = lengths_B.to(self.device, non_blocking=True)
            if item.weights is not None:
                weighted = replace(item, values=item.weights, weights=None, is_integer=False)
                x_BT1, _ = weighted.batch(host_B, self.device)
                made[values_of(name)] = x_BT1.squeeze(-1)
            if self.device.type != "cpu":
                made[host_lengths_of(lengths_of(name))] = lengths_B
        return made

    def again(self, taken: Taken) -> dict[str, Tensor]:
        """A batch once more; the one that was made last stays what it was."""
        before = self._taken
        batch = self.batch(taken)
        self._taken = before
        return batch

    def spaced(self, num_rows: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Evenly spaced rows, at most so many: their numbers, and their batch."""
        count = min(num_rows, self.num_rows)
        rows_B = torch.arange(count) * self.num_rows // count
        return rows_B, self.batch(rows_B.to(self._home), rows_B)

    def epoch(
        self, batch_size: int, *, drop_last: bool, order: tuple[int, int] | None, first: int = 0
    ) -> Iterator[dict[str, Tensor]]:
        """The batches of one epoch; ``order`` is (seed, epoch), None for the stored order.

        ``first``: batches that were taken before; they are not made again.
        """
        last = self.num_rows // batch_size * batch_size if drop_last else self.num_rows
        host_N = None if order is None else shuffled(self.num_rows, *order)
        order_N = None if host_N is None else host_N.to(self._home)
        for start in range(first * batch_size, last, batch_size):
            rows_B = slice(start, min(start + batch_size, last))
            if order_N is None or host_N is None:
                yield self.batch(rows_B)
            else:
                yield self.batch(order_N[rows_B], host_N[rows_B])


def shuffled(num_rows: int, seed: int, epoch: int) -> Tensor:
    """The order of the rows in one epoch: a pure function of (seed, epoch)."""
    generator = torch.Generator().manual_seed((seed * _EPOCH_STRIDE + epoch) % 2**63)
    return torch.randperm(num_rows, generator=generator)


def load(
    source: Source,
    fields: dict[str, Field],
    table: Table,
    *,
    seed: int,
    device: torch.device,
    limit: Sequences = Sequences(),  # noqa: B008 (frozen)
) -> Rows:
    """Read the rows of a source; on the device where they fit well, else beside it.

    Raises:
        DataFailed: the data does not fit its declaration, or no rows are left.
    """
    num_rows = table.num_rows(source.split)
    sequences = {
        name: _ragged(name, field, table, source.split)
        for name, field in fields.items()
        if isinstance(field, RaggedField)
    }
    limits = {n: item for n, item in sequences.items() if isinstance(fields[n], SequenceField)}
    kept = limited(limits, source_rows(num_rows, source.fraction, seed), limit)
    rows = kept.rows
    num_taken = num_rows if rows is None else len(rows)
    if num_taken == 0:
        raise DataFailed(
            f"split {source.split!r} has no rows"
            + (" in this fraction" if source.fraction else "")
            + (" that are short enough" if kept.left_out else "")
        )
    loaded: dict[str, Loaded] = {}
    for name, field in fields.items():
        if isinstance(field, SparseField):
            loaded[name] = load_sparse(name, field, sequences[name], rows)
        elif isinstance(field, SequenceField):
            loaded[name] = load_sequence(name, field, sequences[name], rows, limit)
        else:
            loaded[name] = load_field(name, field, table, (source.split, rows))
    made = place(loaded, num_taken, device, rows)
    made.left_out = kept.left_out
    return made


def _ragged(name: str, field: RaggedField, table: Table, split: str) -> RaggedColumn:
    _checked_shape(name, field, table)
    return table.ragged(split, field_columns(name, field)[0])


def place(
    loaded: Mapping[str, Loaded],
    num_rows: int,
    device: torch.device,
    numbers: Tensor | None = None,
) -> Rows:
    """Move fields onto the device when they take at most a quarter of its free memory."""
    if device.type == "cuda":
        size = sum(item.nbytes for item in loaded.values())
        if size <= torch.cuda.mem_get_info(device)[0] // 4:
            loaded = {name: item.to(device) for name, item in loaded.items()}
    return Rows(loaded, num_rows, device, numbers)


def longest_of(rows: Rows) -> dict[str, int]:
    """The steps of the longest row of each sequence field, at least one."""
    return {
        name: max(1, int(item.lengths.max()))
        for name, item in rows.fields.items()
        if isinstance(item, LoadedSequence)
    }


def inline_rows(
    inputs: dict[str, Any],
    shapes: dict[str, FieldShape],
    device: torch.device,
    most: int | None = None,
) -> Rows:
    """Rows given as nested lists, already in the values that the network takes.

    ``most``: the steps of a sequence that are read, if not all of them are.

    Raises:
        BadField: not a regular nested list of numbers, of the wrong shape, or out of range;
            ``key`` is the field's name.
    """
    loaded: dict[str, Loaded] = {}
    heights: dict[str, int] = {}
    for name, shape in shapes.items():
        if shape.is_sequence:
            sequence = _inline_sequence(name, inputs[name], shape)
            loaded[name] = sequence if most is None or shape.is_sparse else sequence.cut(most)
            heights[name] = len(sequence.lengths)
            continue
        values = _inline_tensor(name, inputs[name], shape)
        heights[name] = values.shape[0]
        loaded[name] = LoadedField(values, is_integer=shape.dim is not None)
    if len(set(heights.values())) > 1:
        listed = ", ".join(f"{name!r} has {count}" for name, count in heights.items())
        raise BadField(f"all inputs need the same number of rows: {listed}")
    return place(loaded, next(iter(heights.values())), device)


def _inline_tensor(name: str, given: Any, shape: FieldShape) -> Tensor:
    wanted: Sequence[int] = shape.shape
    try:
        array = np.array(jsonio_numbers(given), dtype=np.float64)
    except (ValueError, TypeError):
        detail = f"input {name!r} is not a regular nested list of numbers"
        raise BadField(f"{detail} of shape [rows, {', '.join(map(str, wanted))}]", name) from None
    if array.ndim == 0 or array.shape[1:] != tuple(wanted) or array.shape[0] == 0:
        got = list(array.shape)
        detail = f"input {name!r} has shape {got}; the network takes {['rows', *wanted]}"
        raise BadField(detail, name)
    if shape.dim is None:
        return torch.from_numpy(array.astype(np.float32))
    if ((array != np.floor(array)) | (array < 0) | (array >= shape.dim)).any():
        raise BadField(f"input {name!r} takes integers in [0, {shape.dim})", name)
    return torch.from_numpy(array.astype(np.int64))


def _inline_sequence(name: str, given: Any, shape: FieldShape) -> LoadedSequence:
    """A list per row, each with its own length."""
    if shape.has_values:
        return _inline_sparse(name, given, shape)
    width = list(shape.shape[1:])
    if not isinstance(given, list) or not given or not all(isinstance(row, list) for row in given):
        detail = f"input {name!r} is not a list of rows that are lists"
        raise BadField(f"{detail}, of shape [rows, steps{''.join(f', {n}' for n in width)}]", name)
    rows: list[np.ndarray[Any, Any]] = []
    for number, row in enumerate(given):
        if not row:
            rows.append(np.empty((0, *width), np.int64 if shape.dim else np.float32))
            continue
        try:
            steps = _inline_tensor(name, row, replace(shape, shape=tuple(width)))
        except BadField as cause:
            raise BadField(f"row {number}: {cause}", name) from None
        rows.append(steps.numpy())
    return from_lists(rows, is_integer=shape.dim is not None, padding_value=shape.padding_value)


def _inline_sparse(name: str, given: Any, shape: FieldShape) -> LoadedSequence:
    """A list of pairs [place, value] per row."""
    if (shape.dim or 0) > _EXACT_PLACES:
        detail = f"input {name!r} has more than {_EXACT_PLACES:,} places; read it from a dataset"
        raise BadField(detail, name)
    both = replace(shape, shape=(0, 2), dtype=torch.float32, dim=None, has_values=False)
    pairs = _inline_sequence(name, given, both)
    try:
        return split_pairs(pairs, name, int(shape.dim or 0))
    except DataFailed as cause:
        raise BadField(cause.detail, name) from None


def jsonio_numbers(value: Any) -> Any:
    """A nested list with the names of non-finite numbers replaced by the numbers."""
    if isinstance(value, list):
        return [jsonio_numbers(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, bool) or value is None:
        raise TypeError("not a number")
    return jsonio.number(value)
