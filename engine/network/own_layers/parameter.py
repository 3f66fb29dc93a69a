"""A tensor as a layer."""

from typing import Literal

import torch
from torch import Tensor, nn


class TrainableParameter(nn.Module):
    """A tensor that does not depend on its input: for module parameters outside of layers."""

    def __init__(
        self, shape: list[int], kind: Literal["float32", "int64", "bool"] = "float32"
    ) -> None:
        """Starts as zeros unless ``init`` is set. Only a float32 tensor is trained."""
        super().__init__()
        if min(shape, default=1) < 0:
            raise ValueError("shape must be sizes from 0 on")
        zeros = torch.zeros(tuple(shape), dtype=getattr(torch, kind))
        if kind == "float32":
            self.weight = nn.Parameter(zeros)
        else:
            self.register_buffer("weight", zeros)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tensor. The input only determines its place in the graph."""
        del x
        return self.weight

    def extra_repr(self) -> str:
        """Return the shape, for error messages."""
        return f"shape={list(self.weight.shape)}"


LAYERS: dict[str, type[nn.Module]] = {"Parameter": TrainableParameter}
