"""Name the tensors of a network and of a batch: ``lstm.1.0``, ``words.lengths``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


def leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield an output's tensors with names: ``lstm.0``, ``lstm.1.0`` …; a single one: ``lstm``."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from leaves(f"{name}.{key}", item)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):  # pyright: ignore[reportUnknownArgumentType]
            yield from leaves(f"{name}.{index}", item)


def input_leaves(
    name: str, args: Sequence[Any], keywords: Mapping[str, Any]
) -> list[tuple[str, Tensor]]:
    """Return a call's input tensors: one alone has the layer's name, several are ``name.0`` …."""
    given = {**dict(enumerate(args)), **keywords}
    found = list(leaves(name, given))
    return [(name, found[0][1])] if len(found) == 1 else found


def root(name: str) -> str:
    """Return the layer or field that a reference such as ``lstm.1.0`` belongs to."""
    return name.partition(".")[0]


def lengths_of(field: str) -> str:
    """Return the name of the row lengths of a sequence field."""
    return f"{field}.lengths"


def values_of(field: str) -> str:
    """Return the name of the values that belong to the indices of a sparse field."""
    return f"{field}.values"


def host_lengths_of(lengths: str) -> str:
    """Return the name of a batch's host copy of lengths whose tensor is on another device."""
    return f"{lengths}:host"
