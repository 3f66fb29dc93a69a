"""The ``data`` of a spec: which rows of a dataset to use, and how columns are read."""

import inspect
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol, cast

from glasshouse.client.data.frames import field_name, is_frame
from glasshouse.client.modules import is_dataset, is_module
from glasshouse.client.training.specs import Document, TrainOptions, as_document, network_of
from glasshouse.spec import Source


class Stored(Protocol):
    """The attributes of a dataset that specs use."""

    @property
    def id(self) -> str: ...  # noqa: D102

    @property
    def splits(self) -> dict[str, int]: ...  # noqa: D102

    @property
    def columns(self) -> list[dict[str, Any]]: ...  # noqa: D102


def arguments_of(network: Any) -> list[str]:
    """The required arguments of a module's ``forward``, or the data fields that a graph reads."""
    if is_module(network):
        known = inspect.signature(network.forward).parameters.values()
        return [item.name for item in known if item.default is item.empty]
    described = network_of(network)
    layers = described.get("layers", ())
    names = {layer["name"] for layer in layers}
    read = [name for layer in layers for name in layer.get("inputs") or ()]
    return [name for name in dict.fromkeys(read) if name.partition(".")[0] not in names]


def for_all(described: list[Document]) -> Document:
    """The fields of the first dataset, each with the largest ``dim`` over all datasets."""
    fields: Document = {}
    for name, item in described[0]["fields"].items():
        dims = [other["fields"].get(name, {}).get("dim") for other in described]
        known = [dim for dim in dims if dim is not None]
        fields[name] = {**item, "dim": max(known)} if known else item
    return fields


def first_split(dataset: Stored, wanted: str) -> str:
    """The wanted split if it exists, else the first one."""
    return wanted if wanted in dataset.splits else next(iter(dataset.splits), "all")


def is_source(value: Any) -> bool:
    """Whether a value is a source as in a spec: ``{"dataset", "split", "fraction"}``."""
    if isinstance(value, Mapping):
        return isinstance(cast("Mapping[str, Any]", value).get("dataset"), str)
    return isinstance(value, Source)


def named_validations(validation: Any) -> Mapping[str, Any]:
    """Several validation sources by name; empty if the argument is one source, or none.

    A dict of arrays by column is one source. In a dict of sources, each value is a source by
    itself: the name of a split, a stored dataset, a source as in a spec, an ``(x, y)`` pair, a dict
    of arrays, a data frame or a torch dataset.
    """
    if not isinstance(validation, Mapping) or is_source(validation):
        return {}
    named = cast("Mapping[str, Any]", validation)
    return named if named and all(map(_is_rows, named.values())) else {}


def _is_rows(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(cast("tuple[Any, ...]", value)) == 2
    kind = cast("Any", type(value))
    is_stored = isinstance(value, str) or is_source(value) or hasattr(kind, "splits")
    return is_stored or isinstance(value, Mapping) or is_frame(value) or is_dataset(value)


def sources(dataset: Stored, options: TrainOptions) -> Document:
    """The data sources for training and validation."""
    train = options.get("split") or first_split(dataset, "train")
    validation = options.get("validation")
    if isinstance(validation, float):
        kept = 1 - validation
        return {
            "train": {"dataset": dataset.id, "split": train, "fraction": [0.0, kept]},
            "validation": {"dataset": dataset.id, "split": train, "fraction": [kept, 1.0]},
        }
    sources: Document = {"train": {"dataset": dataset.id, "split": train}}
    held = validation if isinstance(validation, str) else "validation"
    if isinstance(validation, str) or held in dataset.splits:
        sources["validation"] = {"dataset": dataset.id, "split": held}
    return sources


def has_uncounted(dataset: Stored) -> bool:
    """Whether statistics are needed to find the number of classes of a column."""
    return any(_is_whole(column) and column.get("classes") is None for column in dataset.columns)


def declared(
    dataset: Stored, stats: Document | None, read: Sequence[str] = (), label: str | None = None
) -> Document:
    """Infer the fields of a stored dataset: a column of integers, one per row, has classes.

    Args:
        dataset: the dataset.
        stats: its statistics, if they are needed to count classes.
        read: the columns that the network reads, if known.
        label: the target column, if known.
    """
    largest = _largest(stats or {"splits": {}})
    texts = _text_fields(dataset, read, label)
    fields: Document = {}
    for column in dataset.columns:
        name, shape = column["name"], column["shape"]
        if column["dtype"] == "string":
            fields |= texts.get(name, {})
            continue
        if _is_whole(column):
            kind = "integer_sequence" if shape else "integer"
            classes: list[str] | None = column.get("classes")
            dim = largest[name] + 1 if classes is None else len(classes)
            fields[name] = {"type": kind, "dim": dim}
        elif None in shape:
            fields[name] = {"type": "dense_sequence", "dim": prod(shape[1:])}
        else:
            fields[name] = {"type": "dense", "shape": shape or [1]}
    return fields


def _text_fields(dataset: Stored, read: Sequence[str], label: str | None) -> dict[str, Document]:
    """The fields of text columns: words if the network reads the column, classes for the target.

    By default, the network reads the first column, and the target is the only other text column,
    unless there are integer columns, which may be the target.
    """
    names = [column["name"] for column in dataset.columns]
    texts = [column["name"] for column in dataset.columns if column["dtype"] == "string"]
    inputs = [name for name in read or names[:1] if name in texts and name != label]
    others = [name for name in texts if name not in inputs]
    has_numbers = any(_is_whole(column) for column in dataset.columns)
    if label is None and len(others) == 1 and not has_numbers:
        label = others[0]
    fields: dict[str, Document] = {
        name: {name: {"type": "integer_sequence", "tokens": "words"}} for name in inputs
    }
    if label is not None and label in texts:
        called = field_name(label)
        field = {"type": "integer"}
        fields[label] = {called: field if called == label else {**field, "column": label}}
    return fields


def with_shapes(fields: Document, dataset: Stored) -> Document:
    """The fields; dense ones with the shape of a row."""
    shapes = {column["name"]: column["shape"] for column in dataset.columns}
    shaped: Document = {}
    for name, field in fields.items():
        shaped[name] = as_document(field)
        if field["type"] == "dense" and field.get("shape") is None:
            columns = field.get("columns") or [field.get("column") or name]
            known = [shapes.get(column, []) for column in columns]
            is_one = len(known) == 1 and "columns" not in field
            shaped[name]["shape"] = known[0] if is_one else [sum(map(prod, known))]
    return shaped


def _is_whole(column: Document) -> bool:
    is_integer = column["dtype"].lstrip("u").startswith("int")
    return is_integer and column["shape"] in ([], [None])


def _largest(stats: Document) -> dict[str, int]:
    """The largest value of each column over all splits."""
    largest: dict[str, int] = {}
    for columns in stats["splits"].values():
        for name, figures in columns.items():
            if isinstance(figures.get("max"), (int, float)):
                largest[name] = max(largest.get(name, 0), int(figures["max"]))
    return largest
