"""The names of weights in a graph, and in the module that it was made from. Imports no torch."""

from collections.abc import Iterable, Mapping
from typing import Any

_LENGTHS = ("lengths", "length", "seq_lengths", "seq_lens")


def is_lengths(argument: str) -> bool:
    """Whether an argument is named like the lengths of the rows of a sequence."""
    return argument in _LENGTHS or argument.endswith("_lengths")


def names_in_module(graph: Mapping[str, Any], weights: Iterable[str]) -> dict[str, list[str]]:
    """For each weight of a graph the names that it has in the module; several where it is tied.

    A layer says in ``path`` where it stood in the module. A weight of a layer without one has none.
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
"""By a module's parameters a learning rate's factor and a weight decay; None: the optimizer's."""


def with_rates(graph: Mapping[str, Any], weights: Iterable[str], rates: Rates) -> dict[str, Any]:
    """The graph, its layers with ``lr_scale`` and ``weight_decay`` where parameters have own ones.

    Args:
        graph: made from a module.
        weights: the names of its weights.
        rates: by the names that the parameters have in the module.
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
