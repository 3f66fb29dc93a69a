"""Simulate a shuffle pool with row numbers only: which rows enter it, and which are drawn.

Rows are read in runs of adjacent rows, and the order of the runs is random in each epoch, so the
first batches of a sorted file are mixed too. Each batch is drawn uniformly from all rows in the
pool. The pool starts with ``min_buffer_size`` rows, at least a batch. It grows by a batch with each
batch until it has ``buffer_size`` rows. From then on a row enters for each that was drawn.

Everything is a function of (seed, epoch) and of these sizes. Nothing is read here.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.data.batches.rows import order_generator

Integers = NDArray[np.int64]

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
        self._pool = pool
        self._generator = order_generator(seed, epoch)
        self._runs = self._order(pool)
        self._short = int(np.flatnonzero(self._runs == pool.num_runs - 1)[0])
        self._last = pool.num_rows - (pool.num_runs - 1) * pool.run
        self._place_of = np.zeros(pool.capacity, np.int64)
        self._held = np.zeros(pool.capacity, np.int64)
        self._free = np.arange(pool.capacity)
        self._num_held = self._num_read = self._num_drawn = 0

    def _order(self, pool: Pool) -> Integers:
        """Return the order of reading runs; a run belongs to the source that it begins in."""
        ends = [-(-end // pool.run) for end in np.cumsum(pool.sizes).tolist()] or [pool.num_runs]
        orders = [
            torch.randperm(end - start, generator=self._generator).numpy() + start
            for start, end in pairwise([0, *ends])
        ]
        return np.concatenate(orders)

    @property
    def capacity(self) -> int:
        """The number of slots in the pool."""
        return self._pool.capacity

    @property
    def batch_size(self) -> int:
        """The number of rows in a batch."""
        return self._pool.batch_size

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
        runs, entered = self._enter()
        size = min(self._pool.batch_size, self._num_held)
        at = self._distinct(size)
        self._num_drawn += size
        drawn = self._leave(at)
        return Draw(runs, entered, drawn, self._place_of[drawn])

    def _enter(self) -> tuple[list[tuple[int, int]], Integers]:
        pool = self._pool
        wanted = min(pool.capacity, pool.begin + self._num_drawn)
        num = min(wanted - self._num_held, pool.num_rows - self._num_read)
        if num <= 0:
            return [], np.zeros(0, np.int64)
        runs = self._next(num)
        free = pool.capacity - self._num_held
        slots = self._free[free - num : free].copy()
        self._held[self._num_held : self._num_held + num] = slots
        self._place_of[slots] = np.concatenate([np.arange(*run) for run in runs])
        self._num_held += num
        self._num_read += num
        return runs, slots

    def _next(self, num: int) -> list[tuple[int, int]]:
        """Return the next rows in reading order, as ranges of positions."""
        found: list[tuple[int, int]] = []
        at, end = self._num_read, self._num_read + num
        while at < end:
            first, left = self._at(at)
            size = min(left, end - at)
            found.append((first, first + size))
            at += size
        return found

    def _at(self, at: int) -> tuple[int, int]:
        """Return a row's position by its reading order, and how many rows of its run remain."""
        run, short = self._pool.run, self._short * self._pool.run
        if at < short:
            number, within, size = at // run, at % run, run
        elif at < short + self._last:
            number, within, size = self._short, at - short, self._last
        else:  # after the run that is shorter than the others
            number, within = divmod(at - self._last, run)
            number, size = number + 1, run
        return int(self._runs[number]) * run + within, size - within

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

    def _leave(self, at: Integers) -> Integers:
        """Remove rows; those at the end of the held rows fill their places."""
        num, size = self._num_held, len(at)
        drawn = self._held[at]
        kept = np.ones(size, np.bool_)
        kept[at[at >= num - size] - (num - size)] = False
        self._held[at[at < num - size]] = self._held[num - size : num][kept]
        free = self._pool.capacity - num
        self._free[free : free + size] = drawn
        self._num_held = num - size
        return drawn
