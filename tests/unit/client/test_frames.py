"""Data frames and torch datasets as columns of a dataset, with the fields that read them."""

import importlib
from collections import namedtuple
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from glasshouse.client.data.arrays import derive_fields, read_splits
from glasshouse.client.data.frames import as_columns, columns_for, is_frame, read_frame
from glasshouse.jsonio import dumps
from glasshouse.spec import Data

COLUMNS: dict[str, list[Any]] = {
    "age": [31, 25, 47, 38],
    "height": [1.7, 1.6, 1.8, 1.75],
    "smokes": [True, False, False, True],
    "town": ["Bern", "Chur", "Bern", "Genf"],
    "note": ["a fine film", "dull", "so so", "fine"],
    "ill": ["no", "yes", "no", "yes"],
}


def arrow(columns: dict[str, Any]) -> Any:
    table = pa.table(columns)
    if "town" not in columns:
        return table
    place = table.schema.get_field_index("town")
    return table.set_column(place, "town", table.column("town").dictionary_encode())


def pandas(columns: dict[str, Any]) -> Any:
    library = pytest.importorskip("pandas")
    frame = library.DataFrame(columns)
    return frame.astype({"town": "category"}) if "town" in columns else frame


def polars(columns: dict[str, Any]) -> Any:
    library = pytest.importorskip("polars")
    frame = library.DataFrame(columns)
    casts = [library.col("town").cast(library.Categorical)] if "town" in columns else []
    return frame.with_columns(casts)


LIBRARIES = {"pyarrow": arrow, "pandas": pandas, "polars": polars}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_frame_becomes_numbers_side_by_side_and_fields_of_texts(library: str):
    frame = LIBRARIES[library](COLUMNS)
    assert is_frame(frame)
    table = read_frame(frame, "ill")
    assert table.fields == {
        "x": {"type": "dense", "columns": ["age", "height", "smokes"]},
        "town": {"type": "integer", "classes": ["Bern", "Chur", "Genf"]},
        "note": {"type": "integer_sequence", "tokens": "words"},
        "ill": {"type": "integer", "classes": ["no", "yes"]},
    }
    assert {name: item.tolist() for name, item in table.columns.items()} == COLUMNS | {
        "smokes": [1, 0, 0, 1]
    }
    data = {"train": {"dataset": "ds_1"}, "fields": table.fields, "batch_size": 2}
    Data.model_validate_json(dumps(data))
    again = columns_for(frame, table.fields)
    assert np.asarray(again["x"]).shape == (4, 3)
    assert again["town"] == COLUMNS["town"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_column_that_the_network_names_is_a_field_of_its_own(library: str):
    frame = LIBRARIES[library]({"a": [1.0, 2.0], "b": [3.0, 4.0], "rank": [0, 2]})
    assert read_frame(frame, "rank", ["a"]).fields == {
        "x": {"type": "dense", "columns": ["b"]},
        "a": {"type": "dense", "shape": [1]},
        "rank": {"type": "integer", "dim": 3},
    }
    assert read_frame(frame, "b").fields["b"] == {"type": "dense", "shape": [1]}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "values", [[1.0, None, None], ["a", None, None], [1.0, float("nan"), None]]
)
def test_missing_values_are_counted_and_explained(library: str, values: list[Any]):
    frame = LIBRARIES[library]({"a": values, "y": [0, 1, 0]})
    with pytest.raises(
        ValueError, match=r"'a' has [12] missing values: fill them or drop the rows"
    ):
        read_frame(frame, "y")


def test_a_column_with_an_invalid_field_name_gets_a_field_of_another_name():
    frame = {"a b": [0.5, 1.5], "is it?": [0, 1]}
    pandas = importlib.import_module("pandas")
    table = read_frame(pandas.DataFrame(frame), "is it?")
    assert table.fields["x"] == {"type": "dense", "columns": ["a b"]}
    assert table.fields["is_it_"] == {"type": "integer", "dim": 2, "column": "is it?"}
    found = columns_for(pandas.DataFrame(frame), table.fields)
    np.testing.assert_array_equal(found["is_it_"], [0, 1])
    with pytest.raises(ValueError, match="rename 'is_it_'"):
        read_frame(pandas.DataFrame({**frame, "is_it_": ["no", "yes"]}), "is it?")


