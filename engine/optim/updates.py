"""Compute what an optimizer's step changes in each parameter, and read the optimizer state."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def copies(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the parameters before the step."""
    return {name: item.detach().clone() for name, item in parameters.items()}


@torch.no_grad()
def changes(before: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters minus their copies, written into the copies."""
    return {
        name: torch.sub(parameters[name].detach(), old, out=old) for name, old in before.items()
    }


def states(optimizer: torch.optim.Optimizer, name: str, parameter: Tensor) -> dict[str, Tensor]:
    """Return a parameter's optimizer state: ``conv1.weight.exp_avg`` …; numbers as scalars."""
    kept = optimizer.state.get(parameter, {})
    return {
        f"{name}.{key}": made for key, item in kept.items() if (made := as_tensor(item)) is not None
    }


def as_tensor(item: Any) -> Tensor | None:
    """Return a tensor of an optimizer's state, or a number as a scalar tensor; else None."""
    if isinstance(item, Tensor):
        return item
    if isinstance(item, (bool, int, float)):
        return torch.tensor(item, dtype=None if isinstance(item, (bool, int)) else torch.float64)
    return None
