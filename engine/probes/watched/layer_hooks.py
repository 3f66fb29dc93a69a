"""Hooks on the outputs of layers, and on the gradients with respect to a tensor."""

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from engine.network.network import Network


def watch_outputs(
    network: Network, see: Callable[[str, Any], None], names: AbstractSet[str] | None = None
) -> list[Any]:
    """Call ``see`` with the name and the output of each layer in ``names``; return the handles.

    A module that several layers share is called once for each, in the order of the layers. If one
    of them is in ``names``, the others are seen too. Several forward passes may follow each other.
    """
    by_module: dict[nn.Module, list[str]] = {}
    for name, module in network.layers.items():
        by_module.setdefault(module, []).append(name)
    return [
        module.register_forward_hook(_named(see, cycle(layers)))
        for module, layers in by_module.items()
        if names is None or not names.isdisjoint(layers)
    ]


def _named(see: Callable[[str, Any], None], layers: Iterator[str]) -> Callable[..., None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        see(next(layers), output)

    return hook


def watch_gradient(tensor: Tensor, see: Callable[[Tensor], None]) -> list[Any]:
    """Call ``see`` with the gradient with respect to a tensor's present value; return the handles.

    A tensor hook stays with the operation that made the value, so a later in-place operation does
    not matter. The exception is a view (``Flatten``, a ``Linear`` over sequences) that is
    overwritten in place: autograd then skips that operation. The gradient with respect to the
    view's base still arrives, and the view's part of it is the tensor's gradient.
    """
    seen: list[bool] = []

    def own(gradient: Tensor) -> None:
        seen.append(True)
        see(gradient)

    base = tensor._base if tensor._is_view() else None  # pyright: ignore[reportPrivateUsage]
    if base is None or not base.requires_grad:  # a DTensor's local part is a view without a base
        return [tensor.register_hook(own)]
    # the hooks hold neither of the two
    of_base, of_view = (base.size(), base.stride()), (tensor.size(), tensor.stride())
    offset = tensor.storage_offset() - base.storage_offset()

    def from_base(gradient: Tensor) -> None:
        if not seen:
            laid = torch.empty_strided(*of_base, dtype=gradient.dtype, device=gradient.device)
            see(laid.copy_(gradient).as_strided(*of_view, offset))

    return [tensor.register_hook(own), base.register_hook(from_base)]
