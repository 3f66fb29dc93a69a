import numpy as np
import pytest
import torch

from engine.data.columns.fields import BadField, field_shape
from engine.data.columns.table import Table
from engine.data.sources.inline import inline_rows
from engine.data.sources.loading import load
from engine.network.shapes import FieldShape
from glasshouse.errors import DataFailed
from glasshouse.spec import DenseField, IntegerField, Source
from tests.unit.engine.runs import write_table

CPU = torch.device("cpu")


@pytest.fixture
def table(tmp_path):
    columns = {
        "a": np.array([1, 2, 3], dtype=np.int64),
        "b": np.array([0.5, 1.5, np.nan]),
        "bytes": np.array([[0, 51], [102, 255], [1, 2]], dtype=np.uint8),
        "flag": np.array([True, False, True]),
        "pair": np.arange(6, dtype=np.float32).reshape(3, 2),
    }
    return Table(write_table(tmp_path, columns, {"all": slice(None)}))


def _read(table, field, name="x"):
    rows = load(Source(dataset="d"), {name: field}, table, seed=0, device=CPU)
    return rows.batch(slice(0, 3))[name]


def test_bytes_become_exactly_the_byte_over_255(table):
    found = _read(table, DenseField(type="dense", column="bytes"))
    expected = (
        torch.tensor([[0, 51], [102, 255], [1, 2]], dtype=torch.uint8).to(torch.float32) / 255
    )
    assert torch.equal(found, expected)


def test_scale_multiplies_whatever_the_column_is(table):
    found = _read(table, DenseField(type="dense", column="bytes", scale=2.0))
    assert found.tolist() == [[0, 102], [204, 510], [2, 4]]
    found = _read(table, DenseField(type="dense", column="a", scale=0.5))
    assert found.tolist() == [0.5, 1.0, 1.5]


def test_columns_stand_side_by_side_in_the_order_given(table):
    found = _read(table, DenseField(type="dense", columns=("pair", "a", "flag")))
    assert found.tolist() == [[0, 1, 1, 1], [2, 3, 2, 0], [4, 5, 3, 1]]


def test_a_bytes_column_keeps_its_scale_beside_other_types(table):
    found = _read(table, DenseField(type="dense", columns=("bytes", "a")))
    assert found[1].tolist() == pytest.approx([102 / 255, 1.0, 2.0])


def test_rows_take_the_shape_of_the_field(table):
    assert _read(table, DenseField(type="dense", column="pair", shape=(2, 1))).shape == (3, 2, 1)


def test_nan_in_a_column_reaches_the_network_where_a_field_says_so(table):
    assert torch.isnan(_read(table, DenseField(type="dense", column="b", fill="NaN")))[2]


def test_a_batch_is_memory_of_its_own(table):
    rows = load(Source(dataset="d"), {"pair": DenseField(type="dense")}, table, seed=0, device=CPU)
    rows.batch(slice(0, 3))["pair"].zero_()
    assert rows.batch(slice(0, 3))["pair"].sum() == 15


@pytest.mark.parametrize(
    ("field", "key", "words"),
    [
        (DenseField(type="dense", column="zz"), "column", "has no column 'zz'"),
        (DenseField(type="dense", columns=("a", "zz")), "columns/1", "has no column 'zz'"),
        (DenseField(type="dense", column="pair", shape=(3,)), "shape", "[3]"),
        (IntegerField(type="integer", column="pair", dim=9), "", "shape [2]"),
        (IntegerField(type="integer", column="b", dim=9), "", "float64"),
    ],
)
def test_a_field_that_does_not_fit_its_column_says_why(table, field, key, words):
    with pytest.raises(BadField) as caught:
        field_shape("x", field, table.meta)
    assert caught.value.key == key
    assert words in str(caught.value)


def test_a_split_that_is_not_there_is_refused_with_those_that_are(table):
    with pytest.raises(DataFailed, match="it has: all"):
        load(Source(dataset="d", split="train"), {}, table, seed=0, device=CPU)


def test_a_missing_file_is_a_failure_of_the_data(table, tmp_path):
    (tmp_path / "all" / "0.npy").unlink()
    with pytest.raises(DataFailed, match="column 'a'"):
        _read(table, DenseField(type="dense", column="a"))


def test_inline_values_are_checked_against_the_fields():
    shapes = {"x": FieldShape((2,), torch.float32), "n": FieldShape((), torch.int64, 4)}
    rows = inline_rows({"x": [[1, "NaN"], [3, 4]], "n": [0, 3]}, shapes, CPU)
    assert torch.isnan(rows.batch(slice(0, 2))["x"][0, 1])
    for inputs, key in (
        ({"x": [[1, 2], [3]], "n": [0, 1]}, "x"),
        ({"x": [[1, 2, 3]], "n": [0]}, "x"),
        ({"x": [[1, True]], "n": [0]}, "x"),
        ({"x": [[1, 2]], "n": [4]}, "n"),
        ({"x": [[1, 2]], "n": [0.5]}, "n"),
        ({"x": [[1, 2]], "n": [1, 2]}, ""),
        ({"x": [], "n": []}, "x"),
    ):
        with pytest.raises(BadField) as caught:
            inline_rows(inputs, shapes, CPU)
        assert caught.value.key == key
