"""The converted values of trace nodes: tensors of the graph, constants, weights, sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Ref:
    """A tensor of the graph, by the name that layers use as input."""

    name: str


@dataclass(frozen=True)
class Fixed:
    """A tensor that does not depend on the data: a buffer, or one built from sizes and numbers."""

    value: Tensor
    path: str | None = None
    """The name of the buffer in the module, if it is one."""


@dataclass(frozen=True)
class Varying:
    """A value that differs between batches: the number of rows, the steps of a sequence."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Packed:
    """A packed sequence: the padded tensor and its lengths."""

    tensor: Ref
    lengths: Ref
    batch_first: bool


@dataclass(frozen=True)
class Weight:
    """A parameter of the module whose use is not known yet."""

    value: nn.Parameter
    path: str


def steady(shapes: Sequence[tuple[int, ...]]) -> list[int | None]:
    """The sizes of axes; None where they differ between batches."""
    return [sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*shapes, strict=True)]


def reads(args: Any, kwargs: Any) -> bool:
    """Whether an argument depends on the data or on parameters."""
    return any(isinstance(item, (Ref, Weight, Packed)) for item in parts_of((args, kwargs)))


def parts_of(item: Any) -> list[Any]:
    """All nested parts of an argument."""
    if isinstance(item, (tuple, list)):
        return [found for part in item for found in parts_of(part)]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(item, dict):
        return [found for part in item.values() for found in parts_of(part)]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(item, slice):
        return [item.start, item.stop, item.step]
    return [item]


def has_varying(item: Any) -> bool:
    """Whether any part of an argument differs between batches."""
    return any(isinstance(part, Varying) for part in parts_of(item))


def settled(values: tuple[Any, ...]) -> Any:
    """Wrap values that do not depend on the data: constant over all samples, or varying."""
    first = values[0]
    if isinstance(first, Tensor):
        same = all(item.shape == first.shape and torch.equal(item, first) for item in values)
        return Fixed(first) if same else Varying(values)
    if isinstance(first, (tuple, list)) and all(len(item) == len(first) for item in values):
        return tuple(settled(part) for part in zip(*values, strict=True))
    return first if all(item == first for item in values) else Varying(values)


def named(name: str, value: Any) -> Any:
    """The structure of a tuple, with `Ref`s to its leaves."""
    if isinstance(value, Tensor):
        return Ref(name)
    if isinstance(value, (tuple, list)):
        return tuple(named(f"{name}.{number}", item) for number, item in enumerate(value))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return None
