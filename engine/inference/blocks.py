"""Outputs of some rows: one column for each layer and field, and their shapes over all rows.

Shape suffixes: N = rows, S = the steps of all rows together, T = steps of the longest row.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Column:
    """One field of one layer for some rows, in host memory."""

    values: Tensor
    """[N, …]; of a value for each step of a sequence [S, …], the rows concatenated."""
    lengths: Tensor | None = None
    """The number of steps of each row; None: one value for each row."""

    def padded(self, longest: int) -> Tensor:
        """Return [N, longest, …], with zeros after the end of each row."""
        if self.lengths is None:
            return self.values
        is_step = torch.arange(longest) < self.lengths[:, None]
        x_NT = self.values.new_zeros((*is_step.shape, *self.values.shape[1:]))
        x_NT[is_step] = self.values
        return x_NT

    def by_row(self) -> Iterator[Tensor]:
        """Yield the value, or the values of all steps, of each row."""
        yield from self.values if self.lengths is None else self.values.split(self.lengths.tolist())


@dataclass(frozen=True, slots=True)
class Block:
    """The outputs of some adjacent rows."""

    rows: Tensor
    """Their numbers in the split."""
    columns: Mapping[str, Column]
    """By name, ``<layer>/<field>``."""

    @property
    def num_bytes(self) -> int:
        """The size of all values."""
        return sum(column.values.nbytes for column in self.columns.values())


def joined(blocks: Iterable[Block], num_bytes: int) -> Iterator[Block]:
    """Yield the same rows in blocks of at least ``num_bytes``; the last may be smaller."""
    waiting: list[Block] = []
    size = 0
    for block in blocks:
        waiting.append(block)
        size += block.num_bytes
        if size >= num_bytes:
            yield _one(waiting)
            waiting, size = [], 0
    if waiting:
        yield _one(waiting)


def _one(blocks: Sequence[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    columns: dict[str, Column] = {}
    for name in blocks[0].columns:
        parts = [block.columns[name] for block in blocks]
        lengths = [part.lengths for part in parts if part.lengths is not None]
        values = torch.cat([part.values for part in parts])
        columns[name] = Column(values, torch.cat(lengths) if lengths else None)
    return Block(torch.cat([block.rows for block in blocks]), columns)


@dataclass(frozen=True, slots=True)
class ColumnShape:
    """What a column is over many rows."""

    dtype: torch.dtype
    item: tuple[int, ...]
    """The shape of one value."""
    num_values: int = 0
    """Rows, or steps of all rows."""
    longest: int | None = None
    """The steps of the longest row; None: one value for each row."""

    @property
    def width(self) -> int:
        """The number of elements of one value."""
        return torch.Size(self.item).numel()


@dataclass
class Shapes:
    """The number of rows, and the shape of each column, of blocks so far."""

    num_rows: int = 0
    columns: dict[str, ColumnShape] = field(default_factory=dict[str, ColumnShape])

    def add(self, block: Block) -> None:
        """Count a block."""
        self.num_rows += len(block.rows)
        for name, column in block.columns.items():
            x, lengths = column.values, column.lengths
            longest = None if lengths is None else max([1, *lengths.tolist()])
            self._grow(name, ColumnShape(x.dtype, tuple(x.shape[1:]), len(x), longest))

    def join(self, other: "Shapes") -> None:
        """Count the blocks of another."""
        self.num_rows += other.num_rows
        for name, shape in other.columns.items():
            self._grow(name, shape)

    def _grow(self, name: str, more: ColumnShape) -> None:
        known = self.columns.get(name)
        if known is not None:
            longest = None if known.longest is None else max(known.longest, more.longest or 0)
            more = replace(known, num_values=known.num_values + more.num_values, longest=longest)
        self.columns[name] = more

    @property
    def num_bytes(self) -> int:
        """The size of all values, without padding."""
        return sum(
            shape.num_values * shape.width * shape.dtype.itemsize for shape in self.columns.values()
        )


Blocks = Callable[[], Iterable[Block]]
"""Returns all blocks in the order of the rows, each time from the start."""
