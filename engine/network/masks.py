"""Comparisons and masks as functions of a graph, for ``where`` and ``masked_fill``.

They return bool tensors, except ``tril``, ``triu`` and ``positions``. There are no shape suffixes,
because these take any shape.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def eq(a: Tensor, b: Tensor | None = None, *, other: float | None = None) -> Tensor:
    """Whether two inputs, or one input and the number ``other``, are equal."""
    return torch.eq(a, _second(b, other))


def ne(a: Tensor, b: Tensor | None = None, *, other: float | None = None) -> Tensor:
    """Whether two inputs, or one input and the number ``other``, differ."""
    return torch.ne(a, _second(b, other))


def lt(a: Tensor, b: Tensor | None = None, *, other: float | None = None) -> Tensor:
    """Whether the first input is less than the second, or than the number ``other``."""
    return torch.lt(a, _second(b, other))


def le(a: Tensor, b: Tensor | None = None, *, other: float | None = None) -> Tensor:
    """Whether the first input is less than or equal to the second, or to the number ``other``."""
    return torch.le(a, _second(b, other))


def gt(a: Tensor, b: Tensor | None = None, *, other: float | None = None) -> Tensor:
    """Whether the first input is greater than the second, or than the number ``other``."""
    return torch.gt(a, _second(b, other))


def ge(a: Tensor, b: Tensor | None = None, *, other: float | None = None) -> Tensor:
    """Whether the first input is greater than or equal to the second, or the number ``other``."""
    return torch.ge(a, _second(b, other))


def logical_and(a: Tensor, b: Tensor) -> Tensor:
    """Whether both inputs are nonzero."""
    return torch.logical_and(a, b)


def logical_or(a: Tensor, b: Tensor) -> Tensor:
    """Whether either input is nonzero."""
    return torch.logical_or(a, b)


def logical_not(x: Tensor) -> Tensor:
    """Whether the input is zero."""
    return torch.logical_not(x)


def tril(x: Tensor, *, diagonal: int = 0) -> Tensor:
    """Last two axes with zeros above a diagonal."""
    return torch.tril(x, diagonal)


def triu(x: Tensor, *, diagonal: int = 0) -> Tensor:
    """Last two axes with zeros below a diagonal."""
    return torch.triu(x, diagonal)


def positions(x: Tensor, *, dim: int = 1) -> Tensor:
    """Indices 0, 1, 2 … along an axis of the input, as int64."""
    return torch.arange(x.shape[dim], device=x.device)


def causal_mask(x: Tensor, *, dim: int = 1) -> Tensor:
    """Which step may attend to which along an axis: [steps, steps], itself and earlier ones."""
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
