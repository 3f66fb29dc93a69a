"""A field's values in memory, one row of the same size after the other.

Shape suffixes: B = rows of a batch, N = rows of the split.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.data.augmentation.augmenting import Change
from engine.data.columns.staging import gathered


@dataclass(frozen=True)
class LoadedField:
    """A field's values in memory, as they are stored, and how a batch of them is made."""

    values: Tensor
    divide_by: float | None = None
    scale: float | None = None
    is_integer: bool = False
    normal: tuple[Tensor, Tensor] | None = None
    """What a batch is shifted and divided by, where that was not done beforehand."""

    def to(self, device: torch.device) -> "LoadedField":
        """The same with its values on a device."""
        return replace(self, values=self.values.to(device))

    def ready(self, device: torch.device) -> "LoadedField":
        """The same with all that a batch needs beside its values on a device."""
        if self.normal is None:
            return self
        shift, divisor = self.normal
        return replace(self, normal=(shift.to(device), divisor.to(device)))

    def normalized(self, shift: Tensor, divisor: Tensor) -> "LoadedField":
        """The same with batches that are normalised."""
        return replace(self, normal=(shift, divisor))

    @property
    def nbytes(self) -> int:
        """What moves to a device."""
        return self.values.nbytes

    def batch(
        self, rows_B: Tensor | slice, device: torch.device, change: Change | None = None
    ) -> Tensor:
        """The rows as the network takes them; always memory of its own.

        ``change`` is done to them before they are normalised.
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
