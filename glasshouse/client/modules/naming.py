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
