"""Group rows of similar length into batches, to reduce padding.

The rows of an epoch's batches are a function of (seed, epoch) and of the lengths. The number of
batches and their sizes depend on the lengths only, so all epochs have the same number of steps, and
a plan can compute it. Handles numbers, not files.

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
    """A single row has more steps than a batch may have."""

    def __init__(self, length: int) -> None:
        super().__init__(f"a row has {length} steps")
        self.length = length


@dataclass(frozen=True)
class EpochBatches:
    """The batches of one epoch, in order."""

    rows: Tensor
    """All rows, grouped by batch."""
    starts: Tensor
    """The index in ``rows`` at which each batch begins."""
    sizes: Tensor

    def batches(self, first: int = 0) -> Iterator[Tensor]:
        """Yield the rows of each batch, starting at batch ``first``."""
        starts, sizes = self.starts[first:].tolist(), self.sizes[first:].tolist()
        for start, size in zip(starts, sizes, strict=True):
            yield self.rows[start : start + size]

    def rows_before(self, batch: int) -> int:
        """Return the number of rows in the batches before a batch."""
        return int(self.sizes[:batch].sum())


class Buckets:
    """Groups the rows of a source into the batches of an epoch by their lengths."""

    def __init__(
        self, wanted: BucketByLength, lengths_N: Tensor, batch_size: int, *, drop_last: bool = False
    ) -> None:
        """Compute the batch sizes from the lengths.

        Raises:
            TooLong: a length is more than ``max_tokens``.
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
        """Batches of an epoch with ``max_tokens``; None: each batch has ``batch_size`` rows."""
        return None if self._token_sizes_M is None else len(self._token_sizes_M)

    def epoch(self, order: tuple[int, int] | None) -> EpochBatches:
        """Return the batches of an epoch; ``order`` is (seed, epoch), None: from short to long.

        If batches have ``batch_size`` rows, a smaller last batch has rows drawn from all lengths.
        """
        return self.cut(None if order is None else order_generator(*order))

    def cut(self, generator: torch.Generator | None) -> EpochBatches:
        """Return the batches of an epoch, drawn with a generator; None: from short to long."""
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
        """Sort rows from short to long. Rows in the same bucket stay in their order."""
        return rows_N[self._keys_N[rows_N].argsort(stable=True)]


def _drawn(num: int, generator: torch.Generator | None) -> Tensor:
    return torch.arange(num) if generator is None else torch.randperm(num, generator=generator)


def token_sizes(
    wanted: BucketByLength, lengths: Integers, rows: Integers, batch_size: int
) -> Integers:
    """Return how many rows each batch has, from short rows to long ones.

    ``lengths`` are the unique lengths, ascending, and ``rows`` how many rows have each.

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
        if begun >= room:  # the batch has no room for a row as long as these
            sizes.append(np.array([begun], np.int64))
            begun = 0
        whole, begun = divmod(begun + count, room)
        sizes.append(np.full(whole, room, np.int64))
    return np.concatenate([*sizes, np.array([begun] if begun else [], np.int64)])


def padding_of(lengths_N: Tensor, cut: EpochBatches) -> float:
    """Return the fraction of the steps in an epoch's batches that is padding."""
    if not len(cut.sizes):
        return 0.0
    order = cut.starts.argsort()
    starts, sizes = cut.starts[order].numpy(), cut.sizes[order].numpy()
    lengths = lengths_N[cut.rows].numpy()[: int(sizes.sum())]
    widest = np.maximum(np.maximum.reduceat(lengths, starts), 1)
    return 1 - int(lengths.sum()) / int((widest * sizes).sum())


def by_chance(num_rows: int, batch_size: int, order: tuple[int, int]) -> EpochBatches:
    """Return the batches of an epoch that are drawn without regard to lengths."""
    starts = torch.arange(0, num_rows, batch_size)
    sizes = (num_rows - starts).clamp(max=batch_size)
    return EpochBatches(_drawn(num_rows, order_generator(*order)), starts, sizes)
