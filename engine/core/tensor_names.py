"""What the tensors of a network and of a batch are called: ``lstm.1.0``, ``words.lengths``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


def leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer's output by name: ``lstm.0``, ``lstm.1.0`` …; one tensor: itself."""
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
    """The tensors that go into a call: one alone has the layer's name, else ``name.0`` …."""
    given = {**dict(enumerate(args)), **keywords}
    found = list(leaves(name, given))
    return [(name, found[0][1])] if len(found) == 1 else found


def root(name: str) -> str:
    """The layer or field that a reference such as ``lstm.1.0`` belongs to."""
    return name.partition(".")[0]


def lengths_of(field: str) -> str:
    """The name of the lengths of a sequence field's rows."""
    return f"{field}.lengths"


def values_of(field: str) -> str:
    """The name of the values beside the places of a sparse field."""
    return f"{field}.values"


def host_lengths_of(lengths: str) -> str:
    """The name under which a batch has lengths in host memory too, if they are elsewhere."""
    return f"{lengths}:host"
