"""Copy rows to the device: to CUDA through pinned memory, so that no copy blocks.

torch copies to CUDA asynchronously only from pinned memory. Rows are gathered directly into it,
which needs no second copy on the host. torch's allocator of pinned memory keeps a block until the
device has read it.
"""

import contextlib

import torch
from torch import Tensor


def gathered(values: Tensor, rows_B: Tensor | slice, device: torch.device) -> Tensor:
    """Return rows of a tensor on a device, in newly allocated memory.

    ``rows_B`` are on the device of ``values``, or a slice with a start and a stop.
    """
    if _is_pinned_for(values, device):
        landed = None
        with contextlib.suppress(RuntimeError):  # no more memory can be pinned: copy without it
            landed = _pinned(values, rows_B)
        if landed is not None:
            return landed.to(device, non_blocking=True)
    if isinstance(rows_B, slice):
        return values[rows_B].clone().to(device)
    return values.index_select(0, rows_B).to(device)


def moved(values: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device. A tensor that is already there is returned as it is."""
    if _is_pinned_for(values, device):
        return gathered(values, slice(0, len(values)), device)
    return values.to(device)


def _is_pinned_for(values: Tensor, device: torch.device) -> bool:
    return device.type == "cuda" and not values.is_cuda


def _pinned(values: Tensor, rows_B: Tensor | slice) -> Tensor:
    """Return the rows in pinned host memory."""
    found = values[rows_B] if isinstance(rows_B, slice) else None
    num_rows = len(rows_B) if found is None else len(found)  # pyright: ignore[reportArgumentType]
    landed = torch.empty((num_rows, *values.shape[1:]), dtype=values.dtype, pin_memory=True)
    if found is not None:
        return landed.copy_(found)
    return torch.index_select(values, 0, rows_B, out=landed)  # pyright: ignore
