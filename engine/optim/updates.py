"""What an optimizer's step does to each parameter, and what the optimizer keeps of it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def copies(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters as they are before the step."""
    return {name: item.detach().clone() for name, item in parameters.items()}


@torch.no_grad()
def changes(before: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """After minus before, written over the copies."""
    return {
        name: torch.sub(parameters[name].detach(), old, out=old) for name, old in before.items()
    }


def states(optimizer: torch.optim.Optimizer, name: str, parameter: Tensor) -> dict[str, Tensor]:
    """What the optimizer keeps of a parameter: ``conv1.weight.exp_avg`` …; numbers as scalars."""
    kept = optimizer.state.get(parameter, {})
    return {
        f"{name}.{key}": made for key, item in kept.items() if (made := as_tensor(item)) is not None
    }


def as_tensor(item: Any) -> Tensor | None:
    """A tensor of an optimizer's state, or a number of it as a scalar; None for what is neither."""
    if isinstance(item, Tensor):
        return item
    if isinstance(item, (bool, int, float)):
        return torch.tensor(item, dtype=None if isinstance(item, (bool, int)) else torch.float64)
    return None
