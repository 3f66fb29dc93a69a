"""Return the class that a network predicts for each row, by name if the classes have names."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from glasshouse import jsonio
from glasshouse.spec import InferJob, IntegerField, Trained, TrainJob

CLASS_LOSSES = frozenset({"CrossEntropyLoss", "NLLLoss", "MultiMarginLoss"})
"""Losses that compare scores of shape [rows, classes] with one class per row."""
SOFTMAXES = frozenset({"Softmax", "softmax", "LogSoftmax", "log_softmax"})
FILE = "predictions.csv"
MAX_LISTED = 1000
"""Number of unnamed classes that a result lists."""


class Classes(NamedTuple):
    """The classes that the scores of a layer are for."""

    column: str
    """The data column with the true class."""
    named: tuple[Any, ...] | None
    """The names of the classes in order; None: the classes are their numbers."""
    number: int

    @property
    def values(self) -> list[Any]:
        """Return the classes in order."""
        return list(range(self.number)) if self.named is None else list(self.named)


def classified(trained_by: Trained) -> dict[str, Classes]:
    """Return the layers whose outputs are class scores: the inputs of a classification loss.

    A softmax over such an output has the same classes.
    """
    found: dict[str, Classes] = {}
    for loss in trained_by.losses if isinstance(trained_by, TrainJob) else ():
        field = trained_by.data.fields.get(loss.inputs[-1])
        if loss.type in CLASS_LOSSES and isinstance(field, IntegerField):
            column = field.column or loss.inputs[-1]
            found[loss.inputs[0]] = Classes(column, field.classes, field.dim or 0)
    for layer in trained_by.network.layers:
        read = (layer.inputs or ())[:1]
        if layer.type in SOFTMAXES and read and read[0] in found:
            found[layer.name] = found[read[0]]
    return found


def fields_of(job: InferJob, name: str, known: Mapping[str, Classes]) -> tuple[str, ...]:
    """Return the fields that an inference returns for a layer."""
    if job.fields is not None:
        return job.fields
    has_classes = job.flatten is False and name in known
    return ("value", "id", "prob") if has_classes else ("value",)


def names_in(known: Mapping[str, Classes], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the metadata with names in the outputs' file: ``<layer>/classes``, a JSON list."""
    return {
        f"{name}/classes": jsonio.dumps(list(classes.named))
        for name, classes in known.items()
        if classes.named is not None and f"{name}/id" in tensors
    }


def told(classes: Classes, ids_N: Tensor) -> dict[str, Any]:
    """Return a layer's result entries besides its tensors: all classes, and each row's."""
    values = classes.values
    dtype = "string" if values and isinstance(values[0], str) else "int64"
    found: dict[str, Any] = {}
    if classes.named is not None or classes.number <= MAX_LISTED:
        shape = [len(values)]
        found["classes"] = {"dtype": dtype, "shape": shape, "data": values}
        found["classes"]["column"] = classes.column
    if classes.named is not None:
        data = [values[number] for number in ids_N.tolist()]
        found["class"] = {"dtype": dtype, "shape": [len(data)], "data": data}
    return found


def write(path: Path, tensors: Mapping[str, Tensor], known: Mapping[str, Classes]) -> bool:
    """Write a line per row: its number, and each layer's class and its probability.

    Return whether there is anything to write.
    """
    columns: dict[str, Sequence[Any]] = {}
    for name, classes in known.items():
        ids_N = tensors.get(f"{name}/id")
        if ids_N is None:
            continue
        columns[f"{name}/id"] = ids_N.tolist()
        if classes.named is not None:
            columns[f"{name}/class"] = [classes.named[number] for number in ids_N.tolist()]
        if f"{name}/prob" in tensors:
            columns[f"{name}/prob"] = tensors[f"{name}/prob"].tolist()
    if not columns:
        return False
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["row", *columns])
        writer.writerows(
            [row, *cells] for row, cells in enumerate(zip(*columns.values(), strict=True))
        )
    return True
