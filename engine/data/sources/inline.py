"""Read rows that a request contains as nested lists, or as texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.batches.rows import Loaded, MemoryRows, place
from engine.data.columns.fields import BadField
from engine.data.columns.loaded import LoadedField, LoadedSequence
from engine.data.columns.normalization import of_field
from engine.data.columns.prepared import WINDOWS, Preparing
from engine.data.columns.ragged import in_memory
from engine.data.columns.vocabulary import Tokens, split
from engine.network.shapes import FieldShape
from glasshouse import jsonio
from glasshouse.spec import (
    DenseField,
    DenseSequenceField,
    Field,
    IntegerField,
    IntegerSequenceField,
)
from glasshouse.spec.preprocessing import Unit

_EXACT_PLACES = 1 << 24
"""The number of integers that float32 represents exactly."""
_LISTED = 20


@dataclass(frozen=True)
class ValueMeaning:
    """How to read the values of a request: like those of a column, before they are normalized.

    Without statistics and vocabularies (a plan does not have them) texts are only counted.
    """

    fields: Mapping[str, Field] = field(default_factory=dict[str, Field])
    preparing: Preparing = Preparing()  # noqa: RUF009 (frozen)

    def unit(self, name: str) -> Unit | None:
        """Return the unit that the texts of a field are split into; None: it takes no texts."""
        mine, windows = self.fields.get(name), self.preparing.windows
        if isinstance(mine, IntegerSequenceField) and mine.tokens is not None:
            return mine.tokens
        return None if windows is None else windows.tokens

    def ids(self, name: str, tokens: Sequence[str]) -> list[int]:
        """Return the ids of a field's tokens."""
        known = self.preparing.known
        found = {} if known is None else known.tokens
        return found.get(name, found.get(WINDOWS, Tokens(()))).ids(tokens)

    def number(self, name: str, given: Any) -> Any:
        """Convert the values of an integer field from classes, or from one token each."""
        mine = self.fields.get(name)
        if not isinstance(mine, IntegerField) or not isinstance(given, list):
            return given  # pyright: ignore[reportUnknownVariableType]
        if mine.classes is not None:
            return _places(name, given, mine.classes)  # pyright: ignore[reportUnknownArgumentType]
        if self.unit(name) is not None and all(isinstance(item, str) for item in given):  # pyright: ignore[reportUnknownVariableType]
            return self.ids(name, given)  # pyright: ignore[reportUnknownArgumentType]
        return given  # pyright: ignore[reportUnknownVariableType]

    def steps(self, name: str, row: Any) -> Any:
        """Convert a row of a sequence field: a text becomes ids."""
        unit = self.unit(name)
        if not isinstance(row, str) or unit is None:
            return row
        return self.ids(name, split(row, unit))

    def floats(self, name: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Fill and normalize values of a dense field or steps of a sequence."""
        mine, known = self.fields.get(name), self.preparing.known
        if not isinstance(mine, DenseField | DenseSequenceField):
            return x
        figures = of_field(None if known is None else known.figures.get(name), mine.fill)
        return x if figures is None else figures.normalized(figures.filled(x))

    def changes(self, name: str) -> bool:
        """Whether `floats` changes values of a field."""
        mine, known = self.fields.get(name), self.preparing.known
        if not isinstance(mine, DenseField | DenseSequenceField):
            return False
        figures = of_field(None if known is None else known.figures.get(name), mine.fill)
        return figures is not None and not figures.is_empty


def _places(name: str, given: list[Any], classes: Sequence[Any]) -> list[int]:
    places = {value: place for place, value in enumerate(classes)}
    for row, value in enumerate(given):
        if isinstance(value, bool) or not isinstance(value, str | int) or value not in places:
            listed = ", ".join(jsonio.dumps(item) for item in classes[:_LISTED])
            detail = f"input {name!r}: row {row} has {jsonio.dumps(value)[:100]}, and the classes"
            raise BadField(f"{detail} are {listed}", name)
    return [places[value] for value in given]


def inline_rows(
    inputs: dict[str, Any],
    shapes: dict[str, FieldShape],
    device: torch.device,
    most: int | None = None,
    meaning: ValueMeaning = ValueMeaning(),
) -> MemoryRows:
    """Read rows given as nested lists; ``scale`` does not apply to them.

    ``most``: truncate sequences to this many steps.

    Raises:
        BadField: not a regular nested list of numbers, of the wrong shape, or out of range;
            ``key`` is the field's name.
    """
    loaded = {
        name: inline_field(name, inputs[name], shape, meaning, most)
        for name, shape in shapes.items()
    }
    heights = {name: num_rows_of(item) for name, item in loaded.items()}
    if len(set(heights.values())) > 1:
        listed = ", ".join(f"{name!r} has {count}" for name, count in heights.items())
        raise BadField(f"all inputs need the same number of rows: {listed}")
    return place(loaded, next(iter(heights.values())), device)


def num_rows_of(loaded: Loaded) -> int:
    """Return the number of rows of a field."""
    return len(loaded.lengths if isinstance(loaded, LoadedSequence) else loaded.values)


def inline_field(
    name: str,
    given: Any,
    shape: FieldShape,
    meaning: ValueMeaning = ValueMeaning(),
    most: int | None = None,
    *,
    only_numbers: bool = False,
) -> Loaded:
    """Read the rows of one field given as nested lists; the rest as in `inline_rows`.

    ``only_numbers``: it is known that the lists hold numbers and nothing else.

    Raises:
        BadField: as in `inline_rows`.
    """
    if shape.is_sequence:
        sequence = _plain_integers(given, shape) if only_numbers else None
        if sequence is None:
            sequence = _inline_sequence(name, given, shape, meaning)
        return _limited(sequence, shape, most)
    given = meaning.number(name, given)
    values = _inline_tensor(name, given, shape, meaning, only_numbers=only_numbers)
    return LoadedField(values, is_integer=shape.dim is not None)


def array_field(
    name: str,
    array: NDArray[Any],
    shape: FieldShape,
    meaning: ValueMeaning = ValueMeaning(),
    most: int | None = None,
    lengths: NDArray[np.int64] | None = None,
) -> Loaded:
    """Read the rows of one field given as an array of numbers, which mean the same as in lists.

    Args:
        name: the field.
        array: [rows, …]; of a sequence [rows, steps, …].
        shape: that of the field.
        meaning: how values are read.
        most: truncate sequences to this many steps.
        lengths: the steps of each row of a sequence, in [0, steps]; None: all.

    Raises:
        BadField: as in `inline_rows`.
    """
    mine = meaning.fields.get(name)
    if isinstance(mine, IntegerField) and mine.classes is not None:
        return inline_field(name, array.tolist(), shape, meaning)
    if not shape.is_sequence:
        values = _checked(name, array, shape, meaning)
        return LoadedField(values, is_integer=shape.dim is not None)
    item = ("steps", 2) if shape.has_values else ("steps", *shape.shape[1:])
    if array.ndim != len(item) + 1 or array.shape[2:] != item[1:] or not len(array):
        detail = f"input {name!r} has shape {list(array.shape)}; the network takes"
        raise BadField(f"{detail} {['rows', *item]}", name)
    if lengths is None:
        lengths = np.full(len(array), array.shape[1], np.int64)
    steps = array[np.arange(array.shape[1]) < lengths[:, None]]
    if shape.has_values:
        pairs = _steps(name, steps, _pairs_of(name, shape), ValueMeaning())
        return _weighted(name, in_memory(pairs, lengths), shape)
    is_integer = shape.dim is not None
    values = _steps(name, steps, shape, meaning)
    sequence = in_memory(values, lengths, is_integer=is_integer, padding_value=shape.padding_value)
    return _limited(sequence, shape, most)


def _limited(sequence: LoadedSequence, shape: FieldShape, most: int | None) -> LoadedSequence:
    return sequence if most is None or shape.is_sparse else sequence.cut(most)


def _steps(
    name: str, steps: NDArray[Any], shape: FieldShape, meaning: ValueMeaning
) -> NDArray[Any]:
    """Return the steps of all rows together, checked."""
    one = replace(shape, shape=shape.shape[1:])
    if not len(steps):
        return np.empty(steps.shape, np.float32 if shape.dim is None else np.int64)
    return _checked(name, steps, one, meaning).numpy()


def _inline_tensor(
    name: str, given: Any, shape: FieldShape, meaning: ValueMeaning, *, only_numbers: bool = False
) -> Tensor:
    wanted: Sequence[int] = shape.shape
    is_direct = only_numbers and shape.dim is None and not meaning.changes(name)
    dtype = np.float32 if is_direct else np.float64
    try:
        with np.errstate(over="ignore"):  # values beyond float32 become Inf
            array = np.array(given if only_numbers else jsonio_numbers(given), dtype=dtype)
    except (ValueError, TypeError, RecursionError):
        detail = f"input {name!r} is not a regular nested list of numbers"
        raise BadField(f"{detail} of shape [rows, {', '.join(map(str, wanted))}]", name) from None
    return _checked(name, array, shape, meaning)


def _checked(name: str, array: NDArray[Any], shape: FieldShape, meaning: ValueMeaning) -> Tensor:
    """Check the shape and the range of values, and convert them."""
    wanted: Sequence[int] = shape.shape
    if array.ndim == 0 or array.shape[1:] != tuple(wanted) or array.shape[0] == 0:
        got = list(array.shape)
        detail = f"input {name!r} has shape {got}; the network takes {['rows', *wanted]}"
        raise BadField(detail, name)
    if shape.dim is None:
        return _floats(name, array, meaning)
    if ((array != np.floor(array)) | (array < 0) | (array >= shape.dim)).any():
        raise BadField(f"input {name!r} takes integers in [0, {shape.dim})", name)
    return torch.from_numpy(array.astype(np.int64))


def _floats(name: str, array: NDArray[Any], meaning: ValueMeaning) -> Tensor:
    """Return values as the network takes them; they are rounded once, from float64."""
    if array.dtype == np.float32 and not meaning.changes(name):
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    x = meaning.floats(name, array.astype(np.float64, copy=False))
    with np.errstate(over="ignore"):
        return torch.from_numpy(x.astype(np.float32))


def _inline_sequence(
    name: str, given: Any, shape: FieldShape, meaning: ValueMeaning
) -> LoadedSequence:
    """Read a list per row, each with its own length; or texts, if the field has tokens."""
    if shape.has_values:
        return _inline_sparse(name, given, shape)
    width = list(shape.shape[1:])
    if isinstance(given, list):
        given = [meaning.steps(name, row) for row in given]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(given, list) or not given or not all(isinstance(row, list) for row in given):
        detail = f"input {name!r} is not a list of rows that are lists"
        raise BadField(f"{detail}, of shape [rows, steps{''.join(f', {n}' for n in width)}]", name)
    rows: list[np.ndarray[Any, Any]] = []
    for number, row in enumerate(given):
        if not row:
            rows.append(np.empty((0, *width), np.int64 if shape.dim else np.float32))
            continue
        try:
            steps = _inline_tensor(name, row, replace(shape, shape=tuple(width)), meaning)
        except BadField as cause:
            raise BadField(f"row {number}: {cause}", name) from None
        rows.append(steps.numpy())
    lengths = np.array([len(row) for row in rows], np.int64)
    is_integer = shape.dim is not None
    return in_memory(
        np.concatenate(rows), lengths, is_integer=is_integer, padding_value=shape.padding_value
    )


def _plain_integers(given: Any, shape: FieldShape) -> LoadedSequence | None:
    """Read rows of integers at once; None: they are something else, or one is out of range.

    `_inline_sequence` reads them one by one, and says what is wrong.
    """
    if shape.dim is None or shape.has_values or len(shape.shape) > 1:
        return None
    if not isinstance(given, list) or not all(isinstance(row, list) for row in given):
        return None
    rows: list[list[Any]] = given
    lengths = [*map(len, rows)]
    try:
        values = np.array(rows[0] if len(rows) == 1 else [*chain.from_iterable(rows)])
    except (ValueError, OverflowError):
        return None
    if values.dtype != np.int64 or values.ndim != 1 or not len(values):
        return None
    if values.min() < 0 or values.max() >= shape.dim:
        return None
    counts = np.array(lengths, np.int64)
    return in_memory(values, counts, is_integer=True, padding_value=shape.padding_value)


def _inline_sparse(name: str, given: Any, shape: FieldShape) -> LoadedSequence:
    """Read a list of pairs [index, value] per row."""
    pairs = _inline_sequence(name, given, _pairs_of(name, shape), ValueMeaning())
    return _weighted(name, pairs, shape)


def _pairs_of(name: str, shape: FieldShape) -> FieldShape:
    """Return the shape of a sparse field's pairs [index, value].

    Raises:
        BadField: float32 has not enough indices.
    """
    if (shape.dim or 0) > _EXACT_PLACES:
        detail = f"input {name!r} has more than {_EXACT_PLACES:,} places; read it from a dataset"
        raise BadField(detail, name)
    return replace(shape, shape=(0, 2), dtype=torch.float32, dim=None, has_values=False)


def _weighted(name: str, pairs: LoadedSequence, shape: FieldShape) -> LoadedSequence:
    """Divide pairs into indices and values."""
    places, dim = pairs.values[:, 0], int(shape.dim or 0)
    if bool(((places != places.floor()) | (places < 0) | (places >= dim)).any()):
        raise BadField(f"input {name!r} takes places in [0, {dim})", name)
    weights = pairs.values[:, 1:].to(torch.float32).contiguous()
    return replace(pairs, values=places.to(torch.int64), weights=weights, is_integer=True)


def jsonio_numbers(value: Any) -> Any:
    """Replace the names of NaN and infinities in a nested list by the numbers."""
    if isinstance(value, list):
        return [jsonio_numbers(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, bool) or value is None:
        raise TypeError("not a number")
    return jsonio.number(value)
