"""Compute quantiles on request where only histograms were stored."""

from itertools import pairwise

import numpy as np

from glasshouse import histogram_bins
from models.observations.stats_bytes import Histograms, StatsArrays
from models.observations.thinning import evenly


def filled(kept: StatsArrays | None, counted: Histograms, most: int) -> StatsArrays:
    """Return the stored quantiles, and up to ``most`` computed from histograms of other steps.

    Histograms lack the extremes, which would narrow the outermost bins. The error is at most
    ``bins.RELATIVE_ERROR``, as for every quantile.
    """
    if kept is not None:
        counted = counted.take(~np.isin(counted.steps, kept.steps))
    counted = counted.take(evenly(len(counted.steps), most))
    begins = [0, *np.cumsum(counted.sizes).tolist()]
    numbers, counts = counted.bins.tolist(), counted.counts.tolist()
    rows = [
        histogram_bins.quantiles(numbers[begin:end], counts[begin:end])
        for begin, end in pairwise(begins)
    ]
    values = np.array(rows, np.float64).reshape(-1, len(histogram_bins.QUANTILES)).T
    made = StatsArrays(counted.steps, values)
    if kept is None:
        return made
    joined = StatsArrays.join([kept, made])
    return joined.take(np.argsort(joined.steps, kind="stable"))
