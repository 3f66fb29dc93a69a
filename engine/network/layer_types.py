"""Find the types of layers by name: torch.nn's classes, our own, installed ones and functions."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.loss import _Loss  # pyright: ignore[reportPrivateUsage]

from engine.core import arguments
from engine.core.arguments import Parameter
from engine.core.problems import one
from engine.network import own_layers
from engine.network.functions import FUNCTIONS, Function
from engine.network.lengths import TakesLengths
from engine.network.recurrent import REPLACED
from glasshouse import plugins
from glasshouse.suggestions import did_you_mean

_NOT_LAYERS = (nn.DataParallel, nn.SyncBatchNorm, nn.RNNBase, nn.modules.rnn.RNNCellBase)


@cache
def layer_classes() -> dict[str, type[nn.Module]]:
    """Return every class of a layer that a graph may use, by name: torch.nn's, and others."""
    return dict(sorted((_torch_layers() | other_layers()).items()))


@cache
def other_layers() -> dict[str, type[nn.Module]]:
    """Return the layers that torch does not have: our own, and those of installed packages.

    Raises:
        PluginError: an installed package registers a layer that cannot be used.
    """
    own: dict[str, type[nn.Module]] = {}
    for module in plugins.modules_of(own_layers):
        own |= getattr(module, "LAYERS", {})
    known = {*own, *FUNCTIONS, *_torch_layers()}
    return own | plugins.installed_classes("glasshouse.layers", nn.Module, known)


@cache
def layers_with_lengths() -> dict[str, type[Any]]:
    """Return the layers that can use lengths, as they are built."""
    others = {k: cls for k, cls in other_layers().items() if issubclass(cls, TakesLengths)}
    return REPLACED | others


@cache
def _torch_layers() -> dict[str, type[nn.Module]]:
    return {
        name: cls
        for name, cls in vars(nn).items()
        if isinstance(cls, type) and issubclass(cls, nn.Module) and _is_layer(name, cls)
    }


def _is_layer(name: str, cls: type[nn.Module]) -> bool:
    if issubclass(cls, (_Loss, LazyModuleMixin)) or cls is nn.Module:
        return False
    if cls.__module__ == nn.Sequential.__module__ or cls in _NOT_LAYERS:
        return False
    takes_code = {"encoder_layer", "decoder_layer"} & set(inspect.signature(cls).parameters)
    return not takes_code and not name.startswith("_")


def layer_parameters(layer_type: str, pointer: str = "") -> dict[str, Parameter]:
    """Return the arguments of a layer type.

    Raises:
        SpecProblems: there is no such layer type.
    """
    if layer_type in FUNCTIONS:
        return arguments.read_signature(FUNCTIONS[layer_type], keyword_only=True)
    cls = layer_classes().get(layer_type)
    if cls is None:
        raise one(f"{pointer}/type", _unknown(layer_type), "unknown_layer")
    return arguments.parameters(cls)


def _unknown(layer_type: str) -> str:
    if hasattr(nn, layer_type) and inspect.isclass(getattr(nn, layer_type)):
        reason = "it is a loss, a container, or takes other layers as arguments"
        return f"torch.nn.{layer_type} cannot be a layer of a graph: {reason}"
    meant = did_you_mean(layer_type, [*layer_classes(), *FUNCTIONS])
    hint = meant or "; GET /catalog/layers lists what there is"
    return f"torch.nn has no layer {layer_type!r}, nor is it a listed function{hint}"


def layer_like(function: str) -> str:
    """Return a hint at the torch.nn layer with a function's name; empty if there is none."""
    plain = function.replace("_", "")
    near = [name for name in layer_classes() if name.lower() == plain]
    return f"; did you mean the layer {near[0]}?" if near else ""


def build_layer(layer_type: str, args: Mapping[str, Any], *, trainable: bool = True) -> nn.Module:
    """Build one layer from arguments that have been checked and converted."""
    if layer_type in FUNCTIONS:
        return Function(layer_type, dict(args))
    module = (REPLACED.get(layer_type) or layer_classes()[layer_type])(**args)
    return module if trainable else module.requires_grad_(False)


def takes_lengths(layer_type: str) -> bool:
    """Whether layers of this type use row lengths to tell steps from padding."""
    return layer_type in layers_with_lengths()
