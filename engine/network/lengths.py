"""Row lengths of a padded batch, for the layers that use them.

Shape suffixes: B = rows of a batch, T = steps of the longest row.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lengths:
    """The number of steps of each row, without padding.

    Not a tuple, so that it is not one of a layer's input tensors for hooks.
    """

    of_rows: Tensor
    """int64 of shape [B], on the layer's device."""
    known: Tensor | None = None
    """The same in host memory, if `of_rows` is on another device."""

    @property
    def on_host(self) -> Tensor:
        """The lengths in host memory. Waits for the device only if there is no host copy."""
        return self.of_rows.cpu() if self.known is None else self.known

    def are_all(self, num_steps: int) -> bool:
        """Whether all rows have ``num_steps`` steps; if that is the width, there is no padding."""
        shortest, longest = self._extremes
        return shortest == longest == num_steps

    @property
    def has_empty(self) -> bool:
        """Whether a row has no steps."""
        return self._extremes[0] == 0

    @cached_property
    def _extremes(self) -> tuple[int, int]:
        """The fewest and the most steps."""
        shortest, longest = torch.aminmax(self.on_host)
        return int(shortest), int(longest)


class TakesLengths:
    """A layer whose call takes ``lengths``, by keyword; None: all steps count."""

    counted_input = 0
    """The index of the input whose steps the lengths count."""


def is_padding(lengths_B: Tensor, num_steps: int) -> Tensor:
    """Return which steps are past the end of their row: bool of shape [B, T]."""
    steps_T = torch.arange(num_steps, device=lengths_B.device)
    return steps_T >= lengths_B[:, None]
