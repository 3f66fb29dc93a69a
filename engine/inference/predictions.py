"""Which class a network gives each row, by its name where the classes have names."""

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
"""Classes without names that a result lists."""


class Classes(NamedTuple):
    """What the scores of a layer are of."""

    column: str
    """Of the data, in which the true class stands."""
    named: tuple[Any, ...] | None
    """What the classes are called, by their numbers; None: by these numbers."""
    number: int

    @property
    def values(self) -> list[Any]:
        """The classes in order."""
        return list(range(self.number)) if self.named is None else list(self.named)


def classified(trained_by: Trained) -> dict[str, Classes]:
    """The layers whose outputs are scores of classes: what a loss of classes compares.

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
    """What an inference gives of a layer."""
    if job.fields is not None:
        return job.fields
    has_classes = job.flatten is False and name in known
    return ("value", "id", "prob") if has_classes else ("value",)


def names_in(known: Mapping[str, Classes], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """What the file of the outputs says of names: ``<layer>/classes``, a JSON list."""
    return {
        f"{name}/classes": jsonio.dumps(list(classes.named))
        for name, classes in known.items()
        if classes.named is not None and f"{name}/id" in tensors
    }


def told(classes: Classes, ids_N: Tensor) -> dict[str, Any]:
    """The entries of a layer in a result beside its tensors: all classes, and that of each row."""
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
    """Write a line per row: its number, and of each layer the class and its probability.

    Whether there is anything to write.
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
