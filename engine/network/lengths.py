"""How long each row of a padded batch is, for the layers that can be told.

Shape suffixes: B = rows of a batch, T = steps of the longest row.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Lengths(NamedTuple):
    """How many steps of each row count."""

    of_rows: Tensor
    """int64 of shape [B], where the layer computes."""
    known: Tensor | None = None
    """The same in host memory, where the others are not."""

    @property
    def on_host(self) -> Tensor:
        """The lengths in host memory; waits for the device only where nobody has them there."""
        return self.of_rows.cpu() if self.known is None else self.known

    def are_all(self, num_steps: int) -> bool:
        """Whether every row has so many: of as many as the batch is wide, nothing is padding."""
        return bool((self.on_host == num_steps).all())


class TakesLengths:
    """A layer that can be told the lengths before it is called; None: all steps count."""

    lengths: Lengths | None = None
    counted_input = 0
    """Which of its inputs has the steps that the lengths count."""


def is_padding(lengths_B: Tensor, num_steps: int) -> Tensor:
    """Which steps stand behind the end of their row: bool of shape [B, T]."""
    steps_T = torch.arange(num_steps, device=lengths_B.device)
    return steps_T >= lengths_B[:, None]
