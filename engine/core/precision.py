"""Mixed precision: which products are computed with fewer bits. Parameters stay float32.

torch.autocast decides by its own lists what is computed in bfloat16 or float16; losses are computed
in float32. bfloat16 has the range of float32, so that gradients need no scaling; float16 has not.
"""

import torch
from torch import Tensor

Choice = str
"""``float32``, ``bfloat16``, ``float16`` or ``auto``, as in a spec."""


def chosen(precision: Choice, device: torch.device) -> torch.dtype | None:
    """In which type a device computes what may be computed with fewer bits; None: in float32."""
    if precision == "float16":
        return torch.float16
    is_low = precision == "bfloat16" or (precision == "auto" and multiplies_bfloat16(device))
    return torch.bfloat16 if is_low else None


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as it is written everywhere outside torch: ``float32``."""
    return str(dtype).removeprefix("torch.")


def name_of(low: torch.dtype | None) -> str:
    """What a spec calls it."""
    return dtype_name(low or torch.float32)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions that multiply matrices of bfloat16; else it is slower."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    has_amx: bool = torch.cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]
    return has_amx or torch.cpu._is_avx512_bf16_supported()  # pyright: ignore[reportPrivateUsage]


def in_float32(tensor: Tensor) -> Tensor:
    """The same numbers with all the bits that a sum over many of them needs."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
