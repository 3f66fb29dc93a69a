import io
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.ingest.conftest import Ingesting
from tests.unit.ingest.test_jsonl import described


def parquet(table: dict[str, Any], **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(table), file, **options)
    return file.getvalue()


def test_lists_become_ragged_columns_over_row_groups(ingesting: Ingesting):
    rows = [[3, 1, 2], [], [7], [1, 2]]
    vectors = [[[1.0, 2.0]], [], [[3.0, 4.0], [5.0, 6.0]], []]
    columns = ingesting("parquet", parquet({"ids": rows, "v": vectors}, row_group_size=3))
    assert described(columns) == {"ids": ("int64", [None]), "v": ("float64", [None, 2])}
    assert [row.tolist() for row in columns.lists("all", "ids")] == rows
    assert [row.tolist() for row in columns.lists("all", "v")] == vectors
    assert columns.meta["columns"][0]["lengths"] == {"all": {"min": 0, "max": 3, "total": 6}}


def test_lists_of_one_length_and_fixed_lists_are_plain_columns(ingesting: Ingesting):
    fixed = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))
    columns = ingesting("parquet", parquet({"a": [[1, 2], [3, 4]], "b": fixed}))
    assert described(columns) == {"a": ("int64", [2]), "b": ("float32", [2])}
    assert columns.array("all", "b").tolist() == [[1, 2], [3, 4]]


def test_single_values_keep_their_types_and_what_is_missing(ingesting: Ingesting):
    table = {
        "i": pa.array([1, 2, 3], pa.int16()),
        "u": pa.array([1, None, 3], pa.uint8()),
        "x": pa.array([0.5, None, math.inf], pa.float32()),
        "b": [True, False, True],
        "bn": [True, None, False],
        "t": ["a", None, "grün"],
        "d": pa.array(["x", "y", "x"]).dictionary_encode(),
        "n": pa.nulls(3),
    }
    columns = ingesting("parquet", parquet(table))
    assert described(columns) == {
        "i": ("int16", []),
        "u": ("float64", []),
        "x": ("float32", []),
        "b": ("bool", []),
        "bn": ("float64", []),
        "t": ("string", []),
        "d": ("string", []),
        "n": ("float64", []),
    }
    np.testing.assert_array_equal(columns.array("all", "u"), [1, math.nan, 3])
    np.testing.assert_array_equal(columns.array("all", "bn"), [1, math.nan, 0])
    np.testing.assert_array_equal(columns.array("all", "x"), [0.5, math.nan, math.inf])
    assert columns.texts("all", "t") == ["a", "", "grün"]
    assert columns.texts("all", "d") == ["x", "y", "x"]
    assert [item["missing"] for item in columns.meta["columns"]] == [0, 1, 1, 0, 1, 1, 0, 3]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"x": [[1], None]}, "row 1: column 'x' has no list"),
        ({"x": [[1], [], [2, None]]}, "row 2: column 'x' has a null inside of its list"),
        ({"x": [[[1, 2], [3]]]}, "column 'x': among the rows 0 to 0 there are lists"),
        ({"x": [["a"]]}, "column 'x' has the type list<"),
        ({"x": pa.array([0, 1], pa.timestamp("s"))}, "column 'x' has the type timestamp"),
        ({"x": [{"a": 1}]}, "column 'x' has the type struct"),
        ({"x": [b"a"]}, "column 'x' has the type binary"),
        ({"x": pa.array([], pa.int64())}, "split 'all' has no rows"),
    ],
)
def test_what_no_column_can_hold_is_named(ingesting: Ingesting, table: Any, says: str):
    assert says in ingesting.problem("parquet", parquet(table))


def test_a_missing_value_of_floats_in_a_list_is_nan(ingesting: Ingesting):
    columns = ingesting("parquet", parquet({"x": [[0.5, None], [1.0]]}))
    np.testing.assert_array_equal(columns.lists("all", "x")[0], [0.5, math.nan])


@pytest.mark.parametrize("part", [1, 5, 9, 12])
def test_a_truncated_file_is_a_problem(ingesting: Ingesting, part: int):
    content = parquet({"x": list(range(5000)), "y": [[1, 2, 3]] * 5000})
    said = ingesting.problem("parquet", content[: len(content) * part // 13])
    assert "cannot be read as parquet" in said


@pytest.mark.long
def test_damage_in_the_middle_is_a_problem_or_other_numbers_but_never_a_crash(
    ingesting: Ingesting,
):
    content = bytearray(parquet({"x": list(range(2000)), "t": ["abc", "d"] * 1000}))
    rng = np.random.default_rng(0)
    for _ in range(8):
        damaged = bytearray(content)
        for place in rng.integers(4, len(content), 8):
            damaged[place] = rng.integers(256)
        done = ingesting.process("parquet", ingesting.file(bytes(damaged)))
        assert done["status"] == 0
        assert done["answer"]["ok"] or done["answer"]["problem"]["code"] == "invalid_dataset"


@pytest.mark.long
def test_memory_does_not_grow_with_the_rows(ingesting: Ingesting):
    rng = np.random.default_rng(0)

    def made(num_rows: int) -> bytes:
        values = pa.array(rng.integers(0, 2**60, num_rows * 20))
        offsets = pa.array(np.arange(0, num_rows * 20 + 1, 20, dtype=np.int32))
        lists = pa.ListArray.from_arrays(offsets, values)
        return parquet({"ids": lists}, row_group_size=10_000, use_dictionary=False)

    few = ingesting.process("parquet", ingesting.file(made(20_000)))
    many = ingesting.process("parquet", ingesting.file(made(200_000)))  # 32 MB
    assert many["answer"]["meta"]["splits"] == {"all": 200_000}
    assert many["peak_bytes"] < few["peak_bytes"] + (12 << 20)


@pytest.mark.long
def test_a_bomb_ends_with_a_problem_in_bounded_memory(ingesting: Ingesting):
    zeros = pa.array(np.zeros(60 << 20, np.int64))  # one row group of 480 MB, a few KB compressed
    content = parquet(
        {"x": pa.ListArray.from_arrays(pa.array([0, len(zeros)], pa.int32()), zeros)},
        compression="zstd",
        use_dictionary=False,
    )
    assert len(content) < 1 << 20
    done = ingesting.process("parquet", ingesting.file(content), "--max-memory-bytes", str(1 << 30))
    assert done["status"] == 0
    assert "of memory that it may" in done["answer"]["problem"]["detail"]
    assert done["left"] == []


def test_a_message_of_arrow_ends_without_its_own_full_stop(ingesting: Ingesting):
    problem = ingesting.problem("parquet", b"no parquet at all, but long enough")
    assert "not a parquet file; it may be cut short or damaged" in problem
