"""The rows of a source, in memory or read from files, and the order in which they become batches.

The row order is a function of (seed, epoch) only. Depends on torch, not on files or networks. Shape
suffixes: B = rows of a batch, N = rows of the split.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import starmap
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from engine.core.device import free_bytes, is_accelerator
from engine.core.tensor_names import host_lengths_of, lengths_of, values_of
from engine.data.augmentation.augmenting import Augmenting, Change
from engine.data.batches.batch import Batch, Taken, numbers_of
from engine.data.batches.division import WHOLE, Division
from engine.data.columns.loaded import LoadedField, LoadedSequence, moved
from engine.data.columns.prepared import Prepared

_EPOCH_STRIDE = 1_000_003

Loaded = LoadedField | LoadedSequence
Key = TypeVar("Key")
Made = TypeVar("Made")


class Prefetcher(Generic[Made]):
    """Runs tasks in order, ahead of the consumer of their results."""

    def __init__(self, workers: int = 0) -> None:
        """``workers``: number of threads; with 0 each task runs when its result is needed."""
        self.workers = workers
        self._threads: ThreadPoolExecutor | None = None

    def each(self, tasks: Iterable[tuple[Key, Callable[[], Made]]]) -> Iterator[tuple[Key, Made]]:
        """Yield each key with the result of its task."""
        if not self.workers:
            for key, task in tasks:
                yield key, task()
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="data")
        waiting: deque[tuple[Key, Future[Made]]] = deque()
        for key, task in tasks:
            waiting.append((key, self._threads.submit(task)))
            if len(waiting) > self.workers:
                first, made = waiting.popleft()
                yield first, made.result()
                del made  # free it before the next one is ready
        while waiting:
            key, made = waiting.popleft()
            yield key, made.result()
            del made

    def close(self) -> None:
        """End the threads. Running tasks complete; the others are cancelled."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None


