"""Batch plan of a training job, from the dataset's description alone. Reads no row.

It has the number of batches, their sizes and their padding. The description counts how many rows
have each length, so batches that are cut by lengths are known.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.problems import Findings
from engine.data.batches.batch_counts import BatchCounts
from engine.data.batches.batching import bucket_field, widest_rows
from engine.data.batches.buckets import Buckets, TooLong, by_chance, padding_of, token_sizes
from engine.data.columns.fields import column_view
from engine.network.shapes import FieldShape
from glasshouse.spec import BucketByLength, TrainJob

_MOST_ROWS = 1_000_000
"""With more rows, padding is computed from this many, evenly spaced."""
_POINTER = "/data/bucket_by_length"


@dataclass(frozen=True)
class LengthCounts:
    """The unique lengths of the rows of a field, and how many rows have each."""

    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]

    def listed(self, most: int) -> Tensor:
        """Return the length of every row, ascending; of at most ``most`` evenly spaced rows."""
        total = int(self.rows.sum())
        places = np.arange(min(total, most)) * total // min(total, most)
        return torch.from_numpy(
            self.lengths[np.searchsorted(np.cumsum(self.rows), places, side="right")]
        )

    def cut(self, most: int, *, drops: bool) -> "LengthCounts":
        """Limit rows to ``most`` steps: longer ones are cut or dropped."""
        if drops:
            kept = self.lengths <= most
            return LengthCounts(self.lengths[kept], self.rows[kept])
        lengths, places = np.unique(np.minimum(self.lengths, most), return_inverse=True)
        rows = np.zeros(len(lengths), np.int64)
        np.add.at(rows, places, self.rows)
        return LengthCounts(lengths, rows)


class BatchPlan:
    """The batches of a job."""

    def __init__(
        self,
        spec: TrainJob,
        meta: Mapping[str, Any],
        shapes: Mapping[str, FieldShape],
        num_rows: int,
        findings: Findings,
    ) -> None:
        """Plan the batches; ``shapes`` are those of the job's fields, no longer than rows may be.

        Problems of ``bucket_by_length`` become findings.
        """
        self._spec = spec
        self._meta = meta
        self._shapes = shapes
        self.num_rows = num_rows
        self._field = self._check(findings)
        longest = None if self._field is None else shapes[self._field].shape[0]
        self.batch_size = widest_rows(spec.data, num_rows, longest)
        """The number of rows of a batch of the longest rows."""
        self.pace = self._pace(findings)
        """None: the number of batches of an epoch is not known before the rows are read."""

    def _check(self, findings: Findings) -> str | None:
        data, wanted = self._spec.data, self._spec.data.bucket_by_length
        if wanted is None:
            return None
        name = bucket_field(wanted, data.fields)
        pointer = f"{_POINTER}/field"
        if name is None:
            shapes = self._shapes.values()
            has_any = any(shape.is_sequence and not shape.is_sparse for shape in shapes)
            detail = "name the field" if has_any else "no field is a sequence"
            findings.problem(_POINTER, f"{detail} whose lengths count", "no_sequence")
            return None
        if name not in self._shapes or not self._shapes[name].is_sequence:
            detail = f"{name!r} is no field whose rows have lengths"
            findings.problem(pointer, detail, "no_sequence")
            return None
        longest = self._shapes[name].shape[0]
        if wanted.max_tokens is not None and wanted.max_tokens < longest:
            detail = f"the longest row of field {name!r} has {longest} steps: raise max_tokens, or"
            detail += " set data.sequence.max_length"
            if data.whole.fraction is None:
                findings.problem(f"{_POINTER}/max_tokens", detail, "too_long")
            else:
                findings.warn(f"{_POINTER}/max_tokens", detail, "too_long")
        return name

    @property
    def num_steps(self) -> int | None:
        """Number of updates of the job; None if it is not known yet."""
        stop = self._spec.stop
        return stop.steps if self.pace is None else self.pace.num_steps(stop)

    def _pace(self, findings: Findings) -> BatchCounts | None:
        wanted = self._spec.data.bucket_by_length
        if wanted is None or wanted.max_tokens is None or self._field is None:
            return BatchCounts.of(self._spec, self.num_rows)
        lengths = self.lengths(self._field)
        drops = self._drops and len(self._sequences) > 1
        if lengths is None or self._spec.data.whole.fraction is not None or drops:
            why = "which rows are taken" if lengths is not None else "the lengths of the rows"
            detail = f"how many batches an epoch has depends on {why}: known when they are read"
            findings.warn(f"{_POINTER}/max_tokens", detail, "unknown_length")
            return None
        try:
            sizes = token_sizes(wanted, lengths.lengths, lengths.rows, self._spec.global_batch_size)
        except TooLong:
            return None
        return BatchCounts.of(self._spec, int(lengths.rows.sum()), len(sizes))

    @property
    def _drops(self) -> bool:
        limit = self._spec.data.sequence
        return limit.max_length is not None and limit.overflow == "drop"

    @property
    def _sequences(self) -> list[str]:
        return [name for name, shape in self._shapes.items() if shape.is_sequence]

    def lengths(self, name: str) -> LengthCounts | None:
        """Return the lengths of a field's rows, of the whole split; None: there are too many."""
        field = self._spec.data.fields[name]
        column = column_view(name, field, self._meta)
        split = self._spec.data.whole.split
        if column["shape"][0] is not None:
            counts = [[int(column["shape"][0]), int(self._meta["splits"][split])]]
        else:
            counts = (column.get("length_counts") or {}).get(split)
        if not counts:
            return None
        found = LengthCounts(*np.array(counts, np.int64).T)
        limit = self._spec.data.sequence
        if limit.max_length is None or self._shapes[name].is_sparse:
            return found
        return found.cut(limit.max_length, drops=self._drops)

    def _bucketed(self, lengths_N: Tensor, wanted: BucketByLength) -> float | None:
        data = self._spec.global_data
        if data.shuffle.buffer_size is not None:  # it depends on which rows meet in a pool
            return None
        try:
            buckets = Buckets(wanted, lengths_N, data.batch_size, drop_last=data.drop_last)
        except TooLong:
            return None
        return round(padding_of(lengths_N, buckets.epoch((self._spec.seed, 0))), 4)

    def sequences(self) -> dict[str, dict[str, Any]]:
        """Return the lengths and the padding of each field with rows of different lengths.

        ``padding`` is the fraction of the network's input that is padding, ``by_chance`` that
        without ``bucket_by_length``; null if the dataset's description does not determine it.
        """
        described: dict[str, dict[str, Any]] = {}
        for name in self._sequences:
            lengths = self.lengths(name)
            described[name] = {"lengths": self._ends(name, lengths), **self._padding(name, lengths)}
        return described

    def _ends(self, name: str, lengths: LengthCounts | None) -> dict[str, Any]:
        if lengths is not None and len(lengths.lengths):
            total = int((lengths.lengths * lengths.rows).sum())
            mean = round(total / int(lengths.rows.sum()), 3)
            return {"min": int(lengths.lengths[0]), "mean": mean, "max": int(lengths.lengths[-1])}
        return {"min": None, "mean": None, "max": self._shapes[name].shape[0]}

    def _padding(self, name: str, lengths: LengthCounts | None) -> dict[str, float | None]:
        wanted = self._spec.data.bucket_by_length
        if lengths is None or not len(lengths.lengths):
            return {"padding": None} if wanted is None else {"padding": None, "by_chance": None}
        listed = lengths.listed(_MOST_ROWS)
        cut = by_chance(len(listed), self._spec.global_batch_size, (self._spec.seed, 0))
        chance = round(padding_of(listed, cut), 4)
        if wanted is None:
            return {"padding": chance}
        if name != self._field:
            return {"padding": None, "by_chance": chance}
        return {"padding": self._bucketed(listed, wanted), "by_chance": chance}
