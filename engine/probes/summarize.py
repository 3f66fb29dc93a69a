"""The figures of one tensor: mean, std, min, max, l2, absmax, zeros, nan, inf; and its histogram.

All but ``zeros``, ``nan`` and ``inf`` are over the finite values and are NaN where there are none;
``std`` has the population's divisor; ``zeros`` is a fraction, ``nan`` and ``inf`` are counts.
Sums are accumulated in float64. CPU tensors go through the native kernel where it was built, else
through a plain path in torch; tests hold the two equal. The bins of histograms are those of
``glasshouse.bins``.
"""

import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from engine.probes import kernel
from engine.probes.kernel import Histogram, takes
from engine.probes.sparse import parts, with_zeros
from glasshouse.bins import NUM_BINS

Figures = list[float] | Tensor
Counts = Histogram | Tensor
"""Bins and their counts for a CPU tensor, else the counts of all bins as a float64 vector."""
_LARGEST = torch.finfo(torch.float32).max
_AS_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16)
_FIRST_INFINITE = 0x7F8


@overload
def summarize(tensor: Tensor, *, histogram: Literal[False] = False) -> Figures: ...
@overload
def summarize(tensor: Tensor, *, histogram: Literal[True]) -> tuple[Figures, Counts]: ...
def summarize(tensor: Tensor, *, histogram: bool = False) -> Figures | tuple[Figures, Counts]:
    """A tensor's figures: numbers for a CPU tensor, else a float64 vector on its device.

    With ``histogram`` its histogram as well, from the same pass.
    """
    if tensor.layout is torch.sparse_coo:
        values, num_absent = parts(tensor)
        if not histogram:
            return with_zeros(summarize(values), values.numel(), num_absent)
        figures, counts = summarize(values, histogram=True)
        return with_zeros(figures, values.numel(), num_absent), _with_zeros(counts, num_absent)
    if kernel.LOADED is None or not takes(tensor):
        return (_with_torch(tensor), count_with_torch(tensor)) if histogram else _with_torch(tensor)
    if not histogram:
        return kernel.LOADED.one(tensor)
    figures, counts = kernel.LOADED.count([tensor])
    return figures[0], counts[0]


def summarize_all(tensors: Sequence[Tensor]) -> list[Figures]:
    """The figures of several tensors; those that the kernel takes are one call."""
    if kernel.LOADED is None:
        return [summarize(tensor) for tensor in tensors]
    taken = iter(kernel.LOADED([tensor for tensor in tensors if takes(tensor)]))
    return [next(taken) if takes(tensor) else summarize(tensor) for tensor in tensors]


def sparse(counts: Tensor) -> Histogram:
    """The bins that are not empty, and their counts, of the counts of all bins."""
    bins = counts.nonzero().reshape(-1)
    return bins.tolist(), [int(count) for count in counts[bins].tolist()]


def _with_zeros(counts: Counts, num: int) -> Counts:
    """The histogram with so many zeros more; they are in bin 0."""
    if isinstance(counts, Tensor):
        counts[0] += num
        return counts
    bins, held = counts
    if not num:
        return counts
    if bins and bins[0] == 0:
        return bins, [held[0] + num, *held[1:]]
    return [0, *bins], [num, *held]


@torch.no_grad()
def count_with_torch(tensor: Tensor) -> Counts:
    """The histogram without the kernel."""
    x = _flat(tensor)
    return sparse(_count(x)) if x.device.type == "cpu" else _count(x)


def _count(x: Tensor) -> Tensor:
    """The counts of all bins, without asking the device for a number."""
    counts = torch.zeros(NUM_BINS, dtype=torch.int64, device=x.device)
    one = torch.ones((), dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, _bins(x), one.expand(x.shape))
    counts.view(2, -1)[:, _FIRST_INFINITE:] = 0  # NaN and the infinities
    return counts.to(torch.float64)


def _bins(x: Tensor) -> Tensor:
    if x.dtype in _AS_FLOAT32:
        narrow = x.to(torch.float32)
    else:
        wide = x.to(torch.float64)
        narrow = wide.to(torch.float32)
        beyond = torch.isinf(narrow) & torch.isfinite(wide)
        narrow = torch.where(beyond, narrow.clamp(-_LARGEST, _LARGEST), narrow)
    bits = narrow.view(torch.int32)
    return torch.where(bits == -(2**31), 0, (bits >> 20) & (NUM_BINS - 1)).to(torch.int64)


@torch.no_grad()
def _with_torch(tensor: Tensor) -> Figures:
    x = _flat(tensor)
    return _on_device(x) if x.device.type != "cpu" else _on_cpu(x)


def _flat(tensor: Tensor) -> Tensor:
    """All values of a tensor in one axis, as numbers that can be compared."""
    x = tensor.detach()
    if x.layout is not torch.strided:
        x = x.to_dense()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    x = x.reshape(-1)
    return x.to(torch.uint8) if x.dtype == torch.bool else x


def _on_cpu(x: Tensor) -> list[float]:
    total = x.numel()
    if total == 0:
        return [math.nan] * 7 + [0.0, 0.0]
    num_nan = num_inf = 0
    num_zeros = total - int(torch.count_nonzero(x))
    low, high = (float(item) for item in torch.aminmax(x))
    if not (math.isfinite(low) and math.isfinite(high)):
        num_nan = int(torch.isnan(x).sum())
        x = x[torch.isfinite(x)]
        num_inf = total - num_nan - x.numel()
        if x.numel() == 0:
            return [math.nan] * 6 + [num_zeros / total, float(num_nan), float(num_inf)]
        low, high = (float(item) for item in torch.aminmax(x))
    absmax = max(abs(low), abs(high))
    mean, std, l2 = _moments(x.to(torch.float64, copy=True), absmax)
    return [mean, std, low, high, l2, absmax, num_zeros / total, float(num_nan), float(num_inf)]


def _moments(x: Tensor, absmax: float) -> tuple[float, float, float]:
    """Mean, std and norm of a float64 vector, which is overwritten."""
    scale = 1.0
    if absmax > 1e150:  # squares would overflow
        scale = absmax
        x /= scale
    mean = float(x.sum()) / x.numel()
    l2 = math.sqrt(float(torch.dot(x, x)))
    x -= mean
    std = math.sqrt(float(torch.dot(x, x)) / x.numel())
    return mean * scale, std * scale, l2 * scale


def _on_device(x: Tensor) -> Tensor:
    """The same without asking the device for a number: every branch is a mask."""
    if x.numel() == 0:
        return torch.tensor([math.nan] * 7 + [0.0, 0.0], dtype=torch.float64, device=x.device)
    wide = x.to(torch.float64)
    finite = torch.isfinite(wide)
    count = finite.sum(dtype=torch.float64)
    some = count > 0
    kept = torch.where(finite, wide, 0.0)
    mean = kept.sum() / count
    deviation = torch.where(finite, wide - mean, 0.0)
    low = torch.where(finite, wide, math.inf).amin()
    high = torch.where(finite, wide, -math.inf).amax()
    num_nan = torch.isnan(wide).sum(dtype=torch.float64)
    figures = [
        mean,
        (torch.dot(deviation, deviation) / count).sqrt(),
        low,
        high,
        torch.dot(kept, kept).sqrt(),
        torch.maximum(low.abs(), high.abs()),
    ]
    return torch.stack(
        [
            *(torch.where(some, item, math.nan) for item in figures),
            (wide == 0).sum(dtype=torch.float64) / x.numel(),
            num_nan,
            x.numel() - count - num_nan,
        ]
    )
