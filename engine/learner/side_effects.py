"""Keep gradients, buffers and random generators unchanged by a pass that is not training."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.device import is_accelerator, random_state, set_random_state
from engine.network.network import Network


@dataclass(frozen=True)
class Randomness:
    """The states of the random generators of the CPU and of the computing device."""

    device: torch.device
    host: Tensor
    own: Tensor | None

    @staticmethod
    def now(device: torch.device) -> "Randomness":
        """Return the current states."""
        own = random_state(device) if is_accelerator(device) else None
        return Randomness(device, torch.get_rng_state(), own)

    def restore(self) -> None:
        """Restore the states."""
        torch.set_rng_state(self.host)
        if self.own is not None:
            set_random_state(self.device, self.own)


@contextlib.contextmanager
def untouched(network: Network, device: torch.device) -> Generator[None]:
    """Restore the gradients, buffers and random generators when the block ends."""
    randomness = Randomness.now(device)
    gradients = [(item, item.grad) for item in network.parameters()]
    buffers = [(item, item.detach().clone()) for item in network.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with network.output_clips.uncounted():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        randomness.restore()
