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
    """The states of the random generators of the CPU and of the computing devices."""

    devices: tuple[torch.device, ...]
    host: Tensor
    own: tuple[Tensor, ...]
    """Of each accelerator."""

    @staticmethod
    def now(*devices: torch.device) -> "Randomness":
        """Return the current states."""
        own = tuple(random_state(one) for one in devices if is_accelerator(one))
        return Randomness(devices, torch.get_rng_state(), own)

    def restore(self) -> None:
        """Restore the states."""
        torch.set_rng_state(self.host)
        for device, state in zip(filter(is_accelerator, self.devices), self.own, strict=True):
            set_random_state(device, state)


@contextlib.contextmanager
def untouched(network: Network, *devices: torch.device) -> Generator[None]:
    """Restore the gradients, buffers and random generators when the block ends.

    ``devices``: those that compute.
    """
    randomness = Randomness.now(*devices)
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
