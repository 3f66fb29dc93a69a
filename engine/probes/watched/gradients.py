"""The gradient of a tensor with the value it had when it was watched, whatever overwrites it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

See = Callable[[Tensor], None]


def watch_gradient(tensor: Tensor, see: See) -> list[Any]:
    """Call ``see`` with the gradient with respect to a tensor's present value; return the handles.

    A tensor hook stays with the operation that made the value, so a later in-place operation does
    not matter. The exception is a view (``Flatten``, a ``Linear`` over sequences) that is
    overwritten in place: autograd then skips that operation. The gradient with respect to the
    view's base still arrives, and the view's part of it is the tensor's gradient.
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
        """Return the view's part of a tensor shaped like its base."""
        laid_out = torch.empty_strided(*self._base, dtype=gradient.dtype, device=gradient.device)
        laid_out.copy_(gradient)
        return laid_out.as_strided(*self._view, self._offset)
