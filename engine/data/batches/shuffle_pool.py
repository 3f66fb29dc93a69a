"""Simulate a shuffle pool with row numbers only: which rows enter it, and which are drawn.

Rows are read in runs of adjacent rows, and the order of the runs is random in each epoch, so the
first batches of a sorted file are mixed too. Each batch is drawn uniformly from all rows in the
pool. The pool starts with ``min_buffer_size`` rows, at least a batch. It grows by a batch with each
batch until it has ``buffer_size`` rows. From then on a row enters for each that was drawn.

Everything is a function of (seed, epoch), of these sizes and, with buckets, of the lengths. Nothing
is read here. Shape suffixes: N = rows of the source.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.data.batches.buckets import Buckets, Integers
from engine.data.batches.rows import order_generator
from glasshouse.spec import BucketByLength

_RUNS_PER_BATCH = 8
"""The number of places in the file that a batch's worth of rows is read from."""
_MAX_RUNS = 1 << 20
"""With more runs, their order would take memory that grows with the data."""
_FEW = 4
"""A batch of more than a quarter of the pool is drawn by shuffling the pool's indices."""


@dataclass(frozen=True)
class Pool:
    """The size of a pool, in rows."""

    num_rows: int
    """Rows of the source."""
    batch_size: int
    buffer_size: int
    min_buffer_size: int = 0
    sizes: tuple[int, ...] = ()
    """If sources are read one after another: the number of rows of each."""

    @property
    def capacity(self) -> int:
        """The maximum number of rows in the pool."""
        return min(self.buffer_size, self.num_rows)

    @property
    def begin(self) -> int:
        """The number of rows in the pool before the first batch."""
        return min(max(self.batch_size, self.min_buffer_size), self.capacity)

    @property
    def run(self) -> int:
        """The number of adjacent rows that are read together."""
        return max(1, self.batch_size // _RUNS_PER_BATCH, -(-self.num_rows // _MAX_RUNS))

    @property
    def num_runs(self) -> int:
        """The number of runs in an epoch."""
        return -(-self.num_rows // self.run)

    @property
    def index_bytes(self) -> int:
        """Memory for the pool's indices, in bytes."""
        return 24 * self.capacity + 8 * self.num_runs


class Draw(NamedTuple):
    """What happens for one batch: rows enter the pool, then rows are drawn."""

    runs: list[tuple[int, int]]
    """The rows that enter, by their positions in the source, in the order of their slots."""
    entered: Integers
    """The slots that they enter."""
    drawn: Integers
    """The slots of the batch, which are free after it."""
    places: Integers
    """The rows of the batch, by their positions in the source."""


class PoolDraws:
    """Draws the batches of one epoch, one after another."""

    def __init__(self, pool: Pool, seed: int, epoch: int) -> None:
        self.pool = pool
        self._generator = order_generator(seed, epoch)
        self._runs = self._order(pool)
        self._short = int(np.flatnonzero(self._runs == pool.num_runs - 1)[0])
        self._lack = pool.num_runs * pool.run - pool.num_rows
        """The run at ``short`` in reading order has so many rows fewer than the others."""
        self._place_of = np.zeros(pool.capacity, np.int64)
        self._held = np.zeros(pool.capacity, np.int64)
        self._free = np.arange(pool.capacity)
        self._num_held = self._num_read = 0

    def _order(self, pool: Pool) -> Integers:
        """Return the order of reading runs; a run belongs to the source that it begins in."""
        ends = [-(-end // pool.run) for end in np.cumsum(pool.sizes).tolist()] or [pool.num_runs]
        orders = [
            torch.randperm(end - start, generator=self._generator).numpy() + start
            for start, end in pairwise([0, *ends])
        ]
        return np.concatenate(orders)

    def skip(self, num_batches: int) -> None:
        """Skip ``num_batches`` batches."""
        for _ in range(num_batches):
            self.draw()

    @property
    def held(self) -> tuple[Integers, Integers]:
        """The slots that hold a row, and the rows' positions in the source."""
        slots = self._held[: self._num_held].copy()
        return slots, self._place_of[slots]

    def draw(self) -> Draw:
        """Return the next batch; empty when all rows were drawn."""
        wanted = self.pool.begin + self._num_read - self._num_held
        runs, entered = self._enter(min(wanted, self.pool.capacity) - self._num_held)
        self._held[self._num_held - len(entered) : self._num_held] = entered
        at = self._distinct(min(self.pool.batch_size, self._num_held))
        drawn = self._held[at]
        num, size = self._num_held, len(at)  # rows at the end of the held ones fill their places
        kept = np.ones(size, np.bool_)
        kept[at[at >= num - size] - (num - size)] = False
        self._held[at[at < num - size]] = self._held[num - size : num][kept]
        return self._leave(runs, entered, drawn)

    def _enter(self, num: int) -> tuple[list[tuple[int, int]], Integers]:
        """Put the next ``num`` rows, or all that are left, into free slots."""
        num = min(num, self.pool.num_rows - self._num_read)
        if num <= 0:
            return [], np.zeros(0, np.int64)
        runs = self._next(num)
        free = self.pool.capacity - self._num_held
        slots = self._free[free - num : free].copy()
        self._place_of[slots] = np.concatenate([np.arange(*run) for run in runs])
        self._num_held += num
        self._num_read += num
        return runs, slots

    def _next(self, num: int) -> list[tuple[int, int]]:
        """Return the next rows in reading order, as ranges of positions."""
        at, end, run = self._num_read, self._num_read + num, self.pool.run
        behind = (self._short + 1) * run - self._lack  # the first row after the short run
        first, last = ((row + self._lack if row >= behind else row) // run for row in (at, end - 1))
        numbers = np.arange(first, last + 2)
        starts = numbers * run - np.where(numbers > self._short, self._lack, 0)
        away = self._runs[first : last + 1] * run - starts[:-1]
        begins, stops = np.maximum(starts[:-1], at) + away, np.minimum(starts[1:], end) + away
        return list(zip(begins.tolist(), stops.tolist(), strict=True))

    def _distinct(self, size: int) -> Integers:
        """Draw unique indices of held rows, all equally likely."""
        num = self._num_held
        if size * _FEW > num:
            return torch.randperm(num, generator=self._generator)[:size].numpy()
        found = np.zeros(0, np.int64)
        while len(found) < size:
            more = torch.randint(num, (size + size // 4 + 8,), generator=self._generator).numpy()
            both = np.concatenate([found, more])
            found = both[np.sort(np.unique(both, return_index=True)[1])][:size]
        return found

    def _leave(self, runs: list[tuple[int, int]], entered: Integers, drawn: Integers) -> Draw:
        free = self.pool.capacity - self._num_held
        self._free[free : free + len(drawn)] = drawn
        self._num_held -= len(drawn)
        return Draw(runs, entered, drawn, self._place_of[drawn])


def block_rows(pool: Pool) -> int:
    """Return the number of rows that are sorted together by length."""
    if pool.num_rows <= pool.capacity:
        return pool.num_rows
    return max(1, pool.capacity // pool.batch_size - 1) * pool.batch_size


class BucketDraws(PoolDraws):
    """Draws the batches of one epoch, each of rows of similar length.

    The rows of an epoch, in reading order, are divided into blocks. A block has as many whole
    batches as fit in the pool next to one more batch. It is sorted by length and cut into batches,
    which are returned in random order. For each batch that is drawn, a batch's worth of rows of the
    next block enters. So all blocks but the last have whole batches only, and every epoch has as
    many batches as without buckets.
    """

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
        num = self.pool.batch_size + (0 if self._num_read else self._block)
        runs, entered = self._enter(min(num, self.pool.capacity - self._num_held))
        self._waiting = np.concatenate([self._waiting, entered])
        if not self._due and len(self._waiting):
            self._due = [*self._cut()][::-1]
        return self._leave(runs, entered, self._due.pop() if self._due else entered[:0])

    def _cut(self) -> Iterator[Integers]:
        """Cut the rows that were read first into batches."""
        slots, self._waiting = self._waiting[: self._block], self._waiting[self._block :]
        lengths = torch.from_numpy(self._lengths_N[self._place_of[slots]])
        cut = Buckets(self._wanted, lengths, self.pool.batch_size).cut(self._generator)
        for rows in cut.batches():
            yield slots[rows.numpy()]
