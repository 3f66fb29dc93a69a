"""Batches of rows of like length, so that little of a batch is padding.

Which rows an epoch's batches have is a function of (seed, epoch) and of the lengths; how many
batches there are, and how many rows each has, is one of the lengths alone. So all epochs have the
same number of steps, and a plan knows it. Knows numbers; knows nothing of files.

Shape suffixes: N = rows of the source, M = batches of an epoch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.batches.rows import order_generator
from glasshouse.spec import BucketByLength

Integers = NDArray[np.int64]


class TooLong(Exception):
    """A row alone has more steps than a batch may have."""

    def __init__(self, length: int) -> None:
        super().__init__(f"a row has {length} steps")
        self.length = length


@dataclass(frozen=True)
class EpochBatches:
    """The batches of one epoch, in the order in which they come."""

    rows: Tensor
    """All rows, those of a batch side by side."""
    starts: Tensor
    """Where each batch begins in ``rows``."""
    sizes: Tensor

    def batches(self, first: int = 0) -> Iterator[Tensor]:
        """The rows of each batch, from one on."""
        starts, sizes = self.starts[first:].tolist(), self.sizes[first:].tolist()
        for start, size in zip(starts, sizes, strict=True):
            yield self.rows[start : start + size]

    def rows_before(self, batch: int) -> int:
        """The rows of the batches before one."""
        return int(self.sizes[:batch].sum())


class Buckets:
    """How the rows of a source, of which the lengths are known, become batches of an epoch."""

    def __init__(
        self, wanted: BucketByLength, lengths_N: Tensor, batch_size: int, *, drop_last: bool = False
    ) -> None:
        """Look at the lengths.

        Raises:
            TooLong: one is more than ``max_tokens``.
        """
        self._wanted = wanted
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._lengths_N = lengths_N
        self._keys_N = (lengths_N + wanted.width - 1) // wanted.width
        self._token_sizes_M: Integers | None = None
        if wanted.max_tokens is not None:
            lengths, rows = np.unique(lengths_N.numpy(), return_counts=True)
            self._token_sizes_M = token_sizes(wanted, lengths, rows, batch_size)

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch that ``max_tokens`` makes; None: each has ``batch_size`` rows."""
        return None if self._token_sizes_M is None else len(self._token_sizes_M)

    def epoch(self, order: tuple[int, int] | None) -> EpochBatches:
        """The batches of an epoch; ``order`` is (seed, epoch), None for from short to long.

        Where batches have ``batch_size`` rows, those that are left over for a smaller one are drawn
        from all, and it comes last.
        """
        return self.cut(None if order is None else order_generator(*order))

    def cut(self, generator: torch.Generator | None) -> EpochBatches:
        """The same with what is drawn from a generator; None: nothing is."""
        rows_N = _drawn(len(self._keys_N), generator)
        sizes_M = self._token_sizes_M
        if sizes_M is None:
            return self._of_one_size(rows_N, generator)
        sorted_N = self._sorted(rows_N)
        sizes = torch.from_numpy(sizes_M)
        starts = sizes.cumsum(0) - sizes
        drawn = _drawn(len(sizes), generator)
        return EpochBatches(sorted_N, starts[drawn], sizes[drawn])

    def _of_one_size(self, rows_N: Tensor, generator: torch.Generator | None) -> EpochBatches:
        size = self._batch_size
        whole, rest = divmod(len(rows_N), size)
        sorted_N = self._sorted(rows_N[: whole * size])
        starts = _drawn(whole, generator) * size
        sizes = torch.full((whole,), size)
        if rest and not self._drop_last:
            sorted_N = torch.cat([sorted_N, rows_N[whole * size :]])
            starts = torch.cat([starts, torch.tensor([whole * size])])
            sizes = torch.cat([sizes, torch.tensor([rest])])
        return EpochBatches(sorted_N, starts, sizes)

    def _sorted(self, rows_N: Tensor) -> Tensor:
        """From short to long; those of like length stay in their order."""
        return rows_N[self._keys_N[rows_N].argsort(stable=True)]


def _drawn(num: int, generator: torch.Generator | None) -> Tensor:
    return torch.arange(num) if generator is None else torch.randperm(num, generator=generator)


def token_sizes(
    wanted: BucketByLength, lengths: Integers, rows: Integers, batch_size: int
) -> Integers:
    """How many rows each batch has, from short rows to long ones.

    ``lengths`` are the different lengths, ascending, and ``rows`` how many rows have each.

    Raises:
        TooLong: a length is more than ``max_tokens``.
    """
    keys = -(-lengths // wanted.width)
    firsts = np.flatnonzero(np.diff(keys, prepend=-1))
    longest = np.maximum.reduceat(lengths, firsts)
    counts = np.add.reduceat(rows, firsts)
    sizes: list[Integers] = []
    begun = 0
    for length, count in zip(longest.tolist(), counts.tolist(), strict=True):
        room = min(batch_size, int(wanted.max_tokens or 0) // max(1, length))
        if not room:
            raise TooLong(length)
        if begun >= room:  # it has no room for a row as long as these
            sizes.append(np.array([begun], np.int64))
            begun = 0
        whole, begun = divmod(begun + count, room)
        sizes.append(np.full(whole, room, np.int64))
    return np.concatenate([*sizes, np.array([begun] if begun else [], np.int64)])


def padding_of(lengths_N: Tensor, cut: EpochBatches) -> float:
    """The part of the steps of an epoch's batches that is padding."""
    if not len(cut.sizes):
        return 0.0
    order = cut.starts.argsort()
    starts, sizes = cut.starts[order].numpy(), cut.sizes[order].numpy()
    lengths = lengths_N[cut.rows].numpy()[: int(sizes.sum())]
    widest = np.maximum(np.maximum.reduceat(lengths, starts), 1)
    return 1 - int(lengths.sum()) / int((widest * sizes).sum())


def by_chance(num_rows: int, batch_size: int, order: tuple[int, int]) -> EpochBatches:
    """The batches of an epoch in which lengths count for nothing."""
    starts = torch.arange(0, num_rows, batch_size)
    sizes = (num_rows - starts).clamp(max=batch_size)
    return EpochBatches(_drawn(num_rows, order_generator(*order)), starts, sizes)
