"""Record the inputs and outputs of a layer's call for the planner."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.core.tensor_names import input_leaves, leaves
from engine.network.call_names import Calls


@dataclass(frozen=True)
class SeenTensor:
    """A tensor as it was when it was recorded."""

    tensor: Tensor
    owner: str
    path: str
    """The module inside the layer that it is an input or output of; empty: the layer itself."""
    is_first: bool
    made_by: Any
    """The autograd node that created it. An in-place operation gives the tensor another node."""
    base_made_by: Any
    """For a view: the autograd node that created the base tensor."""

    @property
    def size_bytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass
class LayerCall:
    """One call of a layer."""

    inputs: dict[str, SeenTensor] = field(default_factory=dict[str, SeenTensor])
    outputs: dict[str, SeenTensor] = field(default_factory=dict[str, SeenTensor])
    called: set[str] = field(default_factory=set[str])
    """Paths of the inner modules that ran."""

    def forget_inside(self) -> None:
        """Keep only what concerns the layer itself, because the call could not be followed."""
        self.called.clear()
        for side in (self.inputs, self.outputs):
            for name in [name for name, seen in side.items() if seen.path]:
                del side[name]


def seen_in(value: Iterable[tuple[str, Tensor]], owner: str, path: str) -> dict[str, SeenTensor]:
    """Record the named tensors of a call's inputs or outputs as they are now."""
    found: dict[str, SeenTensor] = {}
    for name, tensor in value:
        base = tensor._base if tensor._is_view() else None  # pyright: ignore[reportPrivateUsage]
        base_made_by = None if base is None else base.grad_fn
        found[name] = SeenTensor(tensor, owner, path, not found, tensor.grad_fn, base_made_by)
    return found


@contextmanager
def recording(layer: str, module: nn.Module) -> Generator[LayerCall]:
    """Record one call of a layer's module and of every module inside it."""
    record, calls = LayerCall(), Calls([layer])

    def begin(_module: nn.Module, _args: Any) -> None:
        calls.begin()

    def took(path: str, _module: nn.Module, args: Any, keywords: Any) -> None:
        owner = calls.name(path, "input")
        record.called.add(path)
        record.inputs |= seen_in(input_leaves(owner, args, keywords), owner, path)

    def gave(path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        owner = calls.name(path, "output")
        record.outputs |= seen_in(leaves(owner, output), owner, path)

    handles = [module.register_forward_pre_hook(begin)]
    for path, inner in module.named_modules():
        handles.append(inner.register_forward_pre_hook(partial(took, path), with_kwargs=True))
        handles.append(inner.register_forward_hook(partial(gave, path)))
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


class GradientReach:
    """Finds which tensors the loss sends a gradient to, in its graph, without running it."""

    def __init__(self, loss: Tensor) -> None:
        self._all_that_learn = loss.device.type != "meta"
        """The loss was tried on a tiny batch, so its graph is not the network's."""
        self._arrivals: dict[Any, int] = {}
        waiting = [loss.grad_fn]
        visited: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            for parent, _ in node.next_functions:
                self._arrivals[parent] = self._arrivals.get(parent, 0) + 1
                waiting.append(parent)
        self._visited = visited
        self._variables = {id(node.variable) for node in visited if hasattr(node, "variable")}

    def lacks(self, seen: SeenTensor) -> str:
        """Return why the gradient with respect to a tensor cannot be seen; empty if it can."""
        none = "no gradient reaches {}"
        if self._all_that_learn:
            return "" if seen.tensor.requires_grad else none
        if seen.base_made_by is None:
            return "" if seen.made_by in self._visited else none
        overwritten = seen.tensor.grad_fn is not seen.made_by
        if seen.made_by in self._visited:
            return "" if not overwritten else _OVERWRITTEN
        if seen.base_made_by not in self._visited or not overwritten:
            return none
        return "" if self._arrivals.get(seen.base_made_by, 0) == 1 else _OVERWRITTEN

    def reaches(self, parameter: Tensor) -> bool:
        """Whether a parameter gets a gradient."""
        if self._all_that_learn:
            return parameter.requires_grad
        return id(parameter) in self._variables


_OVERWRITTEN = (
    "{} is a view that is overwritten in place after something else has read it, so that its own "
    "gradient is never computed (set inplace to false after it)"
)


def meta_sum(tensors: list[Tensor]) -> Tensor:
    """Return a scalar on the meta device that depends on each of the tensors."""
    total = torch.zeros((), device="meta")
    for item in tensors:
        if item.requires_grad:
            total = total + item.sum().to(torch.float32)
    return total
