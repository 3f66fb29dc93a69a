"""Columns of texts that integer fields read: which texts there are, so that each has a number."""

from collections.abc import Mapping, Sequence
from typing import Any

from glasshouse.spec.data import Field, IntegerField

Columns = Sequence[Mapping[str, Any]]


def text_labels(fields: Mapping[str, Field], columns: Columns) -> set[str]:
    """The columns of texts whose classes a job does not list: they are those of the dataset."""
    texts = {column["name"] for column in columns if column["dtype"] == "string"}
    asked = {
        (field.source_columns or (name,))[0]
        for name, field in fields.items()
        if isinstance(field, IntegerField) and field.classes is None
    }
    return asked & texts


def with_values(columns: Columns, stats: Mapping[str, Any], names: set[str]) -> list[Any]:
    """The columns, those that are named with ``values``: their different texts in all splits.

    In the order of their characters, without the empty text of a missing value. None: there are
    too many to be classes, or one is too long.

    Args:
        columns: as a dataset describes them.
        stats: of the dataset, by split and column.
        names: of the columns of labels.
    """
    return [
        {**column, "values": _values(stats, column["name"])} if column["name"] in names else column
        for column in columns
    ]


def _values(stats: Mapping[str, Any], name: str) -> list[str] | None:
    counts = [split.get(name, {}).get("counts") for split in stats.values()]
    if any(found is None for found in counts):
        return None
    return sorted({value for found in counts for value, _ in found if value})
