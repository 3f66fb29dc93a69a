"""The classes of integer fields that read columns of texts."""

from collections.abc import Mapping, Sequence
from typing import Any

from glasshouse.spec.data import Field, IntegerField

Columns = Sequence[Mapping[str, Any]]


def text_labels(fields: Mapping[str, Field], columns: Columns) -> set[str]:
    """The columns of texts that a job uses as classes without listing them."""
    texts = {column["name"] for column in columns if column["dtype"] == "string"}
    asked = {
        (field.source_columns or (name,))[0]
        for name, field in fields.items()
        if isinstance(field, IntegerField) and field.classes is None
    }
    return asked & texts


def with_values(columns: Columns, stats: Mapping[str, Any], names: set[str]) -> list[Any]:
    """Add ``values`` to the named columns: their unique texts in all splits, sorted.

    The empty text of a missing value is not included. ``values`` is None if there are too many
    texts, or one is too long.

    Args:
        columns: as in the description of a dataset.
        stats: of the dataset, by split and column.
        names: the columns of labels.
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
