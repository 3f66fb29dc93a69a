"""Conversion of arrays to torch tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
_BYTES: dict[str, tuple[Any, torch.dtype]] = {
    "bfloat16": (np.uint16, torch.bfloat16),
    "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn),
    "float8_e5m2": (np.uint8, torch.float8_e5m2),
}
"""By ml_dtypes dtype: the integer dtype with the same bits, and the torch dtype."""


def as_tensors(named: Mapping[str, Array]) -> dict[str, Tensor]:
    """Copy arrays to tensors of the same dtype."""
    return {name: _tensor(array) for name, array in named.items()}


def _tensor(array: Array) -> Tensor:
    as_bytes = _BYTES.get(array.dtype.name)
    if as_bytes is not None:
        held, dtype = as_bytes
        return torch.from_numpy(array.view(held).copy()).view(dtype)
    return torch.from_numpy(array.copy())
