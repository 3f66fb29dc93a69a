import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.storage.columns import DatasetColumns
from tests.unit.ingest.conftest import Ingesting


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def described(columns: DatasetColumns) -> dict[str, tuple[str, list[int | None]]]:
    return {item["name"]: (item["dtype"], item["shape"]) for item in columns.meta["columns"]}


def test_lists_of_different_lengths_are_one_ragged_column(ingesting: Ingesting):
    columns = ingesting(
        "jsonl", lines({"ids": [3, 1, 2], "y": 0}, {"ids": [], "y": 1}, {"ids": [7], "y": 0})
    )
    assert described(columns) == {"ids": ("int64", [None]), "y": ("int64", [])}
    ids = columns.meta["columns"][0]
    assert ids["lengths"] == {"all": {"min": 0, "max": 3, "total": 4}}
    assert [row.tolist() for row in columns.lists("all", "ids")] == [[3, 1, 2], [], [7]]
    assert [row.tolist() for row in columns.lists("all", "ids", 1, 99)] == [[], [7]]
    figures = columns.stats()["all"]["ids"]
    assert (figures["count"], figures["min"], figures["max"]) == (4, 1, 7)
    assert figures["lengths"] == {"min": 0, "max": 3, "total": 4, "mean": 4 / 3}
    assert columns.rows("all", 0, 2) == [{"ids": [3, 1, 2], "y": 0}, {"ids": [], "y": 1}]
    with pytest.raises(TypeError, match="lists of different lengths"):
        columns.array("all", "ids")
    with pytest.raises(TypeError, match="no lists"):
        columns.lists("all", "y")


def test_lists_of_vectors_are_ragged_in_their_outermost_axis(ingesting: Ingesting):
    columns = ingesting("jsonl", lines({"x": [[1, 2], [3, 4.5]]}, {"x": []}, {"x": [[5, 6]]}))
    assert described(columns) == {"x": ("float64", [None, 2])}
    assert [row.tolist() for row in columns.lists("all", "x")] == [[[1, 2], [3, 4.5]], [], [[5, 6]]]


def test_lists_that_all_agree_are_a_plain_column(ingesting: Ingesting):
    columns = ingesting(
        "jsonl", lines({"x": [1, 2], "i": [[[1], [2]]]}, {"x": [3, 4], "i": [[[3], [4]]]})
    )
    assert described(columns) == {"x": ("int64", [2]), "i": ("int64", [1, 2, 1])}
    np.testing.assert_array_equal(columns.array("all", "x"), [[1, 2], [3, 4]])
    assert columns.array("all", "i").shape == (2, 1, 2, 1)
    assert "lengths" not in columns.meta["columns"][0]


def test_single_values_keep_their_types_and_what_is_missing(ingesting: Ingesting):
    columns = ingesting(
        "jsonl",
        b'{"n": 1, "x": 2.5, "t": "gr\xc3\xbcn", "b": true}\n\n'
        b'{"n": 2, "x": NaN, "t": null, "b": false, "late": 4}\r\n'
        b'{"x": "-Infinity", "t": "", "b": true, "n": 3, "late": null}',
    )
    assert described(columns) == {
        "n": ("int64", []),
        "x": ("float64", []),
        "t": ("string", []),
        "b": ("bool", []),
        "late": ("float64", []),
    }
    np.testing.assert_array_equal(columns.array("all", "x"), [2.5, math.nan, -math.inf])
    np.testing.assert_array_equal(columns.array("all", "late"), [math.nan, 4, math.nan])
    assert columns.texts("all", "t") == ["grün", "", ""]
    assert [item["missing"] for item in columns.meta["columns"]] == [0, 1, 2, 0, 2]


