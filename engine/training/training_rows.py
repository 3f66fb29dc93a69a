"""Rows of a training job: find them, scan them if needed, keep them in memory or in files."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.core.spool import now
from engine.core.tensor_names import root
from engine.data.augmentation.augmenting import Augmenting, unchanged
from engine.data.batches.batching import bucket_field
from engine.data.batches.rows import Prefetcher, Rows
from engine.data.columns.prepared import Prepared, Preparing
from engine.data.columns.table import StoredTable, Table
from engine.data.sources.joined import Joined, JoinedStored, TablePart, name_of
from engine.data.sources.loading import load
from engine.data.sources.reading import SourceReader
from engine.data.sources.streamed import StreamedRows
from engine.data.sources.streamed_windows import WindowReader
from engine.training.control import RunControl
from engine.training.report import Outputs
from glasshouse.spec import BucketByLength, Field, Source, TrainJob

_REPORT_S = 5.0


class EndedEarly(Exception):
    """The job was asked to end before its first step."""


class Progress:
    """Reports how many rows were scanned before the first step."""

    def __init__(self, step: int, control: RunControl, out: Outputs) -> None:
        """``step``: the first that will be run."""
        self._step, self._control, self._out = step, control, out
        self._began = self._reported_at = time.perf_counter()
        self._num_rows = 0

    def __call__(self, num_rows: int) -> None:
        """Count scanned rows.

        Raises:
            EndedEarly: the job was asked to end.
        """
        self._num_rows += num_rows
        if self._control.cancel_requested:
            raise EndedEarly
        if time.perf_counter() - self._reported_at >= _REPORT_S:
            self.report()

    def report(self) -> None:
        """Report how many rows were scanned and how long it took; nothing if there were none."""
        if not self._num_rows:
            return
        self._reported_at = time.perf_counter()
        values = {"data/fitted_rows": self._num_rows, "data/fit_s": self._reported_at - self._began}
        record = {"type": "metrics", "at": now(), "step": self._step, "epoch": 0}
        self._out.emit(record | {"values": values})
        self._out.flush()


@dataclass(frozen=True)
class Gathering:
    """Creates the rows of a job."""

    job: TrainJob
    tables: Mapping[str, Table]
    """The datasets that the job names."""
    device: torch.device
    control: RunControl
    out: Outputs
    first_step: int = 0

    def training(self, known: Prepared | None) -> Rows:
        """Return the training rows."""
        fields = fields_read(self.job)
        rows = self._rows(self.job.data.sources, fields, known, self.job.data.bucket_by_length)
        rows.augmenting = Augmenting.of(self.job.seed, fields)
        return rows

    def judging(self, source: Source, known: Prepared | None) -> Rows:
        """Return the rows of evaluations."""
        fields = {name: unchanged(field) for name, field in fields_read(self.job).items()}
        return self._rows([source], fields, known)

    def _rows(
        self,
        sources: Sequence[Source],
        fields: dict[str, Field],
        known: Prepared | None,
        bucket: BucketByLength | None = None,
    ) -> Rows:
        """Return the rows of all sources as one; report the dropped rows.

        ``known``: what was learned of the training rows before.

        Raises:
            DataFailed: they cannot be read, or do not fit the fields.
            EndedEarly: the job was asked to end meanwhile.
        """
        job, data = self.job, self.job.data
        source, table = sources[0], self.tables[sources[0].dataset]
        if len(sources) > 1:
            parts = [TablePart(self.tables[source.dataset], source) for source in sources]
            source = Source(dataset=source.dataset, split=name_of(sources))
            table = (Joined if data.shuffle.buffer_size is None else JoinedStored)(parts)
        preparing = Preparing.of(data, known)
        if data.shuffle.buffer_size is None:
            rows = load(
                source,
                fields,
                table,
                seed=job.seed,
                device=self.device,
                limit=data.sequence,
                preparing=preparing,
            )
            rows.ahead = Prefetcher(data.workers)
        else:
            stored = table if isinstance(table, JoinedStored) else StoredTable(table.directory)
            rows = self._streamed(source, fields, stored, preparing, bucket)
        for what, count in rows.left_out.items():
            self.out.emit({"type": "dropped", "at": now(), "what": what, "count": count})
        return rows

    def _streamed(
        self,
        source: Source,
        fields: Mapping[str, Field],
        table: StoredTable | JoinedStored,
        preparing: Preparing,
        bucket: BucketByLength | None,
    ) -> StreamedRows:
        data = self.job.data
        progress = Progress(self.first_step, self.control, self.out)
        if data.windows is not None and isinstance(table, StoredTable):
            reader = WindowReader(source, fields, table, data.windows, preparing.known, progress)
        else:
            reader = SourceReader(
                source,
                fields,
                table,
                seed=self.job.seed,
                limit=data.sequence,
                preparing=preparing,
                look=progress,
                bucket=None if bucket is None else bucket_field(bucket, data.fields),
            )
        progress.report()
        return StreamedRows(
            reader,
            self.device,
            shuffle=data.shuffle,
            workers=data.workers,
            keeps=data.cache == "memory",
            in_turn=data.interleave == "sequential",
            bucket=bucket,
        )


def fields_read(spec: TrainJob) -> dict[str, Field]:
    """Return the fields that a layer, the loss or a metric reads."""
    read = {root(name) for layer in spec.network.layers for name in layer.reads}
    read |= {root(name) for name in spec.loss_reads}
    read |= {root(name) for metric in spec.metrics for name in metric.sources}
    return {name: field for name, field in spec.data.fields.items() if name in read}
