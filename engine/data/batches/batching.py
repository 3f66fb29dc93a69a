"""Group the rows of a training job into batches, by count or by the lengths of their sequences."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from engine.data.batches.batch import Batch
from engine.data.batches.batch_counts import BatchCounts
from engine.data.batches.buckets import Buckets, TooLong
from engine.data.batches.division import WHOLE, Division
from engine.data.batches.rows import MemoryRows, Rows
from engine.data.columns.loaded import LoadedSequence
from glasshouse.errors import DataFailed, SpecFailed
from glasshouse.spec import BucketByLength, Data, Field, SequenceField, TrainJob

Epoch = tuple[Iterator[Batch], Callable[[int], int]]
"""The remaining batches of an epoch, and a function: how many of its rows come before a batch."""


class Batching:
    """Creates the batches of a job's epochs."""

    def __init__(self, job: TrainJob, rows: Rows, division: Division = WHOLE) -> None:
        """Prepare the batches, and which micro-batches of each this process runs.

        Raises:
            DataFailed: a single row is longer than a batch may be.
        """
        self._job = job
        self._rows = rows
        self._division = division
        self._shuffles = job.data.shuffle.enabled is not False
        self._buckets = _buckets(job.global_data, rows)
        num_batches = None if self._buckets is None else self._buckets.num_batches
        self.pace = BatchCounts.of(job, rows.num_rows, num_batches)

    def parts_of(self, num_rows: int) -> list[int]:
        """Return how many rows each own micro-batch of a batch has."""
        return self._division.sizes(num_rows)

    def epoch(self, epoch: int, first: int) -> Epoch:
        """Yield the micro-batches of an epoch's batches, starting at batch ``first``."""
        pace, order = self.pace, (self._job.seed, epoch) if self._shuffles else None
        if self._buckets is not None and isinstance(self._rows, MemoryRows):
            cut = self._buckets.epoch(order)
            batches = self._rows.chosen(cut.batches(first), self._division, trained_in=epoch)
            return batches, cut.rows_before
        batches = self._rows.epoch(
            pace.batch_size,
            drop_last=pace.drop_last,
            order=order,
            first=first,
            division=self._division,
            trained_in=epoch,
        )
        return batches, pace.rows_before

    def order(self) -> dict[str, Any]:
        """Return what the order of the rows depends on besides the seed, without unset options."""
        pace, data = self.pace, self._job.data
        found: dict[str, Any] = {
            "num_rows": pace.num_rows,
            "batch_size": pace.batch_size,
            "drop_last": pace.drop_last,
            "accumulate": pace.accumulate,
            "shuffle": self._shuffles,
        }
        if data.bucket_by_length is not None:
            found["bucket_by_length"] = data.bucket_by_length.model_dump(mode="json")
            found["num_batches"] = pace.num_batches
        if data.shuffle.buffer_size is not None:
            found["buffer_size"] = data.shuffle.buffer_size
            found["min_buffer_size"] = data.shuffle.min_buffer_size
            found["cache"] = data.cache
            if data.interleave == "sequential":
                found["interleave"] = data.interleave
        return found


def bucket_field(wanted: BucketByLength, fields: dict[str, Field]) -> str | None:
    """Return the field whose lengths count; None: it is not named, and there is not just one."""
    if wanted.field is not None:
        return wanted.field
    sequences = [name for name, field in fields.items() if isinstance(field, SequenceField)]
    return sequences[0] if len(sequences) == 1 else None


def widest_rows(data: Data, num_rows: int, longest: int | None) -> int:
    """Return the rows in a batch of the longest rows; ``longest``: max length of the field."""
    most, bucket = min(data.batch_size, num_rows), data.bucket_by_length
    if bucket is None or bucket.max_tokens is None or longest is None:
        return most
    return max(1, min(most, bucket.max_tokens // max(1, longest)))


def _buckets(data: Data, rows: Rows) -> Buckets | None:
    wanted = data.bucket_by_length
    if wanted is None or data.shuffle.buffer_size is not None:  # a shuffle pool has its own
        return None
    name = bucket_field(wanted, data.fields)
    field = rows.fields.get(name or "") if isinstance(rows, MemoryRows) else None
    if not isinstance(field, LoadedSequence):
        raise SpecFailed("data.bucket_by_length names no sequence that the job reads.")
    try:
        return Buckets(wanted, field.lengths, data.batch_size, drop_last=data.drop_last)
    except TooLong:
        at = int((field.lengths > int(wanted.max_tokens or 0)).to(torch.int64).argmax())
        row = int(rows.numbers(torch.tensor([at], device=rows.home))[0])
        detail = f"row {row} has {int(field.lengths[at])} steps in field {name!r}, and a batch may"
        raise DataFailed(
            f"{detail} have {wanted.max_tokens} (data.bucket_by_length.max_tokens)",
            hint="Raise max_tokens, or set data.sequence.max_length.",
        ) from None


class PaddingCounts:
    """Counts the sequence steps and the padding in the batches of a step, by field."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._counts: dict[str, tuple[int, int]] = {}

    def count(self, batch: Batch, *, has_rows: bool = True) -> None:
        """Count the steps of a batch; without ``has_rows`` its rows are another process's."""
        for name, lengths_B in batch.lengths.items():
            steps, places = self._counts.setdefault(name, (0, 0))
            if not has_rows:
                continue
            widest = max(1, int(lengths_B.max()))
            self._counts[name] = steps + int(lengths_B.sum()), places + widest * len(lengths_B)

    @property
    def counts(self) -> list[int]:
        """The counts so far; set them to those of all processes."""
        return [number for pair in self._counts.values() for number in pair]

    @counts.setter
    def counts(self, numbers: Sequence[int]) -> None:
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        self._counts = dict(zip(self._counts, pairs, strict=True))

    @property
    def num_tokens(self) -> int:
        """Number of sequence steps so far, in the field that has most of them."""
        return max((steps for steps, _ in self._counts.values()), default=0)

    def figures(self) -> dict[str, float]:
        """Return the fraction of a step's values that is padding, and reset the counts."""
        counts, self._counts = self._counts, {}
        return {f"padding/{name}": 1 - steps / places for name, (steps, places) in counts.items()}

    def upkeep(self) -> dict[str, float]:
        """Return metrics of the rows in memory."""
        return self._rows.figures()
