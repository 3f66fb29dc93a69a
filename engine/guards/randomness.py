"""The random generators that a pass draws from, as they were before it. Waits for no device."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Randomness:
    """The states of the generators of the CPU and of the device that computes."""

    device: torch.device
    host: Tensor
    own: Tensor | None

    @staticmethod
    def now(device: torch.device) -> "Randomness":
        """What they are now."""
        own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return Randomness(device, torch.get_rng_state(), own)

    def restore(self) -> None:
        """Draw on from here."""
        torch.set_rng_state(self.host)
        if self.own is not None:
            torch.cuda.set_rng_state(self.own, self.device)
