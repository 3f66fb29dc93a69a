"""Layers over the steps of a row: pooling, masking and softmax.

Shape suffixes: B = rows of a batch, T = steps of the longest row, D = width.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from engine.network.lengths import Lengths, TakesLengths, is_padding

PoolMode = Literal["sum", "average", "max", "sqrt_n", "first", "last"]


class SequencePool(TakesLengths, nn.Module):
    """Reduces steps to one value per row: sum, average, max, sum / sqrt(count), first or last.

    A row without steps outputs zeros.
    """

    def __init__(self, mode: PoolMode) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, x_BTD: Tensor, *, lengths: Lengths | None = None) -> Tensor:
        """Pool over axis 1."""
        if x_BTD.dim() < 2 or not x_BTD.is_floating_point():
            raise ValueError("SequencePool takes floating-point numbers of shape [rows, steps, …]")
        num_rows, num_steps = x_BTD.shape[:2]
        if num_steps and (lengths is None or lengths.are_all(num_steps)):
            return self._pool_all(x_BTD)
        wide = (num_rows, *(1,) * (x_BTD.dim() - 2))
        if lengths is None:
            lengths_B = torch.full((num_rows,), num_steps, device=x_BTD.device)
        else:
            lengths_B = lengths.of_rows
        is_empty = (lengths_B == 0).reshape(wide)
        if self.mode == "first":
            return x_BTD[:, 0].masked_fill(is_empty, 0.0)
        if self.mode == "last":
            index_B = (lengths_B - 1).clamp(min=0)
            rows_B = torch.arange(num_rows, device=x_BTD.device)
            return x_BTD[rows_B, index_B].masked_fill(is_empty, 0.0)
        behind = is_padding(lengths_B, num_steps).reshape(num_rows, num_steps, *wide[1:])
        if self.mode == "max":
            highest = x_BTD.masked_fill(behind, -torch.inf).amax(dim=1)
            return highest.masked_fill(is_empty, 0.0)
        total = x_BTD.masked_fill(behind, 0.0).sum(dim=1)
        count = lengths_B.clamp(min=1).reshape(wide).to(x_BTD.dtype)
        if self.mode == "average":
            return total / count
        return total / count.sqrt() if self.mode == "sqrt_n" else total

    def _pool_all(self, x_BTD: Tensor) -> Tensor:
        """Pool rows without padding."""
        num_steps = x_BTD.shape[1]
        if self.mode in ("first", "last"):
            return x_BTD[:, 0 if self.mode == "first" else num_steps - 1]
        if self.mode == "max":
            return x_BTD.amax(dim=1)
        total = x_BTD.sum(dim=1)
        if self.mode == "sum":
            return total
        count = torch.full((), num_steps, dtype=x_BTD.dtype, device=x_BTD.device)
        return total / (count if self.mode == "average" else count.sqrt())

    def extra_repr(self) -> str:
        """Return the mode, for error messages."""
        return self.mode


class MaskPadding(TakesLengths, nn.Module):
    """Sets steps past the end of their row to zero, like the padding of a convolution."""

    def forward(self, x_BTD: Tensor, *, lengths: Lengths | None = None) -> Tensor:
        """Mask the padding; axis 1 is the steps."""
        if lengths is None:
            return x_BTD
        behind_BT = is_padding(lengths.of_rows, x_BTD.shape[1])
        return x_BTD.masked_fill(_as_wide(behind_BT, x_BTD), 0)


class SequenceSoftmax(TakesLengths, nn.Module):
    """Values that sum to 1 over the steps of a row; zeros past its end."""

    def forward(self, x_BTD: Tensor, *, lengths: Lengths | None = None) -> Tensor:
        """Compute the softmax over axis 1, for each row and feature."""
        if lengths is None:
            return x_BTD.softmax(dim=1)
        behind = _as_wide(is_padding(lengths.of_rows, x_BTD.shape[1]), x_BTD)
        lowest = torch.finfo(x_BTD.dtype).min  # not -inf: a row without steps would be NaN
        return x_BTD.masked_fill(behind, lowest).softmax(dim=1).masked_fill(behind, 0.0)


def _as_wide(item_BT: Tensor, x_BTD: Tensor) -> Tensor:
    return item_BT.reshape(*item_BT.shape, *(1,) * (x_BTD.dim() - 2))


LAYERS: dict[str, type[nn.Module]] = {
    "SequencePool": SequencePool,
    "SequenceSoftmax": SequenceSoftmax,
    "MaskPadding": MaskPadding,
}
