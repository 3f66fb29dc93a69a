"""The gradient of a tensor as it was when it was looked at, whatever overwrites it later."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

See = Callable[[Tensor], None]


def watch_gradient(tensor: Tensor, see: See) -> list[Any]:
    """Have the gradient by a tensor's present value seen in the backward pass; returns the handles.

    A hook on a tensor stays with the operation that made its value, so that an in-place operation
    after it changes nothing. Only where the tensor is a view (``Flatten``, a ``Linear`` over
    sequences) and is overwritten through it, autograd leaves that operation out: then the gradient
    by the memory it views comes by, and its part of it is the tensor's.
    """
    if not tensor._is_view() or tensor._base is None:  # pyright: ignore[reportPrivateUsage]
        return [tensor.register_hook(_silently(see))]
    base = tensor._base  # pyright: ignore[reportPrivateUsage]
    part = _Part(tensor, base)
    seen: list[bool] = []

    def own(gradient: Tensor) -> None:
        seen.append(True)
        see(gradient)

    def of_base(gradient: Tensor) -> None:
        if not seen:
            see(part.of(gradient))

    return [tensor.register_hook(own), base.register_hook(of_base)]


def _silently(see: See) -> See:
    def hook(gradient: Tensor) -> None:
        see(gradient)

    return hook


class _Part:
    """Where in the memory of its base a view lies; holds neither of them."""

    def __init__(self, view: Tensor, base: Tensor) -> None:
        self._base = (base.size(), base.stride())
        self._offset = view.storage_offset() - base.storage_offset()
        self._view = (view.size(), view.stride())

    def of(self, gradient: Tensor) -> Tensor:
        """The view's part of a tensor like its base."""
        laid_out = torch.empty_strided(*self._base, dtype=gradient.dtype, device=gradient.device)
        laid_out.copy_(gradient)
        return laid_out.as_strided(*self._view, self._offset)
