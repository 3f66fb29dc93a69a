"""Comparisons and masks as functions of a graph: what ``where`` and ``masked_fill`` decide by.

They give bool tensors, but for ``tril``, ``triu`` and ``positions``. Shape suffixes are left out:
these take any shape.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def eq(a: Tensor, b: Tensor | None = None, *, other: float | None = None) -> Tensor:
    """Whether two inputs, or one and the number ``other``, are equal."""
    return torch.eq(a, _second(b, other))


def ne(a: Tensor, b: Tensor | None = None, *, other: float | None = None) -> Tensor:
    """Whether they differ."""
    return torch.ne(a, _second(b, other))


def lt(a: Tensor, b: Tensor | None = None, *, other: float | None = None) -> Tensor:
    """Whether the first is less."""
    return torch.lt(a, _second(b, other))


def le(a: Tensor, b: Tensor | None = None, *, other: float | None = None) -> Tensor:
    """Whether the first is less or equal."""
    return torch.le(a, _second(b, other))


def gt(a: Tensor, b: Tensor | None = None, *, other: float | None = None) -> Tensor:
    """Whether the first is greater."""
    return torch.gt(a, _second(b, other))


def ge(a: Tensor, b: Tensor | None = None, *, other: float | None = None) -> Tensor:
    """Whether the first is greater or equal."""
    return torch.ge(a, _second(b, other))


def logical_and(a: Tensor, b: Tensor) -> Tensor:
    """Whether both are not zero."""
    return torch.logical_and(a, b)


def logical_or(a: Tensor, b: Tensor) -> Tensor:
    """Whether either is not zero."""
    return torch.logical_or(a, b)


def logical_not(x: Tensor) -> Tensor:
    """Whether it is zero."""
    return torch.logical_not(x)


def tril(x: Tensor, *, diagonal: int = 0) -> Tensor:
    """The last two axes with zeros above a diagonal."""
    return torch.tril(x, diagonal)


def triu(x: Tensor, *, diagonal: int = 0) -> Tensor:
    """The last two axes with zeros below a diagonal."""
    return torch.triu(x, diagonal)


def positions(x: Tensor, *, dim: int = 1) -> Tensor:
    """0, 1, 2 … for the places of an axis of the input: int64 of that length."""
    return torch.arange(x.shape[dim], device=x.device)


def causal_mask(x: Tensor, *, dim: int = 1) -> Tensor:
    """Which step may look at which, of the steps of an axis: [steps, steps], itself and before."""
    steps = positions(x, dim=dim)
    return steps[:, None] >= steps


def _second(b: Tensor | None, number: float | None) -> Any:
    if (b is None) == (number is None):
        raise ValueError("give either a second input or the number, not both or neither")
    return b if b is not None else number


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    eq, ne, lt, le, gt, ge, logical_and, logical_or, logical_not, tril, triu, positions,
    causal_mask,
)  # fmt: skip
