"""Mixed precision: which operations run in bfloat16 or float16. Parameters stay float32.

torch.autocast decides by its own lists which operations run in the lower precision. Losses are
computed in float32. bfloat16 has the range of float32, so its gradients need no scaling; those of
float16 do.
"""

import torch
from torch import Tensor

from engine.core.device import multiplies_bfloat16


def chosen(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the autocast dtype for a device; None: everything runs in float32.

    ``precision`` is as in a spec: ``float32``, ``bfloat16``, ``float16`` or ``auto``.
    """
    if precision == "float16":
        return torch.float16
    is_low = precision == "bfloat16" or (precision == "auto" and multiplies_bfloat16(device))
    return torch.bfloat16 if is_low else None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as it is written everywhere outside torch: ``float32``."""
    return str(dtype).removeprefix("torch.")


def name_of(low: torch.dtype | None) -> str:
    """Return the name of the autocast dtype in a spec; ``float32`` for None."""
    return dtype_name(low or torch.float32)


def in_float32(tensor: Tensor) -> Tensor:
    """Return bfloat16 and float16 tensors as float32, for accurate sums over many values."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
