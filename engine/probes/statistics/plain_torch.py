"""Statistics and histogram of a tensor in plain torch: no compiler, any device, slower.

Tests hold both equal to the kernels. On a device every branch is a mask, so that nothing waits for
a value.
"""

import math

import torch
from torch import Tensor

from engine.probes.statistics.native_kernel import Histogram
from glasshouse.histogram_bins import NUM_BINS

_LARGEST = torch.finfo(torch.float32).max
_AS_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16)
_FIRST_INFINITE = 0x7F8
_VANISHES, _OVERFLOWS = 1e-140, 1e140
"""Float64 magnitudes beyond which squares underflow or overflow."""


@torch.no_grad()
def figures(tensor: Tensor) -> list[float] | Tensor:
    """Return the nine statistics: floats for a CPU tensor, else a float64 vector on its device."""
    return _on_cpu(_flat(tensor)) if tensor.device.type == "cpu" else figures_on_device(tensor)


@torch.no_grad()
def counts(tensor: Tensor) -> Histogram | Tensor:
    """Return the nonempty bins for a CPU tensor, else the counts of all bins on its device."""
    found = counts_on_device(tensor)
    return sparse(found) if tensor.device.type == "cpu" else found


def sparse(counts: Tensor) -> Histogram:
    """Return the nonempty bins and their counts from the counts of all bins."""
    bins = counts.nonzero().reshape(-1)
    return bins.tolist(), [int(count) for count in counts[bins].tolist()]


@torch.no_grad()
def counts_on_device(tensor: Tensor) -> Tensor:
    """Return the counts of all bins as float64, without synchronizing with the device."""
    x = _flat(tensor)
    counts = torch.zeros(NUM_BINS, dtype=torch.int64, device=x.device)
    one = torch.ones((), dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, _bins(x), one.expand(x.shape))
    counts.view(2, -1)[:, _FIRST_INFINITE:] = 0  # NaN and Inf
    return counts.to(torch.float64)


@torch.no_grad()
def figures_on_device(tensor: Tensor) -> Tensor:
    """Return the nine statistics as a float64 vector, without synchronizing with the device."""
    x = _flat(tensor)
    if x.numel() == 0:
        return torch.tensor([math.nan] * 7 + [0.0, 0.0], dtype=torch.float64, device=x.device)
    wide = x.to(torch.float64)
    finite = torch.isfinite(wide)
    count = finite.sum(dtype=torch.float64)
    some = count > 0
    low = torch.where(finite, wide, math.inf).amin()
    high = torch.where(finite, wide, -math.inf).amax()
    absmax = torch.maximum(low.abs(), high.abs())
    is_odd = (absmax > _OVERFLOWS) | ((absmax < _VANISHES) & (absmax > 0))
    scale = torch.where(is_odd & some, absmax, 1.0)
    kept = torch.where(finite, wide, 0.0) / scale
    mean = kept.sum() / count
    deviation = torch.where(finite, kept - mean, 0.0)
    std = (torch.dot(deviation, deviation) / count).sqrt()
    l2 = torch.dot(kept, kept).sqrt()
    num_nan = torch.isnan(wide).sum(dtype=torch.float64)
    figures = [mean * scale, std * scale, low, high, l2 * scale, absmax]
    return torch.stack(
        [
            *(torch.where(some, item, math.nan) for item in figures),
            (wide == 0).sum(dtype=torch.float64) / x.numel(),
            num_nan,
            x.numel() - count - num_nan,
        ]
    )


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


def _flat(tensor: Tensor) -> Tensor:
    """Return all values of a tensor, flattened, in a type that can be compared."""
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
    """Return mean, std and norm of a float64 vector, which is overwritten."""
    scale = 1.0
    if absmax > _OVERFLOWS or 0 < absmax < _VANISHES:
        scale = absmax
        x /= scale
    mean = float(x.sum()) / x.numel()
    l2 = math.sqrt(float(torch.dot(x, x)))
    x -= mean
    std = math.sqrt(float(torch.dot(x, x)) / x.numel())
    return mean * scale, std * scale, l2 * scale
