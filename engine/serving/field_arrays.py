"""Fields of a request that come as arrays or lists, checked together."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.tensor_names import lengths_of
from engine.data.batches.rows import Loaded
from engine.data.columns.fields import BadField
from engine.data.columns.loaded import LoadedField
from engine.data.sources.inline import array_field, inline_field, num_rows_of
from engine.serving.asked import Problems, bad, listed, similar, token
from engine.serving.model_inputs import ModelInputs
from glasshouse.spec import DenseField, DenseSequenceField, IntegerField

MAX_STEPS = 1 << 22
"""The most steps of all rows of a sequence field, with padding."""
_TOO_MANY = "rows"
Given = NDArray[Any] | list[str]
"""Numbers, or a text for each row."""


def too_many(num_rows: int, max_rows: int) -> str:
    """Return the refusal of a request with too many rows."""
    return f"the request has {num_rows:,} rows: send at most {max_rows:,} at once"


def check_names(
    given: Mapping[str, Any],
    inputs: ModelInputs,
    needed: Sequence[str],
    problems: Problems,
    pointers: Mapping[str, str],
) -> None:
    """Check that all needed fields are given, and no others than those of training.

    ``pointers``: to the fields by name; "" to all of them.
    """
    known = inputs.trained_by.data.fields
    for name in given:
        if name not in known:
            detail = f"the network has no field {name[:100]!r}; it has: {listed(known)}"
            detail += similar(name, known)
            pointer = pointers.get(name, f"{pointers['']}/{token(name)}")
            problems.problem(pointer, detail, "unknown_field")
    for name in needed:
        if name not in given:
            detail = f"the network needs the input {name!r}"
            problems.problem(pointers[""], detail, "missing_input")


def same_rows(loaded: Mapping[str, Loaded], max_rows: int, problems: Problems, pointer: str) -> int:
    """Return the number of rows of all fields.

    Raises:
        BadRequest: they differ, or something was found before.
    """
    heights = {name: num_rows_of(item) for name, item in loaded.items()}
    if len({*heights.values()}) > 1:
        listed = ", ".join(f"{name!r} has {height}" for name, height in heights.items())
        detail = f"all inputs need the same number of rows: {listed}"
        problems.problem(pointer, detail, "num_rows")
    num_rows = max(heights.values(), default=0)
    for name, item in loaded.items():
        longest = 0 if isinstance(item, LoadedField) else item.longest
        if num_rows * longest > MAX_STEPS:
            detail = f"{num_rows:,} rows padded to the {longest:,} steps of the longest row of"
            detail += f" {name!r} have more than {MAX_STEPS:,} steps: send fewer rows at once"
            problems.problem(pointer, detail, "too_many_steps")
    if num_rows > max_rows:
        problems.problem(pointer, too_many(num_rows, max_rows), "too_many_rows")
    problems.refuse()
    if not num_rows:
        raise bad("the request has no rows: give at least one", "empty", pointer)
    return num_rows


def from_arrays(
    arrays: Mapping[str, Given],
    needed: Sequence[str],
    inputs: ModelInputs,
    max_rows: int,
    problems: Problems,
    pointers: Mapping[str, str],
) -> tuple[dict[str, Loaded], int]:
    """Convert arrays of fields, and ``<field>.lengths`` of sequences; return the number of rows.

    The numbers are those of the columns before they are normalized, but ``scale`` does not apply:
    they mean the same as ``inputs`` in JSON. Only uint8 is scaled, as in a dataset: pixels of 0 to
    255 become [0, 1] unless the field has another ``scale``.

    Raises:
        BadRequest: they do not fit the model, or something was found before.
    """
    lengths = {
        lengths_of(name): name
        for name, shape in inputs.shapes.items()
        if shape.is_sequence and lengths_of(name) in arrays
    }
    given = {name: item for name, item in arrays.items() if name not in lengths}
    check_names(given, inputs, needed, problems, pointers)
    loaded: dict[str, Loaded] = {}
    for name in needed:
        if name not in given:
            continue
        pointer = pointers.get(name, f"{pointers['']}/{token(name)}")
        try:
            own = arrays.get(lengths_of(name)) if inputs.shapes[name].is_sequence else None
            loaded[name] = _field(name, given[name], own, inputs, max_rows)
        except BadField as cause:
            code = "too_many_rows" if cause.key == _TOO_MANY else "shape"
            problems.problem(pointer, str(cause), code)
    return loaded, same_rows(loaded, max_rows, problems, pointers[""])


def _field(
    name: str, given: Given, lengths: Given | None, inputs: ModelInputs, max_rows: int
) -> Loaded:
    shape, meaning = inputs.shapes[name], inputs.meaning
    if isinstance(given, np.ndarray) and not given.ndim:
        raise BadField(f"input {name!r} is a single number: its first axis is the rows", name)
    if len(given) > max_rows:
        raise BadField(too_many(len(given), max_rows), _TOO_MANY)
    if isinstance(given, list):
        mine = meaning.fields.get(name)
        has_texts = isinstance(mine, IntegerField) and mine.classes is not None
        if not has_texts and meaning.unit(name) is None:
            raise BadField(f"input {name!r} takes numbers, and it has texts", name)
        if lengths is not None:
            raise BadField(f"texts have their own lengths: remove {lengths_of(name)!r}", name)
        return inline_field(name, given, shape, meaning, inputs.most)
    numbers = given.astype(np.uint8) if given.dtype == np.bool_ else _in_units(name, given, inputs)
    steps = None if lengths is None else _lengths(name, lengths, numbers)
    return array_field(name, numbers, shape, meaning, inputs.most, steps)


def _in_units(name: str, given: NDArray[Any], inputs: ModelInputs) -> NDArray[Any]:
    """Scale bytes of a dense field as a uint8 column of a dataset is; leave other arrays."""
    mine = inputs.meaning.fields.get(name)
    if given.dtype != np.uint8 or not isinstance(mine, DenseField | DenseSequenceField):
        return given
    scaled = given.astype(np.float32)
    return scaled / np.float32(255) if mine.scale is None else scaled * np.float32(mine.scale)


def _lengths(name: str, given: Given, array: NDArray[Any]) -> NDArray[np.int64]:
    """Return the steps of each row, checked."""
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "iu" or given.ndim != 1:
        raise BadField(f"{lengths_of(name)!r} is not one integer for each row", name)
    num_steps = array.shape[1] if array.ndim > 1 else 0
    if len(given) != len(array):
        detail = f"{lengths_of(name)!r} has {len(given)} rows, and {name!r} has {len(array)}"
        raise BadField(detail, name)
    wrong = np.flatnonzero((given < 0) | (given > num_steps))
    if len(wrong):
        row = int(wrong[0])
        detail = f"{lengths_of(name)!r} has {int(given[row])} in row {row}, and {name!r} has"
        raise BadField(f"{detail} {num_steps} steps", name)
    return given.astype(np.int64)
