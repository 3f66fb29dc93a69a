"""Arrays as torch's tensors."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from glasshouse.client.tensors import Array


def as_tensors(named: Mapping[str, Array]) -> dict[str, Tensor]:
    """Tensors of their own memory, in the arrays' types."""
    return {name: _tensor(array) for name, array in named.items()}


def _tensor(array: Array) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
