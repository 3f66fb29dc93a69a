import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from engine.probes.statistics import native_kernel, plain_torch
from engine.probes.statistics.native_kernel import NUM_FIGURES, Histogram, takes
from engine.probes.statistics.triton_check import kernel_for

Figures = list[float] | Tensor
Counts = Histogram | Tensor
"""Bins and their counts for a CPU tensor, else the counts of all bins as a float64 vector."""
_MEAN, _STD, _MIN, _MAX, _L2, _ABSMAX, _ZEROS, _NAN, _INF = range(NUM_FIGURES)


@overload
def summarize(tensor: Tensor, *, histogram: Literal[False] = False) -> Figures: ...
@overload
def summarize(tensor: Tensor, *, histogram: Literal[True]) -> tuple[Figures, Counts]: ...
def summarize(tensor: Tensor, *, histogram: bool = False) -> Figures | tuple[Figures, Counts]:
    """Return a tensor's statistics: floats for a CPU tensor, else a float64 vector on its device.

    With ``histogram``, return its histogram as well, from the same pass.
    """
    if tensor.layout is torch.sparse_coo:
        values = tensor.detach().coalesce().values()
        num_absent = math.prod(tensor.shape) - values.numel()
        if not histogram:
            return _with_zeros(summarize(values), values.numel(), num_absent)
        figures, counts = summarize(values, histogram=True)
        figures = _with_zeros(figures, values.numel(), num_absent)
        return figures, _counts_with_zeros(counts, num_absent)
    kernel = native_kernel.LOADED
    if kernel is None or not takes(tensor):
        kernel = _on_device(tensor)
    if kernel is not None:
        return kernel.count(tensor) if histogram else kernel.one(tensor)
    found = plain_torch.figures(tensor)
    return (found, plain_torch.counts(tensor)) if histogram else found


def summarize_all(tensors: Sequence[Tensor]) -> list[Figures]:
    """Return the statistics of several tensors; tensors of the same kernel share one call."""
    places: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        kernel = native_kernel.LOADED
        if kernel is None or not takes(tensor):
            kernel = _on_device(tensor)
        places.setdefault(kernel, []).append(place)
    found: dict[int, Figures] = {}
    for kernel, own in places.items():
        some = [tensors[place] for place in own]
        figures = [*map(summarize, some)] if kernel is None else kernel.many(some)
        found |= zip(own, figures, strict=True)
    return [found[place] for place in range(len(tensors))]


def _on_device(tensor: Tensor) -> Any:
    """Return the kernel of a tensor's CUDA device, if there is one and it takes the tensor."""
    if not tensor.is_cuda or (kernel := kernel_for(tensor.device)) is None:
        return None
    return kernel if kernel.takes(tensor) else None


def _with_zeros(figures: Figures, num_there: int, num_absent: int) -> Figures:
    """Return the statistics as if the absent rows of a sparse tensor were stored as zeros.

    They are computed in float64, on the device of the statistics.
    """
    if num_absent == 0:
        return figures
    f = torch.as_tensor(figures, dtype=torch.float64)
    finite = num_there - f[_NAN] - f[_INF]
    total = finite + num_absent
    there = torch.where(finite > 0, f, 0.0)
    mean = there[_MEAN] * finite / total
    around = finite * (there[_STD] ** 2 + (there[_MEAN] - mean) ** 2) + num_absent * mean**2
    zeros = (torch.nan_to_num(f[_ZEROS]) * num_there + num_absent) / (num_there + num_absent)
    joined = torch.stack(
        [
            mean,
            (around / total).sqrt(),
            there[_MIN].clamp(max=0.0),
            there[_MAX].clamp(min=0.0),
            there[_L2],
            there[_ABSMAX],
            zeros,
            f[_NAN],
            f[_INF],
        ]
    )
    return joined.tolist() if isinstance(figures, list) else joined


def _counts_with_zeros(counts: Counts, num: int) -> Counts:
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
