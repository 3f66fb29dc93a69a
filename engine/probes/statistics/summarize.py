"""Statistics of one tensor (mean, std, min, max, l2, absmax, zeros, nan, inf) and its histogram.

All except ``zeros``, ``nan`` and ``inf`` are over the finite values, and NaN if there are none.
``std`` is the population's; ``zeros`` is a fraction; ``nan`` and ``inf`` are counts. Sums are
accumulated in float64. CPU tensors use the native kernel if it was built, CUDA tensors the Triton
kernel if Triton is available, and all others plain torch; tests hold the three equal. The bins of
histograms are those of ``glasshouse.histogram_bins``.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from engine.probes.statistics import native_kernel, plain_torch
from engine.probes.statistics.native_kernel import Histogram, takes
from engine.probes.statistics.sparse import parts, with_zeros
from engine.probes.statistics.triton_check import kernel_for

Figures = list[float] | Tensor
Counts = Histogram | Tensor
"""Bins and their counts for a CPU tensor, else the counts of all bins as a float64 vector."""
Many = Callable[[Sequence[Tensor]], Any]


@overload
def summarize(tensor: Tensor, *, histogram: Literal[False] = False) -> Figures: ...
@overload
def summarize(tensor: Tensor, *, histogram: Literal[True]) -> tuple[Figures, Counts]: ...
def summarize(tensor: Tensor, *, histogram: bool = False) -> Figures | tuple[Figures, Counts]:
    """Return a tensor's statistics: floats for a CPU tensor, else a float64 vector on its device.

    With ``histogram``, return its histogram as well, from the same pass.
    """
    if tensor.layout is torch.sparse_coo:
        values, num_absent = parts(tensor)
        if not histogram:
            return with_zeros(summarize(values), values.numel(), num_absent)
        figures, counts = summarize(values, histogram=True)
        return with_zeros(figures, values.numel(), num_absent), _with_zeros(counts, num_absent)
    if native_kernel.LOADED is not None and takes(tensor):
        if not histogram:
            return native_kernel.LOADED.one(tensor)
        figures, counts = native_kernel.LOADED.count([tensor])
        return figures[0], counts[0]
    if (there := _of_its_device(tensor)) is not None:
        return there.count(tensor) if histogram else there.one(tensor)
    return (
        (plain_torch.figures(tensor), plain_torch.counts(tensor))
        if histogram
        else plain_torch.figures(tensor)
    )


def summarize_all(tensors: Sequence[Tensor]) -> list[Figures]:
    """Return the statistics of several tensors; tensors of the same kernel share one call."""
    if native_kernel.LOADED is not None and all(map(takes, tensors)):
        return [*native_kernel.LOADED(tensors)]
    found: dict[int, Figures] = {}
    together: dict[Many, list[int]] = {}
    for place, tensor in enumerate(tensors):
        many = _many(tensor)
        if many is None:
            found[place] = summarize(tensor)
        else:
            together.setdefault(many, []).append(place)
    for many, places in together.items():
        found |= zip(places, many([tensors[place] for place in places]), strict=True)
    return [found[place] for place in range(len(tensors))]


def _many(tensor: Tensor) -> Many | None:
    """Return the function that takes many tensors like this one at once."""
    if native_kernel.LOADED is not None and takes(tensor):
        return native_kernel.LOADED
    there = _of_its_device(tensor)
    return None if there is None else there.many


def _of_its_device(tensor: Tensor) -> Any:
    """Return the kernel of a tensor's CUDA device, if there is one and it takes the tensor."""
    if not tensor.is_cuda or (there := kernel_for(tensor.device)) is None:
        return None
    return there if there.takes(tensor) else None


def _with_zeros(counts: Counts, num: int) -> Counts:
    """Return the histogram with ``num`` more zeros, which are in bin 0."""
    if isinstance(counts, Tensor):
        counts[0] += num
        return counts
    bins, held = counts
    if not num:
        return counts
    if bins and bins[0] == 0:
        return bins, [held[0] + num, *held[1:]]
    return [0, *bins], [num, *held]
