"""Keep rows in memory while a job reads them from files: those of a pool, or all rows read."""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.data.batches.rows import Loaded
from engine.data.batches.shuffle_pool import Draw, PoolDraws
from engine.data.sources.reading import ReadsRows, RowStore, picked

Integers = NDArray[np.int64]
Read = dict[str, Loaded]


class Held(Protocol):
    """Stores the rows that enter a pool, and returns those that are drawn."""

    store: RowStore

    def put(self, draw: Draw, rows: Read) -> None:
        """Store the rows that enter with a draw."""
        ...

    def take(self, draw: Draw) -> Read:
        """Return the rows that were drawn."""
        ...

    def fill(self, draws: PoolDraws) -> None:
        """Read what the pool contained when training was interrupted."""
        ...


class Drained:
    """Stores rows until they are drawn."""

    def __init__(self, reader: ReadsRows, capacity: int) -> None:
        self._reader = reader
        self.store = RowStore(capacity)

    def put(self, draw: Draw, rows: Read) -> None:
        """Store the rows that enter with a draw."""
        self.store.put(draw.entered, rows)

    def take(self, draw: Draw) -> Read:
        """Return the rows that were drawn, and free them."""
        rows = self.store.get(draw.drawn)
        self.store.free(draw.drawn)
        return rows

    def fill(self, draws: PoolDraws) -> None:
        """Read what the pool contained when training was interrupted, a few rows at a time."""
        slots, places = draws.held
        order = np.argsort(places)
        for start in range(0, len(order), draws.batch_size):
            part = order[start : start + draws.batch_size]
            self.store.put(slots[part], self._reader.read(places[part]))


class Cache:
    """Stores rows permanently once they were read, by their positions in the source."""

    def __init__(self, reader: ReadsRows) -> None:
        self._reader = reader
        self.store = RowStore(reader.num_rows)
        self._is_there = np.zeros(reader.num_rows, np.bool_)

    def put(self, draw: Draw, rows: Read) -> None:
        """Store the rows that enter with a draw."""
        self.keep(np.concatenate([np.arange(*run) for run in draw.runs]), rows)

    def take(self, draw: Draw) -> Read:
        """Return the rows that were drawn."""
        return self.store.get(draw.places)

    def fill(self, draws: PoolDraws) -> None:
        """Read what the pool contained when training was interrupted."""
        self.need(draws.held[1], draws.batch_size)

    def keep(self, places: Integers, rows: Read) -> None:
        """Store rows; those that are stored already stay unchanged."""
        fresh = ~self._is_there[places]
        if not fresh.all():
            some = torch.from_numpy(np.flatnonzero(fresh))
            places, rows = places[fresh], {n: picked(item, some) for n, item in rows.items()}
        if not len(places):
            return
        self.store.put(places, rows)
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
