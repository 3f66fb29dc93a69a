"""Compute what an optimizer's step changes in each parameter, and read the optimizer state."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.core.shards import from_part, own_part


@torch.no_grad()
def copies(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the parameters before the step, or this process's parts of them."""
    return {name: own_part(item.detach()).clone() for name, item in parameters.items()}


@torch.no_grad()
def changes(before: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters minus their copies, written into the copies."""
    found: dict[str, Tensor] = {}
    for name, old in before.items():
        newest = parameters[name].detach()
        found[name] = from_part(torch.sub(own_part(newest), old, out=old), newest)
    return found


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