def test_the_name_of_a_non_finite_number_is_a_text_among_texts(ingesting: Ingesting):
    columns = ingesting("jsonl", lines({"t": "NaN", "x": "NaN"}, {"t": "nan", "x": 1}))
    assert described(columns) == {"t": ("string", []), "x": ("float64", [])}
    assert columns.texts("all", "t") == ["NaN", "nan"]
    assert described(ingesting("jsonl", lines({"t": "NaN"}))) == {"t": ("string", [])}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lines({"x": [1]}, {"x": [1, None]}), "line 2: column 'x' has a null inside of a list"),
        (lines({"x": [1]}, {"x": 3}), "line 2: column 'x' has a list, and other rows"),
        (lines({"x": 3}, {"x": [1]}), "line 2: column 'x' has a list, and other rows"),
        (lines({"x": [1]}, {"x": None}), "line 2: column 'x' has no list"),
        (lines({"y": 1}, {"y": 2, "x": [1]}), "line 1: column 'x' has no list"),
        (lines({"x": ["a"]}), "line 1: column 'x' has a list of texts"),
        (lines({"x": [1]}, {"x": [[1]]}), "line 2: column 'x' has a list of values of the shape"),
        (lines({"x": [[1, 2], [3]]}), "line 1: column 'x' has lists of different lengths inside"),
        (lines({"x": [[1, 2], 3]}), "line 1: column 'x' has lists and single values side by side"),
        (lines({"x": [[]]}), "line 1: column 'x' has lists of different lengths inside"),
        (lines({"x": [[1, 2]]}, {"x": [[1, 2, 3]]}), "line 2: column 'x' has a list of values"),
        (lines({"x": {"a": 1}}), "line 1: column 'x' has an object"),
        (lines({"x": [{"a": 1}]}), "line 1: column 'x' has an object"),
        (lines({"x": 1}, {"x": "a"}), "line 2: column 'x' has texts, and rows before have numbers"),
        (lines({"x": [1, True]}), "line 1: column 'x' has true or false among numbers"),
        (lines({"x": True}, {"x": 2}), "line 2: column 'x' has numbers, and rows before have true"),
        (b'{"x": 1}\n{"x": 1e999}\n', "line 2: column 'x' has a number that does not fit"),
        (b'{"x": [0.5]}\n{"x": [1, 1e999]}\n', "line 2: column 'x' has a number that does not fit"),
        (b'{"x": 1' + b"0" * 400 + b"}\n", "line 1: column 'x' has a number that does not fit"),
        (b'{"x": 1' + b"0" * 5000 + b"}\n", "line 1 has a number that is too long"),
        (b'{"x": "\\ud800"}\n', "line 1: column 'x' has half a character"),
        (b'{"x": 1}\n{"x": [1, 2', "line 2, character 12: this is not JSON"),
        (b'[{"x": 1}]\n', "line 1 holds a list; each line is one JSON object"),
        (b"3\n", "line 1 holds a single value"),
        (b'{"x": 1, "x": 2}\n', "line 1: the key 'x' is given twice"),
        (b'{"x": ' + b"[" * 100_000, "line 1 is nested too deeply"),
        (lines({"x": [[[[[[[[[1]]]]]]]]]}), "line 1: column 'x' has more than 8 axes"),
        (b'{"x": "\xff"}\n', "line 1, byte 8 is not UTF-8"),
        (b"\n \n", "the file holds no rows"),
        (b"{}\n{}\n", "the file holds no data"),
    ],
)  # fmt: skip
def test_an_invalid_table_is_named_by_line_and_column(
    ingesting: Ingesting, content: bytes, says: str
):
    assert says in ingesting.problem("jsonl", content)


def test_the_line_at_fault_is_found_behind_many_good_ones(ingesting: Ingesting):
    rows = [{"ids": [1, 2], "y": 1}] * 60_000
    rows[52_345] = {"ids": [1, "2"], "y": 1}
    assert ingesting.problem("jsonl", lines(*rows)).startswith("line 52346: column 'ids' has")


def test_a_large_integer_makes_a_column_of_floats(ingesting: Ingesting):
    columns = ingesting("jsonl", lines({"x": [1]}, {"x": [2**63, 1]}))
    assert described(columns) == {"x": ("float64", [None])}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6), min_size=1, max_size=20))
def test_every_list_comes_back_as_it_was(tmp_path_factory: Any, rows: list[list[int]]):
    columns = Ingesting(tmp_path_factory.mktemp("x"))("jsonl", lines(*({"x": row} for row in rows)))
    (column,) = columns.meta["columns"]
    if None not in column["shape"]:
        assert columns.array("all", "x").tolist() == rows
    else:
        assert [row.tolist() for row in columns.lists("all", "x")] == rows


def test_long_rows_are_cut_when_they_are_shown(ingesting: Ingesting):
    columns = ingesting("jsonl", lines({"x": list(range(1500)), "z": 1}, {"x": [5], "z": 2}))
    first, second = columns.rows("all", 0, 2)
    assert first["x"] == {"truncated": True, "shape": [1500], "values": list(range(1000))}
    assert second == {"x": [5]}
    assert columns.note() == "A row may have 1,501 values; the first 1,000 are shown."


@pytest.mark.long
def test_memory_does_not_grow_with_the_rows(ingesting: Ingesting):
    text = lines({"ids": list(range(100, 140)), "y": 1}, {"ids": [1], "y": 0})
    few = ingesting.process("jsonl", ingesting.file(text * 25_000))  # 6 MB
    many = ingesting.process("jsonl", ingesting.file(text * 100_000))
    assert many["answer"]["meta"]["splits"] == {"all": 200_000}
    assert many["peak_bytes"] < few["peak_bytes"] + (8 << 20)
