"""Statistics of a sparse gradient as if its absent rows were stored as zeros."""

import math

import torch
from torch import Tensor

from engine.probes.statistics.native_kernel import NUM_FIGURES

MEAN, STD, MIN, MAX, L2, ABSMAX, ZEROS, NAN, INF = range(NUM_FIGURES)


def with_zeros(
    figures: list[float] | Tensor, num_there: int, num_absent: int
) -> list[float] | Tensor:
    """Add zeros to the statistics of some values; in float64, on the device of the statistics."""
    if num_absent == 0:
        return figures
    f = torch.as_tensor(figures, dtype=torch.float64)
    finite = num_there - f[NAN] - f[INF]
    total = finite + num_absent
    some = finite > 0

    def there(place: int) -> Tensor:
        return torch.where(some, f[place], 0.0)

    mean = there(MEAN) * finite / total
    around = finite * (there(STD) ** 2 + (there(MEAN) - mean) ** 2) + num_absent * mean**2
    zeros = (torch.nan_to_num(f[ZEROS]) * num_there + num_absent) / (num_there + num_absent)
    joined = torch.stack(
        [
            mean,
            (around / total).sqrt(),
            there(MIN).clamp(max=0.0),
            there(MAX).clamp(min=0.0),
            there(L2),
            there(ABSMAX),
            zeros,
            f[NAN],
            f[INF],
        ]
    )
    return joined.tolist() if isinstance(figures, list) else joined


def parts(tensor: Tensor) -> tuple[Tensor, int]:
    """Return a sparse tensor's values, coalesced, and the number of zeros that are not stored."""
    values = tensor.detach().coalesce().values()
    return values, math.prod(tensor.shape) - values.numel()
