"""Stream rows from their files: read on demand, and drawn from a pool of bounded size.

Training uses them like rows in memory. The contents and the order of batches are a function of
(seed, epoch). To resume within an epoch, the draws of the earlier batches are repeated without
reading their rows.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from engine.data.batches.batch import Batch, Taken
from engine.data.batches.bucket_pool import BucketDraws
from engine.data.batches.buckets import Buckets, by_chance
from engine.data.batches.prefetch import Prefetcher
from engine.data.batches.rows import Rows, divided, tensors_of
from engine.data.batches.shuffle_pool import Draw, Integers, Pool, PoolDraws
from engine.data.sources.cache import Cache, Drained, Held, Read
from engine.data.sources.reading import ReadsRows
from glasshouse.spec import BucketByLength, Shuffle

Parts = Callable[[Read, Taken], Iterator[Batch]]
"""Creates the micro-batches of a batch from rows that were read."""
_ALL = slice(None)


class StreamedRows(Rows):
    """The rows of one source, of which only a pool is in memory."""

    def __init__(  # noqa: PLR0913 (rows, and how they become batches)
        self,
        reader: ReadsRows,
        device: torch.device,
        *,
        shuffle: Shuffle,
        workers: int = 0,
        keeps: bool = False,
        in_turn: bool = False,
        bucket: BucketByLength | None = None,
    ) -> None:
        """``keeps``: rows stay in memory once they were read.

        ``in_turn``: joined sources are read one after another. ``bucket``: batches have rows of
        similar length, which the reader must know.
        """
        super().__init__(reader.num_rows, device, torch.device("cpu"), reader.numbers)
        self.left_out = reader.left_out
        self.prepared = None if reader.prepared.is_empty else reader.prepared
        self._reader = reader
        self._bucket = bucket
        self._shuffle = shuffle
        self._sizes = tuple(reader.sizes) if in_turn else ()
        self._ahead: Prefetcher[Read] = Prefetcher(workers)
        self._cache = Cache(reader) if keeps else None
        self._held: Held | None = self._cache

    def figures(self) -> dict[str, float]:
        """Return how many rows are in memory, and their size in bytes."""
        if self._held is None:
            return {}
        store = self._held.store
        return {"data/pool_rows": store.num_rows, "data/pool_bytes": store.num_bytes}

    def close(self) -> None:
        """Stop the threads that prefetch."""
        self._ahead.close()

    def batch(
        self, rows_B: Taken, host_B: Taken | None = None, trained_in: int | None = None
    ) -> Batch:
        """Read one batch from the files now."""
        return self._part(trained_in, self._reader.read(self._places(rows_B)), _ALL, rows_B)

    def epoch(
        self,
        batch_size: int,
        *,
        drop_last: bool,
        order: tuple[int, int] | None,
        first: int = 0,
        parts: int = 1,
        trained_in: int | None = None,
    ) -> Iterator[Batch]:
        """Yield the batches of one epoch; ``order`` is (seed, epoch), None for the stored order.

        ``first``: the number of batches to skip, without reading their rows. ``parts``: the number
        of micro-batches that each batch is split into. ``trained_in``: as in `batch`.
        """
        made = partial(self._made, parts, trained_in)
        num_batches = self.num_rows // batch_size if drop_last else self.num_batches(batch_size)
        batches = range(first, num_batches)
        if order is None:
            return self._stored(batch_size, batches, made)
        if self._cache is not None and order[1]:
            return self._cached(self._cache, batch_size, batches, order, made)
        size, least = self._shuffle.buffer_size or batch_size, self._shuffle.min_buffer_size
        draws = self._draws(Pool(self.num_rows, batch_size, size, least, self._sizes), order)
        draws.skip(first)
        self._held = self._cache or Drained(self._reader, draws.capacity)
        return self._drawn(draws, self._held, len(batches), made)

    def _draws(self, pool: Pool, order: tuple[int, int]) -> PoolDraws:
        if self._bucket is None:
            return PoolDraws(pool, *order)
        lengths_N = self._reader.lengths.numpy()
        return BucketDraws(pool, *order, wanted=self._bucket, lengths_N=lengths_N)

    def _stored(self, batch_size: int, batches: range, made: Parts) -> Iterator[Batch]:
        cache = self._cache

        def tasks() -> Iterator[tuple[slice, Callable[[], Read]]]:
            for number in batches:
                start = number * batch_size
                stop = min(start + batch_size, self.num_rows)
                yield slice(start, stop), lambda run=(start, stop): self._unread(run)

        for rows_B, read in self._ahead.each(tasks()):
            if cache is None:
                yield from made(read, rows_B)
                continue
            places = self._places(rows_B)
            if read:
                cache.keep(cache.missing(places), read)
            yield from made(cache.store.get(places), rows_B)

    def _unread(self, run: tuple[int, int]) -> Read:
        """Read a run of adjacent rows; with a cache, only those that it does not have."""
        if self._cache is None:
            return self._reader.read_runs([run])
        missing = self._cache.missing(np.arange(*run))
        return self._reader.read(missing) if len(missing) else {}

    def _drawn(
        self, draws: PoolDraws, held: Held, num_batches: int, made: Parts
    ) -> Iterator[Batch]:
        held.fill(draws)

        def tasks() -> Iterator[tuple[Draw, Callable[[], Read]]]:
            for _ in range(num_batches):
                draw = draws.draw()
                yield draw, lambda runs=draw.runs: self._reader.read_runs(runs) if runs else {}

        for draw, read in self._ahead.each(tasks()):
            if read:
                held.put(draw, read)
            yield from made(held.take(draw), torch.from_numpy(draw.places))

    def _cached(
        self, cache: Cache, batch_size: int, batches: range, order: tuple[int, int], made: Parts
    ) -> Iterator[Batch]:
        """Yield an epoch after the first, with all rows in memory."""
        cache.need(np.arange(self.num_rows), batch_size)  # reads only if training began here
        cut = by_chance(self.num_rows, batch_size, order)
        if self._bucket is not None:
            cut = Buckets(self._bucket, self._reader.lengths, batch_size).epoch(order)

        def tasks() -> Iterator[tuple[Tensor, Callable[[], Read]]]:
            for rows_B in islice(cut.batches(batches.start), len(batches)):
                yield rows_B, lambda rows_B=rows_B: cache.store.get(rows_B.numpy())

        for rows_B, read in self._ahead.each(tasks()):
            yield from made(read, rows_B)

    def _made(
        self, parts: int, trained_in: int | None, rows: Read, taken: Taken
    ) -> Iterator[Batch]:
        """Yield the micro-batches of a batch from rows that were read."""
        if parts == 1:
            yield self._part(trained_in, rows, _ALL, taken)
            return
        places = torch.from_numpy(self._places(taken))
        for part in divided(slice(0, len(places)), parts):
            yield self._part(trained_in, rows, part, places[part])

    def _part(self, trained_in: int | None, rows: Read, part: slice, taken: Taken) -> Batch:
        ready = {name: item.ready(self.device) for name, item in rows.items()}
        changes = self.changes(taken, trained_in)
        tensors, lengths = tensors_of(ready, part, part, self.device, changes)
        return Batch(tensors, lengths, taken, trained_in, self._numbers)

    def _places(self, rows_B: Taken) -> Integers:
        if isinstance(rows_B, slice):
            return np.arange(rows_B.start, rows_B.stop)
        return rows_B.numpy()
