"""The names of weights in a graph and in the traced module. Does not import torch."""

from collections.abc import Iterable, Mapping
from typing import Any

_LENGTHS = ("lengths", "length", "seq_lengths", "seq_lens")


def is_lengths(argument: str) -> bool:
    """Whether an argument has a name for sequence lengths."""
    return argument in _LENGTHS or argument.endswith("_lengths")


def names_in_module(graph: Mapping[str, Any], weights: Iterable[str]) -> dict[str, list[str]]:
    """By weight of a graph: its names in the module; several if the weight is tied.

    The ``path`` of a layer is its name in the module. Weights of layers without a path have none.
    """
    owners: dict[str, list[Mapping[str, Any]]] = {}
    for layer in graph["layers"]:
        if layer.get("path") is not None:
            owners.setdefault(layer.get("shared_with") or layer["name"], []).append(layer)
    found: dict[str, list[str]] = {}
    for weight in weights:
        owner, _, name = weight.partition(".")
        found[weight] = [
            layer["path"] if layer.get("type") == "Parameter" else f"{layer['path']}.{name}"
            for layer in owners.get(owner, [])
        ]
    return found


Rates = Mapping[str, tuple[float | None, float | None]]
"""By module parameter: a learning rate factor and a weight decay; None: those of the optimizer."""


def with_rates(graph: Mapping[str, Any], weights: Iterable[str], rates: Rates) -> dict[str, Any]:
    """Set ``lr_scale`` and ``weight_decay`` of the layers of a graph.

    Args:
        graph: the graph of a module.
        weights: the names of its weights.
        rates: the rates, by parameter name in the module.
    """
    options: dict[str, dict[str, dict[str, float]]] = {}
    for weight, names in names_in_module(graph, weights).items():
        layer, _, parameter = weight.partition(".")
        own = next((rates[name] for name in names if name in rates), (None, None))
        for option, value in zip(("lr_scale", "weight_decay"), own, strict=True):
            if value is not None:
                options.setdefault(layer, {}).setdefault(option, {})[parameter] = value
    layers = [{**layer, **options.get(layer["name"], {})} for layer in graph["layers"]]
    return {**graph, "layers": layers}
