"""Rows that a request gives as nested lists."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.data.fields import BadField
from engine.data.ragged import LoadedSequence, from_lists, split_pairs
from engine.data.rows import Loaded, LoadedField, Rows, place
from engine.shapes import FieldShape
from glasshouse import jsonio
from glasshouse.errors import DataFailed

_EXACT_PLACES = 1 << 24
"""Whole numbers that float32 tells apart."""


def inline_rows(
    inputs: dict[str, Any],
    shapes: dict[str, FieldShape],
    device: torch.device,
    most: int | None = None,
) -> Rows:
    """Rows given as nested lists, already in the values that the network takes.

    ``most``: the steps of a sequence that are read, if not all of them are.

    Raises:
        BadField: not a regular nested list of numbers, of the wrong shape, or out of range;
            ``key`` is the field's name.
    """
    loaded: dict[str, Loaded] = {}
    heights: dict[str, int] = {}
    for name, shape in shapes.items():
        if shape.is_sequence:
            sequence = _inline_sequence(name, inputs[name], shape)
            loaded[name] = sequence if most is None or shape.is_sparse else sequence.cut(most)
            heights[name] = len(sequence.lengths)
            continue
        values = _inline_tensor(name, inputs[name], shape)
        heights[name] = values.shape[0]
        loaded[name] = LoadedField(values, is_integer=shape.dim is not None)
    if len(set(heights.values())) > 1:
        listed = ", ".join(f"{name!r} has {count}" for name, count in heights.items())
        raise BadField(f"all inputs need the same number of rows: {listed}")
    return place(loaded, next(iter(heights.values())), device)


def _inline_tensor(name: str, given: Any, shape: FieldShape) -> Tensor:
    wanted: Sequence[int] = shape.shape
    try:
        array = np.array(jsonio_numbers(given), dtype=np.float64)
    except (ValueError, TypeError):
        detail = f"input {name!r} is not a regular nested list of numbers"
        raise BadField(f"{detail} of shape [rows, {', '.join(map(str, wanted))}]", name) from None
    if array.ndim == 0 or array.shape[1:] != tuple(wanted) or array.shape[0] == 0:
        got = list(array.shape)
        detail = f"input {name!r} has shape {got}; the network takes {['rows', *wanted]}"
        raise BadField(detail, name)
    if shape.dim is None:
        return torch.from_numpy(array.astype(np.float32))
    if ((array != np.floor(array)) | (array < 0) | (array >= shape.dim)).any():
        raise BadField(f"input {name!r} takes integers in [0, {shape.dim})", name)
    return torch.from_numpy(array.astype(np.int64))


def _inline_sequence(name: str, given: Any, shape: FieldShape) -> LoadedSequence:
    """A list per row, each with its own length."""
    if shape.has_values:
        return _inline_sparse(name, given, shape)
    width = list(shape.shape[1:])
    if not isinstance(given, list) or not given or not all(isinstance(row, list) for row in given):
        detail = f"input {name!r} is not a list of rows that are lists"
        raise BadField(f"{detail}, of shape [rows, steps{''.join(f', {n}' for n in width)}]", name)
    rows: list[np.ndarray[Any, Any]] = []
    for number, row in enumerate(given):
        if not row:
            rows.append(np.empty((0, *width), np.int64 if shape.dim else np.float32))
            continue
        try:
            steps = _inline_tensor(name, row, replace(shape, shape=tuple(width)))
        except BadField as cause:
            raise BadField(f"row {number}: {cause}", name) from None
        rows.append(steps.numpy())
    return from_lists(rows, is_integer=shape.dim is not None, padding_value=shape.padding_value)


def _inline_sparse(name: str, given: Any, shape: FieldShape) -> LoadedSequence:
    """A list of pairs [place, value] per row."""
    if (shape.dim or 0) > _EXACT_PLACES:
        detail = f"input {name!r} has more than {_EXACT_PLACES:,} places; read it from a dataset"
        raise BadField(detail, name)
    both = replace(shape, shape=(0, 2), dtype=torch.float32, dim=None, has_values=False)
    pairs = _inline_sequence(name, given, both)
    try:
        return split_pairs(pairs, name, int(shape.dim or 0))
    except DataFailed as cause:
        raise BadField(cause.detail, name) from None


def jsonio_numbers(value: Any) -> Any:
    """A nested list with the names of non-finite numbers replaced by the numbers."""
    if isinstance(value, list):
        return [jsonio_numbers(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, bool) or value is None:
        raise TypeError("not a number")
    return jsonio.number(value)
