"""A field's values in memory, as rows of equal size.

Shape suffixes: B = rows of a batch, N = rows of the split.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.data.augmentation.augmenting import Change
from engine.data.columns.staging import gathered


@dataclass(frozen=True)
class LoadedField:
    """A field's values in memory, as stored, and how to create a batch from them."""

    values: Tensor
    divide_by: float | None = None
    scale: float | None = None
    is_integer: bool = False
    normal: tuple[Tensor, Tensor] | None = None
    """Shift and divisor of a batch, if the values are not normalized beforehand."""

    def to(self, device: torch.device) -> "LoadedField":
        """Return a copy with the values on a device."""
        return replace(self, values=self.values.to(device))

    def ready(self, device: torch.device) -> "LoadedField":
        """Return a copy whose shift and divisor are on a device."""
        if self.normal is None:
            return self
        shift, divisor = self.normal
        return replace(self, normal=(shift.to(device), divisor.to(device)))

    def normalized(self, shift: Tensor, divisor: Tensor) -> "LoadedField":
        """Return a copy whose batches are normalized."""
        return replace(self, normal=(shift, divisor))

    @property
    def nbytes(self) -> int:
        """Bytes to move to a device."""
        return self.values.nbytes

    def batch(
        self, rows_B: Tensor | slice, device: torch.device, change: Change | None = None
    ) -> Tensor:
        """Return the rows as the network takes them, always in newly allocated memory.

        ``change`` is applied before they are normalized.
        """
        stored = gathered(self.values, rows_B, device)
        if self.is_integer:
            return stored
        x = stored.to(torch.float32)
        if self.divide_by is not None:
            x.div_(self.divide_by)
        elif self.scale is not None:
            x.mul_(self.scale)
        if change is not None:
            x = change(x)
        if self.normal is None:
            return x
        shift, divisor = self.normal
        return x.sub_(shift).div_(divisor)
