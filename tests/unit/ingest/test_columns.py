import io
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from glasshouse import jsonio
from models.storage.columns import DatasetColumns
from tests.unit.ingest.conftest import Ingesting


def npz(**arrays: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def test_rows_are_json_ready_and_keep_what_is_nan_or_inf(ingesting: Ingesting):
    columns = ingesting("csv", b"name,x,n\nanna,1.5,1\nbert,,2\ncleo,-inf,3\n")
    rows = columns.rows("all", 1, 10)
    assert rows[1] == {"name": "cleo", "x": -math.inf, "n": 3}
    assert rows[0]["name"] == "bert"
    assert math.isnan(rows[0]["x"])
    assert type(rows[0]["n"]) is int
    assert jsonio.dumps(rows[0]) == '{"name":"bert","x":"NaN","n":2}'
    assert columns.note() is None


def test_rows_outside_the_split_are_no_rows(ingesting: Ingesting):
    columns = ingesting("csv", b"a\n1\n2\n")
    assert (
        columns.rows("all", 2, 5) == columns.rows("all", 99, 5) == columns.rows("all", 0, 0) == []
    )
    assert columns.rows("all", 1, 10**30) == [{"a": 2}]
    with pytest.raises(KeyError):
        columns.rows("train", 0, 1)


def test_a_large_row_is_cut_with_a_note(ingesting: Ingesting):
    images = np.arange(2 * 3 * 32 * 32, dtype=np.int64).reshape(2, 3, 32, 32)
    columns = ingesting("npz", npz(a=np.zeros((2, 2, 2)), image=images, z=np.ones(2)))
    (row,) = columns.rows("all", 1, 1)
    assert list(row) == ["a", "image"]
    assert row["a"] == [[0, 0], [0, 0]]
    assert row["image"] == {
        "truncated": True,
        "shape": [3, 32, 32],
        "values": images[1].ravel()[:996].tolist(),
    }
    assert columns.note() == "A row has 3,077 values; the first 1,000 are shown."


def test_a_large_row_is_whole_if_enough_values_are_requested(ingesting: Ingesting):
    images = np.arange(2 * 3 * 32 * 32, dtype=np.int64).reshape(2, 3, 32, 32)
    columns = ingesting("npz", npz(image=images))
    (row,) = columns.rows("all", 1, 1, 3072)
    assert row["image"] == images[1].tolist()
    assert columns.note(3072) is None
    assert columns.rows("all", 1, 1, 3071)[0]["image"]["truncated"]
    assert columns.note(3071) == "A row has 3,072 values; the first 3,071 are shown."


def test_a_long_text_is_cut_with_its_length(ingesting: Ingesting):
    columns = ingesting("csv", b"t,n\n" + b"x" * 5000 + b",1\n")
    assert columns.rows("all", 0, 1)[0]["t"] == {
        "truncated": True,
        "length": 5000,
        "value": "x" * 1000,
    }


def test_columns_of_the_wrong_kind_say_so(ingesting: Ingesting):
    columns = ingesting("csv", b"t,n\na,1\n")
    with pytest.raises(TypeError):
        columns.array("all", "t")
    with pytest.raises(TypeError):
        columns.texts("all", "n")
    with pytest.raises(KeyError):
        columns.array("all", "m")


def test_a_mapped_column_cannot_be_written(ingesting: Ingesting):
    array = ingesting("csv", b"n\n1\n").array("all", "n")
    assert isinstance(array, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2


def test_texts_that_are_all_empty_are_read(ingesting: Ingesting):
    columns = ingesting("npz", npz(t=np.array(["", ""])))
    assert columns.texts("all", "t") == ["", ""]
    assert columns.stats()["all"]["t"]["missing"] == 2


def test_class_balance_is_counted(ingesting: Ingesting):
    columns = ingesting("csv", b"kind,n,x\nb,2,.5\na,1,.5\nb,2,1\n,2,1\n")
    stats = columns.stats()["all"]
    assert stats["kind"]["counts"] == [["a", 1], ["b", 2]]
    assert (stats["kind"]["distinct"], stats["kind"]["missing"]) == (2, 1)
    assert stats["n"]["counts"] == [[1, 1], [2, 3]]
    assert (stats["x"]["distinct"], stats["x"]["counts"]) == (2, None)


def test_more_than_a_thousand_values_are_not_counted(ingesting: Ingesting):
    many = np.arange(1001)
    stats = ingesting("npz", npz(few=many % 1000, many=many)).stats()["all"]
    assert stats["few"]["distinct"] == 1000
    assert (stats["many"]["distinct"], stats["many"]["counts"]) == (None, None)


def test_statistics_of_a_column_longer_than_a_block_are_those_of_numpy(ingesting: Ingesting):
    values = np.random.default_rng(0).normal(1e6, 1, 700_000)
    values[::1000] = np.nan
    values[5:8] = np.inf
    stats = ingesting("npz", npz(v=values)).stats()["all"]["v"]
    finite = values[np.isfinite(values)]
    assert (stats["count"], stats["missing"], stats["infinite"]) == (700_000, 700, 3)
    assert stats["mean"] == pytest.approx(finite.mean(), rel=1e-12)
    assert stats["std"] == pytest.approx(finite.std(), rel=1e-9)
    assert (stats["min"], stats["max"]) == (finite.min(), finite.max())


def test_extremes_of_integers_are_exact(ingesting: Ingesting):
    values = np.array([2**63 - 1, -(2**63), 0])
    stats = ingesting("npz", npz(v=values)).stats()["all"]["v"]
    assert (stats["min"], stats["max"]) == (-(2**63), 2**63 - 1)


@settings(max_examples=50, deadline=None)
@given(
    hnp.arrays(
        st.sampled_from(["u1", "i4", "f4", "f8", "?"]),
        hnp.array_shapes(max_dims=3, max_side=6),
    )
)
def test_statistics_are_those_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, values: NDArray[Any]
):
    columns: DatasetColumns = Ingesting(tmp_path_factory.mktemp("stats"))("npz", npz(v=values))
    stats = columns.stats()["all"]["v"]
    finite = values[np.isfinite(values)].astype(np.float64)
    assert stats["count"] == values.size
    assert stats["missing"] == int(np.isnan(values).sum())
    assert stats["infinite"] == int(np.isinf(values).sum())
    if finite.size == 0:
        assert stats["mean"] is stats["min"] is None
        return
    assert (stats["min"], stats["max"]) == (finite.min(), finite.max())
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = float(finite.mean()), float(finite.std())
    for name, expected in (("mean", mean), ("std", std)):
        found = jsonio.number(stats[name])
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-300, nan_ok=True)
