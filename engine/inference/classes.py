"""Classes: which layers score them, what they are called, and what a result says of them.

Shape suffixes: N = rows, C = the last axis, taken as classes, K = the most probable classes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from glasshouse import jsonio
from glasshouse.spec import InferJob, IntegerField, Trained, TrainJob

CLASS_LOSSES = frozenset({"CrossEntropyLoss", "NLLLoss", "MultiMarginLoss"})
"""Losses that compare scores of shape [rows, classes] with one class per row."""
SOFTMAXES = frozenset({"Softmax", "softmax", "LogSoftmax", "log_softmax"})
MAX_LISTED = 1000
"""Number of unnamed classes that a result lists."""
CLASS_FIELDS = {"id": "class", "top_k": "top_k_class"}
"""Fields with the numbers of classes, and what the names of these classes are called."""
TOP_K = 5
"""Number of classes of the field ``top_k`` if the job names none."""


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

    def names(self, numbers: Any) -> Any:
        """Return the classes with numbers, which may be nested lists."""
        if isinstance(numbers, list):
            return [self.names(number) for number in numbers]  # pyright: ignore[reportUnknownVariableType]
        return numbers if self.named is None else self.named[numbers]


def probabilities(layer_type: str, x_NC: Tensor) -> Tensor:
    """Convert a layer's output to probabilities: unchanged, by exp, or by softmax."""
    if layer_type in {"Softmax", "softmax"}:
        return x_NC
    if layer_type in {"LogSoftmax", "log_softmax"}:
        return x_NC.exp()
    return x_NC.float().softmax(dim=-1)


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
    if job.flatten is False and name in known:
        return ("value", "id", "prob") if job.top_k is None else ("value", "id", "prob", "top_k")
    return ("value",) if job.top_k is None else ("value", "top_k")


def read_fields(
    fields: tuple[str, ...], layer_type: str, x_NC: Tensor, top_k: int | None = None
) -> dict[str, Tensor]:
    """Return fields of an output: its value, the index of its maximum, its probability, the top k.

    ``top_k`` has two tensors: the indices of the k largest entries in descending order, and as
    ``top_k_prob`` their probabilities, [rows, …, k].
    """
    found: dict[str, Tensor] = {}
    if "value" in fields:
        found["value"] = x_NC
    if fields == ("value",):
        return found
    prob_NC = None if not {"prob", "top_k"} & {*fields} else probabilities(layer_type, x_NC)
    if "id" in fields or "prob" in fields:
        id_N1 = x_NC.argmax(dim=-1, keepdim=True)
        if "id" in fields:
            found["id"] = id_N1.squeeze(-1)
        if prob_NC is not None and "prob" in fields:
            found["prob"] = prob_NC.gather(-1, id_N1).squeeze(-1)
    if prob_NC is not None and "top_k" in fields:
        k = min(TOP_K if top_k is None else top_k, x_NC.shape[-1])
        found["top_k"] = x_NC.topk(k, dim=-1).indices
        found["top_k_prob"] = prob_NC.gather(-1, found["top_k"])
    return {
        name: found[name]
        for name in ("value", "id", "prob", "top_k", "top_k_prob")
        if name in found
    }


def names_in(known: Mapping[str, Classes], names: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata with names in the outputs' file: ``<layer>/classes``, a JSON list."""
    return {
        f"{name}/classes": jsonio.dumps(list(classes.named))
        for name, classes in known.items()
        if classes.named is not None and (f"{name}/id" in names or f"{name}/top_k" in names)
    }


def class_columns(name: str, known: Mapping[str, Classes]) -> dict[str, Classes]:
    """Return what the names of a column's classes are called, with the classes; empty if none.

    ``name`` is that of the column, ``<layer>/<field>``.
    """
    layer, _, title = name.rpartition("/")
    classes = known.get(layer)
    if title not in CLASS_FIELDS or classes is None or classes.named is None:
        return {}
    return {f"{layer}/{CLASS_FIELDS[title]}": classes}


def told(classes: Classes, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a layer's result entries besides its tensors: all classes, and each row's."""
    values = classes.values
    dtype = "string" if values and isinstance(values[0], str) else "int64"
    found: dict[str, Any] = {}
    if classes.named is not None or classes.number <= MAX_LISTED:
        shape = [len(values)]
        found["classes"] = {"dtype": dtype, "shape": shape, "data": values}
        found["classes"]["column"] = classes.column
    if classes.named is None:
        return found
    for field, title in CLASS_FIELDS.items():
        if (numbers := tensors.get(f"{name}/{field}")) is not None:
            data = classes.names(numbers.tolist())
            found[title] = {"dtype": dtype, "shape": list(numbers.shape), "data": data}
    return found
