"""Explains which size of a layer's input does not match the layer."""

from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from glasshouse.client.modules.conversion import Converter
from glasshouse.client.modules.values import parts_of


class _Wanted(NamedTuple):
    argument: str
    """The argument of the layer that sets the size."""
    axis: int
    """The axis of the input."""
    size: int
    word: str


def misfit(module: nn.Module, node: fx.Node, converter: Converter) -> str | None:
    """Describe the size of a layer's input that does not match the layer; None if all match.

    Args:
        module: the whole network.
        node: the layer call that failed in torch.
        converter: has the values of all preceding nodes.
    """
    given = converter.concrete(converter.resolved([*node.args, *node.kwargs.values()]), 0)
    tensors = [item for item in parts_of(given) if isinstance(item, Tensor)]
    if not tensors:
        return None
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        wanted, name = _wanted(layer), f"{node.target!r} ({type(layer).__name__})"
    elif getattr(node.target, "__name__", "") == "linear" and len(tensors) > 1:
        wanted = _Wanted("in_features", -1, tensors[1].shape[-1], "features")
        name = type(module).__name__ if isinstance(module, nn.Linear) else "linear()"
    else:
        return None
    shape = tensors[0].shape
    if wanted is None or not -len(shape) <= wanted.axis < len(shape):
        return None
    got = shape[wanted.axis]
    if got == wanted.size:
        return None
    word = wanted.word if got != 1 else wanted.word.removesuffix("s")
    return (
        f"{name}: its input has {got} {word} and it wants {wanted.size}; the input's shape "
        f"is [{', '.join(map(str, ('batch', *shape[1:])))}], so give {wanted.argument}={got}"
    )


def _wanted(layer: nn.Module) -> _Wanted | None:
    for argument, axis, word in (
        ("in_features", -1, "features"),
        ("input_size", -1, "features"),
        ("embed_dim", -1, "features"),
        ("num_features", 1, "features"),
        ("num_channels", 1, "channels"),
    ):
        size: Any = getattr(layer, argument, None)
        if isinstance(size, int):
            return _Wanted(argument, axis, size, word)
    if isinstance(channels := getattr(layer, "in_channels", None), int):
        return _Wanted("in_channels", -1 - len(_tuple(layer, "kernel_size")), channels, "channels")
    shape = _tuple(layer, "normalized_shape")
    return _Wanted("normalized_shape", -1, shape[0], "features") if len(shape) == 1 else None


def _tuple(layer: nn.Module, name: str) -> tuple[int, ...]:
    value: Any = getattr(layer, name, ())
    return tuple(value)