class Rows(ABC):
    """The rows of one source, as batches."""

    def __init__(
        self, num_rows: int, device: torch.device, home: torch.device, numbers: Tensor | None
    ) -> None:
        """``home``: the device that batches are taken from. ``numbers``: see `numbers`."""
        self.left_out: dict[str, int] = {}
        """What was cut off or dropped while reading, in words, and how much of it."""
        self.prepared: Prepared | None = None
        """The statistics and vocabularies of the training rows; None: there are none."""
        self.augmenting: Augmenting | None = None
        """The augmentation of rows that are trained on; None: there is none."""
        self.ahead: Prefetcher[Any] = Prefetcher()
        """Prefetches the batches of an epoch, or their rows."""
        self.num_rows = num_rows
        self.device = device
        self.home = home
        self._host_numbers = numbers
        self._numbers = None if numbers is None else numbers.to(home)
        """Each row's number in the split; None: these are all rows of the split."""

    @abstractmethod
    def batch(
        self, rows_B: Taken, host_B: Taken | None = None, trained_in: int | None = None
    ) -> Batch:
        """Create the batch of some rows.

        ``host_B``: the same rows in host memory, if available. ``trained_in``: the epoch to augment
        the rows for; None: they are not augmented.
        """

    @abstractmethod
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
        """Yield the batches of one epoch; ``order`` is (seed, epoch), None for the stored order.

        ``first``: the number of batches to skip. ``division``: yield the own micro-batches of each
        batch instead. ``trained_in``: as in `batch`.
        """

    def close(self) -> None:
        """Stop the threads that prefetch."""
        self.ahead.close()

    def numbers(self, taken: Taken) -> Tensor:
        """Return the row numbers, in the split, of a batch."""
        return numbers_of(taken, self._numbers)

    def num_batches(self, batch_size: int) -> int:
        """Return the number of batches of all rows."""
        return -(-self.num_rows // batch_size)

    def in_order(self, batch_size: int, division: Division = WHOLE) -> Iterator[Batch]:
        """Yield all rows once, in the stored order; with ``division``, its own rows."""
        return self.epoch(batch_size, drop_last=False, order=None, division=division)

    @abstractmethod
    def stored(self, batch_size: int, numbers: Iterable[int]) -> Iterator[Batch]:
        """Yield batches of the stored order by their numbers, each prepared ahead of its use."""

    @property
    def takes_all(self) -> bool:
        """Whether these are all rows of the split."""
        return self._host_numbers is None

    def spaced(self, num_rows: int) -> tuple[Tensor, Batch]:
        """Return at most ``num_rows`` evenly spaced rows: their numbers, and their batch."""
        count = min(num_rows, self.num_rows)
        rows_B = torch.arange(count) * self.num_rows // count
        return rows_B, self.batch(rows_B.to(self.home), rows_B)

    def changes(self, host_B: Taken, trained_in: int | None) -> Mapping[str, Change]:
        """Return the augmentation of each field for rows that are trained on."""
        if self.augmenting is None or trained_in is None:
            return {}
        return self.augmenting.changes(numbers_of(host_B, self._host_numbers), trained_in)

    def longest(self) -> dict[str, int]:
        """Return the steps of the longest row of each sequence field in memory, at least one."""
        return {}

    def figures(self) -> dict[str, float]:
        """Return metrics of the rows in memory, to report while training runs."""
        return {}


class MemoryRows(Rows):
    """The rows of one source with all their fields, in memory."""

    def __init__(
        self,
        fields: Mapping[str, Loaded],
        num_rows: int,
        device: torch.device,
        numbers: Tensor | None = None,
    ) -> None:
        home = next(iter(fields.values())).values.device if fields else device
        super().__init__(num_rows, device, home, numbers)
        self.fields = fields

    def batch(
        self, rows_B: Taken, host_B: Taken | None = None, trained_in: int | None = None
    ) -> Batch:
        """Create the batch of some rows."""
        if host_B is None:
            host_B = rows_B.cpu() if isinstance(rows_B, Tensor) else rows_B
        changes = self.changes(host_B, trained_in)
        tensors, lengths = tensors_of(self.fields, rows_B, host_B, self.device, changes)
        return Batch(tensors, lengths, rows_B, trained_in, self._numbers)

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
        """Yield the batches of one epoch."""
        last = self.num_rows // batch_size * batch_size if drop_last else self.num_rows
        host_N = None if order is None else shuffled(self.num_rows, *order)
        cuts = (
            slice(start, min(start + batch_size, last))
            for start in range(first * batch_size, last, batch_size)
        )
        if not division.is_whole:
            cuts = (part for rows_B in cuts for part in division.own(rows_B))
        if host_N is None:
            return self._each(((rows_B, rows_B) for rows_B in cuts), trained_in)
        order_N = host_N.to(self.home)
        return self._each(((order_N[rows_B], host_N[rows_B]) for rows_B in cuts), trained_in)

    def stored(self, batch_size: int, numbers: Iterable[int]) -> Iterator[Batch]:
        """Yield batches of the stored order by their numbers."""
        cuts = (
            slice(number * batch_size, min((number + 1) * batch_size, self.num_rows))
            for number in numbers
        )
        return self._each(((rows_B, rows_B) for rows_B in cuts), None)

    def chosen(
        self,
        batches: Iterable[Tensor],
        division: Division = WHOLE,
        trained_in: int | None = None,
    ) -> Iterator[Batch]:
        """Yield batches of the given rows, which are in host memory; the rest as in `epoch`."""
        cuts = (host_B[part] for host_B in batches for part in division.own(slice(0, len(host_B))))
        return self._each(((host_B.to(self.home), host_B) for host_B in cuts), trained_in)

    def _each(
        self, batches: Iterable[tuple[Taken, Taken]], trained_in: int | None
    ) -> Iterator[Batch]:
        calls = ((*rows, trained_in) for rows in batches)
        if not self.ahead.workers:
            return starmap(self.batch, calls)
        tasks = ((None, partial(self.batch, *call)) for call in calls)
        return map(itemgetter(1), self.ahead.each(tasks))  # keeps no batch while it makes the next

    def longest(self) -> dict[str, int]:
        """Return the steps of the longest row of each sequence field, at least one."""
        return {
            name: max(1, int(item.lengths.max()))
            for name, item in self.fields.items()
            if isinstance(item, LoadedSequence)
        }


def tensors_of(
    fields: Mapping[str, Loaded],
    rows_B: Taken,
    host_B: Taken,
    device: torch.device,
    changes: Mapping[str, Change] = MappingProxyType({}),
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a batch, and the lengths of its sequences in host memory.

    ``host_B``: its rows in host memory. ``changes``: the augmentation.
    """
    made: dict[str, Tensor] = {}
    lengths: dict[str, Tensor] = {}
    for name, item in fields.items():
        if isinstance(item, LoadedField):
            made[name] = item.batch(rows_B, device, changes.get(name))
            continue
        made[name], lengths_B = item.batch(host_B, device)
        lengths[name] = lengths_B
        made[lengths_of(name)] = moved(lengths_B, device)
        if item.weights is not None:
            weighted = replace(item, values=item.weights, weights=None, is_integer=False)
            x_BT1, _ = weighted.batch(host_B, device)
            made[values_of(name)] = x_BT1.squeeze(-1)
        if device.type != "cpu":
            made[host_lengths_of(lengths_of(name))] = lengths_B
    return made, lengths


def shuffled(num_rows: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the rows in one epoch: a pure function of (seed, epoch)."""
    return torch.randperm(num_rows, generator=order_generator(seed, epoch))


def order_generator(seed: int, epoch: int) -> torch.Generator:
    """Return the generator that the order of an epoch, and nothing else, is drawn from."""
    return torch.Generator().manual_seed((seed * _EPOCH_STRIDE + epoch) % 2**63)


def place(
    loaded: Mapping[str, Loaded],
    num_rows: int,
    device: torch.device,
    numbers: Tensor | None = None,
) -> MemoryRows:
    """Move fields onto the device if they need at most a quarter of its free memory."""
    if is_accelerator(device):
        size = sum(item.nbytes for item in loaded.values())
        if size <= (free_bytes(device) or 0) // 4:
            loaded = {name: item.to(device) for name, item in loaded.items()}
    loaded = {name: item.ready(device) for name, item in loaded.items()}
    return MemoryRows(loaded, num_rows, device, numbers)
