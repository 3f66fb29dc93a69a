"""Histograms and quantiles in the record of a step."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from engine.probes.statistics.native_kernel import NUM_FIGURES, Histogram
from engine.probes.statistics.plain_torch import sparse
from engine.probes.statistics.summarize import Counts, Figures
from glasshouse.events import STATS_COLUMNS
from glasshouse.histogram_bins import NUM_BINS, quantiles

_LOW, _HIGH = STATS_COLUMNS.index("min") - 2, STATS_COLUMNS.index("max") - 2
NUM_NUMBERS = NUM_FIGURES + NUM_BINS


class TensorHistogram(NamedTuple):
    """The histogram of one tensor."""

    layer: str
    kind: str
    figures: Figures
    counts: Counts
    wanted: frozenset[str]
    """``histogram``, ``quantiles`` or both."""


def on_device(counted: Sequence[TensorHistogram]) -> list[Tensor]:
    """Return the numbers to read back from a device, ``NUM_NUMBERS`` for each tensor."""
    there = [item for item in counted if isinstance(item.counts, Tensor)]
    numbers = [number for item in there for number in (item.figures, item.counts)]
    return [number for number in numbers if isinstance(number, Tensor)]


def landed(counted: Sequence[TensorHistogram], numbers: Tensor) -> Iterator[TensorHistogram]:
    """Yield the histograms with the numbers that were read back."""
    start = 0
    for item in counted:
        if isinstance(item.counts, Tensor):
            own = numbers[start : start + NUM_NUMBERS]
            start += NUM_NUMBERS
            figures, counts = own[:NUM_FIGURES].tolist(), sparse(own[NUM_FIGURES:])
            yield item._replace(figures=figures, counts=counts)
        else:
            yield item


def told(counted: Sequence[TensorHistogram]) -> dict[str, list[Any]]:
    """Return the keys that a ``stats`` record has besides its rows."""
    histograms: list[Any] = []
    found: list[Any] = []
    for layer, kind, figures, counted_bins, wanted in counted:
        bins, counts = cast("Histogram", counted_bins)
        if "histogram" in wanted:
            histograms.append([layer, kind, bins, counts])
        if "quantiles" in wanted:
            values = quantiles(bins, counts, low=float(figures[_LOW]), high=float(figures[_HIGH]))
            found.append([layer, kind, *values])
    keys = {"histograms": histograms, "quantiles": found}
    return {name: entries for name, entries in keys.items() if entries}
