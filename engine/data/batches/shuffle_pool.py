"""A shuffle pool, as arithmetic on the numbers of rows: which rows enter it, which are drawn.

Rows are read in runs that lie side by side in the file, and the runs come in an order drawn for the
epoch, so that also the first batches of a sorted file are mixed. Each batch is drawn from all rows
in the pool alike. The pool begins with ``min_buffer_size`` rows, at least a batch; then it grows by
a batch with each batch until it has ``buffer_size``, and a row enters for each that was drawn.

All of it is a function of (seed, epoch) and of these sizes. Knows numbers; reads nothing.
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
"""Places of the file that a batch's worth of rows is read from."""
_MAX_RUNS = 1 << 20
"""More of them would take memory that grows with the data."""
_FEW = 4
"""A batch that takes more than a fourth of the pool is drawn by shuffling the pool's numbers."""


@dataclass(frozen=True)
class Pool:
    """How large a pool is, in rows."""

    num_rows: int
    """Of the source."""
    batch_size: int
    buffer_size: int
    min_buffer_size: int = 0
    sizes: tuple[int, ...] = ()
    """Of sources that are read one after the other, how many rows each has."""

    @property
    def capacity(self) -> int:
        """The most rows that it has."""
        return min(self.buffer_size, self.num_rows)

    @property
    def begin(self) -> int:
        """The rows that it has before the first batch."""
        return min(max(self.batch_size, self.min_buffer_size), self.capacity)

    @property
    def run(self) -> int:
        """The rows that are read side by side."""
        return max(1, self.batch_size // _RUNS_PER_BATCH, -(-self.num_rows // _MAX_RUNS))

    @property
    def num_runs(self) -> int:
        """The runs of an epoch."""
        return -(-self.num_rows // self.run)

    @property
    def index_bytes(self) -> int:
        """What its numbers take in memory."""
        return 24 * self.capacity + 8 * self.num_runs


class Draw(NamedTuple):
    """What happens for one batch: rows enter the pool, then rows are drawn."""

    runs: list[tuple[int, int]]
    """The rows that enter, by their places in the source, in the order of their slots."""
    entered: Integers
    """The slots that they take."""
    drawn: Integers
    """The slots of the batch, which are free after it."""
    places: Integers
    """The rows of the batch, by their places in the source."""


class PoolDraws:
    """The batches of one epoch, one after the other."""

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
        """The order in which runs are read; a run that begins in a source counts as its own."""
        ends = [-(-end // pool.run) for end in np.cumsum(pool.sizes).tolist()] or [pool.num_runs]
        orders = [
            torch.randperm(end - start, generator=self._generator).numpy() + start
            for start, end in pairwise([0, *ends])
        ]
        return np.concatenate(orders)

    @property
    def capacity(self) -> int:
        """The slots of the pool."""
        return self._pool.capacity

    @property
    def batch_size(self) -> int:
        """The rows of a batch."""
        return self._pool.batch_size

    def skip(self, num_batches: int) -> None:
        """Go on behind so many batches."""
        for _ in range(num_batches):
            self.draw()

    @property
    def held(self) -> tuple[Integers, Integers]:
        """The slots that have a row, and the rows' places in the source."""
        slots = self._held[: self._num_held].copy()
        return slots, self._place_of[slots]

    def draw(self) -> Draw:
        """The next batch; empty when all rows were drawn."""
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
        """The next rows in the order of reading."""
        found: list[tuple[int, int]] = []
        at, end = self._num_read, self._num_read + num
        while at < end:
            first, left = self._at(at)
            size = min(left, end - at)
            found.append((first, first + size))
            at += size
        return found

    def _at(self, at: int) -> tuple[int, int]:
        """A row in the order of reading: its place, and the rows of its run from it on."""
        run, short = self._pool.run, self._short * self._pool.run
        if at < short:
            number, within, size = at // run, at % run, run
        elif at < short + self._last:
            number, within, size = self._short, at - short, self._last
        else:  # behind the run that is shorter than the others
            number, within = divmod(at - self._last, run)
            number, size = number + 1, run
        return int(self._runs[number]) * run + within, size - within

    def _distinct(self, size: int) -> Integers:
        """Different numbers of held rows, each as likely as any other."""
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
        """Take rows out; those at the end of the held ones take their places."""
        num, size = self._num_held, len(at)
        drawn = self._held[at]
        kept = np.ones(size, np.bool_)
        kept[at[at >= num - size] - (num - size)] = False
        self._held[at[at < num - size]] = self._held[num - size : num][kept]
        free = self._pool.capacity - num
        self._free[free : free + size] = drawn
        self._num_held = num - size
        return drawn
