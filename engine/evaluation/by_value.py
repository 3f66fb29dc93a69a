"""Losses and metrics of the rows of each value of a column."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.core.tensor_names import host_lengths_of
from engine.data.columns.table import StoredTable, runs_of
from engine.losses.loss_sums import LossSums
from engine.losses.losses import Losses
from engine.metrics.metrics import metric_names
from engine.metrics.torch_metrics import running
from glasshouse.errors import DataFailed
from glasshouse.spec import TrainJob

MAX_VALUES = 100


class _Group:
    """The rows of one value."""

    def __init__(self, whole: TrainJob, losses: Losses) -> None:
        self._losses = losses
        self._num_rows = 0
        self._sums: LossSums | None = None
        names, fields = metric_names(whole.metrics), whole.data.fields
        self._metrics = [
            running(name, item, fields) for name, item in zip(names, whole.metrics, strict=True)
        ]
        self._failed: set[str] = set()

    def add(self, values: Mapping[str, Tensor], num_rows: int) -> None:
        sums = self._losses.sums(values, num_rows)
        self._sums = sums if self._sums is None else self._sums + sums
        self._num_rows += num_rows
        for item in self._metrics:
            try:
                item.update([values[name] for name in item.metric.inputs])
            except Exception:  # reported for all rows, where it fails too
                self._failed.add(item.name)

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = {"rows": self._num_rows}
        if self._sums is not None:
            found |= self._losses.figures(self._sums)
        for item in self._metrics:
            try:
                if item.name in self._failed:
                    raise ValueError
                series = item.compute().series
                found |= {name: float(value) for name, value in series.items()}
            except Exception:  # for example a class without rows
                found[item.name] = math.nan
        return found


class ByValue:
    """Losses and scalar metrics by the value of one column."""

    def __init__(self, column: str, whole: TrainJob, losses: Losses, table: StoredTable) -> None:
        self._column, self._whole, self._losses, self._table = column, whole, losses, table
        self._split = whole.data.whole.split
        described = table.described(column)
        self._is_text = described["dtype"] == "string"
        self._names: Sequence[str] | None = described.get("classes")
        self._read = names_read(whole)
        self._groups: dict[str, _Group] = {}

    def add(self, numbers_B: Tensor, values: Mapping[str, Tensor]) -> None:
        """Add a batch.

        Raises:
            DataFailed: the column has too many values, or cannot be read.
        """
        places: dict[str, list[int]] = {}
        for place, key in enumerate(self._keys(numbers_B.numpy())):
            places.setdefault(key, []).append(place)
        for key, mine in places.items():
            group = self._groups.get(key)
            if group is None:
                self._check_room(key)
                group = self._groups[key] = _Group(self._whole, self._losses)
            index = torch.tensor(mine)
            chosen = {
                name: values[name].index_select(0, index.to(values[name].device))
                for name in self._read
                if name in values
            }
            group.add(chosen, len(mine))

    def _check_room(self, key: str) -> None:
        if len(self._groups) == MAX_VALUES:
            detail = f"column {self._column!r}, which by names, has more than {MAX_VALUES} values"
            raise DataFailed(f"{detail} ({key!r} is one more): name a column with fewer values")

    def _keys(self, numbers: np.ndarray[Any, Any]) -> list[str]:
        ascending, back = np.unique(numbers, return_inverse=True)
        window = self._table.window(self._split, runs_of(ascending))
        if self._is_text:
            texts = window.texts(self._split, self._column)
            found = [texts.text(row) for row in range(len(texts))]
        else:
            found = [self._name(value) for value in window.column(self._split, self._column)]
        return [found[place] for place in back.tolist()]

    def _name(self, value: np.generic) -> str:
        if isinstance(value, np.bool_):
            return "true" if value else "false"
        number = int(value)  # pyright: ignore[reportArgumentType]
        if self._names is not None and 0 <= number < len(self._names):
            return self._names[number]
        return str(number)

    def result(self) -> dict[str, Any]:
        """Return losses, metrics and the number of rows of each value."""
        return {key: self._groups[key].result() for key in sorted(self._groups, key=_in_order)}


def _in_order(key: str) -> tuple[int, float, str]:
    """Numbers by size, then texts."""
    try:
        return 0, float(int(key)), key
    except ValueError:
        return 1, 0.0, key


def names_read(whole: TrainJob) -> list[str]:
    """Return the tensors that losses and metrics read, and the lengths in host memory."""
    lengths = [host_lengths_of(item.lengths) for item in whole.losses if item.lengths]
    inputs = [name for metric in whole.metrics for name in metric.inputs]
    return list(dict.fromkeys([*whole.loss_reads, *inputs, *lengths]))
