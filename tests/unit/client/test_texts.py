"""Texts in Python: words where the network reads them, classes where they are the target."""

from typing import Any

import numpy as np
import pytest

from glasshouse.client.data.arrays import derive_fields, read_splits
from glasshouse.client.training.sources import declared

WORDS = {"type": "integer_sequence", "tokens": "words"}
CLASSES = {"type": "integer"}
X = np.ones((3, 2), np.float32)
NAMES = ["cat", "dog", "cat"]


@pytest.mark.parametrize("y", [NAMES, np.array(NAMES), np.array(NAMES, object)])
def test_labels_may_be_texts(y: Any):
    splits = read_splits((X, y))
    assert derive_fields(splits)["y"] == CLASSES
    assert splits["train"]["y"].dtype.kind == "U"  # pyright: ignore[reportAttributeAccessIssue]


def test_what_the_network_reads_is_words():
    texts = {"label": NAMES, "text": ["a b", "c", "d"], "z": NAMES}
    splits = read_splits(texts)
    assert derive_fields(splits) == {"label": WORDS, "text": CLASSES, "z": CLASSES}
    assert derive_fields(splits, ["text"], "label") == {
        "label": CLASSES,
        "text": WORDS,
        "z": CLASSES,
    }


def test_objects_that_are_not_texts_are_refused():
    with pytest.raises(ValueError, match="dtype object"):
        read_splits((X, np.array(["cat", 1, None], object)))


class Stored:
    id = "ds_1"
    splits = {"all": 3}  # noqa: RUF012

    def __init__(self, **dtypes: str) -> None:
        self.columns: list[dict[str, Any]] = [
            {"name": name, "dtype": dtype, "shape": []} for name, dtype in dtypes.items()
        ]


@pytest.mark.parametrize(
    ("columns", "read", "label", "fields"),
    [
        ({"text": "string", "kind": "string"}, ["text"], None, {"text": WORDS, "kind": CLASSES}),
        ({"text": "string", "kind": "string"}, [], None, {"text": WORDS, "kind": CLASSES}),
        ({"kind": "string", "text": "string"}, ["text"], None, {"kind": CLASSES, "text": WORDS}),
        (
            {"text": "string", "note": "string", "kind": "string"},
            ["text"],
            "kind",
            {"text": WORDS, "kind": CLASSES},
        ),
        ({"text": "string", "note": "string", "kind": "string"}, ["text"], None, {"text": WORDS}),
        (
            {"x": "float64", "the kind": "string"},
            [],
            "the kind",
            {"x": {"type": "dense", "shape": [1]}, "the_kind": CLASSES | {"column": "the kind"}},
        ),
    ],
)
def test_columns_of_texts_of_a_stored_dataset(
    columns: dict[str, str], read: list[str], label: str | None, fields: dict[str, Any]
):
    assert declared(Stored(**columns), None, read, label) == fields
