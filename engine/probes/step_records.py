"""Turn the statistics of a watched step into records: sent at once, or kept by a recorder."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from engine.core.readback import Readback
from engine.core.spool import Emit
from engine.probes.flight_recorder import FlightRecorder
from engine.probes.statistics.histograms import TensorHistogram, landed, on_device, told
from engine.probes.statistics.native_kernel import NUM_FIGURES
from engine.probes.watched.probe import ActiveProbe

Seen = tuple[str, str, Any]


class RecordSender:
    """Sends statistics, when they have been read back, to the probes that want them."""

    def __init__(self, emit: Emit, readback: Readback) -> None:
        self.emit = emit
        self._readback = readback

    def tell(
        self,
        record: Mapping[str, Any],
        rows: Sequence[Seen],
        counted: Sequence[TensorHistogram],
        looking: Sequence[ActiveProbe],
        loss: Tensor | None,
    ) -> None:
        """Send the statistics of a watched step.

        ``record`` is the record without them; ``loss`` is read only if there is a recorder.
        """
        recorders = [watch for watch in looking if isinstance(watch, FlightRecorder)]
        if not (recorders or counted or any(isinstance(row[2], Tensor) for row in rows)):
            if rows:  # everything is known and no recorder needs it: the usual case on a CPU
                table = [[layer, kind, *figures] for layer, kind, figures in rows]
                self.emit({**record, "rows": table})
            return
        telling = [watch for watch in looking if not isinstance(watch, FlightRecorder)]
        # Besides tensors on a device there are scalars that the optimizer keeps in CPU memory.
        known = [None if isinstance(found, Tensor) else found for _, _, found in rows]
        coming = [found for _, _, found in rows if isinstance(found, Tensor)]
        coming += [loss.detach()] if recorders and loss is not None else []

        def then(flat: list[float], found: Sequence[TensorHistogram]) -> None:
            arrived = iter(flat)
            table: list[list[Any]] = [
                [layer, kind, *(islice(arrived, NUM_FIGURES) if there is None else there)]
                for (layer, kind, _), there in zip(rows, known, strict=True)
            ]
            if not recorders:
                self.emit({**record, "rows": table, **told(found)})
                return
            now = [row for row in table if any(watch.has_seen(row[1], row[0]) for watch in telling)]
            if now or found:
                self.emit({**record, "rows": now, **told(found)})
            self._record(record, table, next(arrived, 0.0), recorders, now)

        self._deliver(coming, counted, then, some=bool(rows or counted or coming))

    def _record(
        self,
        record: Mapping[str, Any],
        table: Sequence[list[Any]],
        loss: float,
        recorders: Sequence[FlightRecorder],
        now: Sequence[list[Any]],
    ) -> None:
        """Pass the rows to the recorders, and send the records that they return."""
        sent = {(row[0], row[1]) for row in now}
        for recorder in recorders:
            seen = [row for row in table if recorder.has_seen(row[1], row[0])]
            for late in recorder.take(record, seen, loss, sent):
                self.emit(late)

    def _deliver(
        self,
        coming: Sequence[Tensor],
        counted: Sequence[TensorHistogram],
        then: Callable[[list[float], Sequence[TensorHistogram]], None],
        *,
        some: bool,
    ) -> None:
        """Call ``then`` with the numbers: now, or when they have been read back."""
        count = sum(item.numel() for item in coming)

        def then_many(numbers: Tensor) -> None:
            then(numbers[:count].tolist(), [*landed(counted, numbers[count:])])

        if numbers := on_device(counted):
            self._readback.put_many([*coming, *numbers], then_many)
        elif any(not item.is_cpu for item in coming):
            self._readback.put(coming, lambda flat: then(flat, counted))
        elif some:
            then([value for item in coming for value in item.reshape(-1).tolist()], counted)
