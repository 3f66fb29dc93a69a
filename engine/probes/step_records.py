"""Turn the statistics of a watched step into records: sent at once, or kept by a recorder."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from engine.core.readback import Event, Readback
from engine.core.spool import Emit
from engine.probes.flight_recorder import FlightRecorder
from engine.probes.statistics.native_kernel import NUM_FIGURES, Histogram
from engine.probes.statistics.plain_torch import sparse
from engine.probes.statistics.summarize import Counts, Figures
from engine.probes.watched.probe import ActiveProbe
from glasshouse.events import STATS_COLUMNS
from glasshouse.histogram_bins import NUM_BINS, quantiles

_LOW, _HIGH = STATS_COLUMNS.index("min") - 2, STATS_COLUMNS.index("max") - 2
_NUM_NUMBERS = NUM_FIGURES + NUM_BINS


class TensorHistogram(NamedTuple):
    """The histogram of one tensor."""

    layer: str
    kind: str
    figures: Figures
    counts: Counts
    wanted: frozenset[str]
    """``histogram``, ``quantiles`` or both."""


class RecordSender:
    """Sends statistics, when they have been read back, to the probes that want them."""

    def __init__(self, emit: Emit, readback: Readback) -> None:
        self._emit = emit
        self._readback = readback

    def after(self, event: Event, then: Callable[[], None]) -> None:
        """Call ``then`` once ``event`` has happened."""
        self._readback.put_event(event, then)

    def catch_up(self) -> None:
        """Wait for the statistics of earlier steps."""
        self._readback.drain()

    def send(
        self,
        record: Mapping[str, Any],
        rows: Sequence[tuple[str, str, Any]],
        counted: Sequence[TensorHistogram],
        due: Sequence[ActiveProbe],
        loss: Tensor | None,
    ) -> None:
        """Send the statistics of a step that the probes in ``due`` have watched.

        ``record`` is the record without them, with those of single processes under ``ranks``;
        ``loss`` is read only if there is a recorder.
        """
        recorders = [watch for watch in due if isinstance(watch, FlightRecorder)]
        # Besides tensors on a device there are scalars that the optimizer keeps in CPU memory.
        coming = [found for _, _, found in rows if isinstance(found, Tensor)]
        if not (recorders or counted or coming):
            if rows:  # everything is known and no recorder needs it: the usual case on a CPU
                table = [[layer, kind, *figures] for layer, kind, figures in rows]
                self._emit({**record, "rows": table})
            return
        others = [watch for watch in due if not isinstance(watch, FlightRecorder)]
        coming += [loss.detach()] if recorders and loss is not None else []
        num_first = sum(item.numel() for item in coming)
        coming += numbers_of(counted)

        def then(numbers: Tensor) -> None:
            arrived = iter(numbers[:num_first].tolist())
            histograms = histogram_keys([*landed(counted, numbers[num_first:])])
            table: list[list[Any]] = [
                [layer, kind, *(islice(arrived, NUM_FIGURES) if isinstance(it, Tensor) else it)]
                for layer, kind, it in rows
            ]
            if not recorders:
                self._emit({**record, "rows": table, **histograms})
                return
            now = [row for row in table if any(watch.has_seen(row[1], row[0]) for watch in others)]
            if now or counted:
                self._emit({**record, "rows": now, **histograms})
            sent, found = {(row[0], row[1]) for row in now}, next(arrived, 0.0)
            merged = {key: value for key, value in record.items() if key != "ranks"}
            for recorder in recorders:
                seen = [row for row in table if recorder.has_seen(row[1], row[0])]
                for late in recorder.take(merged, seen, found, sent):
                    self._emit(late)

        if coming:
            self._readback.put_many(coming, then)
        elif rows or counted:
            then(torch.empty(0))


def numbers_of(counted: Sequence[TensorHistogram]) -> list[Any]:
    """Return the numbers to read back from a device, ``_NUM_NUMBERS`` for each tensor."""
    there = [item for item in counted if isinstance(item.counts, Tensor)]
    return [number for item in there for number in (item.figures, item.counts)]


def landed(counted: Sequence[TensorHistogram], numbers: Tensor) -> Iterator[TensorHistogram]:
    """Yield the histograms with the numbers that were read back."""
    start = 0
    for item in counted:
        if isinstance(item.counts, Tensor):
            own = numbers[start : start + _NUM_NUMBERS]
            start += _NUM_NUMBERS
            figures, counts = own[:NUM_FIGURES].tolist(), sparse(own[NUM_FIGURES:])
            yield item._replace(figures=figures, counts=counts)
        else:
            yield item


def histogram_keys(counted: Sequence[TensorHistogram]) -> dict[str, list[Any]]:
    """Return the keys that a ``stats`` record has besides its rows."""
    keys: dict[str, list[Any]] = {"histograms": [], "quantiles": []}
    for layer, kind, figures, counted_bins, wanted in counted:
        bins, counts = cast("Histogram", counted_bins)
        if "histogram" in wanted:
            keys["histograms"].append([layer, kind, bins, counts])
        if "quantiles" in wanted:
            values = quantiles(bins, counts, low=float(figures[_LOW]), high=float(figures[_HIGH]))
            keys["quantiles"].append([layer, kind, *values])
    return {name: entries for name, entries in keys.items() if entries}
