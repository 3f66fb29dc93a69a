"""Read integer fields: one class or id per row, checked, into memory."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.columns.checks import BadRows, bad_places, outside
from engine.data.columns.dense import as_tensor
from engine.data.columns.fields import checked_shape, field_columns
from engine.data.columns.loaded import LoadedField
from engine.data.columns.prepared import Prepared
from engine.data.columns.table import Table, TextColumn
from glasshouse import jsonio
from glasshouse.errors import DataFailed
from glasshouse.spec import IntegerField, Sequences

_CHUNK_BYTES = 1 << 22
_LISTED = 20


class IntegerReading:
    """Reads an integer field of one split."""

    def __init__(self, name: str, field: IntegerField, table: Table, split: str) -> None:
        """Map the column, and find the class of each row if the field has classes.

        Raises:
            DataFailed: it is missing or has the wrong shape.
        """
        self._name, self._field, self._split, self._table = name, field, split, table
        shape = checked_shape(name, field, table.meta)
        self._dim = int(shape.dim or 0)
        (self._column,) = field_columns(name, field)
        described = table.described(self._column)
        self._texts: TextColumn | None = None
        if described["dtype"] == "string":
            self._texts = table.texts(split, self._column)
            self._given: NDArray[Any] = np.empty(0)
        else:
            self._given = table.column(split, self._column).reshape(-1)
        self._values = self._given
        if field.classes is not None:
            self._values = self._classified(field.classes, described.get("classes"))

    def _classified(self, classes: tuple[Any, ...], names: list[str] | None) -> NDArray[np.int64]:
        """Return the index of each row's value in the classes; -1 if it is none of them."""
        places = {value: place for place, value in enumerate(classes)}
        if self._texts is not None:
            chunks = self._texts.chunks(_CHUNK_BYTES)
            found = [[places.get(text, -1) for text in texts] for texts in chunks]
            return np.array([place for part in found for place in part], np.int64)
        if names is not None and isinstance(classes[0], str):
            places = {number: places.get(name, -1) for number, name in enumerate(names)}
        known, inverse = np.unique(self._given, return_inverse=True)
        table = np.array([places.get(value, -1) for value in known.tolist()], np.int64)
        return table[inverse.reshape(-1)]

    def flaws(self) -> Iterator[BadRows]:
        """Yield rows whose value is outside [0, dim), is missing, or is not a class."""
        of = f"field {self._name!r}"
        what = f"rows whose value of {of} is no class of it"
        if self._field.classes is None:
            what = f"rows with a value of {of} outside [0, {self._dim})"
        rows = bad_places(self._values, outside(self._dim))
        yield BadRows(f"{what}, of split {self._split!r}", rows, self._failure)

    def _failure(self, row: int) -> DataFailed:
        detail = f"{self._table.where(self._split, row)} has {self._shown(row)} in column"
        detail += f" {self._column!r};"
        key = f"data.fields.{self._name}"
        classes = self._field.classes
        if classes is not None:
            listed = ", ".join(jsonio.dumps(item) for item in classes[:_LISTED])
            more = f" and {len(classes) - _LISTED} more" if len(classes) > _LISTED else ""
            return DataFailed(
                f"{detail} the classes of field {self._name!r} are {listed}{more}",
                hint=f"List it in {key}.classes, correct the data, or set data.on_bad_row to drop.",
            )
        return DataFailed(
            f"{detail} field {self._name!r} takes integers in [0, {self._dim})",
            hint=f"Raise {key}.dim, or correct the data.",
        )

    def _shown(self, row: int) -> str:
        if self._texts is not None:
            return jsonio.dumps(self._texts.text(row)[:200])
        value = self._given[row].item()
        if isinstance(value, float) and np.isnan(value):
            return "no value"
        return f"{value:.17g}" if isinstance(value, float) else str(int(value))

    def load(self, rows: Tensor | None, limit: Sequences, prepared: Prepared) -> LoadedField:
        """Read rows into memory; None: all of the split."""
        return LoadedField(as_tensor(self._values, rows).to(torch.int64), is_integer=True)