def test_columns_of_pandas_that_have_numbers_for_names_go_by_them():
    frame = importlib.import_module("pandas").DataFrame([[0.5, 7.0, 0], [1.5, 8.0, 1]])
    table = read_frame(frame, 2)
    assert table.fields["x"] == {"type": "dense", "columns": ["0", "1"]}
    assert table.fields["column_2"] == {"type": "integer", "dim": 2, "column": "2"}
    np.testing.assert_array_equal(table.columns["2"], [0, 1])
    found = columns_for(frame, table.fields)
    np.testing.assert_array_equal(found["x"], [[0.5, 7.0], [1.5, 8.0]])
    assert list(frame.columns) == [0, 1, 2]  # the user's own is left as it was


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_frame_needs_to_know_its_target(library: str):
    frame = LIBRARIES[library]({"a": [1.0], "y": [0]})
    with pytest.raises(ValueError, match=r"the target column is unset.*a, y"):
        read_frame(frame, None)
    with pytest.raises(ValueError, match="there is no column 'z'"):
        read_frame(frame, "z")


def test_what_is_neither_number_nor_text_is_refused_by_its_column():
    stamps = pa.array(np.array(["2026-01-01"], "datetime64[s]"))
    with pytest.raises(ValueError, match="'when' has dtype timestamp"):
        read_frame(pa.table({"when": stamps, "y": [0]}), "y")
    with pytest.raises(ValueError, match="'parts' has"):
        read_frame(pa.table({"parts": [[1, 2]], "y": [0]}), "y")


class Rows(Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        self.read.append(number)
        return self.rows[number]


def fields_of(data: Any, arguments: list[str] | None = None) -> dict[str, Any]:
    return derive_fields(read_splits(as_columns(data, None, arguments or [])[0]))


def test_a_torch_dataset_is_read_once_and_in_order():
    data = Rows([(torch.full((2, 3), float(n)), n % 2) for n in range(5)])
    columns, fields = as_columns(data, None)
    assert data.read == [0, 1, 2, 3, 4]
    assert fields is None
    split = read_splits(columns)["train"]
    assert split["x"].shape == (5, 2, 3)  # type: ignore[union-attr]
    assert split["x"][3, 0, 0] == 3.0  # type: ignore[call-overload]
    assert fields_of(data) == {
        "x": {"type": "dense", "shape": [2, 3]},
        "y": {"type": "integer", "dim": 2},
    }


def test_rows_of_a_dataset_are_named_by_themselves_or_by_the_networks_arguments():
    Row = namedtuple("Row", "image label")
    cases: list[tuple[Any, list[str], list[str]]] = [
        ({"image": torch.ones(2), "label": 1}, [], ["image", "label"]),
        (Row(torch.ones(2), 1), [], ["image", "label"]),
        ((torch.ones(2), torch.ones(3), 1), ["left", "right"], ["left", "right", "y"]),
        ((torch.ones(2), torch.ones(3), 1), [], ["x0", "x1", "y"]),
        ((torch.ones(2), 1), ["image"], ["image", "y"]),
    ]
    for row, arguments, expected in cases:
        assert list(fields_of(Rows([row, row]), arguments)) == expected


def test_rows_of_different_lengths_are_sequences():
    ids = [torch.tensor([1, 4]), torch.tensor([2]), torch.tensor([], dtype=torch.int64)]
    steps = [torch.ones(3, 2), torch.ones(1, 2), torch.ones(2, 2)]
    numbers = [[0.5, 1.5], [2.5], [1.0]]
    data = {"ids": ids, "steps": steps, "numbers": numbers, "y": [0, 1, 0]}
    assert fields_of(data) == {
        "ids": {"type": "integer_sequence", "dim": 5},
        "steps": {"type": "dense_sequence", "dim": 2},
        "numbers": {"type": "dense_sequence", "dim": 1},
        "y": {"type": "integer", "dim": 2},
    }


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (Endless(), "IterableDataset"),
        (Rows([]), "empty"),
        (Rows([{"a": 1}, {"b": 1}]), "differ in structure"),
        (Rows([(torch.ones(2, 2), 1), (torch.ones(1, 3), 1)]), "differ in more than their length"),
        (Rows([(object(), 1)]), "dtype object"),
        ({"ids": [torch.tensor([-1]), torch.tensor([1, 2])], "y": [0, 1]}, "negative integers"),
    ],
)
def test_rows_that_cannot_be_columns_are_refused_with_the_reason(data: Any, reason: str):
    with pytest.raises(ValueError, match=reason):
        fields_of(data)


def test_no_library_is_imported_for_plain_arrays():
    assert not is_frame({"a": [1]})
    assert not is_frame(np.ones(3))
    assert importlib.util.find_spec("glasshouse.client.data.frames") is not None
