"""Check rows: which do not fit a field, and how to report one. Uses numpy only."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.columns.ragged import Kept, RaggedColumn, forget_pages
from glasshouse.errors import DataFailed
from glasshouse.spec import DenseField, DenseSequenceField, Normalize

_CHUNK_VALUES = 1 << 20
OnBadRow = Literal["fail", "drop"]
Note = Callable[[int, str], None]
"""Called with the number of a row that is dropped, and the reason."""


@dataclass(frozen=True)
class BadRows:
    """Rows that do not fit a field, all for one reason."""

    what: str
    """The reason in words, as counted in an event ``dropped``."""
    rows: NDArray[np.int64]
    """Their numbers in the split, ascending; may be none."""
    failure: Callable[[int], DataFailed]
    """Creates the error for one of them."""


def without(
    flaws: Iterable[BadRows],
    rows: Tensor | None,
    num_rows: int,
    on_bad_row: OnBadRow,
    note: Note | None = None,
) -> Kept:
    """Return the rows of a source that fit all fields. A row counts for its first flaw only.

    ``note`` is called for each row that is dropped.

    Raises:
        DataFailed: a row does not fit, and that fails the job; names the first.
    """
    is_taken = np.ones(num_rows, np.bool_)
    if rows is not None:
        is_taken[:] = False
        is_taken[rows.numpy()] = True
    left_out: dict[str, int] = {}
    for flaw in flaws:
        bad = flaw.rows[is_taken[flaw.rows]]
        if bad.size and on_bad_row == "fail":
            raise flaw.failure(int(bad[0]))
        if bad.size:
            left_out[flaw.what] = int(bad.size)
            is_taken[bad] = False
            if note is not None:
                for row in bad.tolist():
                    note(row, str(flaw.failure(row)))
    if not left_out:
        return Kept(rows, {})
    return Kept(torch.from_numpy(np.flatnonzero(is_taken)), left_out)


def bad_places(
    values: NDArray[Any], is_bad: Callable[[NDArray[Any]], NDArray[np.bool_]]
) -> NDArray[np.int64]:
    """Return the indices along a column's first axis where a value is bad, in bounded memory."""
    found = [np.empty(0, np.int64)]
    step = max(1, _CHUNK_VALUES // max(1, int(np.prod(values.shape[1:]))))
    for start in range(0, len(values), step):
        part = values[start : start + step]
        marks = is_bad(part)
        if marks.any():
            found.append(np.flatnonzero(marks.reshape(len(part), -1).any(axis=1)) + start)
        forget_pages(values)
    return np.concatenate(found)


def outside(dim: int) -> Callable[[NDArray[Any]], NDArray[np.bool_]]:
    """Create a check for values that are not integers in [0, dim)."""

    def is_outside(part: NDArray[Any]) -> NDArray[np.bool_]:
        marks = (part < 0) | (part >= dim)
        return marks | (part != np.floor(part)) if part.dtype.kind == "f" else marks  # NaN too

    return is_outside


def steps_outside(name: str, dim: int, column: RaggedColumn) -> BadRows:
    """Return the rows with an integer outside [0, dim) in their list."""
    values = column.values.reshape(-1)
    is_bad = outside(dim)

    def failure(row: int) -> DataFailed:
        first = int(column.offsets[row])
        step = int(np.flatnonzero(is_bad(values[first : int(column.offsets[row + 1])]))[0])
        detail = f"{column.where(row)} has {values[first + step]:.17g} as value"
        return DataFailed(
            f"{detail} {step} of column {column.name!r}; field {name!r} takes integers in "
            f"[0, {dim})",
            hint=f"Raise data.fields.{name}.dim, or correct the data.",
        )

    what = f"rows with values of field {name!r} outside [0, {dim}), of split {column.split!r}"
    return BadRows(what, column.rows_of(bad_places(values, is_bad)), failure)


def unfilled(
    field: DenseField | DenseSequenceField, normalize: Normalize | None
) -> Callable[[NDArray[Any]], Any] | None:
    """Return the check for bad floating-point values; None: all are accepted."""
    if field.fill is None:
        return np.isnan if normalize is None else lambda part: ~np.isfinite(part)
    return None if normalize is None else np.isinf


def not_there(name: str, where: str, value: float) -> DataFailed:
    """Create the error for a missing value, or for Inf where the field is normalized."""
    if np.isnan(value):
        return DataFailed(
            f"{where} is missing (NaN), and field {name!r} has no fill",
            hint=f"Set data.fields.{name}.fill, or data.on_bad_row to drop.",
        )
    return DataFailed(
        f"{where} is {value:g}, and field {name!r} is normalised, which takes finite values",
        hint="Correct the data, or set data.on_bad_row to drop.",
    )
