"""Stream rows from their files: read on demand, and drawn from a pool of bounded size.

Training uses them like rows in memory. The contents and the order of batches are a function of
(seed, epoch). To resume within an epoch, the draws of the earlier batches are repeated without
reading their rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.batches.batch import Batch, Taken
from engine.data.batches.buckets import Buckets, by_chance
from engine.data.batches.division import WHOLE, Division
from engine.data.batches.rows import Loaded, Prefetcher, Rows, tensors_of
from engine.data.batches.shuffle_pool import BucketDraws, Draw, Integers, Pool, PoolDraws
from engine.data.columns.loaded import LoadedField, LoadedSequence
from engine.data.sources.reading import RowReader
from glasshouse.spec import BucketByLength, Shuffle

Read = dict[str, Loaded]
LIST_BYTES = 128
"""Memory of a list row without its values, in bytes: a numpy array object and its reference."""
Parts = Callable[[Read, Taken], Iterator[Batch]]
"""Creates the micro-batches of a batch from rows that were read."""
_ALL = slice(None)


class RowStore:
    """Rows in memory, by slot; slots may be empty."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._like: dict[str, Loaded] = {}
        self._tensors: dict[str, Tensor] = {}
        self._lists: dict[str, list[NDArray[np.generic] | None]] = {}
        self.num_rows = 0
        """Number of stored rows."""
        self._row_bytes = self._list_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the stored rows, in bytes."""
        return self.num_rows * self._row_bytes + self._list_bytes

    def put(self, slots: Integers, rows: Mapping[str, Loaded]) -> None:
        """Store rows in empty slots."""
        if not self._like:
            self._prepare(rows)
        self.num_rows += len(slots)
        for name, item in rows.items():
            if isinstance(item, LoadedField):
                self._tensors[name].numpy()[slots] = item.values.numpy()
                continue
            self._put_lists(self._lists[name], slots, item, item.values)
            if item.weights is not None:
                self._put_lists(self._lists[f"{name}."], slots, item, item.weights)

    def _prepare(self, rows: Mapping[str, Loaded]) -> None:
        """Allocate tensors for the capacity; the system commits pages when they are written."""
        for name, item in rows.items():
            self._like[name] = item.taken(torch.zeros(0, dtype=torch.int64))
            if isinstance(item, LoadedField):
                shape = (self._capacity, *item.values.shape[1:])
                self._tensors[name] = torch.empty(shape, dtype=item.values.dtype)
                self._row_bytes += self._tensors[name].nbytes // self._capacity
                continue
            self._lists[name] = [None] * self._capacity
            if item.weights is not None:
                self._lists[f"{name}."] = [None] * self._capacity

    def _put_lists(
        self,
        kept: list[NDArray[np.generic] | None],
        slots: Integers,
        item: LoadedSequence,
        values: Tensor,
    ) -> None:
        array = values.numpy()
        starts, ends = item.starts.tolist(), (item.starts + item.lengths).tolist()
        for slot, start, end in zip(slots.tolist(), starts, ends, strict=True):
            row = array[start:end].copy()  # a view would keep the whole array alive
            kept[slot] = row
            self._list_bytes += row.nbytes + LIST_BYTES

    def get(self, slots: Integers) -> dict[str, Loaded]:
        """Return the rows in some slots."""
        return {name: self._get(name, item, slots) for name, item in self._like.items()}

    def _get(self, name: str, like: Loaded, slots: Integers) -> Loaded:
        if isinstance(like, LoadedField):
            values = self._tensors[name].index_select(0, torch.from_numpy(slots))
            return replace(like, values=values)
        rows = self._of(name, slots)
        lengths = torch.tensor([len(row) for row in rows])
        values = torch.from_numpy(np.concatenate(rows))
        weights = None
        if like.weights is not None:
            weights = torch.from_numpy(np.concatenate(self._of(f"{name}.", slots)))
        starts = lengths.cumsum(0) - lengths
        return replace(like, values=values, starts=starts, lengths=lengths, weights=weights)

    def _of(self, name: str, slots: Integers) -> list[NDArray[np.generic]]:
        kept = self._lists[name]
        return [row for slot in slots.tolist() if (row := kept[slot]) is not None]

    def free(self, slots: Integers) -> None:
        """Remove rows from their slots."""
        self.num_rows -= len(slots)
        for kept in self._lists.values():
            for slot in slots.tolist():
                row = kept[slot]
                self._list_bytes -= 0 if row is None else row.nbytes + LIST_BYTES
                kept[slot] = None


class Drained(RowStore):
    """Stores rows until they are drawn."""

    def __init__(self, reader: RowReader, capacity: int) -> None:
        super().__init__(capacity)
        self._reader = reader

    def enter(self, draw: Draw, rows: Read) -> None:
        """Store the rows that enter with a draw."""
        self.put(draw.entered, rows)

    def take(self, draw: Draw) -> Read:
        """Return the rows that were drawn, and free them."""
        rows = self.get(draw.drawn)
        self.free(draw.drawn)
        return rows

    def fill(self, draws: PoolDraws) -> None:
        """Read what the pool contained when training was interrupted, a few rows at a time."""
        slots, places = draws.held
        order = np.argsort(places)
        for start in range(0, len(order), draws.pool.batch_size):
            part = order[start : start + draws.pool.batch_size]
            self.put(slots[part], self._reader.read(places[part]))


class Cache(RowStore):
    """Stores rows permanently once they were read, by their positions in the source."""

    def __init__(self, reader: RowReader) -> None:
        super().__init__(reader.num_rows)
        self._reader = reader
        self._is_there = np.zeros(reader.num_rows, np.bool_)

    def enter(self, draw: Draw, rows: Read) -> None:
        """Store the rows that enter with a draw."""
        self.keep(np.concatenate([np.arange(*run) for run in draw.runs]), rows)

    def take(self, draw: Draw) -> Read:
        """Return the rows that were drawn."""
        return self.get(draw.places)

    def fill(self, draws: PoolDraws) -> None:
        """Read what the pool contained when training was interrupted."""
        self.need(draws.held[1], draws.pool.batch_size)

    def keep(self, places: Integers, rows: Read) -> None:
        """Store rows; those that are stored already stay unchanged."""
        fresh = ~self._is_there[places]
        if not fresh.all():
            some = torch.from_numpy(np.flatnonzero(fresh))
            places, rows = places[fresh], {n: item.taken(some) for n, item in rows.items()}
        if len(places):
            self.put(places, rows)
            self._is_there[places] = True

    def missing(self, places: Integers) -> Integers:
        """Return those of the given rows that were not read yet."""
        return places[~self._is_there[places]]

    def need(self, places: Integers, at_once: int) -> None:
        """Read those of the given rows that are missing, ``at_once`` rows at a time."""
        missing = np.sort(self.missing(places))
        for start in range(0, len(missing), at_once):
            part = missing[start : start + at_once]
            self.keep(part, self._reader.read(part))


class StreamedRows(Rows):
    """The rows of one source, of which only a pool is in memory."""

    def __init__(  # noqa: PLR0913 (rows, and how they become batches)
        self,
        reader: RowReader,
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
        self.ahead = Prefetcher(workers)
        self._cache = Cache(reader) if keeps else None
        self._held: Cache | Drained | None = self._cache

    def figures(self) -> dict[str, float]:
        """Return how many rows are in memory, and their size in bytes."""
        held = self._held
        if held is None:
            return {}
        return {"data/pool_rows": held.num_rows, "data/pool_bytes": held.num_bytes}

    def batch(
        self, rows_B: Taken, host_B: Taken | None = None, trained_in: int | None = None
    ) -> Batch:
        """Read one batch from the files now."""
        if isinstance(rows_B, slice):
            read = self._reader.read_runs([(rows_B.start, rows_B.stop)])
        else:
            read = self._reader.read(rows_B.numpy())
        return self._part(trained_in, read, _ALL, rows_B)

    def epoch(
        self,
        batch_size: int,
        *,
        drop_last: bool,
        order: tuple[int, int] | None,
        first: int = 0,
        division: Division = WHOLE,
        trained_in: int | None = None,
    ) -> Iterator[Batch]:
        """Yield the batches of one epoch; those before ``first`` are drawn, and not read."""
        made = partial(self._made, division, trained_in)
        num_batches = self.num_rows // batch_size if drop_last else self.num_batches(batch_size)
        batches = range(first, num_batches)
        if order is None:
            return self._stored(batch_size, batches, made)
        if self._cache is not None and order[1]:
            return self._cached(self._cache, batch_size, batches, order, made)
        size, least = self._shuffle.buffer_size or batch_size, self._shuffle.min_buffer_size
        pool = Pool(self.num_rows, batch_size, size, least, self._sizes)
        draws = PoolDraws(pool, *order)
        if self._bucket is not None:
            lengths_N = self._reader.lengths.numpy()
            draws = BucketDraws(pool, *order, wanted=self._bucket, lengths_N=lengths_N)
        draws.skip(first)
        self._held = self._cache or Drained(self._reader, draws.pool.capacity)
        return self._drawn(draws, self._held, len(batches), made)

    def stored(self, batch_size: int, numbers: Iterable[int]) -> Iterator[Batch]:
        """Yield batches of the stored order by their numbers; those of others are not read.

        The threads also convert and normalize them.
        """
        cuts = self._cuts(batch_size, numbers)
        tasks = ((None, partial(self.batch, rows_B)) for rows_B in cuts)
        return map(itemgetter(1), self.ahead.each(tasks))  # keeps no batch while it waits

    def _cuts(self, batch_size: int, numbers: Iterable[int]) -> Iterator[slice]:
        """Yield the rows of batches of the stored order."""
        for number in numbers:
            start = number * batch_size
            yield slice(start, min(start + batch_size, self.num_rows))

    def _stored(self, batch_size: int, batches: Iterable[int], made: Parts) -> Iterator[Batch]:
        cache = self._cache
        cuts = self._cuts(batch_size, batches)
        tasks = ((rows_B, partial(self._unread, rows_B)) for rows_B in cuts)
        for rows_B, read in self.ahead.each(tasks):
            if cache is None:
                yield from made(read, rows_B)
                continue
            places = self._places(rows_B)
            if read:
                cache.keep(cache.missing(places), read)
            yield from made(cache.get(places), rows_B)

    def _unread(self, rows_B: slice) -> Read:
        """Read adjacent rows; with a cache, only those that it does not have."""
        if self._cache is None:
            return self._reader.read_runs([(rows_B.start, rows_B.stop)])
        missing = self._cache.missing(self._places(rows_B))
        return self._reader.read(missing) if len(missing) else {}

    def _drawn(
        self, draws: PoolDraws, held: Cache | Drained, num_batches: int, made: Parts
    ) -> Iterator[Batch]:
        held.fill(draws)
        drawn = (draws.draw() for _ in range(num_batches))
        read_runs = self._reader.read_runs
        tasks = ((draw, lambda runs=draw.runs: read_runs(runs) if runs else {}) for draw in drawn)
        for draw, read in self.ahead.each(tasks):
            if read:
                held.enter(draw, read)
            yield from made(held.take(draw), torch.from_numpy(draw.places))

    def _cached(
        self, cache: Cache, batch_size: int, batches: range, order: tuple[int, int], made: Parts
    ) -> Iterator[Batch]:
        """Yield an epoch after the first, with all rows in memory."""
        cache.need(np.arange(self.num_rows), batch_size)  # reads only if training began here
        cut = by_chance(self.num_rows, batch_size, order)
        if self._bucket is not None:
            cut = Buckets(self._bucket, self._reader.lengths, batch_size).epoch(order)
        chosen = islice(cut.batches(batches.start), len(batches))
        tasks = ((rows_B, partial(cache.get, rows_B.numpy())) for rows_B in chosen)
        for rows_B, read in self.ahead.each(tasks):
            yield from made(read, rows_B)

    def _made(
        self, division: Division, trained_in: int | None, rows: Read, taken: Taken
    ) -> Iterator[Batch]:
        if division.is_whole:
            yield self._part(trained_in, rows, _ALL, taken)
            return
        places = torch.from_numpy(self._places(taken))
        for part in division.own(slice(0, len(places))):
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
