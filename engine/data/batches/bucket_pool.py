"""Draw batches of rows of similar length from a shuffle pool: arithmetic on numbers and lengths.

The rows of an epoch, in reading order, are divided into blocks. A block has as many whole batches
as fit in the pool next to one more batch. It is sorted by length and cut into batches, which are
returned in random order. For each batch that is drawn, a batch's worth of rows of the next block
enters. So all blocks but the last have whole batches only, and every epoch has as many batches as
without buckets.

Everything is a function of (seed, epoch), of the sizes, and of the lengths. Nothing is read here.
Shape suffixes: N = rows of the source.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from engine.data.batches.buckets import Buckets
from engine.data.batches.shuffle_pool import Draw, Integers, Pool, PoolDraws
from glasshouse.spec import BucketByLength


def block_rows(pool: Pool) -> int:
    """Return the number of rows that are sorted together."""
    if pool.num_rows <= pool.capacity:
        return pool.num_rows
    return max(1, pool.capacity // pool.batch_size - 1) * pool.batch_size


class BucketDraws(PoolDraws):
    """Draws the batches of one epoch, one after another."""

    def __init__(
        self,
        pool: Pool,
        seed: int,
        epoch: int,
        *,
        wanted: BucketByLength,
        lengths_N: NDArray[np.int64],
    ) -> None:
        """``lengths_N``: the lengths of all rows of the source, by position."""
        super().__init__(pool, seed, epoch)
        self._wanted, self._lengths_N = wanted, lengths_N
        self._block = block_rows(pool)
        self._waiting = np.zeros(0, np.int64)
        """Slots of rows that entered and are in no block yet, in reading order."""
        self._due: list[Integers] = []
        """The remaining batches of the current block, by slot; the next one is at the end."""

    @property
    def held(self) -> tuple[Integers, Integers]:
        """The slots that hold a row, and the rows' positions in the source."""
        slots = np.concatenate([*reversed(self._due), self._waiting])
        return slots, self._place_of[slots]

    def draw(self) -> Draw:
        """Return the next batch; empty when all rows were drawn."""
        pool = self._pool
        ahead = self._block if not self._num_read else 0
        room = pool.capacity - self._num_read + self._num_drawn
        num = min(ahead + pool.batch_size, room, pool.num_rows - self._num_read)
        runs, entered = self._take_in(num)
        if not self._due:
            self._due = [*self._cut()][::-1]
        drawn = self._due.pop() if self._due else np.zeros(0, np.int64)
        self._let_go(drawn)
        return Draw(runs, entered, drawn, self._place_of[drawn])

    def _take_in(self, num: int) -> tuple[list[tuple[int, int]], Integers]:
        if num <= 0:
            return [], np.zeros(0, np.int64)
        runs = self._next(num)
        free = self._pool.capacity - self._num_read + self._num_drawn
        slots = self._free[free - num : free].copy()
        self._place_of[slots] = np.concatenate([np.arange(*run) for run in runs])
        self._waiting = np.concatenate([self._waiting, slots])
        self._num_read += num
        return runs, slots

    def _cut(self) -> Iterator[Integers]:
        """Cut the rows that were read first into batches."""
        slots, self._waiting = self._waiting[: self._block], self._waiting[self._block :]
        if not len(slots):
            return
        lengths = torch.from_numpy(self._lengths_N[self._place_of[slots]])
        cut = Buckets(self._wanted, lengths, self._pool.batch_size).cut(self._generator)
        for rows in cut.batches():
            yield slots[rows.numpy()]

    def _let_go(self, drawn: Integers) -> None:
        free = self._pool.capacity - self._num_read + self._num_drawn
        self._free[free : free + len(drawn)] = drawn
        self._num_drawn += len(drawn)
